"""The order of the axes of values in memory, as far as the graph tells: a random op draws in that order.

`torch.nn.functional.dropout` and the like draw into an empty tensor with the strides of their operand. So the numbers
that a row gets depend on whether the operand is contiguous or, for example, a transposed view. Pure; imports the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tfnb.graph import Node, Spec, Value
from tfnb.graph.op_facts import facts_of

Order = tuple[int, ...]  # axes, from the outermost to the innermost in memory

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_KEEPING = frozenset(
    {
        "native_dropout",
        "_softmax",
        "_log_softmax",
        "clone",
        "_to_copy",
        "convolution",
        "max_pool2d_with_indices",
        "avg_pool2d",
        "_adaptive_avg_pool2d",
        "_native_batch_norm_legit_functional",
        "native_batch_norm",
    }
)
"""Ops whose output has the layout of the operand of the same shape, or of the first one."""


def axis_orders(nodes: Iterable[Node], fed: Mapping[Value, Spec]) -> dict[Value, Order]:
    """The order of the axes of each fed value, and of each output of nodes in program order.

    What is fed, read and captured counts as contiguous, and so does the output of an op that no rule here knows.
    """
    specs = dict(fed)
    found: dict[Value, Order] = {value: tuple(range(len(spec.shape))) for value, spec in fed.items()}
    for node in nodes:
        for index, spec in enumerate(node.outputs):
            specs[node.value(index)] = spec
            found[node.value(index)] = _order(node, index, spec, found, specs)
    return found


def _order(node: Node, index: int, spec: Spec, found: dict[Value, Order], specs: dict[Value, Spec]) -> Order:
    usual = tuple(range(len(spec.shape)))
    name = node.op.split(".")[1] if node.op.startswith("aten.") else ""
    memory_format = node.attrs.get("memory_format")
    if memory_format not in (None, torch.preserve_format):
        is_last = memory_format is not torch.contiguous_format and len(usual) > 2
        return (0, *usual[2:], 1) if is_last else usual
    if name in _RECURRENT and index == 0 and len(usual) == 3:  # they compute time by time
        return (1, 0, 2) if node.attrs.get("batch_first") else usual
    if name == _FLASH and len(usual) == 4:
        return (0, 2, 1, 3)
    if name in _VIEWS and node.inputs[0] in found:
        return _VIEWS[name](node, found[node.inputs[0]])
    if name in _KEEPING or name.endswith("_like") or (name and facts_of(node.op).is_pointwise):
        wide = [v for v in node.inputs if v in specs and len(specs[v].shape) == len(usual)]
        orders = {found[v] for v in [v for v in wide if specs[v].shape == spec.shape] or wide[:1]}
        return orders.pop() if len(orders) == 1 else usual
    return usual


def _permuted(node: Node, order: Order) -> Order:
    dims = [dim % len(order) for dim in node.attrs["dims"]]
    return tuple(dims.index(axis) for axis in order)


def _transposed(node: Node, order: Order) -> Order:
    a, b = (node.attrs.get(name, usual) % len(order) for name, usual in (("dim0", 0), ("dim1", 1)))
    return tuple(b if axis == a else a if axis == b else axis for axis in order)


def _turned(node: Node, order: Order) -> Order:
    return tuple(reversed(order)) if len(order) == 2 else order


def _selected(node: Node, order: Order) -> Order:
    dim = node.attrs.get("dim", 0) % len(order)
    return tuple(axis - (axis > dim) for axis in order if axis != dim)


def _same(node: Node, order: Order) -> Order:
    return order


def _reshaped(node: Node, order: Order) -> Order:
    """A view of a contiguous tensor is contiguous, and one with as many axes has the same order."""
    axes = len(node.outputs[0].shape)
    return order if axes == len(order) else tuple(range(axes))


_VIEWS: dict[str, Callable[[Any, Order], Order]] = {
    "permute": _permuted, "transpose": _transposed, "t": _turned, "select": _selected, "slice": _same, "narrow": _same,
    "split": _same, "split_with_sizes": _same, "chunk": _same, "alias": _same, "detach": _same, "unbind": _selected,
    "view": _reshaped, "reshape": _reshaped, "unsqueeze": _reshaped, "squeeze": _reshaped, "_reshape_alias": _reshaped,
}  # fmt: skip
