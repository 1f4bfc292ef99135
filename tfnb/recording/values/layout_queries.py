"""Questions about the memory layout of a tensor whose sizes vary, as relations that a run can be held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Channels first, from the innermost axis outwards.
_ORDERS: dict[torch.memory_format, tuple[int, ...]] = {
    torch.channels_last: (1, 3, 2, 0),
    torch.channels_last_3d: (1, 4, 3, 2, 0),
}
FORMATS = frozenset({torch.contiguous_format, *_ORDERS})


def contiguous(env: ShapeEnv, sizes: Sequence[Any], strides: Sequence[Any], memory_format: torch.memory_format) -> Any:
    """Whether memory of these sizes and strides has the format, as one relation: torch asks piece by piece, and so more
    than the answer depends on. The strides of an axis of one row do not matter, nor any where there are no elements."""
    order = _ORDERS.get(memory_format, tuple(reversed(range(len(sizes)))))
    if len(order) != len(sizes):
        return False
    axes = [(_expr(sizes[axis]), _expr(strides[axis])) for axis in order]
    expected, parts = sympy.Integer(1), []
    for size, stride in axes:
        parts.append(sympy.Or(sympy.Eq(size, 1), sympy.Eq(stride, expected)))
        expected *= size
    fits = sympy.And(*parts)
    if memory_format is torch.contiguous_format:
        fits = sympy.Or(sympy.Eq(expected, 0), fits)
    return bool(fits) if fits in (sympy.true, sympy.false) else env.create_symboolnode(fits)


def _expr(size: object) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
