"""Rows of a table: the pair (values, indices) that stands for a gradient with few rows, and the shards of rows.

n entries, R rows of the table. Entry k says "add ``values[k]`` to row ``indices[k]``"; a row named twice gets the sum.

P shards share the rows; the first ``R % P`` shards have one row more than the others. Shard ``id % P`` holds an id
where ids are dealt out in turn; by ranges, each shard holds consecutive ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfnb.kernels.define import op


def _fake_slices(values: Tensor, indices: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    count = indices.numel()
    return values.new_empty([count, *values.shape[indices.dim() :]]), indices.new_empty([count], dtype=torch.int64)


@op("(Tensor values, Tensor indices, SymInt rows) -> (Tensor values, Tensor indices)", _fake_slices)
def slices(values: Tensor, indices: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Flatten the axes of indices: values [*I, ...] to [n, ...], indices [*I] to int64 [n], negative ones counted from
    the end.
    """
    flat = indices.reshape(-1).long()
    entries = values.reshape([flat.shape[0], *values.shape[indices.dim() :]])
    return entries.clone(memory_format=torch.contiguous_format), torch.where(flat < 0, flat + rows, flat)


def _fake_densify(values: Tensor, indices: Tensor, rows: int) -> Tensor:
    return values.new_empty([rows, *values.shape[1:]])


@op("(Tensor values, Tensor indices, SymInt rows) -> Tensor", _fake_densify)
def densify(values: Tensor, indices: Tensor, rows: int) -> Tensor:
    """The table [rows, ...] of zeros with the entries added; one allocation of its size."""
    return values.new_zeros([rows, *values.shape[1:]]).index_add_(0, indices, values)


def _fake_coalesce(values: Tensor, indices: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return values.new_empty([count, *values.shape[1:]]), indices.new_empty([count]), torch.empty_like(indices)


@op("(Tensor values, Tensor indices, SymInt rows) -> (Tensor values, Tensor indices, Tensor places)", _fake_coalesce)
def coalesce(values: Tensor, indices: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct rows in ascending order, and the place of each entry among them.

    A row is summed in the order of its entries, as adding them to a table of zeros would. Raises IndexError for a row
    that is not in the table, so that who writes the rows can rely on them.
    """
    found, places = torch.unique(indices, return_inverse=True)
    if found.numel() and (found[0] < 0 or found[-1] >= rows):  # ascending: the ends are the extremes
        bad = found[0] if found[0] < 0 else found[-1]
        raise IndexError(f"row {int(bad)} is outside of a table of {rows} rows")
    summed = values.new_zeros([found.shape[0], *values.shape[1:]]).index_add_(0, places, values)
    return summed, found, places


# -- shards ------------------------------------------------------------------------------------------------------------


def shards_of(ids: Tensor, rows: int, shards: int, by_range: bool) -> tuple[Tensor, Tensor]:
    """The shard of each id, and its row number there.

    >>> ids = torch.tensor([0, 4, 12, 7])
    >>> shards_of(ids, 13, 5, False), shards_of(ids, 13, 5, True)
    ((tensor([0, 4, 2, 2]), tensor([0, 0, 2, 1])), (tensor([0, 1, 4, 2]), tensor([0, 1, 1, 1])))
    """
    if not by_range:
        return ids % shards, ids // shards
    size, longer = divmod(rows, shards)
    shard = torch.maximum(ids // (size + 1), (ids - longer) // max(1, size))
    return shard, torch.where(shard < longer, ids % (size + 1), (ids - longer) % max(1, size))


def _ensure_rows(smallest: Tensor, largest: Tensor, rows: int, table: str) -> None:
    """Raise IndexError for ids that the table does not have, by the extremes."""
    if smallest < 0 or largest >= rows:
        bad = int(smallest) if smallest < 0 else int(largest)
        raise IndexError(f"id {bad} is not within the {rows} rows of {table}: ids are 0 to {rows - 1}")


def _fake_part(ids: Tensor, rows: int, shards: int, by_range: bool, table: str) -> list[Tensor]:
    count = torch.library.get_ctx().new_dynamic_size
    numbers = [ids.new_empty([count()], dtype=torch.int64) for _ in range(shards)]
    return [*numbers, ids.new_empty(ids.shape, dtype=torch.int64)]


@op("(Tensor ids, SymInt rows, int shards, bool by_range, str table) -> Tensor[]", _fake_part)
def part(ids: Tensor, rows: int, shards: int, by_range: bool, table: str) -> list[Tensor]:
    """The distinct row numbers that ids ask of each shard, and last the place of each id among all row numbers.

    The rows of all shards, gathered and joined in the order of the shards, give those of the ids by their places.
    Raises IndexError for an id that the table does not have.
    """
    found, which = torch.unique(ids.reshape(-1).long(), return_inverse=True)
    if found.numel():
        _ensure_rows(found[0], found[-1], rows, table)  # in ascending order
    shard, row = shards_of(found, rows, shards, by_range)
    order = torch.argsort(shard, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(shard, minlength=shards).tolist()
    return [*(numbers.clone() for numbers in row[order].split(counts)), places[which].reshape(ids.shape)]


def _fake_owned(ids: Tensor, rows: int, shards: int, by_range: bool, shard: int, table: str) -> tuple[Tensor, Tensor]:
    return ids.new_empty(ids.shape, dtype=torch.bool), ids.new_empty(ids.shape, dtype=torch.int64)


@op("(Tensor ids, SymInt rows, int shards, bool by_range, int shard, str table) -> (Tensor, Tensor)", _fake_owned)
def owned(ids: Tensor, rows: int, shards: int, by_range: bool, shard: int, table: str) -> tuple[Tensor, Tensor]:
    """Whether a shard holds each id, and the row number there, 0 elsewhere. Raises IndexError as `part` does."""
    if ids.numel():
        _ensure_rows(*torch.aminmax(ids), rows, table)
    of, row = shards_of(ids.long(), rows, shards, by_range)
    return of == shard, torch.where(of == shard, row, 0)
