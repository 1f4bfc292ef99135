"""Layout: two-dimensional convolutions on the CPU run with channels last, if requested and profitable.

The kernels keep the layout that they are given, so one copy of what enters the first convolution is enough: what
follows finds its channels last, forward and backward. Measured (one thread, forward and backward): 0.8 of the time for
GoogLeNet and for depthwise convolutions, 0.9 for plain stacks of convolutions; 1.7 where weights are many and images
small, since the weights are laid out anew in each step. Kernels of this layout add in another order, which a deep net
that normalises each batch makes 2e-3 of its outputs; so it is no default. What a run fetches is made contiguous again,
and a graph in which an op could see strides is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Literal, get_args

import torch

from tfnb.errors import InvalidArgument
from tfnb.graph import Graph, Node, Ref, Value
from tfnb.graph.graph import new_id
from tfnb.graph.ops import WITH_GRADIENT
from tfnb.passes.rewrite import with_nodes

Layout = Literal["torch", "channels_last"]
LAID_OUT = "channels last"  # tag of what may have other strides than recorded
ROWS = 4  # of a batch that only a run knows
PAYS = 3  # numbers that are read and written for each number of the weights
_CONVOLUTION = "aten.convolution.default"
_BACKWARD = "aten.convolution_backward.default"
_SEES_STRIDES = ("as_strided", "_reshape_alias", "view.dtype", "set_", "resize")
_OURS = ("tfnb.read", "tfnb.assign", "tfnb.group", "tfnb.guard", WITH_GRADIENT)


def chosen_layout(wanted: str | None) -> Layout:
    """The meaning of ``layout=``: for None the environment's TFNB_LAYOUT, else torch's own layout."""
    found = os.environ.get("TFNB_LAYOUT", "torch") if wanted is None else wanted
    if found not in get_args(Layout):
        raise InvalidArgument(f"layout is one of {', '.join(map(repr, get_args(Layout)))}, not {found!r}")
    return found  # type: ignore[return-value]


def channels_last(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Copy the inputs of first convolutions with channels last; dependent nodes get the tag LAID_OUT."""
    convolutions = [node for node in graph.nodes if node.op == _CONVOLUTION and _fits(node, graph)]
    if not convolutions or not torch.backends.mkldnn.is_available() or _traffic(convolutions, graph) < PAYS:
        return graph
    entries = _entries(convolutions, graph)
    behind = _behind(graph, entries)
    if not all(_strides_are_hidden(node) for node in graph.nodes if node.id in behind):
        return graph
    copies: dict[Value, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        takes = node.inputs[0] if node.id in entries else None
        if takes is not None and takes not in copies:
            spec = graph.contents.by_id[takes.node].outputs[takes.index]
            new = new_id()
            copies[takes] = replace(
                node, id=new, name=f"{node.name}.layout{new}", op="aten.clone.default", inputs=(takes,),
                outputs=(spec,),
                attrs={"self": Ref(0), "memory_format": torch.channels_last}, control=(), forward=None,
            )  # fmt: skip
            nodes.append(copies[takes])
        if node.op in (_CONVOLUTION, _BACKWARD):
            inputs = tuple(copies[v].value() if v in copies else v for v in node.inputs)
            node = node if inputs == node.inputs else replace(node, inputs=inputs)
        nodes.append(replace(node, tags=node.tags | {LAID_OUT}) if node.id in behind else node)
    return with_nodes(graph, nodes)


def _fits(node: Node, graph: Graph) -> bool:
    """A plain convolution of images in float32 on the CPU."""
    output, source = node.outputs[0], graph.contents.by_id.get(node.inputs[0].node)
    return (
        len(output.shape) == 4 and output.dtype is torch.float32 and output.device == "cpu"
        and not node.attrs["transposed"] and source is not None
    )  # fmt: skip


def _traffic(convolutions: Sequence[Node], graph: Graph) -> float:
    """Numbers of images in and out, for each number of the weights."""
    moved = weights = 0
    for node in convolutions:
        source, weight = (graph.contents.by_id[v.node].outputs[v.index] for v in node.inputs[:2])
        for spec in (source, *node.outputs):
            moved += prod(size if isinstance(size, int) else ROWS for size in spec.shape)
        weights += prod(size if isinstance(size, int) else ROWS for size in weight.shape)
    return moved / max(weights, 1)


def _entries(convolutions: Sequence[Node], graph: Graph) -> set[int]:
    """The convolutions without another convolution among their ancestors."""
    ids = {node.id for node in convolutions}
    behind = _behind(graph, ids)
    return {node.id for node in convolutions if node.inputs[0].node not in behind}


def _behind(graph: Graph, ids: Collection[int]) -> set[int]:
    """Ids of the given nodes and of all dependent nodes, without the way through variables."""
    found = set(ids)
    for node in graph.nodes:
        if any(value.node in found for value in node.inputs):
            found.add(node.id)
    return found


def _strides_are_hidden(node: Node) -> bool:
    if node.op in _OURS or "update" in node.tags:
        return True
    return node.op.startswith("aten.") and not node.op.removeprefix("aten.").startswith(_SEES_STRIDES)
