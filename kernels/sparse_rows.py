"""Rows of a table: the pair (values, indices) that stands for a gradient with few rows, and its distinct form.

n entries, R rows of the table. Entry k says "add ``values[k]`` to row ``indices[k]``"; a row named twice gets the sum.
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
    """Entries in a row: values [*I, ...] as [n, ...], indices [*I] as int64 [n], negative ones counted from the end."""
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
