"""Writes through views, without writing.

A recorded view remembers the ops that led from its base. Writing new values into it means computing a new base: each
view op has a row here that puts the new view back into what it was taken from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverloadPacket
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tfnb.errors import Unsupported
from tfnb.graph.node import map_leaves
from tfnb.graph.op_facts import Op, facts, op_name

aten = torch.ops.aten


class View(NamedTuple):
    """One view op: called on the viewed tensor with ``attrs`` (by name, without the viewed argument)."""

    op: Op
    attrs: dict[str, Any]
    output: int = 0  # which output, for ops with several
    grad: bool = True  # the grad mode it was made under

    def apply(self, base: torch.Tensor) -> torch.Tensor:
        """The view of ``base``."""
        with torch.set_grad_enabled(self.grad):
            out = self.op(base, **self.attrs)
        return out[self.output] if isinstance(out, (list, tuple)) else out

    def put(self, base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """``base`` with ``new`` where this view looks."""
        row = PUT.get(self.op.overloadpacket)
        if row is None:
            raise Unsupported(f"writing through a view made by {op_name(self.op)} is not recorded; write to the base")
        defaults = facts(self.op).defaults
        return row(base, new, {**defaults, **self.attrs}, self.output)


def renewed_chain(chain: tuple[Any, ...], renew: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The views of a chain with their sizes renewed."""
    return tuple(
        view._replace(attrs=map_leaves(renew, view.attrs)) if isinstance(view, View) else view for view in chain
    )


def _reshape(base: torch.Tensor, new: torch.Tensor, a: Mapping[str, Any], i: int) -> torch.Tensor:
    return new.reshape(base.shape)


def _view(base: torch.Tensor, new: torch.Tensor, a: Mapping[str, Any], i: int) -> torch.Tensor:
    return new.view(base.dtype) if "dtype" in a else new.reshape(base.shape)


def _expand(base: torch.Tensor, new: torch.Tensor, a: Mapping[str, Any], i: int) -> torch.Tensor:
    if not statically_known_true(new.numel() == base.numel()):
        raise Unsupported("a write through expand() would write one place of memory more than once: write to the base")
    return new.reshape(base.shape)


def _unfold(base: torch.Tensor, new: torch.Tensor, a: Mapping[str, Any], i: int) -> torch.Tensor:
    if a["size"] > a["step"]:
        raise Unsupported("a write through overlapping unfold() would write one place of memory more than once")
    places = torch.arange(base.numel(), device=base.device).view(base.shape)
    places = places.unfold(a["dimension"], a["size"], a["step"]).reshape(-1)
    return base.reshape(-1).index_put((places,), new.reshape(-1)).view(base.shape)


def _as_strided(base: torch.Tensor, new: torch.Tensor, a: Mapping[str, Any], i: int) -> torch.Tensor:
    reach = 0
    for step, size in sorted((step, size) for size, step in zip(a["size"], a["stride"], strict=True) if size != 1):
        if step <= reach:
            raise Unsupported("a write through overlapping as_strided() would write one place of memory more than once")
        reach += (size - 1) * step
    return aten.as_strided_scatter(base, new, a["size"], a["stride"], a["storage_offset"])


def _permute(base: torch.Tensor, new: torch.Tensor, a: Mapping[str, Any], i: int) -> torch.Tensor:
    dims = [d % base.dim() for d in a["dims"]]
    return new.permute([dims.index(d) for d in range(base.dim())])


def _split(base: torch.Tensor, new: torch.Tensor, a: Mapping[str, Any], i: int) -> torch.Tensor:
    size = a["split_size"]
    return torch.slice_scatter(base, new, a["dim"], i * size, i * size + new.shape[a["dim"]])


def _split_sizes(base: torch.Tensor, new: torch.Tensor, a: Mapping[str, Any], i: int) -> torch.Tensor:
    start = sum(a["split_sizes"][:i])
    return torch.slice_scatter(base, new, a["dim"], start, start + a["split_sizes"][i])


# view -> how the base follows from the new view
PUT: dict[OpOverloadPacket, Callable[[torch.Tensor, torch.Tensor, dict[str, Any], int], torch.Tensor]] = {
    aten.alias: lambda base, new, a, i: new,
    aten.detach: lambda base, new, a, i: new,
    aten.as_strided: _as_strided,
    aten.diagonal: lambda base, new, a, i: torch.diagonal_scatter(base, new, a["offset"], a["dim1"], a["dim2"]),
    aten.expand: _expand,
    aten.index_select: lambda base, new, a, i: base.index_copy(a["dim"], a["index"], new),
    aten.imag: lambda base, new, a, i: torch.complex(torch.real(base), new),
    aten.permute: _permute,
    aten.real: lambda base, new, a, i: torch.complex(new, torch.imag(base)),
    aten.select: lambda base, new, a, i: torch.select_scatter(base, new, a["dim"], a["index"]),
    aten.slice: lambda base, new, a, i: aten.slice_scatter(base, new, a["dim"], a["start"], a["end"], a["step"]),
    aten.split: _split,
    aten.split_with_sizes: _split_sizes,
    aten.squeeze: _reshape,
    aten.t: lambda base, new, a, i: new.t(),
    aten.transpose: lambda base, new, a, i: new.transpose(a["dim0"], a["dim1"]),
    aten.unbind: lambda base, new, a, i: torch.select_scatter(base, new, a["dim"], i),
    aten.unfold: _unfold,
    aten.unsqueeze: _reshape,
    aten.view: _view,
    aten.view_as_complex: lambda base, new, a, i: torch.view_as_real(new),
    aten.view_as_real: lambda base, new, a, i: torch.view_as_complex(new),
    aten._conj_physical: lambda base, new, a, i: new.conj(),
    aten.neg: lambda base, new, a, i: -new,
    aten._unsafe_view: _reshape,
    aten._reshape_alias: _reshape,
}
