"""The one place where names, source lines and error texts become markup.

Everything a user can name is data: it reaches SVG and HTML only through `xml`, DOT only through `dot`, a script
element only through `packed`. Characters that do not print, or that turn text around, are shown as ``\\u202e``.
"""

from __future__ import annotations

import base64
import html
import json
import unicodedata
import zlib
from typing import Any

import graphviz

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


def dot(text: str) -> str:
    """Text for a DOT attribute: never an escape sequence, never an HTML-like label."""
    return graphviz.escape(visible(text))  # NOTE: a str subclass; as plain str, "<...>" would be an HTML-like label


def packed(value: Any) -> str:
    """JSON for the inside of a script element, compressed, a tenth as long: base64 of a zlib stream.

    >>> len(packed({"</script>": "<!--" * 1000}))
    72
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def shorten(text: str, limit: int) -> str:
    """The text on one line, cut to ``limit`` characters.

    >>> shorten("logits = model(x)", 9)
    'logits =…'
    """
    line = visible(text)
    return line if len(line) <= limit else line[: limit - 1] + "…"
