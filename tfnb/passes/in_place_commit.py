"""The in-place plan of a commit: updates and row writes done in the memory of their Variables.

An update whose results are only stored (an optimizer's step, rows of a table) is not computed: the commit calls its
in-place kernel, once for all updates of a kind. A step of SGD even takes the two factors of a large gradient, and the
gradient is never made:

    w - lr * (a @ b)             ->  one matrix product that adds to w
    w - lr * (m * buf + a @ b)   ->  one that adds to the buffer of the momentum, which is then added to w

The gradient of a wide linear layer is as large as its weight, and a step would write and read it once each: of a small
batch that takes several times as long as the products themselves. The same sum, rounded once less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from tfnb.graph import Graph, Node, Ref, Value, Variable
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import HOISTED
from tfnb.graph.spec import is_static
from tfnb.kernels.optim import FUSED, SGD, SGD_PRODUCT
from tfnb.kernels.row_writes import WRITES
from tfnb.passes.liveness import nominal
from tfnb.passes.rewrite import with_nodes

LEAST = 1 << 18  # bytes of a gradient that is not made; a smaller one costs no more than another kernel
SMALLER = 2  # the factors, which are held until the commit and are no feeds, are smaller than it by this factor
_DTYPES = (torch.float32, torch.float64)
IN_PLACE: dict[str, Callable[..., None]] = {**FUSED, **WRITES}
"""In-place twin of each op, by its qualified name: called with a list of rows, and settings."""
_TENSORS = frozenset({"w", "grad", "slots", "indices", "rate", "left", "right", "self", "index", "source"})


def written(node: Node) -> tuple[int, ...]:
    """Indices of the inputs that an update writes: the variable and its slots."""
    return (0,) if node.op in WRITES else (0, *range(2, 2 + len(node.attrs.get("slots", ()))))


def settings(node: Node) -> dict[str, Any]:
    """The arguments that are no tensors."""
    return {name: value for name, value in node.attrs.items() if name not in _TENSORS}


def in_place_updates(graph: Graph, fetches: Collection[Value], feeds: Collection[Value]) -> dict[int, Node]:
    """Update nodes and their assigns, each with its update node, if nobody else consumes the updated values."""
    updates = _Updates(graph, fetches, feeds)
    fused: dict[int, Node] = {}
    for node in graph.nodes:
        done = updates.assigns(node) if node.op in FUSED or updates.is_row(node) else None
        if done is not None:
            fused[node.id] = node
            fused.update({assign.id: node for assign in done})
    return fused


class _Updates:
    def __init__(self, graph: Graph, fetches: Collection[Value], feeds: Collection[Value]) -> None:
        self.contents, self.fetches, self.feeds = graph.contents, frozenset(fetches), frozenset(feeds)
        self.writes = Counter(node.attrs["variable"] for node in graph.nodes if node.op == "tfnb.assign")
        self.reads: dict[Variable, list[Node]] = {}
        for node in graph.nodes:
            if node.op == "tfnb.read":
                self.reads.setdefault(node.attrs["variable"], []).append(node)

    def assigns(self, node: Node) -> list[Node] | None:
        """The assigns that store an update's outputs into the very variables it read; None if there are other
        consumers.

        Who else may take the new value of one that was taken out of a branch, the pass that did so has seen to.
        """
        contents = self.contents
        found: list[Node] = []
        for index, place in enumerate(written(node)):
            output, source = Value(node.id, index), contents.by_id.get(node.inputs[place].node)
            users = contents.consumers.get(output, ())
            assigns = [a for i in users if (a := contents.by_id[i]).op == "tfnb.assign"]
            alone = len(users) == 1 or HOISTED in node.tags
            if output in self.fetches or not alone or len(assigns) != 1 or source is None or source.op != "tfnb.read":
                return None
            (assign,) = assigns
            variable = source.attrs["variable"]
            if (
                assign.op != "tfnb.assign" or assign.attrs["variable"] is not variable or self.writes[variable] != 1
                or Value(source.id) in self.feeds or Value(assign.id) in self.fetches
                or not self._is_unused(assign.value())
                or self._read_later(variable, assign)
            ):  # fmt: skip
                return None
            found.append(assign)
        return found

    def is_row(self, node: Node) -> bool:
        """Whether the node writes rows of a table on the CPU; elsewhere nobody knows in time whether they are there."""
        if node.op not in WRITES or len(node.inputs) != 3:
            return False
        return node.outputs[0].device == "cpu" and bool(node.outputs[0].shape)

    def _read_later(self, variable: Variable, assign: Node) -> bool:
        place = self.contents.position
        later = (n for n in self.reads.get(variable, ()) if place[n.id] > place[assign.id])
        return any(not self._is_unused(n.value()) for n in later)

    def _is_unused(self, value: Value) -> bool:
        """Whether a value has no consumers besides groups, and is not fetched."""
        users = self.contents.consumers.get(value, ())
        return value not in self.fetches and all(self.contents.by_id[i].op == "tfnb.group" for i in users)


# -- gradients that are not made ------------------------------------------------------------------------------------


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
    """Whether an update is w - lr * grad, optionally with momentum, with a number for the rate."""
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


def _is_turned(node: Node) -> bool:
    own = facts_of(node.op)
    return own.whole_view or own.view_or_copy


def _root(value: Value, graph: Graph) -> Value:
    """The base of a chain of transposes: a view of a feed has no memory but the caller's."""
    while (node := graph.contents.by_id.get(value.node)) is not None and _is_turned(node):
        value = node.inputs[0]
    return value
