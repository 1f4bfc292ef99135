"""Optimizer updates that the commit does in place: one fused kernel over the rows of many variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from tfnb.graph import Graph, Node, Value, Variable
from tfnb.kernels.optim import FUSED


def in_place_updates(graph: Graph, fetches: Collection[Value], feeds: Collection[Value]) -> dict[int, Node]:
    """Update nodes and their assigns, each with its update node, where nobody else takes what the update gives."""
    updates = _Updates(graph, fetches, feeds)
    fused: dict[int, Node] = {}
    for node in graph.nodes:
        done = updates.assigns(node) if node.op in FUSED else None
        if done is not None:
            fused[node.id] = node
            fused.update({assign.id: node for assign in done})
    return fused


class _Updates:
    def __init__(self, graph: Graph, fetches: Collection[Value], feeds: Collection[Value]) -> None:
        self.contents, self.fetches, self.feeds = graph.contents, frozenset(fetches), frozenset(feeds)
        self.writes = Counter(node.attrs["variable"] for node in graph.nodes if node.op == "tfnb.assign")

    def assigns(self, node: Node) -> list[Node] | None:
        """The assigns that store the outputs of an update node into the very variables it read, if that is all."""
        contents = self.contents
        state = (0, *range(2, 2 + len(node.attrs["slots"])))  # w and the slots among the flat inputs
        found: list[Node] = []
        for index, place in enumerate(state):
            output, source = Value(node.id, index), contents.by_id.get(node.inputs[place].node)
            users = contents.consumers.get(output, ())
            if output in self.fetches or len(users) != 1 or source is None or source.op != "tfnb.read":
                return None
            assign = contents.by_id[users[0]]
            variable = source.attrs["variable"]
            if (
                assign.op != "tfnb.assign" or assign.attrs["variable"] is not variable or self.writes[variable] != 1
                or Value(source.id) in self.feeds or Value(assign.id) in self.fetches
                or any(contents.by_id[c].op != "tfnb.group" for c in contents.consumers.get(Value(assign.id), ()))
                or self._read_later(variable, assign)
            ):  # fmt: skip
                return None
            found.append(assign)
        return found

    def _read_later(self, variable: Variable, assign: Node) -> bool:
        after = self.contents.nodes[self.contents.position[assign.id] :]
        return any(n.op == "tfnb.read" and n.attrs["variable"] is variable for n in after)
