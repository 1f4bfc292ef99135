"""Functions of the control ops of the dataflow form: iteration numbers, rows in and out, checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tfnb.graph import Node, Spec
from tfnb.graph.node import map_leaves
from tfnb.graph.spec import Dim
from tfnb.graph.subgraph import row_places
from tfnb.kernels.control import gathered
from tfnb.kernels.random import REPLICA, mix
from tfnb.kernels.rows import row_at
from tfnb.passes.flow import frames
from tfnb.passes.flow.cut import Kind
from tfnb.passes.flow.frames import Op
from tfnb.passes.in_place_commit import settings
from tfnb.recording.values.interpret import absent, held, sizes_hold

Sizes = Callable[[Sequence[torch.Tensor]], dict[str, int]]


def sizes_of(specs: Sequence[Spec]) -> Sizes:
    """A function that reads sizes off values of these specs."""
    found: dict[str, tuple[int, int]] = {}
    for place, spec in enumerate(specs):
        for axis, size in enumerate(spec.shape):
            if isinstance(size, Dim) and size.is_symbol:
                found.setdefault(size.expr, (place, axis))
    return lambda values: {symbol: values[place].shape[axis] for symbol, (place, axis) in found.items()}


def _start(op: Op, sizes: Sizes) -> Callable[..., Any]:
    given = (op.part,)
    return lambda: given


def _below(op: Op, sizes: Sizes) -> Callable[..., Any]:
    limit = math.inf if op.part is None else op.part
    return lambda iterations, *limits: (iterations < limit and all(iterations < int(most) for most in limits),)


def _mix(op: Op, sizes: Sizes) -> Callable[..., Any]:
    if isinstance(op.part, tuple):  # a loop with replicas
        first, step = op.part
        return lambda run, iteration: (run + (first + iteration * step) * REPLICA,)
    fixed = [] if op.part is None else [op.part]

    def number(run: int, iteration: int, *limits: Any) -> tuple[int]:
        most = min([*fixed, *map(int, limits)], default=None)
        return (mix(run, iteration if most is None else most - 1 - iteration),)

    return number


def _rows(op: Op, sizes: Sizes) -> Callable[..., Any]:
    return lambda *x: (row_at(x if len(x) > 1 else x[0]), len(x[-1]))


def _row(op: Op, sizes: Sizes) -> Callable[..., Any]:
    reverse = node_of(op).attrs["reverse"]
    return lambda iteration, row: (row(-1 - iteration if reverse else iteration),)


def _stack(op: Op, sizes: Sizes) -> Callable[..., Any]:
    attrs = node_of(op).attrs
    spec = node_of(op).outputs[row_places(attrs)[op.part][0]]
    shape = attrs["rows"][op.part]

    def stack(last: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = []
        while last is not None:
            last, value = last
            made.append(value)
        return gathered(
            made if attrs["reverse"] else made[::-1], (_numbers(shape, sizes(values)), spec.dtype, spec.device)
        )

    return stack


def _absent(op: Op, sizes: Sizes) -> Callable[..., Any]:
    spec, shape = node_of(op).outputs[op.part], node_of(op).attrs["shapes"][op.part]
    return lambda *values: (absent(spec, _numbers(shape, sizes(values))),)


def _check(op: Op, sizes: Sizes) -> Callable[..., Any]:
    def check(*values: torch.Tensor) -> tuple[Any, ...]:
        for guard in op.part:
            sizes_hold(guard, sizes(values))
        return (None,)

    return check


def _numbers(shape: Sequence[int], symbols: Mapping[str, int]) -> Any:
    return map_leaves(lambda leaf: leaf.evaluate(symbols) if isinstance(leaf, Dim) else leaf, shape)


CALLS: dict[str, Callable[[Op, Sizes], Callable[..., Any]]] = {
    frames.START: _start,
    frames.COUNT: lambda op, sizes: lambda iterations: (iterations + 1,),
    frames.TRUTH: lambda op, sizes: lambda value: (bool(value),),
    frames.LOOPCOND: lambda op, sizes: lambda value: (bool(value),),
    frames.ITERATIONS: lambda op, sizes: lambda iterations: (torch.tensor(iterations),),
    frames.MIX: _mix,
    frames.PUSH: lambda op, sizes: lambda before, value: ((before, value),),
    frames.BELOW: _below,
    frames.ROWS: _rows,
    frames.ROW: _row,
    frames.STACK: _stack,
    frames.ABSENT: _absent,
    frames.SIZES: _check,
}
"""What makes the call of an op of the dataflow form: of its inputs, then of the values that tell sizes."""


def _sizes_only(value: torch.Tensor) -> torch.Tensor:
    """The sizes of a value, as a tensor without memory."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


SENDS: dict[Kind, Callable[[Any], Any]] = {
    Kind.DONE: lambda value: None, Kind.SIZE: _sizes_only, Kind.VALUE: lambda value: value,
}  # fmt: skip
"""What a send makes of its value."""


def guarding(node: Node) -> Callable[..., Any]:
    """The call of a guard: raises if the value differs from the recorded one."""

    def guard(value: torch.Tensor) -> tuple[None]:
        held(node, value)
        return (None,)

    return guard


def nothing() -> tuple[None]:
    """The call of an op that others only wait for."""
    return (None,)


class UpdateRow:
    """An update that the commit does in the memory of Variables, in place of each of its results.

    inputs: of its node. kernel: what alike updates have alike, for one call of all of them.
    """

    __slots__ = ("inputs", "kernel", "node", "settings")

    def __init__(self, node: Node, settings: dict[str, Any], kernel: tuple[str, str], inputs: tuple[Any, ...]) -> None:
        self.node, self.settings, self.kernel, self.inputs = node, settings, kernel, inputs


def left_to_commit(node: Node) -> Callable[..., Any]:
    """The call of an update deferred to the commit; its last output is the control output."""
    own, count = settings(node), len(node.outputs)
    kernel = node.op, repr(sorted(own.items()))
    return lambda *inputs: (*[UpdateRow(node, own, kernel, inputs)] * count, None)


def ended(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a region with an additional control output, for control dependencies."""
    return lambda *args: (*forward(*args), None)


def node_of(op: Op) -> Node:
    """The node that an op computes, of an op that computes one."""
    assert op.node is not None
    return op.node
