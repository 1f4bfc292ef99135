"""Operators of torch that call functions: attention is recorded by its tensor code, all others are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tfnb
from tfnb.errors import Unsupported


def _scores(q: Any, k: Any) -> Any:
    return q @ k.mT / math.sqrt(q.shape[-1])


def _below(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


HEADS = torch.arange(2)[:, None, None]
ATTENTION: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any], Any]]] = {
    "plain": (dict, lambda s: s),
    "scores": (
        lambda: {"score_mod": lambda s, b, h, q, k: s + (h + 1) * 0.5 * k},
        lambda s: s + (HEADS + 1) * 0.5 * torch.arange(6),
    ),
    "block mask": (
        lambda: {"block_mask": create_block_mask(_below, None, None, 6, 6, device="cpu")},
        lambda s: s.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf),
    ),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", ATTENTION)
def test_flex_attention_and_its_gradient(name: str) -> None:
    options, scores = ATTENTION[name]
    given = options()
    with tfnb.record():
        held = [tfnb.placeholder(torch.randn(3, 2, 6, 4)) for _ in range(3)]
        y = flex_attention(*held, **given)
        grads = tfnb.gradients(y.sin(), held)
    for rows in (3, 5):
        fed = [torch.randn(rows, 2, 6, 4).requires_grad_() for _ in held]
        expected = F.softmax(scores(_scores(fed[0], fed[1])), -1) @ fed[2]
        wanted = torch.autograd.grad(expected.sin().sum(), fed)
        got = tfnb.run([y, *grads], {x: v.detach() for x, v in zip(held, fed, strict=True)})
        torch.testing.assert_close(got, [expected.detach(), *wanted])


def test_others_are_refused_with_the_line() -> None:
    stacked = torch.ops.higher_order.while_loop_stack_output
    match = r"(?s) calls functions.*tfnb\.cond.*test_higher_order\.py line"
    with pytest.raises(Unsupported, match=match), tfnb.record():
        stacked(lambda x: x.sum() > 1, lambda x: (x * 0.5,), (tfnb.placeholder(torch.ones(4, 3)),), ())
    with pytest.raises(Unsupported, match=match), tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v - 1, (x,))
