"""The edges of one level: between its boxes, and to ports on its frame for edges from and to the outside.

An end is the place of a child, an `Inlet` (the box outside that the value comes from, the same at every depth) or an
`Outlet` (the child inside that gives the value).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tfnb.graph import Contents, Node, Value
from tfnb.view import facts
from tfnb.view.box import Box, Key


class Inlet(NamedTuple):
    """A port at the top of a frame."""

    source: Key


class Outlet(NamedTuple):
    """A port at the bottom of a frame."""

    child: int


End = int | Inlet | Outlet


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """Values that go from one end to another; none for an edge that only orders."""

    tail: End
    head: End
    values: tuple[Value, ...]


class NodeLink(NamedTuple):
    """One node's use of another; ``value`` is None for a control dependency. A quiet link is words, not an edge."""

    producer: int
    consumer: int
    value: Value | None
    quiet: bool


class Wiring:
    """All links of a graph, and where its nodes are in the tree."""

    def __init__(self, contents: Contents, root: Box) -> None:
        self.contents, self.root = contents, root
        self._results: dict[Key, list[tuple[Node, tuple[int, ...]]]] = {}
        self.where: dict[int, Key] = {box.node.id: box.key for box in root.walk() if not box.children and box.nodes}

    @cached_property
    def links(self) -> dict[int, list[NodeLink]]:
        """Links into and out of each node."""
        found: dict[int, list[NodeLink]] = {}
        for node in self.contents.nodes:
            data = [NodeLink(v.node, node.id, v, self._is_quiet(v, node)) for v in dict.fromkeys(node.inputs)]
            order = [NodeLink(producer, node.id, None, False) for producer in node.control]
            order += [self._effect(i, node.id) for i in node.effects]
            for link in data + order:
                if link.producer in self.where and link.consumer in self.where:
                    found.setdefault(link.producer, []).append(link)
                    found.setdefault(link.consumer, []).append(link)
        return found

    def _effect(self, effect: int, step: int) -> NodeLink:
        """A link between a statement and the step that executes it; it points from the step to a statement that stands
        below the step. Statistics of modules are quiet: with counters of batch norm as edges no network would be a
        chain.
        """
        place = self.contents.position
        quiet = "buffer" in self.contents.by_id[effect].tags
        return NodeLink(min(effect, step, key=place.__getitem__), max(effect, step, key=place.__getitem__), None, quiet)

    def _is_quiet(self, value: Value, user: Node) -> bool:
        """Values that a gradient takes from the forward pass, and variables and constants used again far away."""
        producer = self.contents.by_id.get(value.node)
        if producer is None or user.id not in self.where:
            return False
        if "buffer" in user.tags and user.op == "tfnb.group":
            return True
        if "gradient" in user.tags and user.forward is not None and "gradient" not in producer.tags:
            return True
        return producer.op in facts.SMALL and self.where[producer.id][:-1] != self.where[user.id][:-1]

    def edges(self, box: Box) -> list[DrawnEdge]:
        """The edges of the level inside ``box``, in order of first use."""
        merged: dict[tuple[End, End], dict[Value, None]] = {}
        for link in dict.fromkeys(link for node in box.nodes for link in self.links.get(node.id, ())):
            for ends in () if link.quiet else self._ends(link, box.key):
                values = merged.setdefault(ends, {})
                if link.value is not None:
                    values[link.value] = None
        return [DrawnEdge(tail, head, tuple(values)) for (tail, head), values in merged.items()]

    def results(self, box: Box) -> list[tuple[Node, tuple[int, ...]]]:
        """The values of a box that something outside takes, or nothing at all: nodes and output places."""
        if box.key not in self._results:
            self._results[box.key] = self._find_results(box)
        return self._results[box.key]

    def _find_results(self, box: Box) -> list[tuple[Node, tuple[int, ...]]]:
        inside = {node.id for node in box.nodes}
        found = []
        for node in box.nodes:
            users = [link for link in self.links.get(node.id, ()) if link.producer == node.id and not link.quiet]
            outside = {link.value.index for link in users if link.value and link.consumer not in inside}
            if node.outputs and (outside or not users) and not (box.children and node.op in facts.STATE):
                found.append((node, tuple(sorted(outside)) or (0,)))
        return found

    def uses(self, box: Box) -> list[Node]:
        """Nodes outside a box with quiet links into it."""
        inside = {node.id for node in box.nodes}
        quiet = (link for node in box.nodes for link in self.links.get(node.id, ()) if link.quiet)
        return [self.contents.by_id[i] for i in dict.fromkeys(k.producer for k in quiet if k.producer not in inside)]

    def _ends(self, link: NodeLink, level: Key) -> Iterator[tuple[End, End]]:
        tail, head = self.where[link.producer], self.where[link.consumer]
        depth = len(level)
        inside, used_inside = tail[:depth] == level, head[:depth] == level
        if inside and used_inside:
            if tail[depth] != head[depth]:
                yield tail[depth], head[depth]
        elif used_inside:
            yield Inlet(tail[: _shared(tail, head) + 1]), head[depth]
        else:
            yield tail[depth], Outlet(tail[depth])


def _shared(a: Key, b: Key) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
