"""Rules for reading and writing by index: gather and scatter, index and index_put, masks, embeddings."""

from __future__ import annotations

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
def _(n: Forward, dy: Any) -> Any:
    zeros = dy.new_zeros(n["self"].shape)
    return [aten.index_put(zeros, n["indices"], dy, True), *_nones(n)]


@lookup(aten.index.Tensor, aten._unsafe_index.Tensor)
def _(n: Forward, dy: Any, at: Any) -> Any:
    first, *others = n["indices"]
    if first is None or first.dtype is torch.bool or any(index is not None for index in others):
        return None
    return dy, at(first)


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _(n: Forward, dy: Any) -> Any:
    indices, values = n["indices"], n["values"]
    kept = dy if n["accumulate"] else lambda: aten.index_put(dy, indices, torch.zeros_like(values))
    return {"self": kept, "values": lambda: aten.index(dy, indices)}


@rule(aten._unsafe_masked_index.default)
def _(n: Forward, dy: Any) -> Any:
    zeros = dy.new_zeros(n["self"].shape)
    return {"self": aten._unsafe_masked_index_put_accumulate(zeros, n["mask"], n["indices"], dy)}


@rule(aten._unsafe_masked_index_put_accumulate.default)
def _(n: Forward, dy: Any) -> Any:
    return {"self": dy, "values": lambda: aten._unsafe_masked_index(dy, n["mask"], n["indices"], 0)}


# -- along one axis --------------------------------------------------------------------------------------------


@rule(aten.gather.default)
def _(n: Forward, dy: Any) -> Any:
    return dy.new_zeros(n["self"].shape).scatter_add(n["dim"], n["index"], dy), None


@lookup(aten.gather.default)
def _(n: Forward, dy: Any, at: Any) -> Any:
    rows = n["index"] if n["self"].dim() == 1 else _one_a_row(n)
    return None if rows is None else (dy, at(rows))


def _one_a_row(n: Forward) -> torch.Tensor | None:
    """The row numbers where all columns have one, as in ``x.gather(0, rows[:, None].expand(-1, W))``; else None."""
    index, x = n["index"], n["self"]
    whole = not n["dim"] % x.dim() and all(map(_same, index.shape[1:], x.shape[1:]))
    same = all(_same(size, 1) or _same(step, 0) for size, step in zip(index.shape[1:], index.stride()[1:], strict=True))
    return index[(slice(None), *[0] * (index.dim() - 1))] if whole and same else None


@rule(aten.scatter.src)
def _(n: Forward, dy: Any) -> Any:
    return {
        "self": lambda: dy.scatter(n["dim"], n["index"], 0.0),
        "src": lambda: _gather_into(dy, n["dim"], n["index"], n["src"]),
    }


def _gather_into(dy: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """dy at the index; src may be longer than the index, the rest of it gets zeros."""
    found = dy.gather(dim, index)
    for axis in range(found.dim()):
        if found.shape[axis] is not src.shape[axis] and not _same(found.shape[axis], src.shape[axis]):
            pad = [0, 0] * (found.dim() - 1 - axis) + [0, src.shape[axis] - found.shape[axis]]
            found = aten.constant_pad_nd(found, pad)
    return found


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are surely the same, without a guard."""
    return str(a) == str(b)


partials(aten.scatter.value, lambda n, dy: dy.scatter(n["dim"], n["index"], 0.0), None)


@rule(aten.scatter_add.default)
def _(n: Forward, dy: Any) -> Any:
    return {"self": dy, "src": lambda: _gather_into(dy, n["dim"], n["index"], n["src"])}


@rule(aten.scatter.reduce)
def _(n: Forward, dy: Any) -> Any:
    if n["reduce"] == "add":
        return {"self": dy, "src": lambda: _gather_into(dy, n["dim"], n["index"], n["src"])}
    # multiply, unique indices
    factor = torch.ones_like(n["self"]).scatter(n["dim"], n["index"], n["src"], reduce="multiply")
    return {
        "self": lambda: dy * factor,
        "src": lambda: _gather_into(dy * n["self"], n["dim"], n["index"], n["src"]),
    }


@rule(aten.scatter_reduce.two)
def _(n: Forward, dy: Any) -> Any:
    x, dim, index, src, kind, own = (n[a] for a in ("self", "dim", "index", "src", "reduce", "include_self"))
    ones_like_self = torch.ones_like(x) if own else torch.ones_like(x).scatter(dim, index, 0.0)

    def masked(d: torch.Tensor) -> torch.Tensor:
        return d if own else d.scatter(dim, index, 0.0)

    if kind == "sum":
        return {"self": lambda: masked(dy), "src": lambda: _gather_into(dy, dim, index, src)}
    if kind == "mean":
        count = ones_like_self.scatter_add(dim, index, torch.ones_like(src))
        share = dy / count.masked_fill(count == 0, 1.0)
        return {"self": lambda: masked(share), "src": lambda: _gather_into(share, dim, index, src)}
    if kind == "prod":
        return _scatter_prod(n, dy, masked)
    # amax, amin: shared evenly by the winners
    value = n.out.gather(dim, index)
    mine, theirs = (x == n.out).to(dy.dtype), (_front(src, index) == value).to(dy.dtype)
    mine = masked(mine)
    share = dy / mine.scatter_add(dim, index, theirs).clamp_min(1)
    return {"self": lambda: share * mine if own else masked(dy),
            "src": lambda: _gather_pad(share.gather(dim, index) * theirs, src)}  # fmt: skip


@composite(aten.index_reduce.default)
def _(self: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    dim, shape = dim % max(self.dim(), 1), self.shape
    if self.dim() == 0:
        self, source = self.reshape(1), source.reshape(1)
    places = index.reshape([-1] + [1] * (source.dim() - dim - 1)).expand(source.shape)
    return self.scatter_reduce(dim, places, source, reduce, include_self=include_self).reshape(shape)


def _front(src: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The part of src that the index covers."""
    for axis in range(src.dim()):
        if not _same(src.shape[axis], index.shape[axis]):
            src = src.narrow(axis, 0, index.shape[axis])
    return src


def _gather_pad(found: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    for axis in range(found.dim()):
        if not _same(found.shape[axis], src.shape[axis]):
            pad = [0, 0] * (found.dim() - 1 - axis) + [0, src.shape[axis] - found.shape[axis]]
            found = aten.constant_pad_nd(found, pad)
    return found


def _scatter_prod(n: Forward, dy: Any, masked: Any) -> Any:
    """To each factor the product of the others; the second order holds for at most one zero in a place."""
    x, dim, index, src, own = (n[a] for a in ("self", "dim", "index", "src", "include_self"))
    part = _front(src, index)
    zero = part == 0
    alone = zero & (torch.zeros_like(x).scatter_add(dim, index, zero.to(x.dtype)).gather(dim, index) == 1)

    def product(start: torch.Tensor, factors: torch.Tensor, own: bool) -> torch.Tensor:
        return aten.scatter_reduce(start, dim, index, factors, "prod", include_self=own)

    def kept() -> torch.Tensor:
        start = x.masked_fill(x == 0, 1.0)
        return dy * (product(start, src, True) / start) if own else masked(dy)

    def factors() -> torch.Tensor:
        others = (dy * product(x, part.masked_fill(alone, 1.0), own)).gather(dim, index)
        shared = (dy * n.out).gather(dim, index) / part.masked_fill(zero, 1.0)
        return _gather_pad(torch.where(alone, others, shared), src)

    return {"self": kept, "src": factors}


@rule(aten.index_select.default)
def _(n: Forward, dy: Any) -> Any:
    x, index = n["self"], n["index"]
    if x.dim() == 0:
        return dy.reshape([]), None
    return dy.new_zeros(x.shape).index_add(n["dim"], index.reshape(-1), dy), None


@lookup(aten.index_select.default)
def _(n: Forward, dy: Any, at: Any) -> Any:
    return None if n["dim"] % n["self"].dim() else (dy, at(n["index"].reshape(-1)))


@rule(aten.index_add.default)
def _(n: Forward, dy: Any) -> Any:
    def source() -> torch.Tensor:
        found = _rows(dy, n["dim"], n["index"], n["source"])
        return found if n["alpha"] == 1 else found * n["alpha"]

    return {"self": dy, "source": source}


def _rows(dy: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if dy.dim() == 0:
        return dy.expand(source.shape)
    return dy.index_select(dim, index.reshape(-1)).reshape(source.shape)


@rule(aten.index_copy.default)
def _(n: Forward, dy: Any) -> Any:
    return {
        "self": lambda: dy.index_fill(n["dim"], n["index"], 0.0),
        "source": lambda: _rows(dy, n["dim"], n["index"], n["source"]),
    }


partials(aten.index_fill.int_Scalar, lambda n, dy: dy.index_fill(n["dim"], n["index"], 0.0), None)


@rule(aten.index_fill.int_Tensor)
def _(n: Forward, dy: Any) -> Any:
    kept = dy.index_fill(n["dim"], n["index"], 0.0)
    return {"self": kept, "value": lambda: (dy - kept).sum()}  # a row filled twice counts once


# -- flat positions and masks ----------------------------------------------------------------------------------


@rule(aten.take.default)
def _(n: Forward, dy: Any) -> Any:
    return aten.put(dy.new_zeros(n["self"].shape), n["index"], dy, True), None


@rule(aten.put.default)
def _(n: Forward, dy: Any) -> Any:
    def kept() -> torch.Tensor:
        return dy if n["accumulate"] else aten.put(dy, n["index"], torch.zeros_like(n["source"]))

    return {"self": kept, "source": lambda: dy.take(n["index"]).reshape(n["source"].shape)}


def _mask_put(dy: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return aten.masked_scatter(dy.new_zeros(shape), mask, dy)


partials(aten.masked_select.default, lambda n, dy: _mask_put(dy, n["self"], n["mask"]), None)


@rule(aten.masked_scatter.default)
def _(n: Forward, dy: Any) -> Any:
    source, mask = n["source"], n["mask"]

    def to_source() -> torch.Tensor:
        # the k-th true of the mask took the k-th element of source
        order = mask.expand(dy.shape).reshape(-1).cumsum(0) - 1
        picked = dy.where(mask, 0.0).reshape(-1)
        flat = dy.new_zeros([source.numel()]).index_add(0, order.clamp_min(0), picked)
        return flat.reshape(source.shape)

    return {"self": lambda: dy.masked_fill(mask, 0.0), "source": to_source}


# -- embeddings ------------------------------------------------------------------------------------------------


@rule(aten.embedding.default)
def _(n: Forward, dy: Any) -> Any:
    rows = n["weight"].shape[0]
    dense = aten.embedding_dense_backward(dy, n["indices"], rows, n["padding_idx"], n["scale_grad_by_freq"])
    return dense, None


@lookup(aten.embedding.default)
def _(n: Forward, dy: Any, at: Any) -> Any:
    index, padding = at(n["indices"]), n["padding_idx"]
    if n["scale_grad_by_freq"]:
        dy = dy / _frequency(n["indices"], index, dy).unsqueeze(-1)
    return without_padding(dy, index, padding)


def without_padding(dy: Any, index: Any, padding: int) -> tuple[Any, Any]:
    """Entries of a table but for those of the padding row: none at all, so that lazy steps leave that row alone."""
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


@rule(aten.embedding_dense_backward.default)
def _(n: Forward, dd: Any) -> Any:
    index, padding = n["indices"], n["padding_idx"]
    found = aten.embedding(dd, index)
    if n["scale_grad_by_freq"]:
        counts = torch.zeros([dd.shape[0]], dtype=dd.dtype, device=dd.device)
        flat = index.reshape(-1)
        counts = counts.index_add(0, flat, torch.ones_like(flat, dtype=dd.dtype))
        found = found / counts[index].unsqueeze(-1)
    return found.masked_fill((index == padding).unsqueeze(-1), 0.0), None


@composite(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _(weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: bool = False, mode: int = 0, sparse: bool = False,
      per_sample_weights: Any = None, include_last_offset: bool = False, padding_idx: int = -1) -> Any:  # fmt: skip
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


def _first_largest(rows: Any, kept: Any, bag: Any, bags: Any) -> Any:
    """In each column of each bag the first of its largest kept elements, which alone has the gradient; else zero."""
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
