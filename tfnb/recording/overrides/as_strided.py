"""`as_strided` on recorded values: values have no memory, so the op is recorded on a value whose rows are the memory.

That is the value which all views of the memory share, its axes in the order in which they lie there. Each row is called
under the recorder, as those of `tfnb.recording.overrides`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tfnb.errors import Unsupported
from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording

aten = torch.ops.aten


@override(Stage.OP, aten.as_strided.default)
def _as_strided(
    rec: Recording, x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    offset = x.storage_offset() if storage_offset is None else storage_offset
    memory = _memory(rec, rec.handle(x))
    return NotImplemented if memory is x else aten.as_strided(memory, size, stride, offset)


@override(Stage.OP, aten.as_strided_copy.default)
def _as_strided_copy(
    rec: Recording, x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    return aten.as_strided(x, size, stride, storage_offset).clone()


@override(Stage.OP, aten.as_strided_scatter.default)
def _as_strided_scatter(
    rec: Recording,
    x: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    """As torch: a copy with the same strides, then a write into the copy."""
    if _rows_are_memory(x):
        return NotImplemented
    copy = x.clone()
    offset = 0 if storage_offset is None else storage_offset - x.storage_offset()
    if not statically_known_true(offset >= 0):
        raise Unsupported(f"as_strided_scatter() before the first element of its tensor{rec.tape.at()}")
    copy.as_strided(size, stride, offset).copy_(src)
    return copy


def _memory(rec: Recording, x: Any) -> Any:
    """All of the memory that x looks at; raises Unsupported where its elements leave out or share places."""
    every = x._family.entry.fake.numel()
    if _rows_are_memory(x) and statically_known_true(x.numel() == every):
        return x
    whole = rec._wrap(x._family.entry, x._family) if x._chain else x
    if _rows_are_memory(whole):
        return whole
    steps = [rec.symbols.concrete(step) for step in whole.stride()]
    memory = whole.permute(sorted(range(whole.dim()), key=steps.__getitem__, reverse=True))
    if not _rows_are_memory(memory):
        raise Unsupported(f"as_strided() of a tensor with gaps or overlaps in its memory: use a copy{rec.tape.at()}")
    return memory


def _rows_are_memory(x: torch.Tensor) -> bool:
    """Whether the elements are contiguous in memory for all varying sizes."""
    each = zip(x.shape, x.stride(), range(1, x.dim() + 1), strict=True)
    return statically_known_true(x.storage_offset() == 0) and all(
        statically_known_true(size == 1) or statically_known_true(step == math.prod(x.shape[after:]))
        for size, step, after in each
    )
