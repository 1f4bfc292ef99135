"""Rules for reading and writing by index: gather and scatter, index and index_put, masks, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, lookup, nograd, partials, rule

aten = torch.ops.aten

nograd(
    aten.nonzero.default, aten.nonzero_static.default, aten.one_hot.default, aten.repeat_interleave.Tensor,
    aten.tril_indices.default, aten.triu_indices.default,
)  # fmt: skip

# -- index, index_put ------------------------------------------------------------------------------------------


def _nones(n: Forward) -> list[None]:
    return [None] * (len(n.inputs) - 1)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _(n: Forward, dy: torch.Tensor) -> Any:
    zeros = dy.new_zeros(n["self"].shape)
    return [aten.index_put(zeros, n["indices"], dy, True), *_nones(n)]


@lookup(aten.index.Tensor, aten._unsafe_index.Tensor)
def _(n: Forward, dy: torch.Tensor, at: Callable[..., Any]) -> Any:
    first, *others = n["indices"]
    if first is None or first.dtype is torch.bool or any(index is not None for index in others):
        return None
    return dy, at(first)


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    indices, values = n["indices"], n["values"]
    kept = dy if n["accumulate"] else lambda: aten.index_put(dy, indices, torch.zeros_like(values))
    return {"self": kept, "values": lambda: aten.index(dy, indices)}


# -- along one axis --------------------------------------------------------------------------------------------


@rule(aten.gather.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    return dy.new_zeros(n["self"].shape).scatter_add(n["dim"], n["index"], dy), None


@lookup(aten.gather.default)
def _(n: Forward, dy: torch.Tensor, at: Callable[..., Any]) -> Any:
    rows = n["index"] if n["self"].dim() == 1 else _one_a_row(n)
    return None if rows is None else (dy, at(rows))


def _one_a_row(n: Forward) -> torch.Tensor | None:
    """The row numbers where all columns have one, as in ``x.gather(0, rows[:, None].expand(-1, W))``; else None."""
    index, x = n["index"], n["self"]
    whole = not n["dim"] % x.dim() and all(map(_same, index.shape[1:], x.shape[1:]))
    same = all(_same(size, 1) or _same(step, 0) for size, step in zip(index.shape[1:], index.stride()[1:], strict=True))
    return index[(slice(None), *[0] * (index.dim() - 1))] if whole and same else None


def _same(a: object, b: object) -> bool:
    """Whether two sizes are surely the same, without a guard."""
    return str(a) == str(b)


@rule(aten.index_select.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    x, index = n["self"], n["index"]
    if x.dim() == 0:
        return dy.reshape([]), None
    return dy.new_zeros(x.shape).index_add(n["dim"], index.reshape(-1), dy), None


@lookup(aten.index_select.default)
def _(n: Forward, dy: torch.Tensor, at: Callable[..., Any]) -> Any:
    return None if n["dim"] % n["self"].dim() else (dy, at(n["index"].reshape(-1)))


# -- masks -----------------------------------------------------------------------------------------------------


def _mask_put(dy: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return aten.masked_scatter(dy.new_zeros(shape), mask, dy)


partials(aten.masked_select.default, lambda n, dy: _mask_put(dy, n["self"], n["mask"]), None)


# -- embeddings ------------------------------------------------------------------------------------------------


@rule(aten.embedding.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    rows = n["weight"].shape[0]
    dense = aten.embedding_dense_backward(dy, n["indices"], rows, n["padding_idx"], n["scale_grad_by_freq"])
    return dense, None


@lookup(aten.embedding.default)
def _(n: Forward, dy: torch.Tensor, at: Callable[..., Any]) -> Any:
    index, padding = at(n["indices"]), n["padding_idx"]
    if n["scale_grad_by_freq"]:
        dy = dy / _frequency(n["indices"], index, dy).unsqueeze(-1)
    return without_padding(dy, index, padding)


def without_padding(dy: torch.Tensor, index: torch.Tensor, padding: int) -> tuple[Any, Any]:
    """Entries of a table without those of the padding row, so that lazy steps leave that row unchanged."""
    if padding < 0:
        return dy, index
    rows = index.reshape(-1)
    kept = (rows != padding).nonzero().reshape(-1)
    return dy.flatten(0, index.dim() - 1).index_select(0, kept), rows.index_select(0, kept)


def _frequency(indices: torch.Tensor, index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """How often each of ``index`` stands in ``indices``."""
    ordered = indices.reshape(-1).sort().values
    ends = (torch.searchsorted(ordered, index.contiguous(), right=right) for right in (True, False))
    return torch.sub(*ends).to(like.dtype)


@composite(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: torch.Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:  # fmt: skip
    # mode 0 sum, 1 mean, 2 max; a bag is the run of rows between offsets
    rows = aten.embedding(weight, indices, padding_idx, scale_grad_by_freq)
    bags = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    starts = offsets[:bags]
    place = torch.arange(indices.shape[0], device=indices.device)
    bag = torch.searchsorted(starts.contiguous(), place, right=True) - 1
    kept = (indices != padding_idx).to(rows.dtype)
    if mode == 2:
        return _first_largest(rows, kept, bag, bags), bag, bag, bag
    scaled = rows * (kept if per_sample_weights is None else kept * per_sample_weights).unsqueeze(-1)
    out = rows.new_zeros([bags, rows.shape[1]]).index_add(0, bag, scaled)
    if mode == 1:
        out = out / kept.new_zeros([bags]).index_add(0, bag, kept).clamp_min(1).unsqueeze(-1)
    return out, bag, bag, bag


def _first_largest(rows: torch.Tensor, kept: Any, bag: Any, bags: Any) -> Any:
    """In each column of each bag the first maximal kept element, which alone gets the gradient; else zero."""
    count, each = rows.shape[0], bag.unsqueeze(-1).expand(rows.shape)
    low = rows.masked_fill((kept == 0).unsqueeze(-1), float("-inf"))
    largest = rows.new_full([bags, rows.shape[1]], float("-inf")).scatter_reduce(0, each, low, reduce="amax")
    is_largest = (low == largest[bag]) & (kept != 0).unsqueeze(-1)
    place = torch.arange(count, device=rows.device).unsqueeze(-1)
    none = bag.new_zeros([bags, rows.shape[1]]) + count
    first = none.scatter_reduce(0, each, torch.where(is_largest, place, count), reduce="amin")
    return torch.cat([rows, rows.new_zeros([1, rows.shape[1]])]).gather(0, first)


# -- slices ----------------------------------------------------------------------------------------------------

tfnb = torch.ops.tfnb
partials(tfnb.slices.default, lambda n, dys: dys[0].reshape(n["values"].shape), None)
partials(tfnb.densify.default, lambda n, dy: dy.index_select(0, n["indices"]), None)
partials(tfnb.coalesce.default, lambda n, dys: dys[0].index_select(0, n.outs[2]), None)
