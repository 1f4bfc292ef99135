"""`as_strided` by position: it counts in the elements of its tensor, row by row, wherever these lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """The view of a contiguous x; of another, or of a part of a bigger tensor, what it would be if x were alone."""
    x = x.contiguous()
    return torch.as_strided(x, size, stride, x.storage_offset() + (storage_offset or 0))


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """A contiguous copy of x with src where the view looks."""
    out = x.clone(memory_format=torch.contiguous_format)
    torch.as_strided(out, size, stride, storage_offset or 0).copy_(src)
    return out
