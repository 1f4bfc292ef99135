"""Tables that branches, loops and functions look up: their gradients have rows, or a note says that they are dense."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import tfnb

Fn = Callable[..., Any]
INDICES = [[1, 2, 1], [0, 0], [6, 5, 4, 3, 2, 6]]  # sums 4, 0, 26


def cond(pred: Any, then: Fn, other: Fn) -> Any:
    return tfnb.cond(pred, then, other)


def looped(x: Any, e: nn.Embedding, f: nn.Embedding) -> Any:
    def body(i: Any, s: Any) -> Any:
        return i + 1, s + cond(s > 1, lambda: e(x).square().sum(), lambda: f(x).sum())

    return tfnb.while_loop(lambda i, s: i < 3, body, (torch.tensor(0), torch.tensor(0.0)))[1]


PROGRAMS: Mapping[str, tuple[str, Callable[..., Any]]] = {  # forms of the two gradients: rows, dense, nothing
    "both sides": ("r-", lambda x, e, f: cond(x.sum() > 5, lambda: e(x).square().sum(), lambda: e(x[:1]).mean())),
    "one side": ("rr", lambda x, e, f: cond(x.sum() > 5, lambda: e(x).mul(f(x)).sum(), lambda: x.sum() * 1.0)),
    "dense then": (
        "rd",
        lambda x, e, f: cond(x.sum() > 5, lambda: f.weight.square().sum() + e(x).sum(), lambda: f(x).square().sum()),
    ),
    "dense else": (
        "rd",
        lambda x, e, f: cond(x.sum() > 5, lambda: f(x).square().sum(), lambda: f.weight.square().sum() + e(x).sum()),
    ),
    "nested": (
        "rr",
        lambda x, e, f: cond(
            x.sum() > 3,
            lambda: cond(x.sum() > 10, lambda: e(x).square().sum(), lambda: f(x).exp().sum()),
            lambda: f(x).sum() * e(x[:1]).sum(),
        ),
    ),
    "outside too": ("rr", lambda x, e, f: e(x).sum() + cond(x.sum() > 5, lambda: e(x).exp().sum(), lambda: f(x).sum())),
    "in a loop": ("rr", looped),
}


def form(g: Any) -> str:
    return "-" if g is None else "r" if isinstance(g, tfnb.IndexedSlices) else "d"


def dense(g: Any) -> torch.Tensor:
    return g.to_dense() if isinstance(g, tfnb.IndexedSlices) else g


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_stay_rows_through_branches(name: str) -> None:
    torch.manual_seed(0)
    e, f = nn.Embedding(7, 3), nn.Embedding(7, 3)
    forms, program = PROGRAMS[name]
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor([3, 1]), name="x")
        found = tfnb.gradients(program(x, e, f), [e.weight, f.weight])
    assert "".join(map(form, found)) == forms
    notes = [note for note in g.notes if "becomes dense" in note]
    assert len(notes) == forms.count("d") and all("[7, 3] becomes dense, 84 bytes" in note for note in notes)
    session = tfnb.Session(g)
    kept = [i for i, dx in enumerate(found) if dx is not None]
    for indices in map(torch.tensor, INDICES):
        y = program(indices, e, f) + 0.0 * (e.weight.sum() + f.weight.sum())
        want = torch.autograd.grad(y, [e.weight, f.weight])
        got = session.run([found[i] for i in kept], {x: indices})
        torch.testing.assert_close([dense(dx) for dx in got], [want[i] for i in kept])


@pytest.mark.parametrize("rule", ["SGD", "Adagrad"])
def test_an_optimizer_takes_the_rows_of_a_branch(rule: str) -> None:
    torch.manual_seed(0)
    e = nn.Embedding(50, 4)
    other = copy.deepcopy(e)
    peer = getattr(torch.optim, rule)(other.parameters(), lr=0.1)

    def loss(e: nn.Embedding, x: Any) -> Any:
        return cond(x.sum() > 5, lambda: e(x).square().sum(), lambda: x.sum() * 1.0)

    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor([1, 2, 1]), name="x")
        step = getattr(tfnb.train, rule)(0.1).minimize(loss(e, x))
    assert g.notes == ()
    for indices in map(torch.tensor, ([1, 2, 1], [3, 3, 9], [4, 2])):
        tfnb.run(step, {x: indices})
        peer.zero_grad()
        (loss(other, indices) + 0.0 * other.weight.sum()).backward()
        peer.step()
        torch.testing.assert_close(e.weight, other.weight)


def recursive(table: nn.Embedding, x: Any) -> Any:
    @tfnb.function
    def f(n: Any, x: Any) -> Any:
        return tfnb.cond(n > 0, lambda: table(x).sum() + f(n - 1, x), lambda: table(x[:1]).sum())

    return f(torch.tensor(2), x)


def carried(table: nn.Embedding, x: Any) -> Any:
    start = (torch.tensor(0), table.weight, torch.tensor(0.0))
    return tfnb.while_loop(lambda i, w, s: i < 3, lambda i, w, s: (i + 1, w, s + w[x].sum()), start)[2]


@pytest.mark.parametrize("program", [recursive, carried])
def test_a_gradient_that_becomes_dense_says_line_and_bytes(program: Callable[..., Any]) -> None:
    table = nn.Embedding(20000, 16)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor([1, 2, 1]), name="x")
        (dx,) = tfnb.gradients(program(table, x), [table.weight])
    assert form(dx) == "d"
    notes = [note for note in g.notes if "becomes dense" in note]
    assert notes
    for note in notes:
        assert "[20000, 16] becomes dense, 1280000 bytes" in note and "test_tables.py line " in note
    other = torch.tensor([4, 2])
    want = torch.autograd.grad(program(table, other), [table.weight])
    torch.testing.assert_close(tfnb.run([dx], {x: other}), list(want))
