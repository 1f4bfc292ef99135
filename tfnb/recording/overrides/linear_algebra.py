"""Products and factorizations, in ops that leave the sizes open."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording

aten = torch.ops.aten


@override(Stage.OP, aten.linear.default)
def _linear(rec: Recording, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """One matrix product over all leading axes: with symbolic sizes torch would expand the weight over the batch."""
    if x.dim() < 2:
        return NotImplemented
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    out = rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


@override(Stage.OP, aten.matmul.default)
def _matmul(rec: Recording, a: torch.Tensor, b: torch.Tensor) -> Any:
    if a.dim() < 3 or b.dim() != 2:
        return NotImplemented
    return a.flatten(0, -2).mm(b).view(*a.shape[:-1], b.shape[-1])


@override(Stage.OP, aten.cdist.default)
def _cdist(
    rec: Recording, x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: int | None = None
) -> Any:  # fmt: skip
    """The single kernel, which chooses by row count in each run; the composite would choose while recording."""
    return aten._cdist_forward(x1, x2, p, compute_mode)


@override(Stage.OP, aten.linalg_tensorinv.default)
def _tensorinv(rec: Recording, x: torch.Tensor, ind: int = 2) -> Any:
    rows, columns = x.shape[:ind], x.shape[ind:]
    return torch.linalg.inv(x.reshape(math.prod(columns), -1)).reshape(*columns, *rows)


def _checked(op: Any, count: int) -> Callable[..., Any]:
    """A factorization as the op that checks itself: torch's separate check gives no value that a run would need."""

    def row(rec: Recording, *args: object, **kwargs: object) -> Any:
        found = op(*args, **kwargs, check_errors=True)
        return found[:count] if count > 1 else found[0]

    return row


for _op, _own, _count in (
    (aten.linalg_cholesky, aten.linalg_cholesky_ex, 1),
    (aten.linalg_inv, aten.linalg_inv_ex, 1),
    (aten.linalg_solve, aten._linalg_solve_ex, 1),
    (aten.linalg_lu_factor, aten.linalg_lu_factor_ex, 2),
    (aten.linalg_ldl_factor, aten.linalg_ldl_factor_ex, 2),
):
    override(Stage.OP, _op.default)(_checked(_own, _count))
