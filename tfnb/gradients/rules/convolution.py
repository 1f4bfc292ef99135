"""Rules for convolutions and pools: torch's backward kernels, which are linear in each argument they differentiate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._decomp import decomposition_table

from tfnb.gradients.rule_table import Forward, composite, partials, rule
from tfnb.gradients.walker import gradients

aten = torch.ops.aten

# -- convolution -----------------------------------------------------------------------------------------------


def _geometry(n: Forward) -> tuple[Any, ...]:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return tuple(n[name] for name in names)


@rule(aten.convolution.default)
def _(n: Forward, dy: Any) -> Any:
    names = ("input", "weight", "bias")
    mask = [n.needs(name) for name in names]
    sizes = [n["weight"].shape[1 if n["transposed"] else 0] * (n["groups"] if n["transposed"] else 1)]
    found = aten.convolution_backward(dy, n["input"], n["weight"], sizes, *_geometry(n), mask)
    return dict(zip(names, found, strict=True))


@rule(aten.convolution_backward.default)
def _(n: Forward, dds: Any) -> Any:
    """dx is bilinear in (dy, w), dw in (dy, x): each cotangent is a convolution of the same geometry."""
    dy, x, w, geometry = n["grad_output"], n["input"], n["weight"], _geometry(n)
    ddx, ddw, ddb = (dds.given(i) for i in range(3))

    def output() -> Any:
        parts = [] if ddx is None else [aten.convolution(ddx, w, None, *geometry)]
        parts += [] if ddw is None else [aten.convolution(x, ddw, None, *geometry)]
        parts += [] if ddb is None else [ddb.view([1, -1] + [1] * (dy.dim() - 2)).expand(dy.shape)]
        return sum(parts[1:], parts[0])

    def image() -> Any:
        return aten.convolution_backward(dy, x, ddw, None, *geometry, [True, False, False])[0]

    def weight() -> Any:
        return aten.convolution_backward(dy, ddx, w, None, *geometry, [False, True, False])[1]

    return {
        "grad_output": output,
        "input": None if ddw is None else image,
        "weight": None if ddx is None else weight,
    }


# -- average pools: linear, so the second order is the pool itself ---------------------------------------------

_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


def _average(forward: Any, backward: Any) -> None:
    partials(forward, lambda n, dy: backward(dy, n["self"], *(n[a] for a in _POOL)))
    partials(backward, lambda n, dd: forward(dd, *(n[a] for a in _POOL)), None)


def _adaptive(forward: Any, backward: Any, spatial: int) -> None:
    partials(forward, lambda n, dy: backward(dy, n["self"]))
    partials(backward, lambda n, dd: forward(dd, n["grad_output"].shape[-spatial:]), None)


_average(aten.avg_pool2d.default, aten.avg_pool2d_backward.default)
_average(aten.avg_pool3d.default, aten.avg_pool3d_backward.default)
_adaptive(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default, 2)
_adaptive(aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default, 3)

# -- max pools: a gather at the indices of the winners ---------------------------------------------------------


def _gathered(dd: torch.Tensor, indices: torch.Tensor, spatial: int) -> torch.Tensor:
    """Elements of ``dd`` at flat positions within the last ``spatial`` axes."""
    return dd.flatten(-spatial).gather(-1, indices.flatten(-spatial)).reshape(indices.shape)


_WINDOW = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


@rule(aten.max_pool2d_with_indices.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return (aten.max_pool2d_with_indices_backward(dy, n["self"], *(n[a] for a in _WINDOW), n.outs[1]),)


@rule(aten.max_pool3d_with_indices.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return (aten.max_pool3d_with_indices_backward(dy, n["self"], *(n[a] for a in _WINDOW), n.outs[1]),)


@rule(aten.adaptive_max_pool2d.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return (aten.adaptive_max_pool2d_backward(dy, n["self"], n.outs[1]),)


@rule(aten.adaptive_max_pool3d.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return (aten.adaptive_max_pool3d_backward(dy, n["self"], n.outs[1]),)


@rule(aten.fractional_max_pool2d.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return aten.fractional_max_pool2d_backward(dy, n["self"], n["kernel_size"], n["output_size"], n.outs[1]), None


@rule(aten.fractional_max_pool3d.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return aten.fractional_max_pool3d_backward(dy, n["self"], n["kernel_size"], n["output_size"], n.outs[1]), None


for _op in (
    aten.max_pool2d_with_indices_backward, aten.adaptive_max_pool2d_backward, aten.fractional_max_pool2d_backward,
):  # fmt: skip
    partials(_op.default, lambda n, dd: _gathered(dd, n["indices"], 2), None)
for _op in (
    aten.max_pool3d_with_indices_backward, aten.adaptive_max_pool3d_backward, aten.fractional_max_pool3d_backward,
):  # fmt: skip
    partials(_op.default, lambda n, dd: _gathered(dd, n["indices"], 3), None)
partials(aten.max_unpool2d.default, lambda n, dy: _gathered(dy, n["indices"], 2), None)
partials(aten.max_unpool3d.default, lambda n, dy: _gathered(dy, n["indices"], 3), None)

# -- resizing: linear too --------------------------------------------------------------------------------------

_CORNERS = ("align_corners", "scales_h", "scales_w")


def _resize(forward: Any, backward: Any) -> None:
    partials(forward, lambda n, dy: backward(dy, n["output_size"], n["self"].shape, *(n[a] for a in _CORNERS)))
    partials(backward, lambda n, dd: forward(dd, n["output_size"], *(n[a] for a in _CORNERS)))


_resize(aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default)
_resize(aten._upsample_bilinear2d_aa.default, aten._upsample_bilinear2d_aa_backward.default)

# -- sampling a grid -------------------------------------------------------------------------------------------

_GRID = ("interpolation_mode", "padding_mode", "align_corners")

for _op in (aten.grid_sampler_2d, aten.grid_sampler_3d):

    @rule(_op.default)
    def _(n: Forward, dy: Any, name: str = _op.__name__) -> Any:
        back = getattr(aten, f"{name}_backward")
        mask = [n.needs("input"), n.needs("grid")]
        dx, dgrid = back(dy, n["input"], n["grid"], *(n[a] for a in _GRID), mask)
        return dx if mask[0] else None, dgrid


# The backward kernels are differentiated as the gradient of the sampling in plain torch.


def _place(x: torch.Tensor, size: Any, padding: int, align_corners: bool) -> torch.Tensor:
    """Positions in [-1, 1] as indices, padded by zeros (0), the border (1) or reflection (2)."""
    x = (x + 1) * (size - 1) / 2 if align_corners else ((x + 1) * size - 1) / 2
    if padding == 2:
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        away, turns = (x - low).abs() % max(span, 1), ((x - low).abs() / max(span, 1)).detach().floor()
        x = torch.where(turns % 2 == 0, away + low, span - away + low) if span else x * 0
    return x if padding == 0 else x.clamp(0, size - 1)


def _sampled3d(x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> torch.Tensor:
    """x: [N, C, D, H, W] at grid: [N, d, h, w, 3], linear (mode 0) or nearest (1)."""
    batch = torch.arange(x.shape[0], device=x.device).reshape([-1, 1, 1, 1])
    index, weights = [], []
    for axis, size in enumerate(x.shape[2:]):  # what lies on either side, on a leading axis of its own: all at once
        place = _place(grid[..., 2 - axis], size, padding, align_corners)
        low = place.detach().floor()
        away = place - low
        at = torch.stack([low, low + 1]) if mode == 0 else place.detach().round().unsqueeze(0)
        share = torch.stack([1 - away, away]) if mode == 0 else torch.ones_like(at)
        spread = (*(slice(None) if k == axis else None for k in range(3)), ...)
        index.append(at.clamp(0, size - 1).to(torch.int64)[spread])
        weights.append((share * ((at >= 0) & (at < size)))[spread])
    corners = x.permute(0, 2, 3, 4, 1)[(batch, *index)] * math.prod(weights).unsqueeze(-1)
    return corners.sum((0, 1, 2)).permute(0, 4, 1, 2, 3)


def _twice(backward: Any, plain: Any) -> None:
    """The backward op of a sampling, as what the walker makes of the sampling in plain torch."""

    @composite(backward)
    def _(grad_output: Any, input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool,
          output_mask: Any) -> Any:  # fmt: skip
        out = plain(input, grid, interpolation_mode, padding_mode, align_corners)
        return gradients(out, [input, grid], grad_output, unconnected="zero")


_twice(aten.grid_sampler_2d_backward.default, decomposition_table[aten.grid_sampler_2d.default])
_twice(aten.grid_sampler_3d_backward.default, _sampled3d)
