"""Options of the magics: one decorator for all, near matches for a mistyped option, ``-h``.

May import IPython and errors only.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import line_cell_magic, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.utils.process import arg_split

from tfnb.errors import InvalidArgument, NotFound


def magic(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A method as line and cell magic with ``options`` and the common ones; braces and ``$`` stay literal."""
    common = (
        argument("-o", "--out", metavar="VAR", help="store the result under this name"),
        argument("-g", "--graph", metavar="NAME", help="act on this graph instead of the current one"),
        argument("-q", "--quiet", action="store_true", help="show nothing"),
        argument("-h", "--help", action="store_true", help="show this"),
    )

    def decorate(method: object) -> Any:
        method = _with_usage_errors(method)
        for option in (*reversed(common), *reversed(options)):
            method = option(method)
        return no_var_expand(line_cell_magic(magic_arguments()(method)))

    return decorate


def _with_usage_errors(method: Any) -> Any:
    """A magic whose line form turns errors about the line's names into UsageError, without a traceback.

    What a body raises, and what fails while something runs, keeps its class and its frames.
    """

    @functools.wraps(method)
    def called(self: Any, line: str, cell: str | None = None) -> Any:
        __tracebackhide__ = True
        try:
            return method(self, line, cell)
        except (InvalidArgument, NotFound) as error:
            if cell is not None or self.full_tracebacks or type(error) not in (InvalidArgument, NotFound):
                raise
            raise UsageError(str(error)) from error

    return called


def device(text: str) -> str:
    """A device that tensors can be on; raises UsageError."""
    import torch  # loading the extension does not wait for it

    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:  # torch raises any of them
        raise UsageError(f"-d {text}: {str(error).splitlines()[0]}") from None
    return text


def existing(path: Path) -> Path:
    """A file that is there; raises UsageError."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name the file in it")
    if not path.is_file():
        raise UsageError(f"there is no file {path}: %tfsave {path} writes one")
    return path


def words(line: str) -> list[str]:
    """The words of a line; brackets and quotes hold their contents together.

    A word in quotes is what is between them, as in a shell. Quotes within a word are Python's.

    >>> words("loss -f x=torch.tensor([1.0, -2.0]) -q")
    ['loss', '-f', 'x=torch.tensor([1.0, -2.0])', '-q']
    >>> words("'my net' -f x=data['x']")
    ['my net', '-f', "x=data['x']"]
    """
    found: list[str] = []
    try:
        rest = arg_split(line, strict=True)
    except ValueError as error:
        raise UsageError(f"{line.strip()}: {str(error).lower()}") from None
    while rest:
        ends = (end for end in range(1, len(rest) + 1) if _closed(" ".join(rest[:end])))
        end = next(ends, 1)
        found.append(_unquoted(" ".join(rest[:end])))
        rest = rest[end:]
    return found


def _unquoted(word: str) -> str:
    quote = word[:1]
    is_quoted = quote in ("'", '"') and len(word) > 1 and word.endswith(quote) and quote not in word[1:-1]
    return word[1:-1] if is_quoted else word


def _closed(text: str) -> bool:
    return all(text.count(start) == text.count(end) for start, end in ("()", "[]", "{}"))


def near(word: str, known: Iterable[str]) -> str:
    """The known word that is most like this one, or none."""
    return next(iter(difflib.get_close_matches(word, list(known), 1)), "")


def options_of(method: Any) -> list[str]:
    """The options of a magic, long and short."""
    return [name for action in method.parser._actions for name in action.option_strings]


def parsed(method: Any, line: str) -> Namespace:
    """The arguments in ``line``; raises UsageError in one line, with the nearest option for an unknown one."""
    parser, given = method.parser, words(line)
    known = options_of(method)
    try:
        arguments, unknown = parser.parse_known_args(given)
    except UsageError as error:  # a mistyped option leaves its value to an argument that may refuse it
        unknown = [word for word in given if word.startswith("--") and word.partition("=")[0] not in known]
        if not unknown:
            raise UsageError(f"{error}; {_usage(method)}") from None
    if not unknown:
        return arguments
    wrong = next((word for word in unknown if word.startswith("-")), unknown[0])
    return _refuse(method, wrong.partition("=")[0], unknown)


def _refuse(method: Any, wrong: str, unknown: list[str]) -> NoReturn:
    """Raise UsageError with the option probably meant, of this magic or another, else with the usage."""
    known = {
        option.lstrip("-"): f"{option} of %{name}"
        for name, other in inspect.getmembers(type(method.__self__), lambda member: hasattr(member, "parser"))
        for option in options_of(other)
    } | {option.lstrip("-"): option for option in options_of(method)}
    meant = known.get(near(wrong.lstrip("-"), known))
    advice = f"did you mean {meant}?" if meant and wrong.startswith("-") else _usage(method)
    raise UsageError(f"unrecognized arguments: {' '.join(unknown)}; {advice}")


def _usage(method: Any) -> str:
    """How a magic is written, in one line."""
    return "usage: " + " ".join(method.parser.format_usage().removeprefix("::").split())
