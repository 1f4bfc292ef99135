"""Numbers among operands become constants: torch takes a tensor quicker than a number.

Each call with a number makes a tensor of it, which is a third of the time of a short kernel. Worth it in code that runs
many times in one step, the inside of loops.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch

from tfnb.graph import Graph, Node, Ref, Spec, Value
from tfnb.graph.graph import new_id
from tfnb.graph.op_facts import facts_of
from tfnb.passes.rewrite import with_nodes

_NUMBERS = {torch.int64: (int,), torch.float32: (int, float), torch.float64: (int, float)}
"""Numbers that do not change the type of a result."""


def numbers(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Numbers that pointwise ops on the CPU take become constants, one for each number and type."""
    made: dict[tuple[torch.dtype, str], Node] = {}
    nodes = []
    for node in graph.nodes:
        spec = _spec(graph, node)
        if spec is not None:
            value = torch.tensor(node.attrs["other"], dtype=spec.dtype)
            key = spec.dtype, repr(value.item())  # 0.0 is not -0.0
            if key not in made:
                made[key] = _constant(value)
            node = replace(
                node, op=f"{node.op.rpartition('.')[0]}.Tensor", inputs=(node.inputs[0], made[key].value()),
                attrs={**node.attrs, "other": Ref(1)},
            )  # fmt: skip
        nodes.append(node)
    return with_nodes(graph, [*made.values(), *nodes])


def _spec(graph: Graph, node: Node) -> Spec | None:
    """Spec of the tensor operand beside a number that may become a constant of the same dtype."""
    if not facts_of(node.op).takes_number or node.attrs["self"] != Ref(0) or len(node.inputs) != 1:
        return None
    source = graph.contents.by_id.get(node.inputs[0].node)
    if source is None:
        return None
    spec, number = source.outputs[node.inputs[0].index], node.attrs["other"]
    if spec.device != "cpu" or type(number) not in _NUMBERS.get(spec.dtype, ()):
        return None
    return spec if _fits(number, spec.dtype) and node.outputs[0].dtype in (spec.dtype, torch.bool) else None


def _fits(number: float, dtype: torch.dtype) -> bool:
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return not math.isfinite(number) or limits.min <= number <= limits.max


def _constant(value: torch.Tensor) -> Node:
    outputs, attrs = (Spec.of(value),), {"value": value}
    return Node(id=new_id(), name="number", op="tfnb.constant", outputs=outputs, attrs=attrs)
