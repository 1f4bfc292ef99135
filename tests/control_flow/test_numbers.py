"""A Python number that a branch or loop turns into a tensor takes that tensor's dtype, as it does in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import InvalidArgument

F32, F64 = torch.float32, torch.float64


def smallest(x: Any) -> Any:
    best, at = float("inf"), -1
    for i in range(len(x)):
        if x[i] < best:
            best = x[i]
            at = i
    return best, at


def steps_to_the_end(x: Any) -> Any:
    time, step = 0.0, 0.75
    while time < x[0]:
        step = min(step, x[0] - time)
        time = time + step
        if time > 2:
            step = step * 1.5
    return time, step


def a_count_or_a_value(x: Any) -> Any:
    count = 0
    while count < x.sum():
        count += 1
    if x[0] > 1:
        count = x[0] * 2
    return count


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("program", [smallest, steps_to_the_end])
def test_a_number_takes_the_dtype_of_the_tensor_in_the_other_branch(program: Callable[[Any], Any], dtype: Any) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor([0.5, 2.0, -1.0], dtype=dtype))
        out = tfnb.autograph(program)(x)
    assert not any("stays Python" in note for note in graph.notes)
    for fed in ([1.5, 2.0, -1.0], [3.0, 1.0, 0.25, 7.0], [-1.0, -2.0]):
        row = torch.tensor(fed, dtype=dtype)
        for a, b in zip(tfnb.Session(graph).run(out, {x: row}), program(row), strict=True):
            torch.testing.assert_close(a.to(F64), torch.as_tensor(b, dtype=F64))


def test_gradients_pass_through_a_number_that_became_a_tensor() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([0.5, 2.0, -1.0], dtype=F64))
        time, step = tfnb.autograph(steps_to_the_end)(x)
        (dx,) = tfnb.gradients(time * step, [x])
    row = torch.tensor([3.1, 0.0], dtype=F64, requires_grad=True)
    time, step = steps_to_the_end(row)
    (expected,) = torch.autograd.grad(time * step, row)
    torch.testing.assert_close(tfnb.run(dx, {x: row.detach()}), expected)


def a_fraction_or_a_whole_number(x: Any) -> Any:
    part = 0.5
    while part < x[0]:
        part = part * 2
    if x[1] > 0:
        part = x[1].long()
    return part


@pytest.mark.parametrize("program", [a_count_or_a_value, a_fraction_or_a_whole_number])
def test_a_number_of_another_kind_than_the_tensor_of_the_other_branch_is_refused(program: Callable[[Any], Any]) -> None:
    refused = r"is (float32|int64)\[\] in one branch and (float32|int64)\[\] in the other: .*0\.0(.*\n)*.*line \d+"
    with tfnb.record(), pytest.raises(InvalidArgument, match=refused):
        tfnb.autograph(program)(tfnb.placeholder(torch.tensor([0.5, 2.0])))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_rate_that_a_loop_lowers_is_as_exact_as_what_it_is_used_on(dtype: Any) -> None:
    def descend(x: Any, n: Any) -> Any:
        rate, i = 0.1, 0
        while i < n:
            x = x - rate * x.sin()
            rate *= 0.9
            i += 1
        return x

    with tfnb.record() as graph:
        x, n = tfnb.placeholder(torch.linspace(0, 1, 5, dtype=dtype)), tfnb.placeholder(torch.tensor(2))
        y = tfnb.autograph(descend)(x, n)
    fed = {x: torch.linspace(-1, 3, 7, dtype=dtype), n: torch.tensor(9)}
    got = tfnb.Session(graph).run(y, fed)
    torch.testing.assert_close(got, descend(*fed.values()), rtol=4 * torch.finfo(dtype).eps, atol=0.0)


def a_rate_that_a_branch_chooses(x: Any, n: Any) -> Any:
    rate, power = 0.5, 1
    if x.sum() > 0:
        rate, power = 0.1, 2
    x = x**power
    factor = 1.1 if n > 5 else 0.7
    return x * rate * factor, rate * 3.0 + factor


def a_rate_that_a_loop_carries_alone(x: Any, n: Any) -> Any:
    rate = 0.1
    for _ in range(n):
        rate = rate * 1.1 + 0.3
    while rate > 1e-3 and x[0] < 2:
        rate *= 0.7
    return rate, x * rate


@pytest.mark.parametrize("program", [a_rate_that_a_branch_chooses, a_rate_that_a_loop_carries_alone])
def test_a_float_in_a_program_of_doubles_is_a_double(program: Callable[..., Any]) -> None:
    with tfnb.record() as graph:
        x, n = tfnb.placeholder(torch.linspace(0, 1, 5, dtype=F64)), tfnb.placeholder(torch.tensor(2))
        out = tfnb.autograph(program)(x, n)
    for iterations in (0, 3, 9):
        for row in (torch.linspace(-1, 3, 7, dtype=F64), -torch.ones(2, dtype=F64)):
            got = tfnb.Session(graph).run(out, {x: row, n: torch.tensor(iterations)})
            for a, b in zip(got, program(row, iterations), strict=True):
                torch.testing.assert_close(a, torch.as_tensor(b, dtype=F64), rtol=1e-14, atol=0.0)
