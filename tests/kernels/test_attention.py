"""Attention and its backward against torch autograd and plain formulas; the graph shares one forward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import tfnb
from tests.gradients.reference import compare
from tfnb.kernels.attention import plain_backward
from tfnb.passes import optimize


def parts(dtype: torch.dtype, layout: str, length: int = 5, other: int = 5) -> list[torch.Tensor]:
    """q, k, v for 2 rows of 3 heads, as separate tensors or as views of a split projection."""
    sizes = (length, other, other)
    if layout == "split":
        return [torch.randn(2, n, 3, 4, dtype=dtype).transpose(1, 2).requires_grad_() for n in sizes]
    return [torch.randn(2, 3, n, 4, dtype=dtype).requires_grad_() for n in sizes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["plain", "split"])
@pytest.mark.parametrize("sizes", [(5, 5), (4, 7)])
def test_kernels_equal_autograd(causal: bool, layout: str, sizes: tuple[int, int]) -> None:
    q, k, v = parts(torch.float64, layout, *sizes)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    dy = torch.randn_like(want)
    grads = torch.autograd.grad(want, [q, k, v], dy)
    out, lse = torch.ops.tfnb.attention(q.detach(), k.detach(), v.detach(), causal, 0.5)
    torch.testing.assert_close(out, want.detach(), rtol=0, atol=0)
    got = torch.ops.tfnb.attention_backward(dy, q.detach(), k.detach(), v.detach(), out, lse, causal, 0.5)
    plain = plain_backward(dy, q.detach(), k.detach(), v.detach(), causal, 0.5)
    for a, b, c in zip(got, plain, grads, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(b, c, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["plain", "split"])
def test_compilers_are_told_the_strides_of_the_sums(dtype: torch.dtype, layout: str) -> None:
    q, k, v = (t.detach() for t in parts(dtype, layout))
    _, lse = torch.ops.tfnb.attention(q, k, v, True, 0.5)
    with FakeTensorMode() as mode:
        _, told = torch.ops.tfnb.attention(*map(mode.from_tensor, (q, k, v)), True, 0.5)
    assert lse.stride() == told.stride() and lse.shape == told.shape and lse.dtype == told.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["plain", "split"])
def test_shapes_and_strides_are_the_fake_kernels(dtype: torch.dtype, layout: str) -> None:
    q, k, v = (t.detach() for t in parts(dtype, layout))
    torch.library.opcheck(torch.ops.tfnb.attention.default, (q, k, v, True, 0.5), test_utils=("test_schema",))
    out, lse = torch.ops.tfnb.attention(q, k, v, True, 0.5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.tfnb.attention_backward.default, (out, q, k, v, out, lse, True, 0.5), test_utils=checks
    )


def test_a_training_step_computes_attention_once() -> None:
    with tfnb.record() as g:
        q, k, v = (
            tfnb.placeholder(torch.randn(2, 3, 5, 4, dtype=torch.float64), shape=("B", 3, "T", 4)) for _ in "qkv"
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grads = tfnb.gradients(y.square().sum(), [q, k, v])
    keys, fetches = [q, k, v], [y, *grads]
    ops = [node.op for node in optimize(g, [t.value for t in fetches], [t.value for t in keys]).nodes]
    assert ops.count("tfnb.attention.default") == 1 and "aten.scaled_dot_product_attention.default" not in ops
    fresh = [torch.randn(3, 3, 7, 4, dtype=torch.float64, requires_grad=True) for _ in keys]
    want = F.scaled_dot_product_attention(*fresh, is_causal=True)
    expected = [want, *torch.autograd.grad(want.square().sum(), fresh)]
    for got, good in zip(tfnb.run(fetches, dict(zip(keys, fresh, strict=True))), expected, strict=True):
        torch.testing.assert_close(got, good.detach())


@pytest.mark.parametrize("causal", [False, True])
def test_second_order(causal: bool) -> None:
    scale = 1 / math.sqrt(7)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).sin()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # torch's fused kernel has no second order
        compare(function, parts(torch.float64, "plain"))


@pytest.mark.parametrize("kind", ["plain", "causal", "masked", "scaled"])
def test_heads_of_another_width_are_scaled_by_theirs(kind: str) -> None:
    """First and second derivatives where the width of a head varies from run to run, too."""

    def attend(function: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options = {"causal": {"is_causal": True}, "masked": {"attn_mask": q @ k.mT}, "scaled": {"scale": 0.3}}
        return function(q, k, v, **options.get(kind, {}))

    def by_hand(q: Any, k: Any, v: Any, attn_mask: Any = 0.0, is_causal: bool = False, scale: Any = None) -> Any:
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + attn_mask
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(later, -torch.inf) if is_causal else scores).softmax(-1) @ v

    def fed(width: int) -> list[torch.Tensor]:
        return [torch.randn(2, 3, 5, width, dtype=torch.float64) for _ in range(3)]

    with tfnb.record():
        x = [tfnb.placeholder(t, shape=("B", 3, "L", "D")) for t in fed(8)]
        y = attend(F.scaled_dot_product_attention, *x)
        first = tfnb.gradients(y.square().sum(), x)
        second = tfnb.gradients(first[0].sin().sum(), x)
    for width in (8, 4, 16):
        values = fed(width)
        got = tfnb.run([y, *first, *second], dict(zip(x, values, strict=True)))
        leaves = [t.requires_grad_() for t in values]
        expected = attend(by_hand, *leaves)
        grads = torch.autograd.grad(expected.square().sum(), leaves, create_graph=True)
        more = torch.autograd.grad(grads[0].sin().sum(), leaves)
        torch.testing.assert_close(got, [expected, *grads, *more], rtol=1e-9, atol=1e-9)
