"""Loops over generators of the user's: as Python goes over them, for every number of rows; with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import ShapeError


def pairs(x: Any, k: int) -> Iterator[Any]:
    for i in range(0, x.shape[0], k):
        yield i, x[i : i + k]


def of_a_module_level_function(x: Any) -> Any:
    s = x.sum() * 0
    for i, p in pairs(x, 2):
        s = s * 0.5 + p.sum() + i
    return s


def numbered(x: Any) -> Any:
    s = x.sum() * 0
    for n, (_, p) in enumerate(pairs(x, 2), 1):
        s = s * 0.5 + p.sum() * n
    return s


def left_by_break(x: Any) -> Any:
    s = x.sum() * 0
    for _, p in pairs(x, 2):
        s = s + p.sum()
        if s > 3:
            break
    return s


def left_by_return(x: Any) -> Any:
    s = x.sum() * 0
    for _, p in pairs(x, 2):
        if s > 3:
            return s * 10
        s = s + p.sum()
    return s


def skipping(x: Any) -> Any:
    s = x.sum() * 0
    for _, p in pairs(x, 2):
        if p.sum() < 0:
            continue
        s = s + p.sum()
    return s


def yielding_under_a_test(x: Any) -> Any:
    def positive() -> Iterator[Any]:
        for row in x:
            if row > 0:
                yield row * 2

    s = x.sum() * 0
    for row in positive():
        s = s * 0.5 + row
    return s


def yielding_from_others(x: Any) -> Any:
    def rows() -> Iterator[Any]:
        yield from x
        yield from products()

    def products() -> Iterator[Any]:
        for i in range(x.shape[0] - 1):
            yield x[i] * x[i + 1]

    s = x.sum() * 0
    for row in rows():
        s = s * 0.9 + row
    return s


def one_inside_of_another(x: Any) -> Any:
    def inner() -> Iterator[Any]:
        for i, p in pairs(x, 2):
            yield p.sum() * i
            yield p.sum() * 3

    s = x.sum() * 0
    for each in inner():
        for _, p in pairs(x, 3):
            s = s * 0.9 + each * p.sum()
    return s


def without_an_end(x: Any) -> Any:
    def powers() -> Iterator[Any]:
        v = x.sum().abs() + 1
        while True:
            yield v
            v = v * 2

    s = x.sum() * 0
    for p in powers():
        s = s + p
        if s > 100:
            break
    return s


class Recurrent(nn.Module):
    def parts(self, x: Any) -> Iterator[Any]:
        for i in range(0, x.shape[0], 2):
            yield x[i : i + 2]

    def forward(self, x: Any) -> Any:
        h = x.sum() * 0
        for part in self.parts(x):
            h = torch.tanh(h + part.sum())
        return h


def of_a_method(x: Any) -> Any:
    return Recurrent()(x)


def appended(x: Any) -> Any:
    found = []
    for _, p in pairs(x, 2):
        found.append(p.sum())
    return torch.stack(found)


def as_a_list(x: Any) -> Any:
    def halves() -> Iterator[Any]:
        for row in x:
            yield row / 2

    return torch.stack(list(halves()))


PROGRAMS = (
    of_a_module_level_function, numbered, left_by_break, left_by_return, skipping, yielding_under_a_test,
    yielding_from_others, one_inside_of_another, without_an_end, of_a_method, appended, as_a_list,
)  # fmt: skip
FED = [torch.tensor(each) for each in ([1.0, 2, 3, 4], [1.0, 2], [1.0] * 5, [-1.0, 2, -3, 4, 5, 6, -7], [-1.0, -2, -3])]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_loop_over_a_generator(program: Callable[[Any], Any]) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(FED[0], name="x")
        out = tfnb.autograph(program)(x)
        (dx,) = tfnb.gradients(out.sum(), [x])
    assert not any("stays Python" in note for note in g.notes), g.notes
    for fed in FED:
        given = fed.clone().requires_grad_()
        expected = program(given)
        expected_dx = torch.autograd.grad(expected.sum(), given)[0]
        torch.testing.assert_close(tfnb.run([out, dx], {x: fed}), [expected.detach(), expected_dx])


def test_what_takes_items_one_by_one_keeps_the_number_of_the_samples() -> None:
    def zipped(x: Any) -> Any:
        s = x.sum() * 0
        for (_, p), c in zip(pairs(x, 2), [1, 2, 3], strict=False):
            s = s + p.sum() * c
        return s

    with pytest.warns(UserWarning, match="became the constant 4"), tfnb.record():
        x = tfnb.placeholder(FED[0], name="x")
        out = tfnb.autograph(zipped)(x)
    assert tfnb.run(out, {x: FED[0]}) == zipped(FED[0])
    with pytest.raises(ShapeError, match=r"in range\(0, x\.shape\[0\], k\)"):
        tfnb.run(out, {x: FED[1]})


def test_the_value_of_a_yield_leaves_the_generator_to_python() -> None:
    def program(x: Any) -> Any:
        def echo() -> Iterator[Any]:
            got = yield x.sum()
            yield got

        s = x.sum()
        for each in echo():
            s = s if each is None else s + each
        return s

    with tfnb.record() as g:
        x = tfnb.placeholder(FED[0], name="x")
        out = tfnb.autograph(program)(x)
    assert any("uses the value of the `yield`" in note for note in g.notes), g.notes
    assert tfnb.run(out, {x: FED[1]}) == 6
