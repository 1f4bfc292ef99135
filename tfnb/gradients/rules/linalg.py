"""Rules for products of matrices. Autograd's formulas serve for factorisations and solves."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, rule
from tfnb.gradients.rules.shape import turned

aten = torch.ops.aten


def _product(a: torch.Tensor, b: torch.Tensor, like: torch.Tensor, *, turn: str = "") -> Any:
    """``a @ b``, with operands in ``turn`` transposed, in the memory layout of ``like``: gradients match their
    Variables.
    """
    *batch, rows, columns = like.stride()
    product = torch.bmm if batch else torch.mm
    if isinstance(rows, int) and rows == 1 and not (isinstance(columns, int) and columns == 1):
        return product(b if "b" in turn else turned(b), a if "a" in turn else turned(a)).mT
    return product(turned(a) if "a" in turn else a, turned(b) if "b" in turn else b)


@rule(aten.mm.default, aten.bmm.default)
def _(n: Forward, dy: torch.Tensor) -> Any:  # [.., B, K] @ [.., K, N] -> [.., B, N]
    a, b = n.inputs
    return lambda: _product(dy, b, a, turn="b"), lambda: _product(a, dy, b, turn="a")


def _times(x: torch.Tensor, factor: Any) -> torch.Tensor:
    return x if factor == 1 else x * factor


@rule(aten.addmm.default, aten.baddbmm.default)
def _(n: Forward, dy: torch.Tensor) -> Any:  # beta * bias + alpha * a @ b
    _, a, b = n.inputs
    scaled = _times(dy, n["alpha"])
    return (
        lambda: _times(dy, n["beta"]),
        lambda: _product(scaled, b, a, turn="b"),
        lambda: _product(a, scaled, b, turn="a"),
    )
