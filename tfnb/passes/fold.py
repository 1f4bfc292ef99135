"""Constant folding: nodes that depend on constants alone are computed once. White paper §5, semantics S-140."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from tfnb.graph import Graph, Node, Ref, Spec, Value
from tfnb.graph.node import map_leaves
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import overload
from tfnb.graph.spec import Dim
from tfnb.interrupts import from_signal_handler
from tfnb.passes.rewrite import is_pure, with_nodes

LARGEST = 10 << 20  # bytes; a larger result is computed in each run and not kept
WORTH_KEEPING = 64 << 10  # bytes; filling a larger tensor anew costs no more than keeping it


def fold(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Nodes of constants alone become constants, where something else takes them, as long as they have at most 10 MiB
    (64 KiB if made from no inputs).

    An op that fails on its constants stays, so that the run raises the error.
    """
    constants = _Constants(frozenset(feeds))
    for node in graph.nodes:
        constants.meet(node)
    taken = {v for node in graph.nodes if node.id not in constants.nodes for v in node.inputs} | set(fetches)
    return with_nodes(graph, [constants.folded(node) if node.value() in taken else node for node in graph.nodes])


class _Constants:
    """The nodes that depend on constants alone, and their values as far as somebody asked."""

    def __init__(self, fed: frozenset[Value]) -> None:
        self.fed = fed
        self.nodes: dict[int, Node] = {}
        self._values: dict[int, torch.Tensor | None] = {}

    def meet(self, node: Node) -> None:
        """Nodes come in program order."""
        if node.value() not in self.fed and (node.op == "tfnb.constant" or self._is_constant(node)):
            self.nodes[node.id] = node

    def _is_constant(self, node: Node) -> bool:
        if not is_pure(node) or node.control or len(node.outputs) != 1 or node.symbols:
            return False
        inputs_known = facts_of(node.op).shape_only or all(value.node in self.nodes for value in node.inputs)
        return inputs_known and _bytes(node.outputs[0]) <= LARGEST

    def folded(self, node: Node) -> Node:
        """The node as a constant, if constant and worth storing."""
        makes_from_nothing = not node.inputs or facts_of(node.op).shape_only
        if node.id not in self.nodes or node.op == "tfnb.constant":
            return node
        if makes_from_nothing and _bytes(node.outputs[0]) > WORTH_KEEPING:
            return node
        value = self._value(node)
        return node if value is None else replace(node, op="tfnb.constant", inputs=(), attrs={"value": value})

    def _value(self, node: Node) -> torch.Tensor | None:
        if node.op == "tfnb.constant":
            return node.attrs["value"]
        if node.id not in self._values:
            self._values[node.id] = self._computed(node)
        return self._values[node.id]

    def _computed(self, node: Node) -> torch.Tensor | None:
        """The value, in memory of its own; None where the op fails or gives something else than the spec says."""
        spec = node.outputs[0]
        if facts_of(node.op).shape_only:
            given: list[Any] = [torch.empty(spec.sizes({}), dtype=spec.dtype, device=spec.device)]
        else:
            given = [self._value(self.nodes[value.node]) for value in node.inputs]
        op = overload(node.op)
        if op._schema.is_mutable or any(value is None for value in given):
            return None

        def argument(leaf: object) -> Any:
            return given[leaf.input] if isinstance(leaf, Ref) else leaf

        try:
            with torch.no_grad():
                result = op(**map_leaves(argument, node.attrs))
        except Exception as error:  # whatever it is, the run raises it with the user's line
            if from_signal_handler(error):
                raise
            return None
        fits = isinstance(result, torch.Tensor) and result.layout is torch.strided and result.dtype is spec.dtype
        return result.clone() if fits else None


def _bytes(spec: Spec) -> float:
    """Size of a value in bytes; infinite for varying sizes."""
    if any(isinstance(size, Dim) for size in spec.shape):
        return float("inf")
    return torch.Size(spec.sizes({})).numel() * spec.dtype.itemsize
