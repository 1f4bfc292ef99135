"""A graph as an indented listing: the same boxes as the picture, for terminals and where a layout fails."""

from __future__ import annotations

from collections.abc import Iterator

from tfnb.graph import Contents, Graph
from tfnb.view import facts
from tfnb.view.box import Box
from tfnb.view.face import times
from tfnb.view.tree import tree
from tfnb.view.wiring import Wiring
from tfnb.widgets.escaping import shorten

WIDTH = 110  # characters of a line
LINES = 400


def text_tree(graph: Graph, *, cell: str | None = None) -> str:
    """The graph's lines, modules, torch functions and nodes, one per line."""
    return listing(graph.name, Wiring(graph.contents, tree(graph.contents, cell=cell)))


def listing(name: str, wiring: Wiring) -> str:
    """The same of a tree that is there."""
    contents = wiring.contents
    boxes = [box for box in wiring.root.walk() if box.key and not box.is_small]
    lines = [f"{shorten(name, 40)}: {facts.counts(contents)}"]
    for box in boxes[: LINES - 1]:
        lines.append(shorten("  " * len(box.key) + " ".join(_words(box, wiring, contents)), WIDTH))
    more = len(boxes) - (LINES - 1)
    return "\n".join(lines + ([f"  … {facts.plural(more, 'line')} more"] if more > 0 else []))


def _words(box: Box, wiring: Wiring, contents: Contents) -> Iterator[str]:
    is_input = not box.children and box.node.op == "tfnb.placeholder"
    yield contents.shown(box.node) if is_input else box.title
    if box.times > 1:
        yield times(box)
    if box.detail:
        yield box.detail
    if not box.children:
        yield f"= {box.node.op}({facts.arguments(box.node, contents)})"
    results = wiring.results(box)
    if len(results) == 1:
        node, places = results[0]
        yield f"-> {facts.specs(node, places)}"
    if box.code or box.where:
        yield f"  # {' '.join(word for word in (box.where, box.code) if word)}"
