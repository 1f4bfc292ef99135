"""Rules for sums and means, and ops over axes that have no gradient."""

from __future__ import annotations

import math
from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, nograd, partials, rule

aten = torch.ops.aten

nograd(
    aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims, aten.argmax.default,
    aten.argmin.default, aten.argsort.default, aten.argsort.stable, aten.count_nonzero.default,
    aten.count_nonzero.dim_IntList, aten.histc.default, aten.searchsorted.Tensor, aten.bucketize.Tensor,
    aten.equal.default, aten.allclose.default, aten.isin.Tensor_Tensor, aten._unique2.default,
    aten.unique_consecutive.default, aten.unique_dim.default, aten.bincount.default,
)  # fmt: skip


def _dims(n: Forward, name: str = "dim") -> list[int]:
    """The reduced dimensions, never negative; all of them for None or []."""
    rank, dim = n["self"].dim(), n.get(name)
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    return [d % max(rank, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


def _kept(n: Forward, reduced: torch.Tensor) -> torch.Tensor:
    """A reduced tensor with the lost dimensions back as ones."""
    if n.get("keepdim") or n["self"].dim() == 0:
        return reduced
    for dim in sorted(_dims(n)):
        reduced = reduced.unsqueeze(dim)
    return reduced


def _spread(n: Forward, dy: torch.Tensor) -> torch.Tensor:
    """A reduced cotangent, broadcast to the input."""
    return _kept(n, dy).expand(n["self"].shape)


def _count(n: Forward) -> Any:
    """How many elements were reduced into one."""
    return math.prod(n["self"].shape[d] for d in _dims(n)) if n["self"].dim() else 1


partials(aten.sum.default, _spread)
partials(aten.sum.dim_IntList, _spread)
partials(aten.mean.default, lambda n, dy: _spread(n, dy / _count(n)))
partials(aten.mean.dim, lambda n, dy: _spread(n, dy / _count(n)))


def _var(n: Forward, dy: torch.Tensor) -> torch.Tensor:
    """The cotangent of a variance's input; NaN of a single row, as autograd's, where a division by zero would raise."""
    x, correction = n["self"], n.get("correction")
    freedom = _count(n) - (1 if correction is None else correction)
    factor = torch.full((), 2.0, dtype=torch.float64, device=dy.device) / freedom
    return factor * _kept(n, dy) * (x - x.mean(sorted(_dims(n)), keepdim=True))


def _std(n: Forward, dy: torch.Tensor) -> torch.Tensor:
    std = n.outs[0]
    return _var(n, (dy / (std * 2)).masked_fill(std == 0, 0))


partials(aten.var.correction, _var)
partials(aten.std.correction, _std)


@composite(aten.var_mean.correction)
def _(self: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return torch.var(self, dim, correction=correction, keepdim=keepdim), self.mean(dim or [], keepdim=keepdim)


@composite(aten.std_mean.correction)
def _(self: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return torch.std(self, dim, correction=correction, keepdim=keepdim), self.mean(dim or [], keepdim=keepdim)


def _products(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Of each element along ``dim``, the product of the others: right also with zeros."""

    def before(x: torch.Tensor) -> torch.Tensor:
        pad = [0, 0] * (x.dim() - 1 - dim % x.dim()) + [1, 0]
        return aten.constant_pad_nd(x, pad, 1).cumprod(dim).narrow(dim, 0, x.shape[dim])

    return before(x) * before(x.flip(dim)).flip(dim)


@rule(aten.prod.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    x = n["self"]
    if x.dim() == 0:
        return (dy,)
    return (dy * _products(x.reshape(-1), 0).reshape(x.shape),)


@rule(aten.prod.dim_int)
def _(n: Forward, dy: torch.Tensor) -> Any:
    return (_kept(n, dy) * _products(n["self"], n["dim"]) if n["self"].dim() else dy,)


@rule(aten.cumprod.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    x, dim = n["self"], n["dim"]
    if x.dim() == 0:
        return (dy,)
    # dx_i = sum over j >= i of dy_j * prod of x_k over k <= j, k != i: a matrix of products, exact with zeros
    row = x.transpose(dim, -1).unsqueeze(-2)
    eye = torch.eye(x.shape[dim], dtype=torch.bool, device=x.device)
    without = torch.where(eye, torch.ones_like(row), row).cumprod(-1).triu()
    return ((dy.transpose(dim, -1).unsqueeze(-2) * without).sum(-1).transpose(dim, -1),)


for _op in (aten.cummax.default, aten.cummin.default):

    @rule(_op, outputs=1)
    def _(n: Forward, dy: torch.Tensor) -> Any:
        x = n["self"]
        return (dy if x.dim() == 0 else dy.new_zeros(x.shape).scatter_add(n["dim"], n.outs[1], dy),)


@composite(aten._cdist_forward.default)
def _(x1: torch.Tensor, x2: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    return torch.linalg.vector_norm(apart, p, apart.dim() - 1)  # for -1 torch 2.13 refuses an empty batch
