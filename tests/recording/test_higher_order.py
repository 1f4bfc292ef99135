"""torch's own operators of control flow are branches and loops of the graph, with gradients."""

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

F64 = torch.float64


def branch(x: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda v, w: {"a": v * 2, "b": w}, lambda v, w: {"a": v - 1, "b": w * 3}, (x, x[0]))


def loop(x: Any) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    start = (torch.zeros((), dtype=torch.int64), x.sum(0))
    return while_loop(lambda i, s: i < 4, lambda i, s: (i + 1, (s * x[-1]).sin()), start)[1]


def sums(x: Any) -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, r: (c * 0.5 + r["k"], [c.sin(), r["k"].exp()]), torch.zeros_like(x[0]), {"k": x})


def rows(x: Any) -> Any:
    from torch._higher_order_ops.map import map

    return map(lambda row, w: (row * w).cos(), x, x.sum(0))


def plain_branch(x: Any) -> Any:
    return (x * 2, x[0]) if x.sum() > 0 else (x - 1, x[0] * 3)


def plain_loop(x: Any) -> Any:
    s = x.sum(0)
    for _ in range(4):
        s = (s * x[-1]).sin()
    return s


def plain_sums(x: Any) -> Any:
    c, sines, powers = torch.zeros_like(x[0]), [], []
    for row in x:
        sines.append(c.sin())
        powers.append(row.exp())
        c = c * 0.5 + row
    return c, torch.stack(sines), torch.stack(powers)


def plain_rows(x: Any) -> Any:
    return torch.stack([(row * x.sum(0)).cos() for row in x])


def total(function: Any, x: Any) -> tuple[Any, Any]:
    leaves = torch.utils._pytree.tree_leaves(function(x))
    return leaves, sum(leaf.square().sum() for leaf in leaves)


@pytest.mark.parametrize(
    ("function", "plain"), [(branch, plain_branch), (loop, plain_loop), (sums, plain_sums), (rows, plain_rows)]
)
def test_torchs_own_control_flow_is_recorded_and_differentiates(function: Any, plain: Any) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.linspace(0.2, 1, 6, dtype=F64).reshape(3, 2), name="x")
        leaves, value = total(function, x)
        (dx,) = tfnb.gradients(value, [x])
    assert any(node.op in ("tfnb.cond", "tfnb.while") for node in graph.nodes)
    for count, shift in ((4, 0.0), (2, -3.0), (1, 0.5)):
        fed = (torch.linspace(-0.5, 1, 2 * count, dtype=F64).reshape(count, 2) + shift).requires_grad_()
        wanted, loss = total(plain, fed)
        (expected,) = torch.autograd.grad(loss, fed)
        got = tfnb.run([*leaves, dx], {x: fed.detach()})
        torch.testing.assert_close(got, [*(t.detach() for t in wanted), expected])


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
    match = r"(?s)while_loop_stack_output calls functions.*tfnb\.cond.*test_higher_order\.py line"
    with pytest.raises(Unsupported, match=match), tfnb.record():
        stacked(lambda x: x.sum() > 1, lambda x: (x * 0.5,), (tfnb.placeholder(torch.ones(4, 3)),), ())
