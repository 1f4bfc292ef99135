"""What a step must compute again if another one wrote the same Variables since it read them.

A written value that depends on the old one (``v.assign_add(x)``, a running mean, a row of a table, a counter) would
undo what was written in between. Here the light nodes on the way from the read to the write are found; the commit
computes them again, from what is stored then, while nobody else writes. What is heavy on that way (a gradient) is taken
as it was computed: it is as stale as that of any asynchronous step. Pure; imports the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tfnb.graph import Graph, Node, Ref, Value, Variable
from tfnb.graph.graph import new_id
from tfnb.graph.ops import REGIONS, WITH_GRADIENT, overload
from tfnb.graph.subgraph import subgraphs
from tfnb.kernels.optim import FUSED
from tfnb.passes.resolve import State, resolve
from tfnb.passes.rewrite import redirected

_INDEXING = """
    index index_add index_copy index_fill index_put index_select gather scatter scatter_add scatter_reduce
    select_scatter slice_scatter diagonal_scatter as_strided_scatter masked_scatter clone cat view reshape _unsafe_view
    expand permute t transpose select slice squeeze unsqueeze diagonal as_strided unbind split alias
"""
_LIGHT = frozenset(f"aten.{name}" for name in _INDEXING.split())
_LEAVES = frozenset({"tfnb.read", "tfnb.constant"})
_NORM = "aten._native_batch_norm_legit_functional.default"
_RUNNING = {3: "running_mean", 4: "running_var"}  # outputs that are (1 - momentum) times this argument, and more


@dataclass(frozen=True)
class Again:
    """The light nodes in order, reads and constants among them; what they take; what is written.

    operands: values that the nodes take, each with the value of the step that it is. same: of a fetched value, the
    value that it stands for (that of an assign is what was assigned). private: variables of which the step must read a
    copy, since it takes the old value twice.
    """

    nodes: tuple[Node, ...]
    operands: Mapping[Value, Value]
    new: Mapping[Variable, Value]
    same: Mapping[Value, Value]
    private: frozenset[Variable]


def again(graph: Graph, feeds: Collection[Value], done: Collection[Variable] = ()) -> Again | None:
    """What to compute again of a pruned graph; ``done``: variables that a commit updates in place."""
    if not any(node.op == "tfnb.assign" and node.attrs["variable"] not in done for node in graph.nodes):
        return None
    state, then = _with_drift(resolve(graph, feeds))
    finder = _Finder(state, frozenset(feeds), [variable for variable in state.final if variable not in done])
    new = {variable: value for variable, value in state.final.items() if finder.leads(variable, value)}
    if not new:
        return None
    inside = finder.between(new)
    nodes = tuple(node for node in state.nodes.values() if node.id in inside)
    taken = dict.fromkeys(value for node in nodes for value in node.inputs if not finder.gives(value, inside))
    read = (state.nodes.get(value.node) for value in then.values())
    private = frozenset(node.attrs["variable"] for node in read if node is not None and node.op == "tfnb.read")
    return Again(nodes, {value: then.get(value, value) for value in taken}, new, state.same, private)


def _with_drift(state: State) -> tuple[State, dict[Value, Value]]:
    """Running statistics of batch norm by light nodes: what the kernel gave, and what was stored in between.

    new = (1 - momentum) * old + more: for another old one, new + (1 - momentum) * (now - old). Also returned: values
    that stand for the old ones.
    """
    nodes, same, then = dict[int, Node](), dict[Value, Value](), dict[Value, Value]()
    for node in state.nodes.values():
        nodes[node.id] = redirected(node, same)
        if node.op != _NORM or node.attrs["training"] is not True:
            continue
        for index, name in _RUNNING.items():
            old, outputs = node.inputs[node.attrs[name].input], (node.outputs[index],)
            then[key := Value(new_id())] = old
            inputs, attrs = (same.get(old, old), key), {"self": Ref(0), "other": Ref(1)}
            drift = replace(node, id=new_id(), op="aten.sub.Tensor", inputs=inputs, outputs=outputs, attrs=attrs)
            inputs, attrs = (node.value(index), drift.value()), {**attrs, "alpha": 1 - node.attrs["momentum"]}
            whole = replace(node, id=new_id(), op="aten.add.Tensor", inputs=inputs, outputs=outputs, attrs=attrs)
            nodes |= {drift.id: drift, whole.id: whole}
            same[node.value(index)] = whole.value()
    final = {variable: same.get(value, value) for variable, value in state.final.items()}
    stands = {value: same.get(other, other) for value, other in state.same.items()}
    return replace(state, nodes=nodes, final=final, same=same | stands), then


class _Finder:
    """Which values a stored value leads to by light nodes alone: a bit of ``ways`` for each variable."""

    def __init__(self, state: State, feeds: frozenset[Value], variables: Sequence[Variable]) -> None:
        self.state, self.feeds = state, feeds
        self.bit = {variable: 1 << place for place, variable in enumerate(variables)}
        self.ways: dict[int, int] = {}
        for node in state.nodes.values():
            if node.op == "tfnb.read":
                self.ways[node.id] = self.bit.get(node.attrs["variable"], 0)
            elif any(map(self._way, node.inputs)) and is_light(node):
                found = 0
                for value in node.inputs:
                    found |= self._way(value)
                self.ways[node.id] = found

    def _way(self, value: Value) -> int:
        return 0 if value in self.feeds else self.ways.get(value.node, 0)

    def leads(self, variable: Variable, value: Value) -> bool:
        """Whether the variable's stored value leads to this one."""
        return bool(self._way(value) & self.bit.get(variable, 0))

    def gives(self, value: Value, inside: Collection[int]) -> bool:
        """Whether the value is one of these nodes'."""
        return value not in self.feeds and value.node in inside

    def between(self, new: Mapping[Variable, Value]) -> set[int]:
        """The nodes on the ways from each variable to its new value, and the reads and constants that they take."""
        found: set[int] = set()
        for variable, value in new.items():
            bit, seen, stack = self.bit[variable], set[int](), [value]
            while stack:
                value = stack.pop()
                node = None if value in self.feeds else self.state.nodes.get(value.node)
                if node is None or node.id in seen:
                    continue
                if node.op in _LEAVES or self.ways.get(node.id, 0) & bit:
                    seen.add(node.id)
                    stack.extend(node.inputs)
            found |= seen
        return found


def is_light(node: Node) -> bool:
    """Whether a node is quickly computed again: pointwise, on rows, a view, an optimizer's update, or made of such."""
    if node.op == WITH_GRADIENT or node.op in FUSED:
        return True
    if node.stream is not None or node.symbols:
        return False
    if node.op in REGIONS:
        return all(_is_inner(inner) for part in subgraphs(node) for inner in part.contents.nodes)
    if not node.op.startswith("aten."):
        return False
    return node.op.rpartition(".")[0] in _LIGHT or torch.Tag.pointwise in overload(node.op).tags


def _is_inner(node: Node) -> bool:
    return node.op in ("tfnb.placeholder", "tfnb.constant") or is_light(node)
