"""Rules for batch, layer and group norm, and dropout: the fused backward kernels of torch.

The saved mean and scale carry no gradient: the formulas of the second order take them into account.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, rule

aten = torch.ops.aten

# -- batch norm ------------------------------------------------------------------------------------------------


def _batch_norm(n: Forward, dy: torch.Tensor, mean: object, invstd: object, train: bool) -> dict[str, Any]:
    x, w = n["input"], n["weight"]
    bias = n["bias"] is not None
    mask = [n.needs("input"), n.needs("weight"), n.needs("bias")]
    running = n.get("running_mean"), n.get("running_var")
    found = aten.native_batch_norm_backward(dy, x, w, *running, mean, invstd, train, n["eps"], mask)
    dx, dw, db = (d if wanted else None for d, wanted in zip(found, mask, strict=True))
    return {"input": dx} | ({} if w is None else {"weight": dw}) | ({"bias": db} if bias else {})


@rule(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats, outputs=1, saves=True)
def _(n: Forward, dy: torch.Tensor) -> Any:
    return _batch_norm(n, dy, n.outs[1], n.outs[2], n["training"])


@rule(aten._batch_norm_with_update_functional.default, outputs=1, saves=True)
def _(n: Forward, dy: torch.Tensor) -> Any:
    return _batch_norm(n, dy, n.outs[1], n.outs[2], True)


@rule(aten._batch_norm_no_update.default, aten._native_batch_norm_legit_no_training.default, outputs=1, saves=True)
def _(n: Forward, dy: torch.Tensor) -> Any:
    return _batch_norm(n, dy, None, None, False)


def _channels(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """v: [C] shaped to broadcast over x: [B, C, ...]."""
    return v.view([1, -1] + [1] * (x.dim() - 2))


@composite(aten.native_batch_norm_backward.default)
def _(
    grad_out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, running_mean: Any,
    running_var: Any, save_mean: torch.Tensor | None, save_invstd: torch.Tensor | None,
    train: bool, eps: float, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Autograd's formula takes batches of one size only."""
    x, axes = input, [0, *range(2, input.dim())]
    var, mean = torch.var_mean(x, axes, correction=0) if train else (running_var, running_mean)
    invstd = (var + eps).rsqrt()
    hat = (x - _channels(x, mean)) * _channels(x, invstd)
    dw, db = (grad_out * hat).sum(axes), grad_out.sum(axes)
    inner = grad_out
    if train:
        count = x.numel() / x.shape[1] if isinstance(x.numel(), int) else x.numel() // x.shape[1]
        inner = grad_out - _channels(x, db / count) - hat * _channels(x, dw / count)
    return inner * _channels(x, invstd if weight is None else invstd * weight), dw, db


# -- layer norm ------------------------------------------------------------------------------------------------


@rule(aten.native_layer_norm.default, outputs=1, saves=True)
def _(n: Forward, dy: torch.Tensor) -> Any:
    w, b = n["weight"], n["bias"]
    mask = [n.needs("input"), n.needs("weight"), n.needs("bias")]
    found = aten.native_layer_norm_backward(dy, n["input"], n["normalized_shape"], n.outs[1], n.outs[2], w, b, mask)
    dx, dw, db = (d if wanted else None for d, wanted in zip(found, mask, strict=True))
    return {"input": dx} | ({} if w is None else {"weight": dw}) | ({} if b is None else {"bias": db})


# -- group norm ------------------------------------------------------------------------------------------------


@rule(aten.native_group_norm.default, outputs=1)
def _(n: Forward, dy: torch.Tensor) -> Any:
    w, b = n["weight"], n["bias"]
    mask = [n.needs("input"), n.needs("weight"), n.needs("bias")]
    sizes = (n["N"], n["C"], n["HxW"], n["group"])
    found = aten.native_group_norm_backward(dy, n["input"], n.outs[1], n.outs[2], w, *sizes, mask)
    dx, dw, db = (d if wanted else None for d, wanted in zip(found, mask, strict=True))
    return {"input": dx} | ({} if w is None else {"weight": dw}) | ({} if b is None else {"bias": db})


# -- dropout ---------------------------------------------------------------------------------------------------


@rule(aten.native_dropout.default, outputs=1)
def _(n: Forward, dy: torch.Tensor) -> Any:
    if n["train"] is False:
        return (dy,)
    return (aten.native_dropout_backward(dy, n.outs[1], 0.0 if n["p"] == 1 else 1 / (1 - n["p"])),)
