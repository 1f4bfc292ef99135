"""The drawing of a difference: both graphs as one, with what is new, gone and changed in colours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tfnb.graph import Contents, Graph, Node, Value
from tfnb.graph.contents import Names
from tfnb.graph.difference import Difference
from tfnb.view.box import Box
from tfnb.view.style import LIGHT

TONES = {"added": "update", "removed": "failing", "changed": "variable"}


@dataclass(frozen=True, slots=True)
class Marks:
    """Colours boxes by what became of their nodes; others are plain."""

    by_id: Mapping[int, str]
    paths: Mapping[int, tuple[int, ...]]  # of the drawing's nodes in loops and branches: they follow what is around

    def _of(self, node: Node) -> str | None:
        return self.by_id.get(self.paths.get(node.id, (node.id,))[0])

    def tone(self, box: Box) -> str:
        """The colour of a box: that of its nodes if they agree, else a group with some of them is changed."""
        found = {self._of(node) for node in box.nodes}
        mark = found.pop() if len(found) == 1 else "changed"
        return "plain" if mark is None else TONES[mark]

    def words(self, box: Box) -> str:
        """``2 added, 1 removed``; nothing where nothing is marked."""
        found = [self._of(node) for node in box.nodes]
        if not box.children:
            return found[0] or ""
        return ", ".join(f"{found.count(mark)} {mark}" for mark in TONES if mark in found)

    @property
    def legend(self) -> list[list[str]]:
        """Words and colours."""
        return [[mark, LIGHT[tone].line] for mark, tone in TONES.items() if mark in self.by_id.values()]


def marks(difference: Difference) -> dict[int, str]:
    """What became of each node of `union` that is not as it was."""
    parts = {"added": difference.added, "removed": difference.removed, "changed": difference.changed}
    return {node.id: mark for mark, nodes in parts.items() for node in nodes}


def union(difference: Difference) -> Graph:
    """The graph after, and among it the nodes that are gone, below what they took."""
    after, names = difference.after, Names(node.name for node in difference.after.nodes)
    place: dict[int, int] = dict(after.position)  # of nodes after, and of those that are gone: behind which of them
    gone, last = [], -1
    for node in difference.before.nodes:
        now = difference.same.get(node.id)
        if now is not None:
            last = place[now]
            continue
        inputs = tuple(Value(difference.same.get(v.node, v.node), v.index) for v in node.inputs)
        place[node.id] = last = max([last, *(place[v.node] for v in inputs if v.node in place)])
        control = tuple(difference.same.get(i, i) for i in node.control)
        gone.append(replace(node, name=names.fresh(node.name), inputs=inputs, control=control))
    nodes = sorted([*after.nodes, *gone], key=lambda node: (place[node.id], node.id not in after.by_id))
    return Graph(difference.name, Contents(tuple(nodes), after.guards))
