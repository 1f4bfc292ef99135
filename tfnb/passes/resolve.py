"""Elimination of a step's writes to variables: reads after a write become the written value.

After `resolve`, the nodes of a step are pure dataflow, each written variable has one final value, and it is known which
nodes depend on an optimizer update. Pure; imports the graph.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from tfnb.graph import Graph, Node, Value, Variable

_GONE = ("tfnb.assign", "tfnb.group")


@dataclass(frozen=True)
class ResolvedStep:
    """The pure nodes of a step in program order, and its writes.

    ``same``: a value that stands for another (what an assign gives, a read after an assign). ``final``: the new value
    of each written variable. ``updated``: ids of nodes that depend on an update.
    """

    nodes: dict[int, Node]
    same: dict[Value, Value]
    final: dict[Variable, Value]
    updated: frozenset[int]

    def resolved(self, value: Value) -> Value:
        """The value that stands for this one."""
        return self.same.get(value, value)

    def updated_ancestors(self, value: Value) -> set[int]:
        """Nodes that depend on an update and that ``value`` is computed from."""
        found: set[int] = set()
        stack = [value.node]
        while stack:
            node_id = stack.pop()
            if node_id in self.updated and node_id not in found:
                found.add(node_id)
                stack.extend(v.node for v in self.nodes[node_id].inputs)
        return found


def resolve(graph: Graph, feeds: Collection[Value]) -> ResolvedStep:
    """The state of a pruned graph; fed values are taken as they are."""
    nodes: dict[int, Node] = {}
    same: dict[Value, Value] = {}
    final: dict[Variable, Value] = {}
    updated: set[int] = set()
    for node in graph.nodes:
        inputs = tuple(same.get(value, value) for value in node.inputs)
        output = Value(node.id)
        if node.op == "tfnb.assign":
            final[node.attrs["variable"]] = inputs[0]
            if output not in feeds:
                same[output] = inputs[0]
        elif node.op == "tfnb.read" and node.attrs["variable"] in final and output not in feeds:
            same[output] = final[node.attrs["variable"]]
        elif node.op not in _GONE:
            nodes[node.id] = node if inputs == node.inputs else replace(node, inputs=inputs)
            fresh = (value.node for value in inputs if value not in feeds)
            if "update" in node.tags or any(i in updated for i in fresh):
                updated.add(node.id)
    for node_id, node in nodes.items():
        if any(i not in nodes for i in node.control):
            nodes[node_id] = replace(node, control=tuple(i for i in node.control if i in nodes))
    return ResolvedStep(nodes, same, final, frozenset(updated))
