"""Rules for convolutions and pools: torch's backward kernels, which are linear in each argument they differentiate."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.table import Forward, partials, rule

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

for _d in (2, 3):
    _forward, _backward = getattr(aten, f"avg_pool{_d}d").default, getattr(aten, f"avg_pool{_d}d_backward").default
    partials(_forward, lambda n, dy, back=_backward: back(dy, n["self"], *(n[a] for a in _POOL)))
    partials(_backward, lambda n, dd, pool=_forward: pool(dd, *(n[a] for a in _POOL)), None)
    _forward = getattr(aten, f"_adaptive_avg_pool{_d}d").default
    _backward = getattr(aten, f"_adaptive_avg_pool{_d}d_backward").default
    partials(_forward, lambda n, dy, back=_backward: back(dy, n["self"]))
    partials(_backward, lambda n, dd, pool=_forward, d=_d: pool(dd, n["grad_output"].shape[-d:]), None)


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


for _d, _names in (
    (2, ("max_pool2d_with_indices", "adaptive_max_pool2d", "fractional_max_pool2d")),
    (3, ("max_pool3d_with_indices", "adaptive_max_pool3d", "fractional_max_pool3d")),
):
    for _name in _names:
        partials(getattr(aten, f"{_name}_backward").default,
                 lambda n, dd, d=_d: _gathered(dd, n["indices"], d), None)  # fmt: skip

partials(aten.max_unpool2d.default, lambda n, dy: _gathered(dy, n["indices"], 2), None)
partials(aten.max_unpool3d.default, lambda n, dy: _gathered(dy, n["indices"], 3), None)

# -- resizing: linear too --------------------------------------------------------------------------------------

for _name in ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"):
    _forward, _backward = getattr(aten, _name).default, getattr(aten, f"{_name}_backward").default
    _rest = ("align_corners", "scales_h", "scales_w")
    partials(_forward, lambda n, dy, back=_backward: back(
        dy, n["output_size"], n["self"].shape, *(n[a] for a in _rest)))  # fmt: skip
    partials(_backward, lambda n, dd, resize=_forward: resize(dd, n["output_size"], *(n[a] for a in _rest)))

# -- sampling a grid -------------------------------------------------------------------------------------------

_GRID = ("interpolation_mode", "padding_mode", "align_corners")

for _d in (2, 3):

    @rule(getattr(aten, f"grid_sampler_{_d}d").default)
    def _(n: Forward, dy: Any, back: Any = getattr(aten, f"grid_sampler_{_d}d_backward").default) -> Any:
        mask = [n.needs("input"), n.needs("grid")]
        dx, dgrid = back(dy, n["input"], n["grid"], *(n[a] for a in _GRID), mask)
        return dx if mask[0] else None, dgrid
