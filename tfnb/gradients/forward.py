"""Forward mode: `jvp`, by differentiating the backward pass with respect to its cotangents."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.errors import InvalidArgument
from tfnb.gradients.arguments import differentiable, seeded_like
from tfnb.gradients.walker import gradients
from tfnb.graph.spec import flows
from tfnb.recording import Tensor, reopen


def jvp(ys: Any, xs: object, tangents: object) -> list[torch.Tensor]:
    """Add nodes that compute how the ys move when the xs move by the tangents: J(ys, xs) @ tangents, one for each y.

    The backward pass is linear in its cotangents, and the derivative of that linear map is forward mode; of the
    backward nodes only those that the result needs are run. ys, xs: as in `gradients`. tangents: like xs, in shape and
    dtype. A y that depends on no x gets zeros.

    Raises InvalidArgument for a wrong count or dtype, ShapeError for a wrong shape, NoGradient as `gradients` does.

    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.tensor([1.0, 2.0]), shape=(2,))
    ...     dy, = tfnb.jvp(x * x, x, torch.tensor([1.0, 10.0]))
    >>> dy.sample
    tensor([ 2., 40.])
    """
    if callable(ys) and not isinstance(ys, torch.Tensor):
        raise InvalidArgument("jvp(ys, xs, tangents) takes recorded values; of a function in the cell, torch.func.jvp")
    ys, xs, tangents = (list(v) if isinstance(v, (list, tuple)) else [v] for v in (ys, xs, tangents))
    if len(tangents) != len(xs):
        raise InvalidArgument(f"jvp has {len(tangents)} tangents for {len(xs)} xs")
    graph, xs = differentiable(ys, xs)
    with reopen(graph) as recorder, torch.enable_grad():
        ys = [y if isinstance(y, Tensor) else recorder.read(y) for y in ys]
        moves = [seeded_like(x if isinstance(x, Tensor) else recorder.read(x), t, f"tangents[{i}]", "x")
                 for i, (x, t) in enumerate(zip(xs, tangents, strict=True))]  # fmt: skip
        moving = [flows(y.dtype) for y in ys]
        linear = [torch.zeros_like(y) for y, flow in zip(ys, moving, strict=True) if flow]
        back = gradients([y for y, flow in zip(ys, moving, strict=True) if flow], xs, linear) if linear else []
        ends = [(dx, move) for dx, move in zip(back, moves, strict=False) if dx is not None]
        found: Any = iter(gradients([dx for dx, _ in ends], linear, [move for _, move in ends]) if ends else [])
        moved = (next(found, None) if flow else None for flow in moving)
        return [torch.zeros_like(y) if dy is None else dy for y, dy in zip(ys, moved, strict=True)]
