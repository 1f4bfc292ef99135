"""Products and factorizations, in ops that leave the sizes open."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording

aten = torch.ops.aten


@override(Stage.OP, aten.linear.default)
def _linear(rec: Recording, x: Any, weight: Any, bias: Any = None) -> Any:
    """One matrix product over all leading axes: with symbolic sizes torch would expand the weight over the batch."""
    if x.dim() < 2:
        return NotImplemented
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    out = rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


@override(Stage.OP, aten.matmul.default)
def _matmul(rec: Recording, a: Any, b: Any) -> Any:
    if a.dim() < 3 or b.dim() != 2:
        return NotImplemented
    return a.flatten(0, -2).mm(b).view(*a.shape[:-1], b.shape[-1])


@override(Stage.OP, aten.kron.default)
def _kron(rec: Recording, a: Any, b: Any) -> Any:
    """The product of all pairs: torch's own composite wants numbers for the sizes."""
    rank = max(a.dim(), b.dim())
    left, right = ([1] * (rank - t.dim()) + list(t.shape) for t in (a, b))
    pairs = a.reshape([s for size in left for s in (size, 1)]) * b.reshape([s for size in right for s in (1, size)])
    return pairs.reshape([i * j for i, j in zip(left, right, strict=True)])


@override(Stage.OP, aten.cdist.default)
def _cdist(rec: Recording, x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    """One kernel, which chooses by the number of rows in each run; the composite would choose while recording."""
    return aten._cdist_forward(x1, x2, p, compute_mode)


@override(Stage.OP, aten.linalg_multi_dot.default)
def _multi_dot(rec: Recording, tensors: Any) -> Any:
    """Products in the order that is cheapest for the sizes of the samples, without fixing them."""
    first, last = tensors[0].dim() == 1, tensors[-1].dim() == 1
    ts = list(tensors)
    ts[0] = ts[0].unsqueeze(0) if first else ts[0]
    ts[-1] = ts[-1].unsqueeze(1) if last else ts[-1]
    sizes = [rec.symbols.hint(size) for size in (*(t.shape[0] for t in ts), ts[-1].shape[1])]

    @cache
    def best(i: int, j: int) -> tuple[int, int]:  # cost of the product of i..j, and where it is cut
        cuts = ((best(i, k)[0] + best(k + 1, j)[0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j))
        return min(cuts, default=(0, i))

    def product(i: int, j: int) -> Any:
        cut = best(i, j)[1]
        return ts[i] if i == j else product(i, cut).mm(product(cut + 1, j))

    out = product(0, len(ts) - 1)
    out = out.squeeze(1) if last else out
    return out.squeeze(0) if first else out


@override(Stage.OP, aten.cov.default)
def _cov(rec: Recording, x: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Covariances of rows: torch's own composite wants numbers, and looks at the divisor's value."""
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    given = [w for w in (fweights, aweights) if w is not None]
    if not given:
        centred = rows - rows.sum(1, keepdim=True) / rows.shape[1]
        return (centred @ centred.mH / torch.sym_max(rows.shape[1] - correction, 0)).squeeze()
    weights = given[0] if len(given) == 1 else given[0] * given[1]
    total = weights.sum()
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    centred = rows - (rows * weights).sum(1, keepdim=True) / total
    return (centred @ (centred * weights).mH / (total - lost).clamp_min(0)).squeeze()


@override(Stage.OP, aten.linalg_matrix_norm.default)
def _matrix_norm(
    rec: Recording, a: Any, ord: Any, dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """The largest (smallest) sum of a column or row; the other norms are made of singular values."""
    is_empty = any(isinstance(size, int) and size == 0 for size in a.shape)  # that of an empty matrix is 0
    if abs(ord) not in (1, math.inf) or is_empty:
        return NotImplemented
    summed, compared = (d % a.dim() for d in (dim if abs(ord) == 1 else reversed(dim)))
    sums = torch.linalg.vector_norm(a, 1, [summed], keepdim=True, dtype=dtype)
    out = sums.amax([compared], keepdim=True) if ord > 0 else sums.amin([compared], keepdim=True)
    return out if keepdim else out.squeeze((summed, compared))


@override(Stage.OP, aten.linalg_tensorinv.default)
def _tensorinv(rec: Recording, x: Any, ind: int = 2) -> Any:
    rows, columns = x.shape[:ind], x.shape[ind:]
    return torch.linalg.inv(x.reshape(math.prod(columns), -1)).reshape(*columns, *rows)


def _checked(op: Any, count: int) -> Callable[..., Any]:
    """A factorization as the op that checks itself: torch's separate check gives no value that a run would need."""

    def row(rec: Recording, *args: Any, **kwargs: Any) -> Any:
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
