"""Functions whose tests keep something from failing, each with inputs on either side of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tfnb

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """A function, and inputs of one shape."""

    function: Callable[..., Any]
    inputs: tuple[tuple[Tensor, ...], ...]

    def __str__(self) -> str:
        return self.function.__name__


def cases(into: list[Case]) -> Callable[..., Any]:
    """A decorator of the functions of a list, with their inputs: numbers and lists, floats in double precision."""

    def case(*inputs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def kept(function: Callable[..., Any]) -> Callable[..., Any]:
            into.append(Case(function, tuple(tuple(map(_tensor, given)) for given in inputs)))
            return function

        return kept

    return case


CASES: list[Case] = []
case = cases(CASES)


def _tensor(item: Any) -> Tensor:
    found = torch.tensor(item)
    return found.to(F64) if found.is_floating_point() else found


# -- checking -------------------------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """A case in a graph: its placeholders, results and the gradients of their sum."""

    case: Case
    graph: tfnb.Graph
    xs: list[Any]
    out: list[Any]
    grads: list[Any]


def recorded(case: Case, sample: tuple[Tensor, ...]) -> Recorded:
    """The case, recorded with a sample."""
    with warnings.catch_warnings(), tfnb.record() as graph:
        warnings.simplefilter("ignore")  # of branches that stay Python
        xs = [tfnb.placeholder(each, shape=list(each.shape)) for each in sample]
        out = [y for y in _results(tfnb.autograph(case.function)(*xs)) if isinstance(y, tfnb.Tensor)]
        real = [y.sum() for y in out if y.is_floating_point()]
        wanted = [x for x in xs if x.is_floating_point()] if real else []
        grads = tfnb.gradients(real, wanted, unconnected="zero") if wanted else []
    return Recorded(case, graph, xs, out, grads)


def checked(found: Recorded, feed: tuple[Tensor, ...], executor: str) -> None:
    """A run gives what Python gives, and its gradients."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in feed]
    values = [torch.as_tensor(y) for y in _results(found.case.function(*leaves))]
    ends, xs = [v.sum() for v in values if v.requires_grad], [x for x in leaves if x.requires_grad]
    slopes = [torch.zeros_like(x) for x in xs]
    if ends:
        slopes = list(torch.autograd.grad(sum(ends), xs, allow_unused=True, materialize_grads=True))
    with tfnb.Session(found.graph, compile="off", executor=executor) as session:
        got = session.run((found.out, found.grads), dict(zip(found.xs, feed, strict=True)))
    torch.testing.assert_close(got[0], [v.detach() for v in values][: len(got[0])])
    torch.testing.assert_close(got[1], slopes[: len(found.grads)])


def _results(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (list, tuple)) else [found]


# -- the functions --------------------------------------------------------------------------------------------------


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
    """What is the same in each iteration stands in the loop where it can fail."""
    total = torch.tensor(0)
    for _ in range(n):
        total = total + 10 % n
    return total


@case((9, [1.0, 2.0, 3.0], 0), (1, [1.0, 2.0, 3.0], 2))
def looked_up(place: Tensor, x: Tensor, iterations: Tensor) -> Tensor:
    total = torch.zeros((), dtype=F64)
    for _ in range(iterations):
        total = total * 2 + x[place]
    return total


@case((0, 4.0), (3, 4.0))
def guarded_inside(n: Tensor, x: Tensor) -> Tensor:
    """A test in a loop in a branch, none of which the first samples enter."""
    if n > 0:
        for k in range(1, n + 1):
            x = x / (n // k) if n % k == 0 else x - 10 // (n % k)
    return x
