"""The arguments of ``%tfwatch``: names of the notebook, names and patterns of the graph, in one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tfnb

_ITEM = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s,"']+))\s*(:hist)?\s*,?""")


def expressions(words: Sequence[str], names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Items separated by commas or spaces: the name, and the notebook variable's value if it can be watched.

    Of others the item is text.

    >>> list(expressions(["loss,", "conv*/weight", ":hist", "b:hist"], {}))
    [('loss', 'loss'), ('conv*/weight', 'conv*/weight:hist'), ('b', 'b:hist')]
    """
    for quoted, single, bare, hist in _ITEM.findall(" ".join(words)):
        text = quoted or single or bare
        named = names.get(text)
        is_ours = isinstance(named, tfnb.Tensor | tfnb.Variable) or type(named).__name__ == "Parameter"
        yield text.removesuffix(":hist"), named if is_ours and not hist else text + hist


def settle(_result: object = None) -> None:
    """After a cell: show the latest watched values."""
    if "tfnb.watching" in sys.modules:
        for graph in tfnb.graphs().values():
            if (watch := graph.attached.get("watch")) is not None:
                watch.settle()
