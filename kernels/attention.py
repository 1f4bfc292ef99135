"""Attention that saves values for its backward: torch's fused kernels where torch itself would choose them.

q: [B, H, L, D], k and v: [B, H, S, D], no mask but a causal one. ``lse`` [B, H, L] is the logarithm of the sum of the
exponentials of each row of scores, zeros where no fused kernel ran. Gradients lie in memory as [B, L, H, D], the layout
of a projection that was split into heads, and ``lse`` as [B, L, H], as torch's kernel has it. FlashAttention (Dao et
al. 2022), as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
Kernel = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]
_ROWS = 32  # of memory-efficient attention: it wants log-sum-exps of so many rows at a time


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _on_cpu_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, out, lse, 0.0, causal, scale=scale)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    seed = q.new_empty(2, dtype=torch.uint64)  # of dropout, of which there is none
    lengths = None, None, q.shape[2], k.shape[2]  # of sequences in one tensor
    return aten._scaled_dot_product_flash_attention_backward(
        dy, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, seed, seed, scale=scale
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[:, :, : q.shape[2]]


def _efficient_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _ROWS)).contiguous()
    seed = q.new_zeros((), dtype=torch.int64)  # of dropout, of which there is none
    return aten._scaled_dot_product_efficient_attention_backward(
        dy, q, k, v, None, out, lse, seed, seed, 0.0, (True, True, True, False), causal, scale=scale
    )[:3]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.flatten(2)


def _cudnn_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    seed = q.new_zeros((), dtype=torch.int64)  # of dropout, of which there is none
    lengths = None, None, q.shape[2], k.shape[2]  # of sequences in one tensor
    return aten._scaled_dot_product_cudnn_attention_backward(
        dy, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, *lengths, 0.0, causal, scale=scale
    )


_KERNELS: Mapping[tuple[str, int], Kernel] = {
    ("cpu", 1): (_on_cpu, _on_cpu_backward), ("cuda", 1): (_flash, _flash_backward),
    ("cuda", 2): (_efficient, _efficient_backward), ("cuda", 3): (_cudnn, _cudnn_backward),
}  # fmt: skip
"""By device and torch.nn.attention.SDPBackend: flash, memory-efficient, cuDNN's."""


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Kernel | None:
    """The kernels that torch would choose; None if it has none."""
    if type(q) is Tensor:
        return _KERNELS.get((q.device.type, aten._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale)))
    with _disable_current_modes():  # while it is traced, torch is shown tensors that lie as these do
        q, k, v = (
            torch.empty_strided([*map(int, t.shape)], [*map(int, t.stride())], dtype=t.dtype, device=t.device)
            for t in (q, k, v)
        )
        return _fused(q, k, v, causal, scale)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """softmax(q k' * scale) v, and the rows' log-sum-exp."""
    kernel = _fused(q, k, v, causal, scale)
    if kernel is not None:
        return kernel[0](q, k, v, causal, scale)
    out = aten.scaled_dot_product_attention(q, k, v, None, 0.0, causal, scale=scale)
    return out, q.new_zeros(_rows_first(q), dtype=_wide(q)).transpose(1, 2)


def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of q, k and v."""
    kernel = _fused(q, k, v, causal, scale)
    if kernel is not None:
        return kernel[1](dy, q, k, v, out, lse, causal, scale)
    dq, dk, dv = (_split_into_heads(t) for t in plain_backward(dy, q, k, v, causal, scale))
    return dq, dk, dv


def plain_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in ordinary ops: s = q k' * scale, p = softmax(s), y = p v, ds = p * (dp - sum(dp * p))."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q * scale) @ k.mT
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    p = torch.softmax(scores, -1)
    ds = aten._softmax_backward_data(dy @ v.mT, p, -1, p.dtype)
    return ds @ k * scale, ds.mT @ q * scale, p.mT @ dy


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _rows_first(q: Tensor) -> list[int]:
    return [q.shape[0], q.shape[2], q.shape[1]]


def _split_into_heads(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(_rows_first(q), dtype=_wide(q)).transpose(1, 2)
    return aten.scaled_dot_product_attention(q, k, v), lse


def _fake_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty([t.shape[0], t.shape[2], t.shape[1], t.shape[3]]).transpose(1, 2) for t in (q, k, v))
    return dq, dk, dv


_ARGUMENTS = "Tensor q, Tensor k, Tensor v"
for _name, _schema, _function, _shape in (
    ("attention", f"({_ARGUMENTS}, bool causal, float? scale) -> (Tensor out, Tensor lse)", attention, _fake),
    (
        "attention_backward",
        f"(Tensor dy, {_ARGUMENTS}, Tensor out, Tensor lse, bool causal, float? scale) -> (Tensor, Tensor, Tensor)",
        attention_backward,
        _fake_backward,
    ),
):
    torch.library.define(f"tfnb::{_name}", _schema)
    torch.library.impl(f"tfnb::{_name}", "CompositeExplicitAutograd", torch.no_grad()(_function))
    torch.library.register_fake(f"tfnb::{_name}", _shape)
