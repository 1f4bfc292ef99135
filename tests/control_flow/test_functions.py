"""Functions that call themselves give, with their gradients, what the same plain Python functions give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import InvalidArgument, ResourceExhausted

F64 = torch.float64


@tfnb.function
def factorial(n: Any) -> Any:
    return tfnb.cond(n <= 1, lambda: torch.ones_like(n), lambda: n * factorial(n - 1))


def test_factorial_its_gradients_and_its_dtypes() -> None:
    def plain(n: Any) -> Any:
        return torch.ones_like(n) if n <= 1 else n * plain(n - 1)

    with tfnb.record() as g:
        n = tfnb.placeholder(torch.tensor(3.5, dtype=F64), name="n")
        i = tfnb.placeholder(torch.tensor(3), name="i")
        y, k = factorial(n), factorial(i)
        (dy,) = tfnb.gradients(y, [n])
        (ddy,) = tfnb.gradients(dy, [n])
    assert [node.op for node in g.nodes].count("tfnb.call") >= 2
    for value in (0.5, 3.5, 6.25):
        x = torch.tensor(value, dtype=F64, requires_grad=True)
        want = plain(x)
        first = torch.autograd.grad(want, x, create_graph=True, allow_unused=True)[0] if value > 1 else x * 0
        second = torch.autograd.grad(first, x, allow_unused=True)[0]
        got = tfnb.run([y, dy, ddy, k], {n: value, i: int(value)})
        torch.testing.assert_close(got[:3], [want.detach(), first.detach(), second if value > 1 else x.detach() * 0])
        assert got[3] == plain(torch.tensor(int(value)))


def tree_program(cell: Any, words: Any, left: Any, right: Any, root: Any, cond: Any, wrap: Any) -> Any:
    """States of a tree whose nodes have child numbers; -1 in ``left`` is a leaf, and ``right`` its word."""

    @wrap
    def state(at: Any) -> Any:
        def leaf() -> Any:
            return words[right[at]].tanh(), words[right[at]]

        def inner() -> Any:
            (h1, c1), (h2, c2) = state(left[at]), state(right[at])
            gates = cell(torch.cat([h1, h2]))
            i, f, o, u = gates.chunk(4)
            c = i.sigmoid() * u.tanh() + f.sigmoid() * (c1 + c2)
            return o.sigmoid() * c.tanh(), c

        return cond(left[at] < 0, leaf, inner)

    return state(root)[0]


def plain_cond(pred: Any, then: Any, other: Any) -> Any:
    return then() if pred else other()


TREES = [
    ([-1], [2], 0),
    ([-1, -1, 0], [0, 1, 1], 2),
    ([-1, -1, -1, 0, 3, -1, 4], [0, 1, 2, 1, 2, 3, 5], 6),
]


def test_a_tree_lstm_over_arrays_of_children() -> None:
    torch.manual_seed(0)
    cell = torch.nn.Linear(6, 12, dtype=F64)
    words = torch.nn.Parameter(torch.randn(4, 3, dtype=F64))
    with tfnb.record() as g:
        left = tfnb.placeholder(torch.tensor([-1, -1, 0]), shape=("N",), name="left")
        right = tfnb.placeholder(torch.tensor([0, 1, 1]), shape=("N",), name="right")
        root = tfnb.placeholder(torch.tensor(2), name="root")
        out = tree_program(cell, words, left, right, root, tfnb.cond, tfnb.function)
        loss = out.square().sum()
        grads = tfnb.gradients(loss, [words, *cell.parameters()])
    assert out.sample is not None
    assert next(node.scope for node in g.nodes if node.op == "tfnb.call") == ("state",)
    for lefts, rights, top in TREES:
        args = torch.tensor(lefts), torch.tensor(rights), torch.tensor(top)
        want = tree_program(cell, words, *args, plain_cond, lambda f: f)
        wanted = torch.autograd.grad(want.square().sum(), [words, *cell.parameters()], allow_unused=True)
        got = tfnb.run([out, *grads], {left: args[0], right: args[1], root: args[2]})
        got = [g.to_dense() if isinstance(g, tfnb.IndexedSlices) else g for g in got]
        expected = [
            torch.zeros_like(p) if g is None else g for g, p in zip(wanted, [words, *cell.parameters()], strict=True)
        ]
        torch.testing.assert_close(got, [want.detach(), *expected])


def test_functions_that_call_each_other_and_sizes_that_change_from_call_to_call() -> None:
    @tfnb.function
    def even(x: Any) -> Any:
        return tfnb.cond(x.shape[0] == torch.tensor(0), lambda: torch.tensor(1.0), lambda: odd(x[1:]) * 2)

    @tfnb.function
    def odd(x: Any) -> Any:
        return tfnb.cond(x.shape[0] == torch.tensor(0), lambda: torch.tensor(-1.0), lambda: even(x[1:]) * 3)

    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4), name="x")
        y = even(x)
    assert [tfnb.run(y, {x: torch.ones(n)}).item() for n in (2, 3, 4)] == [6.0, -12.0, 36.0]


def test_a_function_that_calls_nothing_is_recorded_in_place_under_its_name() -> None:
    @tfnb.function
    def scaled(x: Any, by: float, *, shift: Any = 0) -> Any:
        return {"y": x * by + shift}

    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = scaled(scaled(x, 2.0)["y"], 3.0, shift=x.sum())["y"]
    assert tfnb.run(y, {x: torch.ones(2)}).tolist() == [8.0, 8.0]
    assert {node.name.split("/")[0] for node in g.nodes if node.op.startswith("aten.mul")} == {"scaled", "scaled_1"}
    assert scaled(torch.ones(2), 2.0)["y"].tolist() == [2.0, 2.0]


def test_draws_differ_between_calls_and_repeat_with_the_run() -> None:
    @tfnb.function
    def walk(n: Any) -> Any:
        return tfnb.cond(
            n <= 0, lambda: torch.zeros((), dtype=F64), lambda: torch.rand(()) * 10.0 ** n.double() + walk(n - 1)
        )

    with tfnb.record() as g:
        n = tfnb.placeholder(torch.tensor(2), name="n")
        ys = [walk(n), walk(n)]
    values = tfnb.Session(g).run(ys, {n: 3})
    assert values == tfnb.Session(g).run(ys, {n: 3})
    digits = [value // 10**i % 10 for value in values for i in (1, 2, 3)]
    assert len(set(digits)) > 3, "three draws a call, all different"


def test_a_recursion_without_an_end_is_refused_or_ends_at_its_limit() -> None:
    @tfnb.function(limit=50)
    def down(n: Any) -> Any:
        return tfnb.cond(n == 0, lambda: n, lambda: down(n - 1))

    @tfnb.function
    def never(n: Any) -> Any:
        return never(n - 1)

    with tfnb.record():
        n = tfnb.placeholder(torch.tensor(3), name="n")
        y = down(n)
        with pytest.raises(InvalidArgument, match=r"never calls itself on every way.*\n.*line"):
            never(n)
    assert tfnb.run(y, {n: 49}) == 0
    with pytest.raises(ResourceExhausted, match="down calls itself more than 50 times deep") as raised:
        tfnb.run(y, {n: 50})
    assert raised.value.line is not None


def test_a_thousand_levels_run_and_leave_the_limit_of_python_alone() -> None:
    import sys

    before = sys.getrecursionlimit()
    with tfnb.record():
        n = tfnb.placeholder(torch.tensor(3.0), name="n")
        y = factorial(n)
    assert torch.isinf(tfnb.run(y, {n: 1000.0}))
    with pytest.raises(ResourceExhausted, match="factorial"):
        tfnb.run(y, {n: 1002.0})
    assert sys.getrecursionlimit() == before


def test_a_graph_with_a_recursion_is_saved_and_loaded(tmp_path: Path) -> None:
    with tfnb.record() as g:
        n = tfnb.placeholder(torch.tensor(3.0), name="n")
        y = factorial(n) + 1
        (dy,) = tfnb.gradients(y, [n])
        z = dy * 2
    g.save(tmp_path / "g.json")
    loaded = tfnb.Graph.load(tmp_path / "g.json")
    assert loaded.text() == g.text()
    got = tfnb.Session(loaded).run([y.name, z.name], {"n": 5.0})
    assert [v.item() for v in got] == [121.0, 308.0]
