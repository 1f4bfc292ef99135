"""Names that a statement sets in some runs: a run has what Python has, and is told where Python would fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import BranchChanged, InvalidArgument, Unsupported

LIMITS = (-1.0, 0.5, 1.5, 3.0, 100.0)


def below_a_break(x: Any, limit: Any) -> Any:
    h = x[0] * 0
    for row in x:
        if h.sum() > limit:
            break
        new = h + row
        h = new
    return h, new


def below_two(x: Any, limit: Any) -> Any:
    h = x[0] * 0
    for row in x:
        if row.sum() < 0.5:
            continue
        if h.sum() > limit:
            break
        new = h + row
        h = new * 1.5
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


def a_number(x: Any, limit: Any) -> Any:
    h = x[0] * 0
    for i in range(x.shape[0]):
        h = h + x[i]
        if h.sum() > limit:
            where = i
            break
    return h, h * where


def several(x: Any, limit: Any) -> Any:
    h = x[0] * 0
    for row in x:
        h = h + row
        if h.sum() > limit:
            best = (row * 2, h.sum())
    return h, best[0] + best[1]


def in_an_inner_loop(x: Any, limit: Any) -> Any:
    h = x[0] * 0
    for row in x:
        i = 0
        while i < 3:
            if h.sum() > limit:
                break
            mid = h + row[i]
            h = mid
            i += 1
    return h, mid


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


def in_one_branch_each(x: Any, limit: Any) -> Any:
    h = x.sum(0)
    if h.sum() > limit:
        value = h * 3
    if h.sum() <= limit:
        value = h * 5
    return h, value


def below_an_else(x: Any, limit: Any) -> Any:
    h = x[0] * 0
    for row in x:
        h = h + row
        if h.sum() > limit:
            value = row * 3
            break
    else:
        value = h * 7
    return h, value


FUNCTIONS = (
    below_a_break, below_two, in_a_while, in_branches_of_a_loop, a_row, a_number, several, in_an_inner_loop,
    before_and_in_a_loop, in_a_branch_of_a_branch, in_one_branch_each, below_an_else,
)  # fmt: skip


def python(function: Callable[..., Any], x: torch.Tensor, limit: float, place: int) -> list[torch.Tensor] | None:
    """A result and its gradient; None where the name has no value."""
    given = x.clone().requires_grad_()
    try:
        result = function(given, limit)[place]
    except UnboundLocalError:
        return None
    (grad,) = torch.autograd.grad(result.sum(), given, materialize_grads=True)
    return [result.detach(), grad]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("sample", [1.0, 3.0])
def test_runs_have_what_python_has(function: Callable[..., Any], sample: float) -> None:
    generator = torch.Generator().manual_seed(1)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.rand(5, 3, generator=generator))
        limit = tfnb.placeholder(torch.tensor(sample), shape=())
        results = tfnb.autograph(function)(x, limit)
        pairs = [(result, tfnb.gradients(result.sum(), [x])[0]) for result in results]
    set_somewhere = 0
    for executor in ("auto", "dataflow"):
        session = tfnb.Session(graph, executor=executor)
        for number in LIMITS:
            given = torch.rand(6, 3, generator=generator)
            feeds = {x: given, limit: torch.tensor(number)}
            for place, pair in enumerate(pairs):
                wanted = python(function, given, number, place)
                if wanted is not None:
                    set_somewhere += place
                    torch.testing.assert_close(session.run(list(pair), feeds), wanted, rtol=1e-5, atol=1e-5)
                elif place:
                    with pytest.raises(BranchChanged, match=r"has no value here: .* give it one before"):
                        session.run(pair[0], feeds)
                else:  # what does not take the name is there
                    session.run(pair[0], feeds)
    assert set_somewhere >= 4


def test_samples_that_do_not_set_a_name_cannot_read_it() -> None:
    with tfnb.record(), pytest.raises(InvalidArgument, match=r"`new` has no value here: .* give it one before"):
        tfnb.autograph(below_a_break)(tfnb.placeholder(torch.ones(5, 3)), torch.tensor(-1.0))


@pytest.mark.parametrize("written", ["new", "h"])
def test_a_write_into_what_two_names_may_hold_is_refused(written: str) -> None:
    def function(x: Any, limit: Any) -> Any:
        h, new = below_a_break(x, limit)
        if written == "new":
            new += 1
        else:
            h += 1
        return h * 1, new * 1

    with tfnb.record():
        x = tfnb.placeholder(torch.rand(5, 3))
        with pytest.raises(Unsupported, match=r"may share memory.*(`new`|`h`).*line \d+(.*\n)*.*clone it"):
            tfnb.autograph(function)(x, tfnb.placeholder(torch.tensor(1.0), shape=()))
