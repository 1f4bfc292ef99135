"""Rules for batch, layer and group norm, and dropout.

The fused backward kernels take the saved mean and scale as inputs of their own. Differentiated again they are taken
apart, and cotangents of the saved statistics flow to the forward op, which is then taken apart too (``outputs=1``).
"""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, partials, rule

aten = torch.ops.aten

# -- batch norm ------------------------------------------------------------------------------------------------


def _batch_norm(n: Forward, dy: torch.Tensor, mean: Any, invstd: Any, train: bool) -> dict[str, Any]:
    x, w = n["input"], n["weight"]
    bias = n["bias"] is not None
    mask = [n.needs("input"), n.needs("weight"), n.needs("bias")]
    running = n.get("running_mean"), n.get("running_var")
    found = aten.native_batch_norm_backward(dy, x, w, *running, mean, invstd, train, n["eps"], mask)
    dx, dw, db = (d if wanted else None for d, wanted in zip(found, mask, strict=True))
    return {"input": dx} | ({} if w is None else {"weight": dw}) | ({"bias": db} if bias else {})


@rule(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return _batch_norm(n, dy, n.outs[1], n.outs[2], n["training"])


@rule(aten._batch_norm_with_update_functional.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return _batch_norm(n, dy, n.outs[1], n.outs[2], True)


@rule(aten._batch_norm_no_update.default, aten._native_batch_norm_legit_no_training.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return _batch_norm(n, dy, None, None, False)


def _channels(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """v: [C] shaped to broadcast over x: [B, C, ...]."""
    return v.view([1, -1] + [1] * (x.dim() - 2))


def _others(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _normalized(x: Any, weight: Any, bias: Any, mean: Any, invstd: Any) -> torch.Tensor:
    out = (x - _channels(x, mean)) * _channels(x, invstd)
    out = out if weight is None else out * _channels(x, weight)
    return out if bias is None else out + _channels(x, bias)


@composite(aten._native_batch_norm_legit.no_stats)
def _batch_norm_parts(input: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    var, mean = torch.var_mean(input, _others(input), correction=0)
    invstd = (var + eps).rsqrt()
    return _normalized(input, weight, bias, mean, invstd), mean, invstd


@composite(aten._native_batch_norm_legit_functional.default)
def _(input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
      eps: float) -> Any:  # fmt: skip
    out, mean, invstd = _batch_norm_parts(input, weight, bias, training, momentum, eps)
    var = input.var(_others(input))
    new = [old + momentum * (now - old) for old, now in ((running_mean, mean), (running_var, var))]
    return out, mean, invstd, *new


@composite(aten.native_batch_norm_backward.default)
def _(grad_out: Any, input: Any, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_invstd: Any,
      train: bool, eps: float, output_mask: Any) -> Any:  # fmt: skip
    x, axes = input, _others(input)
    mean, invstd = (save_mean, save_invstd) if train else (running_mean, (running_var + eps).rsqrt())
    hat = (x - _channels(x, mean)) * _channels(x, invstd)
    dw = (grad_out * hat).sum(axes)
    db = grad_out.sum(axes)
    scale = invstd if weight is None else invstd * weight
    inner = grad_out
    if train:
        count = x.numel() / x.shape[1] if isinstance(x.numel(), int) else x.numel() // x.shape[1]
        inner = grad_out - _channels(x, db / count) - hat * _channels(x, dw / count)
    return inner * _channels(x, scale), dw, db


# -- layer norm ------------------------------------------------------------------------------------------------


@rule(aten.native_layer_norm.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    w, b = n["weight"], n["bias"]
    mask = [n.needs("input"), n.needs("weight"), n.needs("bias")]
    found = aten.native_layer_norm_backward(dy, n["input"], n["normalized_shape"], n.outs[1], n.outs[2], w, b, mask)
    dx, dw, db = (d if wanted else None for d, wanted in zip(found, mask, strict=True))
    return {"input": dx} | ({} if w is None else {"weight": dw}) | ({} if b is None else {"bias": db})


def _trailing(x: torch.Tensor, shape: Any) -> list[int]:
    return list(range(x.dim() - len(shape), x.dim()))


@composite(aten.native_layer_norm.default)
def _(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    var, mean = torch.var_mean(input, _trailing(input, normalized_shape), correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    out = (input - mean) * rstd
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias), mean, rstd


@composite(aten.native_layer_norm_backward.default)
def _(grad_out: Any, input: Any, normalized_shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any,
      output_mask: Any) -> Any:  # fmt: skip
    axes = _trailing(input, normalized_shape)
    lead = list(range(input.dim() - len(normalized_shape)))
    hat = (input - mean) * rstd
    scaled = grad_out if weight is None else grad_out * weight
    inner = scaled - scaled.mean(axes, keepdim=True) - hat * (scaled * hat).mean(axes, keepdim=True)
    dw, db = grad_out * hat, grad_out
    return inner * rstd, (dw.sum(lead) if lead else dw), (db.sum(lead) if lead else db)


# -- group norm ------------------------------------------------------------------------------------------------


@rule(aten.native_group_norm.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    w, b = n["weight"], n["bias"]
    mask = [n.needs("input"), n.needs("weight"), n.needs("bias")]
    sizes = (n["N"], n["C"], n["HxW"], n["group"])
    found = aten.native_group_norm_backward(dy, n["input"], n.outs[1], n.outs[2], w, *sizes, mask)
    dx, dw, db = (d if wanted else None for d, wanted in zip(found, mask, strict=True))
    return {"input": dx} | ({} if w is None else {"weight": dw}) | ({} if b is None else {"bias": db})


@composite(aten.native_group_norm.default)
def _(input: Any, weight: Any, bias: Any, N: Any, C: Any, HxW: Any, group: int, eps: float) -> Any:
    grouped = input.reshape([N, group, C // group, HxW])
    var, mean = torch.var_mean(grouped, [2, 3], correction=0, keepdim=True)
    rstd = (var + eps).rsqrt()
    out = ((grouped - mean) * rstd).reshape(input.shape)
    out = out if weight is None else out * _channels(input, weight)
    out = out if bias is None else out + _channels(input, bias)
    return out, mean.reshape([N, group]), rstd.reshape([N, group])


@composite(aten.native_group_norm_backward.default)
def _(grad_out: Any, input: Any, mean: Any, rstd: Any, weight: Any, N: Any, C: Any, HxW: Any, group: int,
      output_mask: Any) -> Any:  # fmt: skip
    shape = [N, group, C // group, HxW]
    hat = (input.reshape(shape) - mean.reshape([N, group, 1, 1])) * rstd.reshape([N, group, 1, 1])
    dy = grad_out.reshape(shape)
    scaled = dy if weight is None else dy * weight.reshape([1, group, C // group, 1])
    inner = scaled - scaled.mean([2, 3], keepdim=True) - hat * (scaled * hat).mean([2, 3], keepdim=True)
    dx = (inner * rstd.reshape([N, group, 1, 1])).reshape(input.shape)
    return dx, (dy * hat).sum([0, 3]).reshape([C]), dy.sum([0, 3]).reshape([C])


# -- rms norm --------------------------------------------------------------------------------------------------


@composite(aten._fused_rms_norm.default)
def _(input: Any, normalized_shape: Any, weight: Any, eps: float | None) -> Any:
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    rstd = ((input * input).mean(_trailing(input, normalized_shape), keepdim=True) + eps).rsqrt()
    return (input * rstd if weight is None else input * rstd * weight), rstd


# -- dropout ---------------------------------------------------------------------------------------------------


@rule(aten.native_dropout.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    if n["train"] is False:
        return (dy,)
    return (aten.native_dropout_backward(dy, n.outs[1], 0.0 if n["p"] == 1 else 1 / (1 - n["p"])),)


partials(aten.native_dropout_backward.default,
         lambda n, dd: aten.native_dropout_backward(dd, n["mask"], n["scale"]), None)  # fmt: skip
