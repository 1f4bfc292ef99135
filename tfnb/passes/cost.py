"""What it costs to run a node, as bytes moved: those that it takes and makes, and its arithmetic in the same unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from tfnb.graph import Contents, Node, Ref, Spec
from tfnb.graph.node import map_leaves
from tfnb.graph.ops import overload
from tfnb.graph.spec import Dim
from tfnb.passes.memory import nominal

FLOPS_PER_BYTE = 8  # a kernel does so many while it moves one byte


def cost(node: Node, contents: Contents, sizes: Mapping[str, int]) -> float:
    """Bytes, in which a floating-point operation counts as an eighth."""

    def spec(ref: Ref) -> Spec:
        value = node.inputs[ref.input]
        return contents.by_id[value.node].outputs[value.index]

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, Dim):
            return leaf.evaluate({symbol: sizes.get(symbol, 1) for symbol in leaf.symbols})
        return _meta(spec(leaf), sizes) if isinstance(leaf, Ref) else leaf

    op = overload(node.op)
    specs = [*(spec(Ref(place)) for place in range(len(node.inputs))), *node.outputs]
    moved = sum(_numbers(s, sizes) * s.dtype.itemsize for s in specs)
    count = flop_registry.get(op.overloadpacket)
    if count is None:
        return moved
    given = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    given |= map_leaves(plain, node.attrs)
    args = [given.get(a.name) for a in op._schema.arguments if not a.kwarg_only]
    outs = tuple(_meta(output, sizes) for output in node.outputs)
    return moved + count(*args, out_val=outs[0] if len(outs) == 1 else outs) / FLOPS_PER_BYTE


def _meta(spec: Spec, sizes: Mapping[str, int]) -> torch.Tensor:
    return torch.empty(nominal(spec, sizes), dtype=spec.dtype, device="meta")


def _numbers(spec: Spec, sizes: Mapping[str, int]) -> int:
    return torch.Size(nominal(spec, sizes)).numel()
