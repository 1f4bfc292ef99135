"""Write-once arrays: rows of one shape, and a mask of the written rows.

``rows`` is [N, ...], ``written`` bool [N]; an ``index`` is one row number, or [n] of them with a value for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfnb.kernels.define import op


def _fake_unwritten(size: Tensor) -> Tensor:
    return size.new_empty([torch.library.get_ctx().new_dynamic_size()], dtype=torch.bool)


@op("(Tensor size) -> Tensor", _fake_unwritten)
def array_unwritten(size: Tensor) -> Tensor:
    """``written`` of an array of so many rows, as the value of a tensor says; raises ValueError for fewer than none."""
    if (count := int(size)) < 0:
        raise ValueError(f"a TensorArray has a whole number of elements, not {count}")
    return torch.zeros(count, dtype=torch.bool, device=size.device)


def _fake_write(rows: Tensor, written: Tensor, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(written)


@op("(Tensor rows, Tensor written, Tensor index, Tensor values) -> (Tensor rows, Tensor written)", _fake_write)
def array_write(rows: Tensor, written: Tensor, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The array with these rows; raises IndexError for one that is not there, or that was written before."""
    return write_into(rows.clone(), written.clone(), index, values)


def write_into(rows: Tensor, written: Tensor, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`array_write` in place."""
    seen = _here(written)
    for at in _numbers(index, rows.shape[0]):
        if seen[at]:
            raise IndexError(f"element {at} of a TensorArray is written twice: each is written once")
        seen[at] = True
    if seen is not written:
        written[index] = True
    rows[index] = values
    return rows, written


def _here(written: Tensor) -> Tensor:
    """Where its values can be had without waiting for a device each time."""
    return written if written.is_cpu else written.cpu()


def _fake_grown(rows: Tensor, written: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return rows.new_empty([size, *rows.shape[1:]]), written.new_empty([size])


@op("(Tensor rows, Tensor written, Tensor index) -> (Tensor rows, Tensor written)", _fake_grown)
def array_grown(rows: Tensor, written: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The array extended with zeros as far as the index requires."""
    more = int(index.max()) + 1 - rows.shape[0] if index.numel() else 0
    if more <= 0:
        return rows.clone(), written.clone()
    return _longer(rows, more), _longer(written, more)


def _longer(x: Tensor, more: int) -> Tensor:
    return torch.cat([x, x.new_zeros([more, *x.shape[1:]])])


def _fake_read(rows: Tensor, written: Tensor, index: Tensor) -> Tensor:
    return rows.new_empty([*index.shape, *rows.shape[1:]])


@op("(Tensor rows, Tensor written, Tensor index) -> Tensor", _fake_read)
def array_read(rows: Tensor, written: Tensor, index: Tensor) -> Tensor:
    """These rows; raises IndexError for one that is not there, or was not written."""
    seen = _here(written)
    for at in _numbers(index, rows.shape[0]):
        if not seen[at]:
            raise IndexError(f"element {at} of a TensorArray is read, and was not written")
    return rows[index].clone()


def _numbers(index: Tensor, size: int) -> list[int]:
    found = index.reshape(-1).tolist()
    for at in found:
        if not 0 <= at < size:
            raise IndexError(f"element {at} of a TensorArray of {size} elements")
    return found
