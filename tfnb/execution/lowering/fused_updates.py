"""What the commit does in place: optimizer updates, one fused kernel over many variables, and rows of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from tfnb.graph import Graph, Node, Value, Variable
from tfnb.graph.ops import HOISTED
from tfnb.kernels.optim import FUSED
from tfnb.kernels.places import WRITES
from tfnb.passes.hoist import state_places

IN_PLACE: dict[str, Callable[..., None]] = {**FUSED, **WRITES}
"""In-place twin of each op, by its qualified name: called with a list of rows, and settings."""
_TENSORS = frozenset({"w", "grad", "slots", "indices", "rate", "left", "right", "self", "index", "source"})


def written(node: Node) -> tuple[int, ...]:
    """Of the inputs of an update those that it writes: the variable and its slots."""
    return (0,) if node.op in WRITES else state_places(node)


def settings(node: Node) -> dict[str, Any]:
    """What is no tensor among the arguments."""
    return {name: value for name, value in node.attrs.items() if name not in _TENSORS}


def in_place_updates(graph: Graph, fetches: Collection[Value], feeds: Collection[Value]) -> dict[int, Node]:
    """Update nodes and their assigns, each with its update node, where nobody else takes what the update gives."""
    updates = _Updates(graph, fetches, feeds)
    fused: dict[int, Node] = {}
    for node in graph.nodes:
        done = updates.assigns(node) if node.op in FUSED or updates.is_row(node) else None
        if done is not None:
            fused[node.id] = node
            fused.update({assign.id: node for assign in done})
    return fused


class _Updates:
    def __init__(self, graph: Graph, fetches: Collection[Value], feeds: Collection[Value]) -> None:
        self.contents, self.fetches, self.feeds = graph.contents, frozenset(fetches), frozenset(feeds)
        self.writes = Counter(node.attrs["variable"] for node in graph.nodes if node.op == "tfnb.assign")
        self.reads: dict[Variable, list[Node]] = {}
        for node in graph.nodes:
            if node.op == "tfnb.read":
                self.reads.setdefault(node.attrs["variable"], []).append(node)

    def assigns(self, node: Node) -> list[Node] | None:
        """The assigns that store the outputs of an update node into the very variables it read, if that is all.

        Who else may take the new value of one that was taken out of a branch, the pass that did so has seen to.
        """
        contents = self.contents
        found: list[Node] = []
        for index, place in enumerate(written(node)):
            output, source = Value(node.id, index), contents.by_id.get(node.inputs[place].node)
            users = contents.consumers.get(output, ())
            assigns = [a for i in users if (a := contents.by_id[i]).op == "tfnb.assign"]
            alone = len(users) == 1 or HOISTED in node.tags
            if output in self.fetches or not alone or len(assigns) != 1 or source is None or source.op != "tfnb.read":
                return None
            (assign,) = assigns
            variable = source.attrs["variable"]
            if (
                assign.op != "tfnb.assign" or assign.attrs["variable"] is not variable or self.writes[variable] != 1
                or Value(source.id) in self.feeds or Value(assign.id) in self.fetches
                or not self._is_unused(assign.value())
                or self._read_later(variable, assign)
            ):  # fmt: skip
                return None
            found.append(assign)
        return found

    def is_row(self, node: Node) -> bool:
        """Whether the node writes rows of a table on the CPU; elsewhere nobody knows in time whether they are there."""
        if node.op not in WRITES or len(node.inputs) != 3:
            return False
        return node.outputs[0].device == "cpu" and bool(node.outputs[0].shape)

    def _read_later(self, variable: Variable, assign: Node) -> bool:
        place = self.contents.position
        later = (n for n in self.reads.get(variable, ()) if place[n.id] > place[assign.id])
        return any(not self._is_unused(n.value()) for n in later)

    def _is_unused(self, value: Value) -> bool:
        """Whether nobody takes the value, but what just has to be there."""
        users = self.contents.consumers.get(value, ())
        return value not in self.fetches and all(self.contents.by_id[i].op == "tfnb.group" for i in users)
