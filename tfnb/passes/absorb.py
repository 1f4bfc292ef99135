"""Absorb: a step of SGD takes the two factors of a large gradient, and the gradient is never made.

    w - lr * (a @ b)             ->  one matrix product that adds to w, in place at commit
    w - lr * (m * buf + a @ b)   ->  one that adds to the buffer of the momentum, which is then added to w

The gradient of a wide linear layer is as large as its weight, and a step would write and read it once each: of a small
batch that takes several times as long as the products themselves. The same sum, rounded once less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

import torch

from tfnb.graph import Graph, Node, Ref, Value
from tfnb.graph.spec import is_static
from tfnb.kernels.optim import SGD, SGD_PRODUCT
from tfnb.passes.liveness import nominal
from tfnb.passes.rewrite import with_nodes

LEAST = 1 << 18  # bytes of a gradient that is not made; a smaller one costs no more than another kernel
SMALLER = 2  # the factors, which are held until the commit and are no feeds, are smaller than it by this factor
_DTYPES = (torch.float32, torch.float64)
_TURNED = ("aten.t.default", "aten.transpose.int", "aten.view.default", "aten.reshape.default")


def absorb(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Updates whose gradient is a product that nobody else takes are given its factors."""
    if not any(node.op == SGD for node in graph.nodes):
        return graph
    fixed = {*fetches, *feeds}
    nodes = [_absorbed(node, graph, fixed, feeds) if node.op == SGD else node for node in graph.nodes]
    return with_nodes(graph, nodes)


def _absorbed(node: Node, graph: Graph, fixed: Collection[Value], feeds: Collection[Value]) -> Node:
    grad, spec = node.inputs[1], node.outputs[0]
    product = graph.contents.by_id.get(grad.node)
    if product is None or product.op != "aten.mm.default" or grad in fixed or product.control:
        return node
    if len(graph.contents.consumers[grad]) != 1 or not _is_plain(node.attrs):
        return node
    is_fit = spec.device == "cpu" and spec.dtype in _DTYPES and is_static(spec.shape)
    if not is_fit or product.outputs[0] != spec or not _is_worth(product, prod(nominal(spec, {})), graph, feeds):
        return node
    w, _, *slots = node.inputs
    left, right = _factors(product)
    places = [Ref(2 + i) for i in range(len(slots))]  # where an update has its slots
    attrs = {"w": Ref(0), "left": Ref(1), "slots": places, "right": Ref(2 + len(slots)), "lr": node.attrs["lr"]}
    attrs |= {"momentum": node.attrs["momentum"]} if slots else {}
    return replace(node, op=SGD_PRODUCT, inputs=(w, left, *slots, right), attrs=attrs)


def _is_plain(attrs: Mapping[str, object]) -> bool:
    """Whether it is w - lr * grad, with or without a momentum, and with a number for the rate."""
    others = ("rate", "dampening", "nesterov", "weight_decay", "maximize")
    return isinstance(attrs.get("lr"), float) and not any(attrs.get(name) for name in others)


def _factors(product: Node) -> tuple[Value, Value]:
    left, right = (product.attrs[name] for name in ("self", "mat2"))
    return product.inputs[left.input], product.inputs[right.input]


def _is_worth(product: Node, count: int, graph: Graph, feeds: Collection[Value]) -> bool:
    by_id, factors = graph.contents.by_id, _factors(product)
    specs = [by_id[v.node].outputs[v.index] for v in factors if v.node in by_id]
    if len(specs) < 2 or specs[0].shape[1:] != specs[1].shape[:1]:  # a commit may not find out
        return False
    own = [spec for spec, value in zip(specs, factors, strict=True) if _root(value, graph) not in feeds]
    held = sum(prod(nominal(spec, {})) for spec in own)
    return count * specs[0].dtype.itemsize >= LEAST and SMALLER * held <= count


def _root(value: Value, graph: Graph) -> Value:
    """What a value is a view of: that of a feed holds no memory but the caller's."""
    while (node := graph.contents.by_id.get(value.node)) is not None and node.op in _TURNED:
        value = node.inputs[0]
    return value
