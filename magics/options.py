"""Options of the magics: one decorator for all, near matches for a mistyped option, ``-h``.

May import IPython only.
"""

from __future__ import annotations

import difflib
import re
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import line_cell_magic, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.utils.process import arg_split


def magic(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A method as line and cell magic with ``options`` and the common ones; braces and ``$`` stay literal."""
    common = (
        argument("-o", "--out", metavar="VAR", help="store the result under this name"),
        argument("-g", "--graph", metavar="NAME", help="act on this graph instead of the current one"),
        argument("-q", "--quiet", action="store_true", help="show nothing"),
        argument("-h", "--help", action="store_true", help="show this"),
    )

    def decorate(method: Any) -> Any:
        for option in (*reversed(common), *reversed(options)):
            method = option(method)
        return no_var_expand(line_cell_magic(magic_arguments()(method)))

    return decorate


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size(text: str) -> int:
    """Bytes of ``512MB``, ``1.5GiB`` or ``4096``; raises ValueError.

    >>> size("512MB"), size("1.5 KiB"), size("12")
    (512000000, 1536, 12)
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+) *([kmgt]?i?)b?", text.strip(), re.IGNORECASE)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no size: 512MB, 1.5GiB or a number of bytes was expected")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def existing(path: Path) -> Path:
    """A file that is there; raises UsageError."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name the file in it")
    if not path.is_file():
        raise UsageError(f"there is no file {path}: %tfsave {path} writes one")
    return path


def words(line: str) -> list[str]:
    """A line's words; brackets that close further on hold what is between them together, and so do quotes.

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


def parsed(method: Any, line: str) -> Namespace:
    """The arguments in ``line``; raises UsageError in one line, with the nearest option for an unknown one."""
    parser = method.parser
    arguments, unknown = parser.parse_known_args(words(line))
    if not unknown:
        return arguments
    known = [name for action in parser._actions for name in action.option_strings]
    wrong = next((word for word in unknown if word.startswith("-")), unknown[0])
    meant = near(wrong.partition("=")[0], known)
    advice = f"; did you mean {meant}?" if meant else f"; options: {' '.join(sorted(known))}"
    raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{advice}")
