"""``range`` of a size that varies, in staged code: as an index, as data and as a number it equals torch at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import ShapeError

Function = Callable[[torch.Tensor, torch.Tensor], Any]
ROWS = (4, 1, 6)


def _read(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x[range(x.shape[0]), y]


def _read_backwards(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x[range(len(x) - 1, -1, -1), y]


def _written(x: torch.Tensor, y: torch.Tensor) -> Any:
    out = x.clone()
    out[range(x.shape[0]), y] = x.max()
    return out


def _rows(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x[range(x.shape[0])] * 2


def _as_data(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.tensor(range(x.shape[0])) + torch.as_tensor(range(x.shape[0]), dtype=torch.float64)


def _length(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.sum() / len(range(x.shape[0]))


@pytest.mark.parametrize("function", [_read, _read_backwards, _written, _rows, _as_data, _length])
def test_a_range_varies_with_the_batch(function: Function) -> None:
    with tfnb.record() as g:
        x, y = tfnb.placeholder(torch.randn(4, 5)), tfnb.placeholder(torch.tensor([2, 3, 4, 2]))
        out = tfnb.autograph(function)(x, y)
    for rows in ROWS:
        a, b = torch.randn(rows, 5), torch.randint(5, (rows,))
        torch.testing.assert_close(tfnb.Session(g).run(out, {x: a, y: b}), function(a, b))


def _listed(x: torch.Tensor) -> Any:
    return x[list(range(x.shape[0]))]


def _contains(x: torch.Tensor) -> Any:
    return x * (2 if 5 in range(x.shape[0]) else 3)


@pytest.mark.parametrize(("function", "line"), [(_listed, r"list\(range"), (_contains, r"5 in range")])
def test_numbers_that_python_takes_of_a_range_fix_it_with_the_line(function: Callable[..., Any], line: str) -> None:
    with pytest.warns(UserWarning, match="became the constant 4"), tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 5))
        out = tfnb.autograph(function)(x)
    with pytest.raises(ShapeError, match=rf"axis 0 varied(.|\n)*{line}"):
        tfnb.run(out, {x: torch.randn(6, 5)})


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.new_zeros(a.shape[1])
    for u, v in zip(a, b, strict=False):
        out = out * 0.5 + u * v
    return out


@pytest.mark.parametrize("is_fed", [True, False])
def test_zip_over_tensors_ends_with_the_shortest(is_fed: bool) -> None:
    table = torch.randn(4, 2)
    with tfnb.record() as g:
        a = tfnb.placeholder(torch.randn(4, 2))
        b = tfnb.placeholder(torch.randn(3, 2)) if is_fed else table
        out = tfnb.autograph(_dot)(a, b)
    for long, short in ((5, 5), (6, 3), (3, 6), (1, 4)):
        one, other = torch.randn(long, 2), torch.randn(short, 2) if is_fed else table
        found = tfnb.Session(g).run(out, {a: one, b: other} if is_fed else {a: one})
        torch.testing.assert_close(found, _dot(one, other))
