"""Branches and loops that the samples do not enter: what a test keeps from failing is recorded all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tfnb
from tests.control_flow.entered import CASES, Case, checked, recorded


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_samples_do_not_enter_runs_as_python_does(case: Case) -> None:
    """Each input is the sample of one recording and a feed of all: values and gradients are those of Python."""
    for sample in case.inputs:
        found = recorded(case, sample)
        assert not any("stays Python" in note for note in found.graph.notes)
        for feed in case.inputs:
            for executor in ("auto", "dataflow"):
                checked(found, feed, executor)


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


def means(x: torch.Tensor, iterations: torch.Tensor) -> torch.Tensor:
    """K-means of three: its centres are the first rows."""
    centres = x[:3]
    for _ in range(iterations):
        nearest = torch.cdist(x, centres).argmin(1)
        centres = torch.stack([x[nearest == k].mean(0) for k in range(3)])
    return centres


def branched(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return torch.ones(4, 2)
    return x * 2


def test_a_loop_variable_of_a_size_that_is_another_in_name_alone_becomes_a_guard() -> None:
    """Of the first three rows there are ``min(3, B)``, until the first iteration makes three."""
    rows, iterations = torch.arange(12.0).reshape(6, 2)[[0, 3, 5, 1, 4]], torch.tensor(2)
    with tfnb.record():
        x, n = tfnb.placeholder(rows[:4]), tfnb.placeholder(iterations)
        centres = tfnb.autograph(means)(x, n)
    for count in (3, 4, 5):
        torch.testing.assert_close(tfnb.run(centres, {x: rows[:count], n: iterations}), means(rows[:count], iterations))
    with pytest.raises(tfnb.errors.InvalidArgument, match="means"):
        tfnb.run(centres, {x: rows[:2], n: iterations})


def test_a_branch_of_a_size_written_as_a_number_fixes_it() -> None:
    with pytest.warns(UserWarning, match="size B became the constant 4"), tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 2))
        y = tfnb.autograph(branched)(x)
    assert tfnb.run(y, {x: -torch.ones(4, 2)}).tolist() == [[-2.0, -2.0]] * 4
    with pytest.raises(tfnb.errors.ShapeError, match=r"\(3, 2\)"):
        tfnb.run(y, {x: torch.ones(3, 2)})
