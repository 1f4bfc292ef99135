"""Attention, kept whole in the graph: its gradient in matrix form, for all heads at once.

s = q k' * scale + mask, p = softmax(s), y = p v; the weights p are computed again.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, nograd, rule
from tfnb.gradients.rules.shape import turned
from tfnb.kernels.attention import plain_backward

aten = torch.ops.aten


def _scale(q: torch.Tensor, scale: float | None) -> float | torch.SymFloat:
    size = q.shape[-1]
    root = math.sqrt(size) if isinstance(size, int) else size**0.5
    return 1 / root if scale is None else scale


def _weights(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """softmax of [..., L, S] scores under the mask; rows that see nothing give zeros."""
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return torch.softmax(scores.masked_fill(later, -math.inf), -1)
    if mask is None:
        return torch.softmax(scores, -1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return aten._safe_softmax(scores, -1)


@rule(aten.scaled_dot_product_attention.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    q, k, v, mask = n["query"], n["key"], n["value"], n["attn_mask"]
    lead = list(q.shape[:-2])
    if n["enable_gqa"] or any(list(t.shape[:-2]) != lead for t in (k, v)) or n["dropout_p"]:
        return NotImplemented
    scale: Any = _scale(q, n["scale"])
    if mask is None and len(lead) == 2:
        if not isinstance(q.shape[-1], int):
            scale = n["scale"]  # None: that of the run's size
        out, lse = torch.ops.tfnb.attention(q, k, v, n["is_causal"], scale)
        return torch.ops.tfnb.attention_backward(dy, q, k, v, out, lse, n["is_causal"], scale)

    def flat(t: torch.Tensor) -> torch.Tensor:  # [..., T, D] -> [heads, T, D]
        return t.reshape([math.prod(lead), *t.shape[-2:]]) if len(lead) != 1 else t

    def unflat(t: torch.Tensor) -> torch.Tensor:
        return t.reshape([*lead, *t.shape[-2:]]) if len(lead) != 1 else t

    scaled_q, flat_k, flat_dy = flat(q) * scale, flat(k), flat(dy)
    scores = torch.bmm(scaled_q, turned(flat_k))
    p = _weights(scores, None, n["is_causal"]) if mask is None else flat(_weights(unflat(scores), mask, False))
    dp = torch.bmm(flat_dy, turned(flat(v)))
    ds = aten._softmax_backward_data(dp, p, -1, p.dtype)
    return {
        "query": lambda: unflat(torch.bmm(ds, flat_k) * scale),
        "key": lambda: unflat(torch.bmm(ds.mT, scaled_q)),
        "value": lambda: unflat(torch.bmm(p.mT, flat_dy)),
        "attn_mask": lambda: unflat(ds),
    }


@composite(aten.scaled_dot_product_attention.default)
def _(
    query: Any, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    if enable_gqa:  # each key and value head serves a group of query heads
        key, value = (
            t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value)
        )  # fmt: skip
    scores = (query * _scale(query, scale)) @ key.mT
    return _weights(scores, attn_mask, is_causal) @ value


@composite(torch.ops.tfnb.attention_backward.default)
def _(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> Any:
    return plain_backward(dy, q, k, v, causal, scale)


nograd(torch.ops.tfnb.attention.default)  # feeds attention_backward alone, whose parts start from q, k and v
