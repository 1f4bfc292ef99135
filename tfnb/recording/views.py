"""Writes through views, without writing.

A recorded view remembers the ops that led from its base. Writing new values into it means computing a new base: each
view op has a row here that puts the new view back into what it was taken from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tfnb.errors import Unsupported
from tfnb.graph import current
from tfnb.recording.ops import Op, facts, op_name

aten = torch.ops.aten


class View(NamedTuple):
    """One view op: called on the tensor it views with ``attrs`` (by name, without the viewed argument)."""

    op: Op
    attrs: dict[str, Any]
    output: int = 0  # which output, for ops with several

    def apply(self, base: torch.Tensor) -> torch.Tensor:
        """The view of ``base``."""
        out = self.op(base, **self.attrs)
        return out[self.output] if isinstance(out, (list, tuple)) else out

    def put(self, base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """``base`` with ``new`` where this view looks."""
        row = PUT.get(self.op.overloadpacket)
        if row is None:
            raise Unsupported(f"writing through a view made by {op_name(self.op)} is not recorded; write to the base")
        defaults = facts(self.op).defaults
        return row(base, new, {**defaults, **self.attrs}, self.output)


def _reshape(base: Any, new: Any, a: Any, i: int) -> Any:
    return new.reshape(base.shape)


def _permute(base: Any, new: Any, a: Any, i: int) -> Any:
    dims = [d % base.dim() for d in a["dims"]]
    return new.permute([dims.index(d) for d in range(base.dim())])


def _split(base: Any, new: Any, a: Any, i: int) -> Any:
    size = a["split_size"]
    return torch.slice_scatter(base, new, a["dim"], i * size, i * size + new.shape[a["dim"]])


def _split_sizes(base: Any, new: Any, a: Any, i: int) -> Any:
    start = sum(a["split_sizes"][:i])
    return torch.slice_scatter(base, new, a["dim"], start, start + a["split_sizes"][i])


def _detach(base: Any, new: Any, a: Any, i: int) -> Any:
    """A write through a detached alias changes the value and, as in torch, not the path of gradients."""
    with torch.no_grad(), current.recording().tagged(frozenset({"in_place"})):  # type: ignore[union-attr]
        return aten.copy(base, new)


# view -> how the base follows from the new view
PUT: dict[Any, Callable[[Any, Any, dict[str, Any], int], Any]] = {
    aten.alias: lambda base, new, a, i: new,
    aten.detach: _detach,
    aten.as_strided: lambda base, new, a, i: aten.as_strided_scatter(
        base, new, a["size"], a["stride"], a["storage_offset"]
    ),
    aten.diagonal: lambda base, new, a, i: torch.diagonal_scatter(base, new, a["offset"], a["dim1"], a["dim2"]),
    aten.permute: _permute,
    aten.select: lambda base, new, a, i: torch.select_scatter(base, new, a["dim"], a["index"]),
    aten.slice: lambda base, new, a, i: aten.slice_scatter(base, new, a["dim"], a["start"], a["end"], a["step"]),
    aten.split: _split,
    aten.split_with_sizes: _split_sizes,
    aten.squeeze: _reshape,
    aten.t: lambda base, new, a, i: new.t(),
    aten.transpose: lambda base, new, a, i: new.transpose(a["dim0"], a["dim1"]),
    aten.unbind: lambda base, new, a, i: torch.select_scatter(base, new, a["dim"], i),
    aten.unsqueeze: _reshape,
    aten.view: _reshape,
    aten.view_as_complex: lambda base, new, a, i: torch.view_as_real(new),
    aten.view_as_real: lambda base, new, a, i: torch.view_as_complex(new),
    aten._conj_physical: lambda base, new, a, i: new.conj(),
    aten.neg: lambda base, new, a, i: -new,
    aten._unsafe_view: _reshape,
    aten._reshape_alias: _reshape,
}
