"""Loops that take products for many iterations at a time have the bits of the unrolled loop, and autograd's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tfnb.execution import lower
from tfnb.execution.lowering.control_flow_code import Loop

BATCH, WIDTH = 4, 8


def data(iterations: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Rows, two states, and the weights of a cell."""
    generator = torch.Generator().manual_seed(iterations)
    states = [(BATCH, WIDTH), (BATCH, WIDTH)]
    shapes = [(iterations, BATCH, WIDTH), *states, (4 * WIDTH, WIDTH), (4 * WIDTH, WIDTH), (4 * WIDTH,)]
    return [torch.randn(shape, generator=generator, dtype=dtype) * 0.5 for shape in shapes]


def lstm(how: str, xs: Any, h: Any, c: Any, wx: Any, wh: Any, bias: Any, *, reverse: bool = False) -> Any:
    def cell(state: Any, x: Any) -> Any:
        h, c = state
        i, f, g, o = (F.linear(x, wx, bias) + F.linear(h, wh)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    if how == "loop":
        return tfnb.fold(cell, (h, c), xs, reverse=reverse)[0]
    state = (h, c)
    for at in reversed(range(len(xs))) if reverse else range(len(xs)):
        state = cell(state, xs[at])
    return state[0]


def recorded(how: str, values: list[torch.Tensor], **more: Any) -> tuple[Any, list[Any], list[Any]]:
    with tfnb.record() as g:
        fed = [tfnb.placeholder(v, shape=tuple(v.shape)) for v in values]
        loss = lstm(how, *fed, **more).square().mean()
        return g, [loss, *tfnb.gradients(loss, fed[1:])], fed


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("iterations", [2, 5, 33, 3, 4, 70])
def test_a_loop_has_the_bits_of_the_unrolled_one(iterations: int, reverse: bool) -> None:
    """Were one tensor both states, its two gradients could be summed by a product, whose bits the library chooses."""
    values = data(iterations)
    got, want = (
        tfnb.Session(g, compile="off").run(fetches, dict(zip(fed, values, strict=True)))
        for g, fetches, fed in (recorded(how, values, reverse=reverse) for how in ("loop", "unrolled"))
    )
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("iterations", [0, 1, 40])
def test_its_gradients_are_those_of_autograd(iterations: int) -> None:
    values = data(iterations, torch.float64)
    with tfnb.record():
        fed = [tfnb.placeholder(v, shape=("T" if i == 0 else v.shape[0], *v.shape[1:])) for i, v in enumerate(values)]
        loss = lstm("loop", *fed).square().mean()
        first = tfnb.gradients(loss, fed, unconnected="zero")
        second = tfnb.gradients(sum(g.square().sum() for g in first), fed, unconnected="zero")
    leaves = [v.clone().requires_grad_() for v in values]
    want = torch.autograd.grad(lstm("unrolled", *leaves).square().mean(), leaves, create_graph=True, allow_unused=True)
    want = [torch.zeros_like(v) if g is None else g for g, v in zip(want, leaves, strict=True)]
    total = sum(g.square().sum() for g in want)
    more = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
    more = [torch.zeros_like(v) if g is None else g for g, v in zip(more, leaves, strict=True)]
    got = tfnb.run([first, second], dict(zip(fed, values, strict=True)))
    torch.testing.assert_close(got, [[w.detach() for w in want], more], rtol=1e-9, atol=1e-12)


def test_what_is_taken_out_of_the_body() -> None:
    g, fetches, fed = recorded("loop", data(5))
    program = lower(g, [f.value for f in fetches], [x.value for x in fed])
    forward, back = (n.target for n in program.module.graph.nodes if isinstance(n.target, Loop))
    assert len(forward.apart.ahead) == 1 and not forward.apart.totals  # x @ wx is; h @ wh waits
    assert len(back.apart.totals) == 3 and all(back.zero)  # of wx, wh and the bias
    assert "torch.mm" in back.body.code and back.body.code.count("torch.mm") == 1
    assert all(forward.kept) and len(forward.kept) >= 6  # nobody stacks what only the gradient takes


def test_a_sum_that_the_body_looks_at_is_taken_iteration_by_iteration() -> None:
    xs, w = torch.randn(40, 3, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)

    def looked(total: Any, x: Any) -> Any:
        return total + x.t() @ x, total.sum()

    def alone(total: Any, x: Any) -> Any:
        return total + x.t() @ x, ()

    with tfnb.record() as g:
        fed = tfnb.placeholder(xs, shape=("T", 3, 4)), tfnb.placeholder(w, shape=(4, 4))
        results = [tfnb.scan(looked, fed[1], fed[0]), tfnb.scan(alone, fed[1], fed[0])[0]]
    (total, seen), same = tfnb.Session(g).run(results, dict(zip(fed, (xs, w), strict=True)))
    torch.testing.assert_close([total, same], [w + sum(x.t() @ x for x in xs)] * 2)
    torch.testing.assert_close(seen[:2], torch.stack([w.sum(), (w + xs[0].t() @ xs[0]).sum()]))
    assert tfnb.Session(g).run(results[1], dict(zip(fed, (xs[:0], w), strict=True))).equal(w)
