"""Ops that write buffers, as pure ops followed by a recorded assignment."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.errors import Unsupported
from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording
from tfnb.recording.writes.in_place_calls import rebind

aten = torch.ops.aten


@override(Stage.OP, aten.batch_norm.default)
def _batch_norm(
    rec: Recording,
    x: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool = False,
) -> Any:
    """Batch norm as a pure op; the running statistics are written back as recorded assignments."""
    if x.dim() < 2 or any(isinstance(size, int) and size == 0 for size in x.shape):
        return NotImplemented  # torch takes what has no elements, its kernels do not
    if not training:
        return aten._native_batch_norm_legit_no_training(x, w, b, mean, var, momentum, eps)[0]
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, w, b, True, momentum, eps)[0]
    count = batch_count(rec.scopes.module)
    momentum = momentum if count is None else 1.0
    out, _, _, new_mean, new_var = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, momentum, eps)
    for stored, new in ((mean, new_mean), (var, new_var)):
        rebind(rec, stored, new if count is None else stored + (new - stored) / count)
    return out


def batch_count(module: torch.nn.Module | None) -> torch.Tensor | None:
    """The counter of a batch norm with ``momentum=None``, a cumulative mean; None for other modules.

    torch's forward makes a Python number of it, which the recorded update does without.
    """
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.momentum is None:
        return module.num_batches_tracked
    return None


@override(Stage.OP, aten._batch_norm_with_update.default)
def _batch_norm_with_update(
    rec: Recording,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    momentum: float,
    eps: float,
) -> Any:
    found = aten._batch_norm_with_update_functional(x, w, b, mean, var, momentum, eps)
    rebind(rec, mean, found[4])
    rebind(rec, var, found[5])
    return found[:4]


@override(Stage.OP, aten._fused_moving_avg_obs_fq_helper.default)
def _observed(
    rec: Recording,
    x: torch.Tensor,
    observes: torch.Tensor,
    quantizes: torch.Tensor,
    least: torch.Tensor,
    most: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    *rest: object,
) -> Any:
    """The range that an observer of quantization-aware training sees moves with the batches of the runs."""
    if least.numel() == 0:
        raise Unsupported(
            "torch.ao.quantization: an observer of channels learns how many there are from its first batch, and has "
            f"seen none: call the prepared model once before recording it, as in model(batch){rec.tape.at()}"
        )
    *outs, new_least, new_most, new_scale, new_zero = aten._fused_moving_avg_obs_fq_helper_functional(
        x, observes, quantizes, least, most, scale, zero, *rest
    )
    for stored, new in ((least, new_least), (most, new_most), (scale, new_scale), (zero, new_zero)):
        rebind(rec, stored, new)
    return tuple(outs)


@override(Stage.OP, aten.rrelu_with_noise.default)
def _rrelu(rec: Recording, x: torch.Tensor, noise: torch.Tensor, *args: object, **kwargs: object) -> Any:
    out, drawn = aten.rrelu_with_noise_functional(x, noise, *args, **kwargs)
    rebind(rec, noise, drawn)
    return out


@override(Stage.OP, aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def _native_batch_norm(
    rec: Recording,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor,
    mean: torch.Tensor | None,
    var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training:
        return aten._native_batch_norm_legit_no_training(x, w, b, mean, var, momentum, eps)
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, w, b, True, momentum, eps)
    *outs, new_mean, new_var = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, momentum, eps)
    rebind(rec, mean, new_mean)
    rebind(rec, var, new_var)
    return tuple(outs)
