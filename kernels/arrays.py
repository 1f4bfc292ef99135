"""Arrays that are written once: rows of one shape, and which of them were written.

``rows`` is [N, ...], ``written`` bool [N]; an ``index`` is one row number, or [n] of them with a value for each. Of an
array whose elements have several rows each, and not all as many, ``rows`` is int64 [N, 2]: its spans, where an element
begins among the rows of all, and how many are its own.
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
    """The array with zeros behind it, as far as the index needs."""
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


def _fake_spans(spans: Tensor) -> Tensor:
    return spans.new_empty([torch.library.get_ctx().new_dynamic_size()])


@op("(Tensor spans) -> Tensor", _fake_spans)
def array_spans(spans: Tensor) -> Tensor:
    """The numbers of the rows of spans, one span after the other."""
    starts, lengths = spans.unbind(1)
    firsts = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - firsts, lengths) + torch.arange(int(lengths.sum()), device=spans.device)


def _fake_even_spans(spans: Tensor) -> Tensor:
    return spans.new_empty([spans.shape[0], torch.library.get_ctx().new_dynamic_size()])


@op("(Tensor spans) -> Tensor", _fake_even_spans)
def array_even_spans(spans: Tensor) -> Tensor:
    """The numbers of the rows of spans, [n, length]; raises IndexError for several lengths."""
    starts, lengths = spans.unbind(1)
    found = lengths.unique().tolist()
    if len(found) > 1:
        raise IndexError(f"elements of a TensorArray with {found} rows are stacked: concat takes several sizes")
    return starts[:, None] + torch.arange(found[0] if found else 0, device=spans.device)


def _fake_parts(rows: Tensor, lengths: Tensor) -> Tensor:
    return lengths.new_empty([lengths.shape[0], 2], dtype=torch.int64)


@op("(Tensor rows, Tensor lengths) -> Tensor", _fake_parts)
def array_parts(rows: Tensor, lengths: Tensor) -> Tensor:
    """The spans of parts of these lengths; raises IndexError where they are not all the rows there are."""
    lengths = lengths.to(torch.int64)
    if lengths.sum() != rows.shape[0] or (lengths < 0).any():
        raise IndexError(f"{rows.shape[0]} rows are split into elements of {lengths.tolist()} rows")
    return torch.stack([lengths.cumsum(0) - lengths, lengths], 1)


def _numbers(index: Tensor, size: int) -> list[int]:
    found = index.reshape(-1).tolist()
    for at in found:
        if not 0 <= at < size:
            raise IndexError(f"element {at} of a TensorArray of {size} elements")
    return found
