"""Places that slices and ranges of recorded numbers pick. Knows no graph."""

from __future__ import annotations

import torch
from torch import Tensor

from tfnb.kernels.define import op


def _fake_span(start: Tensor, stop: Tensor, step: int, size: int) -> Tensor:
    return start.new_empty([torch.library.get_ctx().new_dynamic_size()], dtype=torch.int64)


@op("(Tensor start, Tensor stop, SymInt step, SymInt size) -> Tensor", _fake_span)
def index_span(start: Tensor, stop: Tensor, step: int, size: int) -> Tensor:
    """The indices of ``[start:stop:step]`` among so many elements, in Python's meaning: int64 [n]."""
    first, end, step = slice(int(start), int(stop), step).indices(size)
    return torch.arange(first, max(first, end), step, device=start.device)


def _fake_single(start: Tensor, size: int) -> Tensor:
    return start.new_empty([1], dtype=torch.int64)


@op("(Tensor start, SymInt size) -> Tensor", _fake_single)
def index_single(start: Tensor, size: int) -> Tensor:
    """The index of ``[start:start + 1]`` among so many elements, int64 [1]; raises IndexError if empty."""
    at = int(start)
    picked = range(size)[at : at + 1]
    if not picked:
        raise IndexError(f"slice [{at}:{at + 1}] of {size} elements has none of them, and one for the samples")
    return torch.tensor([picked[0]], device=start.device)


def _fake_range(start: Tensor, stop: Tensor, step: Tensor) -> Tensor:
    return start.new_empty([torch.library.get_ctx().new_dynamic_size()], dtype=torch.int64)


@op("(Tensor start, Tensor stop, Tensor step) -> Tensor", _fake_range)
def index_range(start: Tensor, stop: Tensor, step: Tensor) -> Tensor:
    """As torch.arange of three whole numbers, int64 [n]."""
    return torch.arange(int(start), int(stop), int(step), device=start.device)
