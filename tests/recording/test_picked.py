"""A row picked by a recorded number is that of each run, and a view of what it was picked from."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument


def _read(x: Any, i: Any) -> Any:
    return x[i] * 2


def _second_axis(x: Any, i: Any) -> Any:
    return x[:, i] + x[..., -i - 1]


def _with_others(x: Any, i: Any) -> Any:
    return x[i, torch.tensor([0, 2])] + x[i, 1:3].sum() + x[i, None, i] + x[1:, i].sum()


def _written(x: Any, i: Any) -> Any:
    y = x * 1
    y[i] = 7.0
    y[0, i] += 3.0
    return y


def _seen_by_a_view(x: Any, i: Any) -> Any:
    y = x * 1
    row = y[i]
    y.mul_(2)
    row[0] = 5.0
    y.add_(1)
    return y.sum(0), row


def _of_a_constant(x: Any, i: Any) -> Any:
    return torch.arange(4.0)[i] * x


def _of_ten(x: Any, i: Any) -> Any:
    return torch.stack([x[k] for k in (i, 2 - i)])


@pytest.mark.parametrize("program", [
    _read, _second_axis, _with_others, _written, _seen_by_a_view, _of_a_constant, _of_ten,
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_each_run_picks_its_own_row(program: Callable[[Any, Any], Any], dtype: torch.dtype) -> None:
    first = torch.randn(4, 4, dtype=torch.float64)
    with tfnb.record() as graph:
        x, i = tfnb.placeholder(first, shape=(4, 4)), tfnb.placeholder(torch.tensor(1, dtype=dtype))
        out = program(x, i)
    assert graph.notes == ()
    for number in (1, 0, 2):
        data = torch.randn(4, 4, dtype=torch.float64)
        torch.testing.assert_close(
            tfnb.run(out, {x: data, i: torch.tensor(number, dtype=dtype)}), program(data, torch.tensor(number))
        )


def test_a_picked_row_of_a_parameter_has_a_row_sparse_gradient() -> None:
    layer = nn.Embedding(5, 3)
    with tfnb.record():
        i = tfnb.placeholder(torch.tensor(2))
        (grad,) = tfnb.gradients(layer.weight[i].square().sum(), [layer.weight])
    assert isinstance(grad, tfnb.IndexedSlices)
    for number in (2, 4, -1):
        layer.zero_grad()
        layer.weight[number].square().sum().backward()
        assert torch.equal(tfnb.run(grad, {i: torch.tensor(number)}).to_dense(), layer.weight.grad)


def test_a_row_that_is_not_there_fails_the_run() -> None:
    with tfnb.record():
        i = tfnb.placeholder(torch.tensor(1))
        row = torch.arange(3.0)[i]
    with pytest.raises(InvalidArgument, match="out of range"):
        tfnb.run(row, {i: torch.tensor(3)})


def _masked(x: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    y = x * 1
    write(y)
    return y


MASKED: dict[str, Callable[..., torch.Tensor]] = {
    "alone": lambda x, m, i: x[m],
    "of all": lambda x, m, i: x.sum()[m],
    "second": lambda x, m, i: x[:, m],
    "behind dots": lambda x, m, i: x[..., m],
    "with a number": lambda x, m, i: x[m, i],
    "around a slice": lambda x, m, i: x[m, :, i],
    "twice": lambda x, m, i: x[m, m],
    "set": lambda x, m, i: _masked(x, lambda y: y.__setitem__(m, 2.0)),
    "set a row": lambda x, m, i: _masked(x, lambda y: y.__setitem__((m, i), x[0])),
    "added to": lambda x, m, i: _masked(x, lambda y: y.__setitem__(m, y[m] + 1)),
}


@pytest.mark.parametrize("name", sorted(MASKED))
def test_each_run_asks_its_own_truth_value(name: str) -> None:
    program = MASKED[name]
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(3, 4), shape=(3, 4))
        m, i = (tfnb.placeholder(torch.tensor(v), shape=()) for v in (True, 1))
        y = program(x, m, i)
        (dx,) = tfnb.gradients((y * y).sum(), [x])
    for truth, number in ((True, 2), (False, 0)):
        fed = torch.randn(3, 4, requires_grad=True)
        want = program(fed, torch.tensor(truth), torch.tensor(number))
        (grad,) = torch.autograd.grad((want * want).sum(), fed)
        got = tfnb.run([y, dx], {x: fed.detach(), m: torch.tensor(truth), i: torch.tensor(number)})
        torch.testing.assert_close(got, [want.detach(), grad])


def test_a_place_that_is_a_size_is_that_of_each_run_and_is_written() -> None:
    def program(x: Any) -> Any:
        n = x.shape[0]
        y, z = x * 1, torch.zeros(3, n + 1)
        y[n - 1] = 7
        y[n // 2, 1] += 2
        z[:, n] = 1
        return x[n - 1], x[n // 2, 0], x[1], y, z, x[..., 1][n - 1], x[None, n - 1]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tfnb.record():
            x = tfnb.placeholder(torch.arange(8.0).reshape(4, 2))
            out = tfnb.autograph(program)(x)
            (dx,) = tfnb.gradients(3 * out[0].sum() + out[1] + out[3].square().sum(), [x])
    for n in (2, 4, 7):
        row = torch.arange(2.0 * n).reshape(n, 2).requires_grad_()
        want = program(row)
        torch.testing.assert_close(tfnb.run(out, {x: row.detach()}), tuple(each.detach() for each in want))
        (slope,) = torch.autograd.grad(3 * want[0].sum() + want[1] + want[3].square().sum(), row)
        torch.testing.assert_close(tfnb.run(dx, {x: row.detach()}), slope)


def test_a_number_that_many_lines_made_picks_a_row() -> None:
    with tfnb.record():
        x, i = tfnb.placeholder(torch.randn(4, 2), shape=("B", 2)), tfnb.placeholder(torch.tensor(0))
        k = i
        for _ in range(600):
            k = k + 1
        row, part = x[k % 3], x[k - 600 : k - 599]
    fed = torch.randn(5, 2)
    torch.testing.assert_close(tfnb.run([row, part], {x: fed, i: torch.tensor(2)}), [fed[602 % 3], fed[2:3]])


def test_a_slice_is_as_long_as_its_numbers_say() -> None:
    with tfnb.record():
        x, i = tfnb.placeholder(torch.randn(9), shape=("B",)), tfnb.placeholder(torch.tensor(2))
        one = torch.ones((), dtype=torch.int64)
        parts = [x[i : torch.add(i, one, alpha=3)], x[2 * i : 2 * i + 1], x[i * i : i * i + i], x[i - 1 : i]]
        places = torch.arange(i, 7, 2)
    fed = torch.randn(12)
    got = tfnb.run([*parts, places], {x: fed, i: torch.tensor(3)})
    want = [fed[3:6], fed[6:7], fed[9:12], fed[2:3], torch.arange(3, 7, 2)]
    torch.testing.assert_close(got, want)
