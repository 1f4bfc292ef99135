"""Functions whose tests keep something from failing, each with inputs on either side of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """A function, and inputs of one shape."""

    function: Callable[..., Any]
    inputs: tuple[tuple[Tensor, ...], ...]

    def __str__(self) -> str:
        return self.function.__name__


CASES: list[Case] = []


def case(*inputs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Each input: numbers and lists, floats in double precision."""

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(function, tuple(tuple(map(_tensor, given)) for given in inputs)))
        return function

    return kept


def _tensor(item: Any) -> Tensor:
    found = torch.tensor(item)
    return found.to(F64) if found.is_floating_point() else found


@case((5, 0), (5, 2))
def divided(a: Tensor, b: Tensor) -> Tensor:
    if b != 0:
        return a // b
    return a


@case((5, 0), (48, 18))
def common_divisor(a: Tensor, b: Tensor) -> Tensor:
    while b != 0:
        a, b = b, a % b
    return a


@case(([1.0, 2.0, 3.0], 7), ([1.0, 2.0, 3.0], 1))
def inside_the_bounds(x: Tensor, i: Tensor) -> Tensor:
    return x[i] * 2 if i < x.shape[0] else x.sum()


@case(([[1.0, 2.0], [2.0, 1.0]], False), ([[2.0, 1.0], [1.0, 2.0]], True))
def factored(matrix: Tensor, is_definite: Tensor) -> Tensor:
    if is_definite:
        return torch.linalg.cholesky(matrix)
    return matrix


@case((-1.0,), (4.0,))
def asserted(x: Tensor) -> Tensor:
    if x > 0:
        assert x > 0, "a root of what is negative"
        return x.sqrt()
    return x


@case((-1.0,), (4.0,))
def raising(x: Tensor) -> Tensor:
    def root(v: Tensor) -> Tensor:
        if v < 0:
            raise ValueError("negative")
        return v.sqrt()

    if x > 0:
        return root(x)
    return -x


@case((0, [1.0, 2.0, 3.0]), (2, [1.0, 2.0, 3.0]), (3, [1.0, 2.0, 3.0]))
def first_rows(n: Tensor, x: Tensor) -> Tensor:
    i, total = torch.tensor(0), torch.zeros((), dtype=F64)
    while i < n:
        total = total + x[i]
        i = i + 1
    return total


@case(([3.0, 1.0, 2.0], 2), ([3.0, 1.0, 7.0], 0), ([3.0, 1.0, 7.0], 3))
def next_large(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    while i < x.shape[0] and x[i] < 5:
        i = i + 1
    if i < x.shape[0]:
        return x[i], i
    return torch.zeros((), dtype=F64), i


@case(([0, 0, 0],), ([0, 1, 1],))
def first_place(x: Tensor) -> Tensor:
    if (x != 0).any():
        return x.nonzero()[0, 0]
    return torch.tensor(-1)


@case(([-1.0, -2.0],), ([1.0, -2.0],))
def largest_positive(x: Tensor) -> Tensor:
    chosen = x > 0
    if chosen.any():
        return x[chosen].max()
    return x.max()


@case((2, [1.0, 2.0, 3.0]), (5, [1.0, 2.0, 3.0]))
def classed(n: Tensor, x: Tensor) -> Tensor:
    if n < 3:
        return F.one_hot(n, 3).to(F64) * x
    return x


@case((0,), (3,))
def remainders(n: Tensor) -> Tensor:
    """What is the same in each turn stands in the loop where it can fail."""
    total = torch.tensor(0)
    for _ in range(n):
        total = total + 10 % n
    return total


@case((9, [1.0, 2.0, 3.0], 0), (1, [1.0, 2.0, 3.0], 2))
def looked_up(place: Tensor, x: Tensor, turns: Tensor) -> Tensor:
    total = torch.zeros((), dtype=F64)
    for _ in range(turns):
        total = total * 2 + x[place]
    return total


@case((0, 4.0), (3, 4.0))
def guarded_inside(n: Tensor, x: Tensor) -> Tensor:
    """A test in a loop in a branch, none of which the first samples enter."""
    if n > 0:
        for k in range(1, n + 1):
            x = x / (n // k) if n % k == 0 else x - 10 // (n % k)
    return x
