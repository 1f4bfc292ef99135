"""Kernels that look at memory, for tensors of any strides.

`as_strided` counts in the elements of its tensor, row by row, wherever these lie. Some kernels of torch read the memory
of a tensor as if it had no gaps, or lay like another one, since the functions around them copy before they call:
`prepared` and `gapless` do so for a graph, in which the kernels stand alone. Tried with torch 2.13 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """The view of a contiguous x; for others and parts of bigger tensors, the view as if x were alone in memory."""
    x = x.contiguous()
    return torch.as_strided(x, size, stride, x.storage_offset() + (storage_offset or 0))


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """A contiguous copy of x with src where the view looks."""
    out = x.clone(memory_format=torch.contiguous_format)
    torch.as_strided(out, size, stride, storage_offset or 0).copy_(src)
    return out


def contiguous(x: Tensor, like: Tensor | None = None) -> Tensor:
    """A contiguous tensor: with channels last if ``like`` has the rank and the strides for that format."""
    if like is None or like.dim() != x.dim():
        return x.contiguous()
    return x.contiguous(memory_format=suggest_memory_format(like))


def unit_rows(x: Tensor) -> Tensor:
    """With the elements of the last axis side by side."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def prepared(op: Callable[..., Any], prepare: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """``op`` on prepared tensors. NOTE: without the op's name, since torch.fx would call ``op`` by name."""

    def ready(x: object) -> Any:
        return prepare(x) if isinstance(x, Tensor) else x

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*map(ready, args), **{name: ready(x) for name, x in kwargs.items()})

    return call


def gapless(op: Callable[..., Any], place: int) -> Callable[..., Any]:
    """``op`` of tensors without gaps, images all laid out like the argument at ``place``."""

    def call(*args: Any) -> Any:
        return op(*(contiguous(x, args[place]) if isinstance(x, Tensor) else x for x in args))

    return call
