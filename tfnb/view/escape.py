"""Names, source lines and error texts in DOT and in script elements; `tfnb.widgets.escaping` has HTML."""

from __future__ import annotations

import base64
import json
import zlib

import graphviz

from tfnb.widgets.escaping import visible


def dot(text: str) -> str:
    """Text for a DOT attribute: never an escape sequence, never an HTML-like label."""
    return graphviz.escape(visible(text))  # NOTE: a str subclass; as plain str, "<...>" would be an HTML-like label


def packed(value: object) -> str:
    """JSON for the inside of a script element, compressed, a tenth as long: base64 of a zlib stream.

    >>> len(packed({"</script>": "<!--" * 1000}))
    72
    """
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
