"""Rules for ops that fold or order axes: sums, means, extremes, norms, variances, scans, sorts."""

from __future__ import annotations

import math
from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, conj, nograd, partials, rule

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


# -- sums ------------------------------------------------------------------------------------------------------

partials(aten.sum.default, _spread)
partials(aten.sum.dim_IntList, _spread)
partials(aten.mean.default, lambda n, dy: _spread(n, dy / _count(n)))
partials(aten.mean.dim, lambda n, dy: _spread(n, dy / _count(n)))
partials(aten.nansum.default, lambda n, dy: _spread(n, dy) * ~n["self"].isnan())
partials(aten.cumsum.default, lambda n, dy: dy.flip(n["dim"]).cumsum(n["dim"]).flip(n["dim"]))


@rule(aten.logsumexp.default)
def _(n: Forward, dy: Any) -> Any:
    out = _kept(n, n.out)
    lowest = out.masked_fill(out.real.isneginf(), 0.0)
    return (_kept(n, dy) * conj((n["self"] - lowest).exp()),)


@rule(aten.logcumsumexp.default)
def _(n: Forward, dy: Any) -> Any:
    x, out, dim = n["self"], n.out, n["dim"]

    def back(d: torch.Tensor) -> torch.Tensor:  # sum over j >= i of d_j exp(x_i - out_j), in logarithms
        logs = torch.where(d > 0, torch.where(d > 0, d, 1.0).log(), torch.finfo(d.dtype).min)
        return ((logs - out).flip(dim).logcumsumexp(dim).flip(dim) + x).exp()

    return (back(dy) - back(-dy),)


# -- products --------------------------------------------------------------------------------------------------


def _products(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Of each element along ``dim``, the product of the others: right also with zeros."""

    def before(x: torch.Tensor) -> torch.Tensor:
        pad = [0, 0] * (x.dim() - 1 - dim % x.dim()) + [1, 0]
        return aten.constant_pad_nd(x, pad, 1).cumprod(dim).narrow(dim, 0, x.shape[dim])

    return before(x) * before(x.flip(dim)).flip(dim)


@rule(aten.prod.default)
def _(n: Forward, dy: Any) -> Any:
    x = conj(n["self"])
    if x.dim() == 0:
        return (dy,)
    return (dy * _products(x.reshape(-1), 0).reshape(x.shape),)


@rule(aten.prod.dim_int)
def _(n: Forward, dy: Any) -> Any:
    return (_kept(n, dy) * _products(conj(n["self"]), n["dim"]) if n["self"].dim() else dy,)


@rule(aten.cumprod.default)
def _(n: Forward, dy: Any) -> Any:
    x, dim = conj(n["self"]), n["dim"]
    if x.dim() == 0:
        return (dy,)
    # dx_i = sum over j >= i of dy_j * prod of x_k over k <= j, k != i: a matrix of products, exact with zeros
    row = x.transpose(dim, -1).unsqueeze(-2)
    eye = torch.eye(x.shape[dim], dtype=torch.bool, device=x.device)
    without = torch.where(eye, torch.ones_like(row), row).cumprod(-1).triu()
    return ((dy.transpose(dim, -1).unsqueeze(-2) * without).sum(-1).transpose(dim, -1),)


# -- extremes --------------------------------------------------------------------------------------------------


def _ties(n: Forward, dy: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """dy shared evenly by all elements equal to the extreme."""
    mask = (n["self"] == _kept(n, out)).to(dy.dtype)
    total = mask.sum(_dims(n), keepdim=True) if n["self"].dim() else mask
    return _kept(n, dy) * (mask / total)


partials(aten.amax.default, lambda n, dy: _ties(n, dy, n.out))
partials(aten.amin.default, lambda n, dy: _ties(n, dy, n.out))
partials(aten.max.default, lambda n, dy: _ties(n, dy, n.out))
partials(aten.min.default, lambda n, dy: _ties(n, dy, n.out))


@rule(aten.aminmax.default)
def _(n: Forward, dys: Any) -> Any:
    parts = [_ties(n, dys[i], n.outs[i]) for i in (0, 1) if dys.given(i) is not None]
    return (sum(parts[1:], parts[0]),)


@rule(aten.median.default, aten.nanmedian.default)
def _(n: Forward, dy: Any) -> Any:
    mask = ((n["self"] == n.out) | (n["self"].isnan() & n.out.isnan())).to(dy.dtype)
    return (dy * (mask / mask.sum()),)


def _selected(n: Forward, dy: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """dy put back to where the reduction took its value."""
    if n["self"].dim() == 0:
        return dy
    if not n.get("keepdim"):
        dy, indices = dy.unsqueeze(n["dim"]), indices.unsqueeze(n["dim"])
    return dy.new_zeros(n["self"].shape).scatter(n["dim"], indices, dy)


for _op in (
    aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.kthvalue.default,
):  # fmt: skip

    @rule(_op, outputs=1)
    def _(n: Forward, dy: Any) -> Any:
        return (_selected(n, dy, n.outs[1]),)


for _op in (aten.sort.default, aten.sort.stable, aten.topk.default):

    @rule(_op, outputs=1)
    def _(n: Forward, dy: Any) -> Any:
        x = n["self"]
        return (dy if x.dim() == 0 else dy.new_zeros(x.shape).scatter(n["dim"], n.outs[1], dy),)


for _op in (aten.cummax.default, aten.cummin.default):

    @rule(_op, outputs=1)
    def _(n: Forward, dy: Any) -> Any:
        x = n["self"]
        return (dy if x.dim() == 0 else dy.new_zeros(x.shape).scatter_add(n["dim"], n.outs[1], dy),)


# -- variance and norms ----------------------------------------------------------------------------------------


def _free(n: Forward) -> Any:
    """Degrees of freedom of a variance: count - correction."""
    correction = 1 if n["correction"] is None else n["correction"]
    return _count(n) - (int(correction) if float(correction).is_integer() else correction)


def _centred(n: Forward) -> torch.Tensor:
    x = n["self"]
    return x - x.mean(_dims(n), keepdim=True) if x.dim() else x * 0


def _var(n: Forward, dy: torch.Tensor) -> torch.Tensor:
    return _kept(n, dy) * (_centred(n) * 2 / _free(n))  # a tensor's division: by no freedom it is nan, as in torch


def _std(n: Forward, dy: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    share = (dy / out).masked_fill(out == 0, 0.0)
    return _kept(n, share) * (_centred(n) / _free(n))


partials(aten.var.correction, _var)
partials(aten.std.correction, lambda n, dy: _std(n, dy, n.out))


def _with_mean(n: Forward, dys: Any, first: Any) -> Any:
    parts = [] if dys.given(0) is None else [first(dys[0])]
    if dys.given(1) is not None:
        parts.append(_spread(n, dys[1] / _count(n)))
    return (sum(parts[1:], parts[0]),)


@rule(aten.var_mean.correction)
def _(n: Forward, dys: Any) -> Any:
    return _with_mean(n, dys, lambda dy: _var(n, dy))


@rule(aten.std_mean.correction)
def _(n: Forward, dys: Any) -> Any:
    return _with_mean(n, dys, lambda dy: _std(n, dy, n.outs[0]))


def _norm(n: Forward, dy: torch.Tensor, p: Any) -> torch.Tensor:
    """Cotangent of the p-norm of the input over its dims."""
    x, out, dy = n["self"], _kept(n, n.out), _kept(n, dy)
    if p == 0:
        return torch.zeros_like(x)
    if p == 1:
        return dy * x.sgn()
    if p in (math.inf, -math.inf):
        hit = (x.abs() == out).to(dy.dtype)
        return dy * x.sgn() * (hit / (hit.sum(_dims(n), keepdim=True) if x.dim() else hit))
    zero = out == 0  # the subgradient there is 0, also in higher orders
    out = out.masked_fill(zero, 1.0)
    if p == 2:
        return x * (dy / out).masked_fill(zero, 0.0)
    scale = (dy / out.pow(p - 1)).masked_fill(zero, 0.0)
    if p < 2:
        return (x.sgn() * x.abs().pow(p - 1)).masked_fill(x == 0, 0.0) * scale
    return x * x.abs().pow(p - 2) * scale


partials(aten.linalg_vector_norm.default, lambda n, dy: _norm(n, dy, n["ord"]))
for _op in (
    aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype,
):  # fmt: skip
    partials(_op, lambda n, dy: _norm(n, dy, 2 if n["p"] is None else n["p"]))


@composite(aten.dist.default)
def _(self: torch.Tensor, other: torch.Tensor, p: float = 2) -> torch.Tensor:
    return torch.linalg.vector_norm(self - other, p)


@composite(aten.renorm.default)
def _(self: torch.Tensor, p: float, dim: int, maxnorm: float) -> torch.Tensor:
    others = [d for d in range(self.dim()) if d != dim % self.dim()]
    norm = torch.linalg.vector_norm(self, p, others, keepdim=True)
    return self * torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), torch.ones_like(norm))


@composite(aten._cdist_forward.default)
def _(x1: torch.Tensor, x2: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    return torch.linalg.vector_norm(apart, p, apart.dim() - 1)  # for -1 torch 2.13 refuses an empty batch


@composite(aten._pdist_forward.default)
def _(self: torch.Tensor, p: float = 2) -> torch.Tensor:
    rows = self.shape[0]
    later = torch.ones([rows, rows], dtype=torch.bool, device=self.device).triu(1)
    first, second = aten.nonzero_static(later, size=rows * (rows - 1) // 2).unbind(1)
    return torch.linalg.vector_norm(self[first] - self[second], p, -1)


# -- segments of one axis --------------------------------------------------------------------------------------


@rule(aten.segment_reduce.default)
def _(n: Forward, dy: Any) -> Any:
    given = {name: n[name] for name in ("lengths", "offsets", "axis", "initial")}
    return {"data": aten._segment_reduce_backward(dy, n.out, n["data"], n["reduce"], **given)}
