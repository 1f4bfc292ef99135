"""Rules for ops that move elements without changing them: views, joins, splits, pads, repeats, conversions."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, columns, partials, rule
from tfnb.graph import Node, current
from tfnb.recording import Recorder, Tensor

aten = torch.ops.aten

# -- the same elements in another shape ------------------------------------------------------------------------


def _back(n: Forward, dy: torch.Tensor) -> torch.Tensor:
    """dy in the shape of the input."""
    return dy.reshape(n.inputs[0].shape)


for _op in (
    aten.view.default, aten.view_copy.default, aten._unsafe_view.default,
    aten._reshape_alias.default, aten._reshape_copy.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims,
):  # fmt: skip
    partials(_op, _back)

for _op in (
    aten.alias.default, aten.alias_copy.default, aten.clone.default, aten._to_copy.default,
    torch.ops.prims.convert_element_type.default, torch.ops.prims.view_of.default,
):  # fmt: skip
    partials(_op, lambda n, dy: dy)
partials("tfnb.assign", lambda n, dy: dy)

partials(aten.copy.default, None, lambda n, dy: dy)
partials(aten.permute.default, lambda n, dy: dy.permute(_inverse(n["dims"])))
partials(aten.permute_copy.default, lambda n, dy: dy.permute(_inverse(n["dims"])))
partials(aten.t.default, lambda n, dy: turned(dy) if dy.dim() == 2 else dy)
partials(aten.t_copy.default, lambda n, dy: dy.t())
partials(aten.transpose.int, lambda n, dy: dy.transpose(n["dim0"], n["dim1"]))
partials(aten.transpose_copy.int, lambda n, dy: dy.transpose(n["dim0"], n["dim1"]))
partials(aten.unsqueeze.default, lambda n, dy: dy.squeeze(n["dim"]))
partials(aten.unsqueeze_copy.default, lambda n, dy: dy.squeeze(n["dim"]))
partials(aten.flip.default, lambda n, dy: dy.flip(n["dims"]))
partials(aten.rot90.default, lambda n, dy: dy.rot90(-n["k"], n["dims"]))
partials(aten.roll.default, lambda n, dy: dy.roll([-s for s in _list(n["shifts"])], n["dims"]))
partials(aten.pixel_shuffle.default, lambda n, dy: aten.pixel_unshuffle(dy, n["upscale_factor"]))
partials(aten.pixel_unshuffle.default, lambda n, dy: aten.pixel_shuffle(dy, n["downscale_factor"]))
partials(aten.tril.default, lambda n, dy: dy.tril(n["diagonal"]))
partials(aten.triu.default, lambda n, dy: dy.triu(n["diagonal"]))


def turned(x: torch.Tensor) -> torch.Tensor:
    """``x.mT``; where x is itself such a transpose, what it was made from, and no node."""
    recorder = current.recording()
    if isinstance(x, Tensor) and isinstance(recorder, Recorder):
        node = recorder.node(x.value.node)
        if node.op == "aten.t.default" or (node.op == "aten.transpose.int" and _iterations_matrices(node)):
            return recorder.tensor(node.inputs[0])
    return x.mT


def _iterations_matrices(node: Node) -> bool:
    """Whether the axes that a transposition exchanges are the last two."""
    rank = len(node.outputs[0].shape)
    return {node.attrs["dim0"] % rank, node.attrs["dim1"] % rank} == {rank - 1, rank - 2}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _inverse(dims: Any) -> list[int]:
    """The permutation that undoes ``dims``."""
    rank = len(dims)
    back = [0] * rank
    for place, dim in enumerate(dims):
        back[dim % rank] = place
    return back


@rule(aten.channel_shuffle.default)
def _(n: Forward, dy: Any) -> Any:
    # [N, g*k, ...] was read as [N, g, k, ...] and transposed: shuffle with k groups undoes it
    return (aten.channel_shuffle(dy, n["self"].shape[1] // n["groups"]),)


# -- broadcasts and repeats ------------------------------------------------------------------------------------

partials(aten.expand.default, lambda n, dy: dy)  # the walker sums what was broadcast
partials(aten.expand_copy.default, lambda n, dy: dy)


@rule(aten.repeat.default)
def _(n: Forward, dy: Any) -> Any:
    repeats, shape = list(n["repeats"]), n["self"].shape
    lead = len(repeats) - len(shape)
    split, summed = [], list(range(lead))  # read dy as [repeats, size] pairs and sum the repeats
    for i, repeat in enumerate(repeats):
        if i < lead:
            split.append(repeat)
            continue
        summed.append(len(split))
        split += [repeat, shape[i - lead]]
    return (dy.reshape(split).sum(summed) if summed else dy,)


# -- parts of a tensor -----------------------------------------------------------------------------------------

for _op in (aten.select.int, aten.select_copy.int):
    partials(_op, lambda n, dy: aten.select_backward(dy, n["self"].shape, n["dim"], n["index"]))
partials(aten.select_backward.default, lambda n, dd: dd.select(n["dim"], n["index"]))
partials(aten.select_scatter.default,
         lambda n, dy: aten.select_scatter(dy, torch.zeros_like(n["src"]), n["dim"], n["index"]),
         lambda n, dy: dy.select(n["dim"], n["index"]))  # fmt: skip


def _slice(n: Forward, x: torch.Tensor) -> torch.Tensor:
    return aten.slice.Tensor(x, n["dim"], n["start"], n["end"], n["step"])


def _slice_back(n: Forward, dy: torch.Tensor, sizes: Any = None) -> torch.Tensor:
    start = 0 if n["start"] is None else n["start"]
    end = torch.iinfo(torch.int64).max if n["end"] is None else n["end"]
    return aten.slice_backward(dy, n["self"].shape if sizes is None else sizes, n["dim"], start, end, n["step"])


columns(aten.slice.Tensor, lambda n, values: _slice_back(n, values, [values.shape[0], *n["self"].shape[1:]]))
columns(aten.unsqueeze.default, lambda n, values: values.squeeze(n["dim"]))
partials(aten.slice.Tensor, _slice_back)
partials(aten.slice_copy.Tensor, _slice_back)
partials(aten.slice_backward.default, lambda n, dd: _slice(n, dd))
partials(aten.slice_scatter.default,
         lambda n, dy: aten.slice_scatter(dy, torch.zeros_like(n["src"]), n["dim"], n["start"], n["end"], n["step"]),
         lambda n, dy: _slice(n, dy))  # fmt: skip
partials(aten.narrow_copy.default, lambda n, dy: aten.slice_backward(
    dy, n["self"].shape, n["dim"], n["start"], n["start"] + n["length"], 1))  # fmt: skip


def _diagonal(n: Forward, x: torch.Tensor) -> torch.Tensor:
    return x.diagonal(n["offset"], n["dim1"], n["dim2"])


for _op in (aten.diagonal.default, aten.diagonal_copy.default):
    partials(_op, lambda n, dy: aten.diagonal_backward(dy, n["self"].shape, n["offset"], n["dim1"], n["dim2"]))
partials(aten.diagonal_backward.default, _diagonal)
partials(aten.diagonal_scatter.default,
         lambda n, dy: aten.diagonal_scatter(dy, torch.zeros_like(n["src"]), n["offset"], n["dim1"], n["dim2"]),
         _diagonal)  # fmt: skip
partials(aten.diag_embed.default, _diagonal)
partials(aten.trace.default, lambda n, dy: dy * torch.eye(*n["self"].shape, dtype=dy.dtype, device=dy.device))

for _op in (aten.unfold.default, aten.unfold_copy.default):
    partials(_op, lambda n, dy: aten.unfold_backward(dy, n["self"].shape, n["dimension"], n["size"], n["step"]))
partials(aten.unfold_backward.default, lambda n, dd: dd.unfold(n["dim"], n["size"], n["step"]))
partials(aten.im2col.default, lambda n, dy: aten.col2im(
    dy, n["self"].shape[-2:], n["kernel_size"], n["dilation"], n["padding"], n["stride"]))  # fmt: skip
partials(aten.col2im.default, lambda n, dy: aten.im2col(
    dy, n["kernel_size"], n["dilation"], n["padding"], n["stride"]))  # fmt: skip


def _places(n: Forward, x: torch.Tensor) -> torch.Tensor:
    """The element of contiguous ``x`` that each element of the strided view shows."""
    every = torch.arange(x.numel(), device=x.device)
    return every.as_strided(n["size"], n["stride"], n["storage_offset"] or 0).reshape(-1)


@rule(aten.as_strided.default)
def _(n: Forward, dy: Any) -> Any:
    x = n["self"]  # its rows are the memory: see tfnb.recording.overrides.as_strided
    flat = dy.new_zeros([x.numel()]).index_add(0, _places(n, x), dy.reshape(-1))
    return (flat.reshape(x.shape),)


@rule(aten.as_strided_scatter.default)
def _(n: Forward, dy: Any) -> Any:
    x, src = n["self"], n["src"]
    places, flat = _places(n, x), dy.reshape(-1)
    return {
        "self": lambda: flat.index_fill(0, places, 0.0).reshape(x.shape),
        "src": lambda: flat.index_select(0, places).reshape(src.shape),
    }


# -- several tensors -------------------------------------------------------------------------------------------


@rule(aten.cat.default)
def _(n: Forward, dy: Any) -> Any:
    dim = n["dim"] % dy.dim()
    start, parts = 0, []
    for x in n.inputs:
        size = x.shape[dim] if x.dim() == dy.dim() else 0  # cat takes empty 1-d tensors anywhere
        parts.append(_part(dy, dim, start, start + size) if x.dim() == dy.dim() else None)
        start = start + size
    return parts


def _part(dy: torch.Tensor, dim: int, start: Any, end: Any) -> Any:
    return lambda: aten.slice.Tensor(dy, dim, start, end)


@rule(aten.stack.default)
def _(n: Forward, dy: Any) -> Any:
    def part(i: int) -> Any:
        return lambda: dy.select(n["dim"], i)

    return [part(i) for i in range(len(n.inputs))]


for _op in (
    aten.split.Tensor, aten.split_copy.Tensor, aten.split_with_sizes.default, aten.split_with_sizes_copy.default,
    aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
):  # fmt: skip
    partials(_op, lambda n, dys: torch.cat(list(dys), n["dim"]))
for _op in (aten.unbind.int, aten.unbind_copy.int):
    partials(_op, lambda n, dys: torch.stack(list(dys), n["dim"]))


@rule(aten.block_diag.default)
def _(n: Forward, dy: Any) -> Any:
    row = column = 0
    parts = []
    for x in n.inputs:
        height, width = (x.shape[0] if x.dim() == 2 else 1), (x.shape[-1] if x.dim() else 1)
        part = dy[row : row + height, column : column + width]
        parts.append(part if x.dim() == 2 else part.reshape(x.shape))  # to reshape is to ask of the strides
        row, column = row + height, column + width
    return parts


# -- padding ---------------------------------------------------------------------------------------------------

partials(aten.constant_pad_nd.default, lambda n, dy: aten.constant_pad_nd(dy, [-p for p in n["pad"]]))


def _pad(forward: Any, backward: Any) -> None:
    """A pad by copies of the border, its backward kernel, and the pad again for the second order."""
    partials(forward, lambda n, dy: backward(dy, n["self"], n["padding"]))
    partials(backward, lambda n, dd: forward(dd, n["padding"]), None)


_pad(aten.reflection_pad1d.default, aten.reflection_pad1d_backward.default)
_pad(aten.reflection_pad2d.default, aten.reflection_pad2d_backward.default)
_pad(aten.reflection_pad3d.default, aten.reflection_pad3d_backward.default)
_pad(aten.replication_pad1d.default, aten.replication_pad1d_backward.default)
_pad(aten.replication_pad2d.default, aten.replication_pad2d_backward.default)
_pad(aten.replication_pad3d.default, aten.replication_pad3d_backward.default)
