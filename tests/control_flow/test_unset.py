"""Names that a statement sets in some runs: whoever reads one is told to give it a value before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import BranchChanged, InvalidArgument, ShapeError


def below_a_break(x: Any, limit: Any) -> Any:
    h = x[0] * 0
    for row in x:
        if h.sum() > limit:
            break
        new = h + row
        h = new
    return h, new


def in_a_while(x: Any, limit: Any) -> Any:
    h, t = x[0] * 0, 0
    while t < x.shape[0]:
        if h.sum() > limit:
            break
        new = h + x[t]
        h = new
        t += 1
    return h, new


def in_branches_of_a_loop(x: Any, limit: Any) -> Any:
    h = x[0] * 0
    for row in x:
        h = h + row
        if h.sum() > limit:
            h = h - 0.1
            if row[0] > 0.5:
                last = h * 2
    return h, last


def a_row(x: Any, limit: Any) -> Any:
    h = x[0] * 0
    for row in x:
        h = h + row
        if h.sum() > limit:
            last = row
    return h, last * 1


def several(x: Any, limit: Any) -> Any:
    h = x[0] * 0
    for row in x:
        h = h + row
        if h.sum() > limit:
            best = (row * 2, h.sum())
    return h, best[0] + best[1]


def before_and_in_a_loop(x: Any, limit: Any) -> Any:
    h = x.sum(0)
    if h.sum() > limit:
        value = h * 3
    for row in x:
        if row.sum() > 1.5:
            value = row * 2
    return h, value


def in_a_branch_of_a_branch(x: Any, limit: Any) -> Any:
    h = x.sum(0)
    if h.sum() > limit:
        h = h + 1
        if h[0] > 2.0:
            value = h * 3
    return h, value


FUNCTIONS = (
    below_a_break, in_a_while, in_branches_of_a_loop, a_row, several,
    before_and_in_a_loop, in_a_branch_of_a_branch,
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_name_that_some_runs_set_cannot_be_read(function: Callable[..., Any]) -> None:
    with tfnb.record():
        x, limit = tfnb.placeholder(torch.rand(5, 3)), tfnb.placeholder(torch.tensor(1.0), shape=())
        with pytest.raises(InvalidArgument, match=r"`\w+` has no value here: .* line \d+.*; give it one before"):
            tfnb.autograph(function)(x, limit)


def of_the_last_iteration(x: Any) -> Any:
    for i, row in enumerate(x):
        new = row * i
        pair = (row, i)
    for row in x:  # what is set above is another value in here
        new = row * 2
    return new.sum() * pair[1]


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_a_name_that_each_iteration_sets_is_there_in_runs_with_one(executor: Any) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.rand(5, 3))
        y = tfnb.autograph(of_the_last_iteration)(x)
        (slope,) = tfnb.gradients(y, [x])
    session = tfnb.Session(graph, executor=executor)
    for rows in (1, 2, 6):
        fed = torch.rand(rows, 3, requires_grad=True)
        wanted = of_the_last_iteration(fed)
        got = session.run([y, slope], {x: fed.detach()})
        torch.testing.assert_close(got, [wanted.detach(), *torch.autograd.grad(wanted, fed)])
    with pytest.raises(BranchChanged, match=r"`new` has no value here: it is first set in the loop of line|`pair`"):
        session.run(y, {x: torch.rand(0, 3)})


@pytest.mark.filterwarnings("ignore:.*became the constant")
def test_a_loop_that_reads_what_an_earlier_one_set_first_stays_python() -> None:
    def program(x: Any) -> Any:
        total = x[0] * 0
        for row in x:
            new = row * 2
        for row in x:
            total = total + new
            new = row
        return total

    given = torch.rand(5, 3)
    with tfnb.record() as graph:
        x = tfnb.placeholder(given)
        y = tfnb.autograph(program)(x)
    assert any("`new` has no value here: it is first set in the loop" in note for note in graph.notes)
    torch.testing.assert_close(tfnb.run(y, {x: given * 2}), program(given * 2))
    with pytest.raises(ShapeError):
        tfnb.run(y, {x: given[:3]})
