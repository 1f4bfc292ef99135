"""Branches and loops that the samples do not enter: what a test keeps from failing is recorded all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.entered import CASES, Case

F64 = torch.float64


def results(found: Any) -> list[torch.Tensor]:
    """The tensors of what a function returned."""
    return [torch.as_tensor(item) for item in (found if isinstance(found, tuple) else (found,))]


def plain(case: Case, given: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What Python gives, and the gradients of its sum."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    values = results(case.function(*leaves))
    ends = [v.sum() for v in values if v.requires_grad]
    xs = [x for x in leaves if x.requires_grad]
    if not ends:
        return [v.detach() for v in values], [torch.zeros_like(x) for x in xs]
    grads = torch.autograd.grad(sum(ends), xs, allow_unused=True, materialize_grads=True)
    return [v.detach() for v in values], list(grads)


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_samples_do_not_enter_runs_as_python_does(case: Case, executor: str) -> None:
    """Each input is the sample of one recording and a feed of all: values and gradients are those of Python."""
    for sample in case.inputs:
        with tfnb.record() as graph:
            xs = [tfnb.placeholder(each, shape=list(each.shape)) for each in sample]
            out = tfnb.autograph(case.function)(*xs)
            out = [out] if isinstance(out, tfnb.Tensor) else list(out)
            real = [y.sum() for y in out if y.is_floating_point()]
            wanted = [x for x in xs if x.is_floating_point()] if real else []
            grads = tfnb.gradients(real, wanted, unconnected="zero") if wanted else []
        assert not any("stays Python" in note for note in graph.notes)
        with tfnb.Session(graph, compile="off", executor=executor) as session:
            for feed in case.inputs:
                values, slopes = plain(case, feed)
                got = session.run((out, grads), dict(zip(xs, feed, strict=True)))
                torch.testing.assert_close(got[0], values)
                torch.testing.assert_close(got[1], slopes[: len(grads)])


def test_loops_and_branches_as_functions_are_not_entered_either() -> None:
    with tfnb.record():
        n = tfnb.placeholder(torch.tensor(0))
        most = tfnb.placeholder(torch.tensor(0))
        halves = tfnb.cond(n != 0, lambda: 10 // n, lambda: n)
        (end,) = tfnb.while_loop(lambda m: m != 0, lambda m: (10 // m - 2,), (n,))
        (few,) = tfnb.while_loop(lambda m: m == m, lambda m: (10 // m,), (n,), maximum_iterations=most)
    assert [v.item() for v in tfnb.run([halves, end], {n: 5})] == [2, 0]
    assert [v.item() for v in tfnb.run([halves, end], {n: 0})] == [0, 0]
    assert tfnb.run(few, {n: 0, most: 0}).item() == 0
    assert tfnb.run(few, {n: 3, most: 2}).item() == 3


def entered(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    if n >= 0:
        return x[n]
    return x[0]


def turned(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    while n >= 0:
        x = x + x[n]
        n = n - 9
    return x


@pytest.mark.parametrize("function", [entered, turned])
def test_what_the_samples_enter_fails_on_them(function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(tfnb.errors.ShapeError, match="out of"), tfnb.record():
        tfnb.autograph(function)(tfnb.placeholder(torch.ones(3)), tfnb.placeholder(torch.tensor(7)))


def test_a_shape_that_does_not_fit_fails_wherever_the_samples_go() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 100:
            return x @ torch.ones(5)
        return x.sum()

    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3, 4))
        with pytest.warns(UserWarning, match="Python took the False branch"):
            tfnb.autograph(wrong)(x)
    assert any("stays Python" in note and "fails" in note for note in graph.notes)


def means(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """K-means of three: its centres are the first rows."""
    centres = x[:3]
    for _ in range(turns):
        nearest = torch.cdist(x, centres).argmin(1)
        centres = torch.stack([x[nearest == k].mean(0) for k in range(3)])
    return centres


def branched(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return torch.ones(4, 2)
    return x * 2


def test_a_loop_variable_of_a_size_that_is_another_in_name_alone_becomes_a_guard() -> None:
    """Of the first three rows there are ``min(3, B)``, until the first turn makes three."""
    rows, turns = torch.arange(12.0).reshape(6, 2)[[0, 3, 5, 1, 4]], torch.tensor(2)
    with tfnb.record():
        x, n = tfnb.placeholder(rows[:4]), tfnb.placeholder(turns)
        centres = tfnb.autograph(means)(x, n)
    for count in (3, 4, 5):
        torch.testing.assert_close(tfnb.run(centres, {x: rows[:count], n: turns}), means(rows[:count], turns))
    with pytest.raises(tfnb.errors.InvalidArgument, match="means"):
        tfnb.run(centres, {x: rows[:2], n: turns})


def test_a_branch_of_a_size_written_as_a_number_fixes_it() -> None:
    with pytest.warns(UserWarning, match="size B became the constant 4"), tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 2))
        y = tfnb.autograph(branched)(x)
    assert tfnb.run(y, {x: -torch.ones(4, 2)}).tolist() == [[-2.0, -2.0]] * 4
    with pytest.raises(tfnb.errors.ShapeError, match=r"\(3, 2\)"):
        tfnb.run(y, {x: torch.ones(3, 2)})
