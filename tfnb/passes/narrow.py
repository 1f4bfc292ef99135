"""Narrow: the indices that max pooling saves for its backward pass are kept as int16 or int32, not int64.

Torch counts places within an image as int64: for a net with many pools that is most of what it keeps between forward
and backward. They are cast right after the pool and back right before its gradient, which costs a few hundredths of
what the pool takes. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import prod

import torch

from tfnb.graph import Graph, Node, Ref, Spec, Value
from tfnb.graph.graph import new_id
from tfnb.graph.op_facts import facts_of
from tfnb.graph.spec import is_static
from tfnb.passes.liveness import nominal
from tfnb.passes.memory_format import LAID_OUT
from tfnb.passes.rewrite import with_nodes

LEAST = 1 << 20  # bytes of indices that are worth two more nodes


def narrow(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Indices of pools that only the backward pass takes are cast after the pool, and back before they are taken."""
    if not any(facts_of(node.op).pool for node in graph.nodes):
        return graph
    kept: dict[Value, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        for place, value in enumerate(node.inputs):
            if value in kept:
                wide = _cast(kept[value], "wide", kept[value].value(), graph.contents.by_id[value.node].outputs[1])
                nodes.append(wide)
                node = replace(node, inputs=(*node.inputs[:place], wide.value(), *node.inputs[place + 1 :]))
        nodes.append(node)
        dtype = _dtype(graph, node) if facts_of(node.op).pool and node.value(1) not in fetches else None
        if dtype is not None:
            kept[node.value(1)] = _cast(node, "narrow", node.value(1), replace(node.outputs[1], dtype=dtype))
            nodes.append(kept[node.value(1)])
    return with_nodes(graph, nodes)


def _dtype(graph: Graph, node: Node) -> torch.dtype | None:
    """A smaller dtype for the indices of a large pool whose gradient alone takes the indices; None if not
    applicable.
    """
    pool = node.op.removesuffix(".default")
    backward, axes = f"{pool}_backward.default", 3 if "3d" in pool else 2  # its indices count over the last axes
    users = [graph.contents.by_id[i] for i in graph.contents.consumers.get(node.value(1), ())]
    source = graph.contents.by_id.get(node.inputs[0].node)
    image = () if source is None else source.outputs[node.inputs[0].index].shape[-axes:]
    large = prod(nominal(node.outputs[1], {})) * node.outputs[1].dtype.itemsize >= LEAST
    if not users or not large or not is_static(image) or any(user.op != backward for user in users):
        return None
    return next((dtype for dtype in (torch.int16, torch.int32) if prod(image) <= torch.iinfo(dtype).max), None)


def _cast(like: Node, suffix: str, value: Value, spec: Spec) -> Node:
    """A cast; casts back use the strides expected by the backward kernel, where known."""
    attrs = {"self": Ref(0), "dtype": spec.dtype}
    if suffix == "wide" and LAID_OUT not in like.tags:
        attrs["memory_format"] = torch.contiguous_format
    new = new_id()
    return replace(
        like, id=new, name=f"{like.name}.{suffix}{new}", op="aten._to_copy.default", inputs=(value,), outputs=(spec,),
        attrs=attrs, control=(), forward=None,
    )  # fmt: skip
