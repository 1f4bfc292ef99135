"""Rules for convolutions and pools: torch's backward kernels."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, partials, rule

aten = torch.ops.aten


def _geometry(n: Forward) -> tuple[Any, ...]:
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return tuple(n[name] for name in names)


@rule(aten.convolution.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
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


_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


partials(aten.avg_pool2d.default, lambda n, dy: aten.avg_pool2d_backward(dy, n["self"], *(n[a] for a in _POOL)))
partials(aten._adaptive_avg_pool2d.default, lambda n, dy: aten._adaptive_avg_pool2d_backward(dy, n["self"]))

_WINDOW = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


@rule(aten.max_pool2d_with_indices.default, outputs=1)
def _(n: Forward, dy: torch.Tensor) -> Any:
    return (aten.max_pool2d_with_indices_backward(dy, n["self"], *(n[a] for a in _WINDOW), n.outs[1]),)
