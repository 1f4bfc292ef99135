"""The one place where names, source lines and error texts become text of HTML and SVG.

Everything a user can name is data. Characters that do not print, or that turn text around, are shown as ``\\u202e``.
Imports nothing of tfnb.
"""

from __future__ import annotations

import html
import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str) -> str:
    r"""The text on one line, with line ends and characters that do not print spelled out.

    >>> visible("a\nb\u202ec")
    'a⏎b\\u202ec'
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    if char == "\n":
        return "⏎"
    if unicodedata.category(char) in _HIDDEN:
        return f"\\u{ord(char):04x}"
    return char


def xml(text: str) -> str:
    """Text for an element or a quoted attribute of HTML and SVG; lines are kept, all else is made visible."""
    return html.escape("\n".join(map(visible, text.split("\n"))), quote=True)


def shorten(text: str, limit: int) -> str:
    """The text on one line, cut to ``limit`` characters.

    >>> shorten("logits = model(x)", 9)
    'logits =…'
    """
    line = visible(text)
    return line if len(line) <= limit else line[: limit - 1] + "…"
