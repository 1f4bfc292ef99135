"""Effects of `tfnb.unordered` in a step: Variables written without order, and races. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

from tfnb.graph import Graph, Node, Variable
from tfnb.graph.ops import LOCKING, UNORDERED


class Race(NamedTuple):
    """Two accesses to a Variable, at least one of them a write, that happen in any order, or at the same time."""

    variable: Variable
    first: Node
    second: Node

    def __repr__(self) -> str:
        return f"{self.variable.name}: {_shown(self.first)} and {_shown(self.second)} are in no order"


def unordered(graph: Graph) -> dict[Variable, bool]:
    """Variables with unordered writes only, each with whether its writes take a lock."""
    found: dict[Variable, tuple[bool, bool]] = {}
    for node in _accesses(graph):
        if _writes(node):
            free, locking = found.get(node.attrs["variable"], (True, True))
            found[node.attrs["variable"]] = free and UNORDERED in node.tags, locking and LOCKING in node.tags
    return {variable: locking for variable, (free, locking) in found.items() if free}


def races(steps: Sequence[Graph]) -> list[Race]:
    """Of pruned graphs that run at the same time: pairs within one of them, and of two of them.

    Within a step two accesses are in order if the program has them outside of `tfnb.unordered`, or if one depends on
    the other. Two accesses of different steps are in order if both steps hold the lock of the Variable.
    """
    found: dict[tuple[object, ...], Race] = {}
    for race in (*_within(steps), *_between(steps)):
        key = (race.variable, _shown(race.first), _shown(race.second))
        found.setdefault(key, race)
    return list(found.values())


def _within(steps: Sequence[Graph]) -> Iterator[Race]:
    for graph in dict.fromkeys(steps):
        behind = _ancestors(graph) if any(UNORDERED in node.tags for node in graph.nodes) else {}
        for one, two in combinations(_accesses(graph) if behind else (), 2):
            if _conflict(one, two) and UNORDERED in one.tags | two.tags and one.id not in behind[two.id]:
                yield Race(one.attrs["variable"], one, two)


def _between(steps: Sequence[Graph]) -> Iterator[Race]:
    free = [{v for v, locking in unordered(graph).items() if not locking} for graph in steps]
    for i, j in combinations(range(len(steps)), 2):
        for one, two in product(_accesses(steps[i]), _accesses(steps[j])):
            if _conflict(one, two) and one.attrs["variable"] in free[i] | free[j]:
                yield Race(one.attrs["variable"], one, two)


def _accesses(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op in ("tfnb.read", "tfnb.assign")]


def _writes(node: Node) -> bool:
    return node.op == "tfnb.assign"


def _conflict(one: Node, two: Node) -> bool:
    return one.attrs["variable"] is two.attrs["variable"] and (_writes(one) or _writes(two))


def _ancestors(graph: Graph) -> dict[int, set[int]]:
    """Ids of the ancestors of each node."""
    found: dict[int, set[int]] = {}
    for node in graph.nodes:
        direct = {value.node for value in node.inputs} | set(node.control)
        found[node.id] = direct.union(*(found.get(i, ()) for i in direct))
    return found


def _shown(node: Node) -> str:
    at = "" if node.source is None else f" at {node.source}"
    return f"{'write' if _writes(node) else 'read'}{at}"
