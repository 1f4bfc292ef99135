"""Rules for ops that move elements without changing them: views, joins, splits, pads, repeats, conversions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfnb.gradients.rule_table import COMPLEX, Forward, columns, composite, partials, rule
from tfnb.graph import Node, current
from tfnb.recording import Recorder, Tensor

aten = torch.ops.aten

# -- the same elements in another shape ------------------------------------------------------------------------


def _back(n: Forward, dy: torch.Tensor) -> torch.Tensor:
    """dy in the shape of the input."""
    return dy.reshape(n.inputs[0].shape)


for _op in (
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims,
):  # fmt: skip
    partials(_op, _back)

for _op in (
    aten.alias.default, aten.clone.default, aten._to_copy.default,
    torch.ops.prims.convert_element_type.default, torch.ops.prims.view_of.default,
):  # fmt: skip
    partials(_op, lambda n, dy: dy)
partials("tfnb.assign", lambda n, dy: dy)

partials(aten.copy.default, None, lambda n, dy: dy)
partials(aten.permute.default, lambda n, dy: dy.permute(_inverse(n["dims"])))
partials(aten.t.default, lambda n, dy: turned(dy) if dy.dim() == 2 else dy)
partials(aten.transpose.int, lambda n, dy: dy.transpose(n["dim0"], n["dim1"]))
partials(aten.unsqueeze.default, lambda n, dy: dy.squeeze(n["dim"]))


def turned(x: torch.Tensor) -> torch.Tensor:
    """``x.mT``; the source if x is itself such a transpose, without a new node."""
    recorder = current.recording()
    if isinstance(x, Tensor) and isinstance(recorder, Recorder):
        node = recorder.node(x.value.node)
        if node.op == "aten.t.default" or (node.op == "aten.transpose.int" and _swaps_matrices(node)):
            return recorder.tensor(node.inputs[0])
    return x.mT


def _swaps_matrices(node: Node) -> bool:
    """Whether the axes that a transposition exchanges are the last two."""
    rank = len(node.outputs[0].shape)
    return {node.attrs["dim0"] % rank, node.attrs["dim1"] % rank} == {rank - 1, rank - 2}


def _inverse(dims: Sequence[int]) -> list[int]:
    """The permutation that undoes ``dims``."""
    rank = len(dims)
    back = [0] * rank
    for place, dim in enumerate(dims):
        back[dim % rank] = place
    return back


# -- broadcasts and repeats ------------------------------------------------------------------------------------

partials(aten.expand.default, lambda n, dy: dy)  # the walker sums what was broadcast

# -- parts of a tensor -----------------------------------------------------------------------------------------

partials(aten.select.int, lambda n, dy: aten.select_backward(dy, n["self"].shape, n["dim"], n["index"]))
partials(aten.select_backward.default, lambda n, dd: dd.select(n["dim"], n["index"]))


def _slice(n: Forward, x: torch.Tensor) -> torch.Tensor:
    return aten.slice.Tensor(x, n["dim"], n["start"], n["end"], n["step"])


def _slice_back(n: Forward, dy: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
    start = 0 if n["start"] is None else n["start"]
    end = torch.iinfo(torch.int64).max if n["end"] is None else n["end"]
    return aten.slice_backward(dy, n["self"].shape if sizes is None else sizes, n["dim"], start, end, n["step"])


columns(aten.slice.Tensor, lambda n, values: _slice_back(n, values, [values.shape[0], *n["self"].shape[1:]]))
columns(aten.unsqueeze.default, lambda n, values: values.squeeze(n["dim"]))
partials(aten.slice.Tensor, _slice_back)
partials(aten.slice_backward.default, lambda n, dd: _slice(n, dd))
partials(aten.slice_scatter.default,
         lambda n, dy: aten.slice_scatter(dy, torch.zeros_like(n["src"]), n["dim"], n["start"], n["end"], n["step"]),
         lambda n, dy: _slice(n, dy))  # fmt: skip


for _op in (aten.unfold.default, aten.unfold_copy.default):
    partials(_op, lambda n, dy: aten.unfold_backward(dy, n["self"].shape, n["dimension"], n["size"], n["step"]))
for _op in (aten.diagonal.default, aten.diagonal_copy.default):
    partials(_op, lambda n, dy: aten.diagonal_backward(dy, n["self"].shape, n["offset"], n["dim1"], n["dim2"]))
partials(aten.diagonal_backward.default, lambda n, dd: dd.diagonal(n["offset"], n["dim1"], n["dim2"]))
partials(aten.unfold_backward.default, lambda n, dd: dd.unfold(n["dim"], n["size"], n["step"]))
partials(aten.trace.default, lambda n, dy: dy * torch.eye(*n["self"].shape, dtype=dy.dtype, device=dy.device))


def _places(n: Forward, x: torch.Tensor) -> torch.Tensor:
    """The element of contiguous ``x`` that each element of the strided view shows."""
    every = torch.arange(x.numel(), device=x.device)
    return every.as_strided(n["size"], n["stride"], n["storage_offset"] or 0).reshape(-1)


@rule(aten.as_strided.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    x = n["self"]  # its rows are the memory: see tfnb.recording.overrides.as_strided
    flat = dy.new_zeros([x.numel()]).index_add(0, _places(n, x), dy.reshape(-1))
    return (flat.reshape(x.shape),)


@rule(aten.as_strided_scatter.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    x, src = n["self"], n["src"]
    places, flat = _places(n, x), dy.reshape(-1)
    return {
        "self": lambda: flat.index_fill(0, places, 0.0).reshape(x.shape),
        "src": lambda: flat.index_select(0, places).reshape(src.shape),
    }


# -- several tensors -------------------------------------------------------------------------------------------


@rule(aten.cat.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    dim = n["dim"] % dy.dim()
    start, parts = 0, []
    for x in n.inputs:
        size = x.shape[dim] if x.dim() == dy.dim() else 0  # cat takes empty 1-d tensors anywhere
        parts.append(_part(dy, dim, start, start + size) if x.dim() == dy.dim() else None)
        start = start + size
    return parts


def _part(dy: torch.Tensor, dim: int, start: int | torch.SymInt | None, end: int | torch.SymInt | None) -> Any:
    return lambda: aten.slice.Tensor(dy, dim, start, end)


@rule(aten.stack.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    def part(i: int) -> Any:
        return lambda: dy.select(n["dim"], i)

    return [part(i) for i in range(len(n.inputs))]


for _op in (aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor):
    partials(_op, lambda n, dys: torch.cat(list(dys), n["dim"]))
partials(aten.unbind.int, lambda n, dys: torch.stack(list(dys), n["dim"]))


@composite(aten._foreach_copy.default)
def _(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
    return [y.to(x.dtype).expand_as(x) for x, y in zip(self, src, strict=True)]


# -- padding ---------------------------------------------------------------------------------------------------

partials(aten.constant_pad_nd.default, lambda n, dy: aten.constant_pad_nd(dy, [-p for p in n["pad"]]))
_OF_ANY_DTYPE = (
    aten.copy.default,
    aten.slice_scatter.default,
    aten.as_strided.default,
    aten.as_strided_scatter.default,
)
COMPLEX.update(map(str, _OF_ANY_DTYPE))
