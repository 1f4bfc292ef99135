"""The order of the axes of values in memory: a random op draws in that order.

`torch.nn.functional.dropout` and the like draw into an empty tensor with the strides of their operand. So the numbers
that a row gets depend on whether the operand is contiguous or, for example, a transposed view. Torch's kernels choose
strides by rules of their own. So each op that leads to a draw is done once, on zeros where there are few of them, and
else without memory (on ``meta``, some of whose shape rules choose other strides than kernels: `_RULES`). Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from tfnb.errors import ShapeError
from tfnb.graph import Dim, Node, Ref, Spec, Value
from tfnb.graph.node import map_leaves
from tfnb.graph.op_facts import kernel, unbind
from tfnb.graph.ops import TRUSTED, WITH_GRADIENT, overload
from tfnb.interrupts import from_signal_handler
from tfnb.kernels.strided import unit_rows

Attrs = Mapping[str, Any]
Order = tuple[int, ...]  # axes, from the outermost to the innermost in memory

FEW = 1 << 14  # numbers: an op on so many is done sooner than torch's shape rules, which are written in Python
_UNIT = 24  # what varies is bound to multiples of it, since an axis of size 1 may lie anywhere


def axis_orders(
    nodes: Sequence[Node], fed: Mapping[Value, Spec], wanted: Iterable[Value], few: int = FEW
) -> dict[Value, Order]:
    """The order of the axes of the values wanted, of nodes in program order. few: numbers that an op is done on.

    What is fed counts as contiguous, and so does the output of loops, branches, ops of users, and what zeros do not
    tell.
    """
    wanted = set(wanted)
    needed = set(wanted)
    for node in reversed(nodes):
        if not needed.isdisjoint(map(node.value, range(len(node.outputs)))):
            needed.update(node.inputs)
    layouts = _Strides(few)
    for value, spec in fed.items() if wanted else ():
        layouts.meet(value, spec)
    for node in nodes:
        if not needed.isdisjoint(map(node.value, range(len(node.outputs)))) and node.value() not in fed:
            layouts.do(node)
    return {value: _order(layouts.found[value]) for value in wanted if value in layouts.found}


def _order(like: Tensor) -> Order:
    strides = torch.empty_like(like).stride()
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))


class _Strides:
    """Values of a step as tensors on ``meta``, which have strides and no memory."""

    def __init__(self, few: int) -> None:
        self.found: dict[Value, Tensor] = {}
        self._few = few
        self._sizes: dict[str, int] = {}
        self._free = count(1)
        self._done: dict[Any, Sequence[Any]] = {}  # models repeat their blocks

    def meet(self, value: Value, spec: Spec, like: object = None) -> None:
        """Take a value: laid out like a tensor of its shape, else contiguous."""
        try:
            shape = [self._size(size) for size in spec.shape]
            found = torch.empty(shape, dtype=spec.dtype, device="meta")
        except (ShapeError, RuntimeError):  # no such sizes, of an image too small for the layers to come
            return
        if isinstance(like, Tensor) and like.layout is torch.strided and list(like.shape) == shape:
            found = torch.empty_strided(shape, like.stride(), dtype=spec.dtype, device="meta")
        self.found[value] = found

    def do(self, node: Node) -> None:
        """Take the outputs of a node."""
        try:
            outs = self._outputs(node)
        except Exception as error:  # whatever it is, the run raises it with the user's line
            if from_signal_handler(error):
                raise
            outs = ()
        for index, spec in enumerate(node.outputs):
            self.meet(node.value(index), spec, outs[index] if index < len(outs) else None)

    def _outputs(self, node: Node) -> Sequence[Any]:
        if node.op == "tfnb.constant":
            return (node.attrs["value"],)
        if node.op == "tfnb.read":
            return (node.attrs["variable"].storage,)
        given = [self.found[value] for value in node.inputs]
        if node.op == WITH_GRADIENT:
            return [given[ref.input] for ref in node.attrs["values"]]
        space, _, name = node.op.rpartition(".")[0].partition(".")
        if space not in TRUSTED or not given:  # what is made of nothing is contiguous
            return ()
        return self._results(node, name, given)

    def _results(self, node: Node, name: str, given: Sequence[Tensor]) -> Sequence[Any]:
        attrs = map_leaves(lambda leaf: self._size(leaf) if isinstance(leaf, Dim) else leaf, node.attrs)
        key = node.op, str(attrs), *((each.shape, each.stride(), each.dtype) for each in given)
        if key not in self._done:
            shapes = [[self._size(size) for size in spec.shape] for spec in node.outputs]
            if node.stream is None and sum(map(_span, given)) + sum(map(prod, shapes)) <= self._few:  # draws nothing
                self._done[key] = _called(node.op, attrs, [_zeros(each) for each in given])
            elif name in _RULES:
                self._done[key] = _RULES[name](attrs, shapes[0], given)
            else:
                self._done[key] = _called(node.op, attrs, given)
        return self._done[key]

    def _size(self, size: int | Dim) -> Any:
        if not isinstance(size, Dim):
            return size
        for symbol in size.symbols:
            if symbol not in self._sizes:
                self._sizes[symbol] = _UNIT * next(self._free)
        return size.evaluate(self._sizes)


def _called(name: str, attrs: Attrs, given: Sequence[Tensor]) -> Sequence[Any]:
    """The results of an op on tensors, on their device."""

    def argument(leaf: object) -> Any:
        if isinstance(leaf, Ref):
            return given[leaf.input]
        return given[0].device if isinstance(leaf, torch.device) else leaf

    op = overload(name)
    args, kwargs = unbind(op, map_leaves(argument, attrs))
    with torch.no_grad():
        out = kernel(op)(*args, **kwargs)
    return out if isinstance(out, (list, tuple)) else (out,)


def _span(like: Tensor) -> int:
    """How many numbers lie from the first of a tensor to the last."""
    steps = ((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    return 1 + sum(steps) if like.numel() else 0


def _zeros(like: Tensor) -> Tensor:
    """Zeros with these strides, some of which may be 0."""
    return torch.zeros(_span(like), dtype=like.dtype, device="cpu").as_strided(like.shape, like.stride())


# -- rules of ops whose shape rules on ``meta`` choose other strides, or take long ------------------------------------


def _recurrent(attrs: Attrs, shape: list[int], given: Sequence[Tensor]) -> list[Tensor]:
    """Recurrent nets compute time by time; their other outputs are contiguous."""
    is_turned = attrs.get("batch_first") and len(shape) == 3
    return [given[0].new_empty([shape[1], shape[0], shape[2]]).transpose(0, 1)] if is_turned else []


def _normalized(attrs: Attrs, shape: list[int], given: Sequence[Tensor]) -> list[Tensor]:
    """Batch norm keeps channels last; other inputs it makes contiguous."""
    return [torch.empty_like(given[0], memory_format=suggest_memory_format(given[0]))]


def _convolved(attrs: Attrs, shape: list[int], given: Sequence[Tensor]) -> list[Tensor]:
    """Convolutions give channels last if the input or the weights have it; those of volumes know no float64."""
    formats = {suggest_memory_format(each) for each in given[:2]} - {torch.contiguous_format}
    knows = len(shape) == 4 or given[0].dtype is not torch.float64
    return [given[0].new_empty(shape).to(memory_format=formats.pop())] if formats and knows else []


def _attention(attrs: Attrs, shape: list[int], given: Sequence[Tensor]) -> list[Tensor]:
    """Flash attention lays out its result like the queries; torch has it for four axes."""
    is_flash = len(shape) == 4 and given[0].shape[-1] == given[2].shape[-1]
    return [torch.empty_like(unit_rows(given[0]))] if is_flash else []


_RULES: Mapping[str, Callable[[Attrs, list[int], Sequence[Tensor]], Sequence[Tensor]]] = {
    op: rule
    for rule, ops in {
        _recurrent: "lstm gru rnn_tanh rnn_relu",
        _normalized: """
            native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
            _native_batch_norm_legit_no_training
        """,
        _convolved: "convolution",
        _attention: "scaled_dot_product_attention",
    }.items()
    for op in ops.split()
}
"""The first results of ops; others are contiguous."""
