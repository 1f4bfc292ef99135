"""Arguments of `gradients` and its kin: checked, and converted to recorded tensors and Variables of one graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.gradients.slices import IndexedSlices
from tfnb.graph import Graph, Variable
from tfnb.recording import Tensor, constant, variable
from tfnb.recording.values.variables import known


def differentiable(ys: Sequence[Any], xs: Sequence[Any]) -> tuple[Graph, list[Tensor | Variable]]:
    """The graph of ``ys`` and ``xs``, and the xs as recorded tensors or Variables; raises InvalidArgument."""
    wanted = [_target(x) for x in xs]
    return _graph_of(ys, wanted), wanted


def listed(items: object) -> list[Any]:
    """One or several as a list; None as an empty one."""
    return list(items) if isinstance(items, (list, tuple)) else [] if items is None else [items]


def entries_of(ys: list[Any], grad_ys: object) -> tuple[list[Any], Any]:
    """Replace IndexedSlices among the ys by their values, and their dense cotangents by the matching rows."""
    if not any(isinstance(y, IndexedSlices) for y in ys):
        return ys, grad_ys
    given = [None] * len(ys) if grad_ys is None else listed(grad_ys)
    pairs = zip(ys, given, strict=False)
    rows = [g.index_select(0, y.indices) if isinstance(y, IndexedSlices) and g is not None else g for y, g in pairs]
    return [y.values if isinstance(y, IndexedSlices) else y for y in ys], rows + given[len(ys) :]


def _target(x: object) -> Tensor | Variable:
    if isinstance(x, (Tensor, Variable)):
        return x
    if isinstance(x, torch.nn.Parameter) or (isinstance(x, torch.Tensor) and known(x) is not None):
        return variable(x)
    raise InvalidArgument(
        f"gradients are taken with respect to recorded tensors, Variables or Parameters, not {type(x).__name__}; "
        "record it with tfnb.placeholder, or make it a tfnb.Variable"
    )


def _graph_of(ys: Sequence[Any], xs: Sequence[Any]) -> Graph:
    for y in ys:
        if not isinstance(y, (Tensor, Variable)):
            raise InvalidArgument(f"gradients of recorded tensors only: a y is a {type(y).__name__}, not recorded")
    graphs = {t.graph for t in (*ys, *xs) if isinstance(t, Tensor)}
    if len(graphs) != 1:
        names = ", ".join(sorted(g.name for g in graphs)) or "none"
        raise InvalidArgument(f"gradients works in one graph: ys and xs belong to {names}")
    return graphs.pop()


def seed(y: Tensor, grad: object, index: int) -> torch.Tensor:
    """The cotangent that starts at ``y``."""
    return torch.ones_like(y) if grad is None else seeded_like(y, grad, f"grad_ys[{index}]", "y")


def seeded_like(y: torch.Tensor, grad: object, what: str, whose: str) -> torch.Tensor:
    """``grad`` as a recorded tensor; raises InvalidArgument or ShapeError unless its dtype and shape match ``y``."""
    assert isinstance(y, Tensor)
    if not isinstance(grad, torch.Tensor):
        grad = torch.as_tensor(grad, dtype=y.dtype)  # a number
    if grad.dtype != y.dtype:
        raise InvalidArgument(f"{what} is {grad.dtype}, its {whose} {y.name} is {y.spec}")
    shape = grad.spec.shape if isinstance(grad, Tensor) else tuple(grad.shape)
    if len(shape) != y.dim() or any(_differ(a, b) for a, b in zip(shape, y.spec.shape, strict=True)):
        raise ShapeError(f"{what} has shape {list(shape)}, its {whose} {y.name} is {y.spec}")
    return grad if isinstance(grad, Tensor) else constant(grad)


def _differ(a: object, b: object) -> bool:
    """Whether two sizes are surely different; symbols may turn out to be anything."""
    return isinstance(a, int) and isinstance(b, int) and a != b
