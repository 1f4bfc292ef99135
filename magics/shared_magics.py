"""The common base of all magics: settings, results, help, cards, and names in a line.

``tfnb.<name>`` loads torch when first used.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from traceback import walk_tb
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics
from traitlets import Bool, Enum

import tfnb
from tfnb.magics.graph_names import fetch_meant, graph_meant
from tfnb.magics.options import parsed
from tfnb.magics.watch import CellWatch


class SharedMagics(Magics):
    """Settings, and common work around the call of a magic."""

    display = Enum(["static", "live", "none"], "static", help="how a recorded cell is drawn").tag(config=True)
    repr = Enum(["html", "text"], "html", help="how objects of tfnb are shown").tag(config=True)
    full_tracebacks = Bool(False, help="show the frames of tfnb in tracebacks").tag(config=True)

    shell: InteractiveShell  # never None here, as it may be in IPython's class

    def __init__(self, shell: InteractiveShell, **kwargs: object) -> None:
        super().__init__(shell=shell, **kwargs)
        self.watch = CellWatch(shell)

    def _graph(self, name: str | None, *words: str) -> Any:
        """The graph that a line is about: see `graph_meant`."""
        return graph_meant(self.shell.user_ns, name, *words)

    def _fetch(self, graph: object, word: str) -> Any:
        """The fetch named by a word: see `fetch_meant`."""
        return fetch_meant(self.shell.user_ns, graph, word)

    def _node(self, graph: object, word: str) -> Any:
        """The Value named by a word."""
        return tfnb.session.structures.value_of(graph, self._fetch(graph, word))

    def _feed(self, words: list[str]) -> tuple[str, Any]:
        """The words after one -f, an expression with spaces among them."""
        text = " ".join(words)
        name, equals, expression = text.partition("=")
        if not equals:
            raise UsageError(f"-f {text}: NAME=EXPR was expected")
        return name, self._value(f"-f {text}", expression)

    def _value(self, option: str, expression: str) -> Any:
        """The value of a user's expression; ``option``: the prefix of its errors."""
        try:
            return self.shell.ev(expression)
        except (SyntaxError, NameError) as error:
            raise UsageError(f"{option}: {getattr(error, 'msg', error)}") from None
        except Exception as error:
            if list(walk_tb(error.__traceback__))[-1][0].f_code.co_filename != "<string>":
                raise  # in a function that the expression calls: its frames say where
            raise UsageError(f"{option}: {type(error).__name__}: {error}") from None

    def _line_only(self, method: Callable[..., Any], line: str, cell: str | None) -> Namespace:
        if cell is not None:
            raise UsageError(f"%{method.__name__} is a line magic: write it with one %")
        return parsed(method, line)

    def _out(self, options: Namespace, result: object) -> Any:
        self._store(options, result)
        return None if options.quiet else result

    def _store(self, options: Namespace, result: object) -> None:
        if options.out:
            self.shell.user_ns[options.out] = result

    def _note(self, options: Namespace, text: str) -> None:
        if not options.quiet:
            self.watch.show({"text/plain": f"note: {text}"})

    def _help(self, method: object) -> None:
        self.watch.show({"text/plain": method.__doc__})

    def _plain(self, bundle: dict[str, Any]) -> dict[str, Any]:
        return bundle if self.repr == "html" else {"text/plain": bundle["text/plain"]}

    def html(self, shown: Any) -> str | None:
        """The HTML of one of tfnb's objects; none where ``%config TfnbMagics.repr = 'text'`` is set."""
        return shown._repr_html_() if self.repr == "html" else None

    def svg(self, shown: Any) -> str | None:
        """The picture of a graph, for front ends that sanitize HTML; None as for `html`."""
        return shown._repr_svg_() if self.repr == "html" else None
