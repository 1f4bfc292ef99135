"""Fractions: a quotient of integers keeps its recorded dtype, independent of torch's current default dtype.

``mask / 3`` and ``labels.sqrt()`` take torch's default dtype when they run, and a later cell may have set another one.
Recordings cast such operands themselves where the default is not float32 (`tfnb.recording.dispatch`), as workers of a
cluster have float32; this pass casts where a process of another default runs what was recorded with float32.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from tfnb.graph import Graph, Node, Ref, Spec, Value
from tfnb.graph.graph import new_id
from tfnb.graph.op_facts import facts_of
from tfnb.passes.rewrite import with_nodes


def fractions(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """The first operand of ops that make fractions, on integers alone, is cast to the real dtype of their result."""
    default = torch.get_default_dtype()
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.inputs and facts_of(node.op).makes_fractions and (dtype := _fractional(node)) not in (None, default):
            first = graph.contents.by_id.get(node.inputs[0].node)
            if first is not None and not any(_is_inexact(_spec(graph, value).dtype) for value in node.inputs):
                cast = _cast(node, replace(first.outputs[node.inputs[0].index], dtype=dtype))
                nodes.append(cast)
                node = replace(node, inputs=(cast.value(), *node.inputs[1:]))
        nodes.append(node)
    return with_nodes(graph, nodes)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _spec(graph: Graph, value: Value) -> Spec:
    return graph.contents.by_id[value.node].outputs[value.index]


def _fractional(node: Node) -> torch.dtype | None:
    """The real dtype of a result that is no integer, unless the node's attributes give the dtype."""
    dtype = node.outputs[0].dtype
    return dtype.to_real() if _is_inexact(dtype) and "dtype" not in node.attrs else None


def _cast(node: Node, spec: Spec) -> Node:
    new = new_id()
    return replace(
        node, id=new, name=f"{node.name}.real{new}", op="aten._to_copy.default", inputs=node.inputs[:1],
        outputs=(spec,), attrs={"self": Ref(0), "dtype": spec.dtype}, forward=None,
    )  # fmt: skip
