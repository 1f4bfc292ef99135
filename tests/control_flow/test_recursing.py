"""Functions that call themselves where a run decides how deep: recursions of the graph, as Python runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import Unsupported

F64 = torch.float64


@tfnb.function
def factorial(n: Any) -> Any:
    if n < 2:
        return torch.ones((), dtype=n.dtype)
    return n * factorial(n - 1)


@tfnb.function
def fibonacci(n: Any) -> Any:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@tfnb.function
def divisor(a: Any, b: Any) -> Any:
    if b == 0:
        return a
    return divisor(b, a % b)


@tfnb.function
def power(x: Any, n: Any) -> Any:
    if n == 0:
        return torch.ones_like(x)
    half = power(x, n // 2)
    return half * half * x if n % 2 == 1 else half * half


def four_levels(x: Any) -> Any:
    def level(x: Any, left: int) -> Any:  # ends by Python
        if left == 0:
            return x
        if x.sum() > 0:
            return level(x - 1, left - 1)
        return level(x + 2, left - 1)

    return level(x, 4)


class Tree(nn.Module):
    """A net over a tree of arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -0.25], dtype=F64))

    @tfnb.function
    def node(self, values: Any, left: Any, right: Any, i: Any) -> Any:
        """The value of the tree at node ``i``."""
        if left[i] < 0:
            return values[i]
        below = torch.stack([self.node(values, left, right, left[i]), self.node(values, left, right, right[i])])
        return torch.tanh(values[i] + self.w @ below)

    def forward(self, values: Any, left: Any, right: Any) -> Any:
        """That of its root."""
        return self.node(values, left, right, torch.tensor(0))


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=F64)


def row(n: int) -> torch.Tensor:
    return torch.linspace(-1, 1.5, n, dtype=F64)


PROGRAMS: list[tuple[Callable[..., Any], list[tuple[Any, ...]]]] = [
    (factorial, [(number(4.0),), (number(6.0),), (number(1.0),)]),
    (fibonacci, [(number(4.0),), (number(7.0),), (number(0.0),)]),
    (divisor, [(torch.tensor(a), torch.tensor(b)) for a, b in ((12, 18), (7, 5), (9, 0))]),
    (power, [(number(1.5), torch.tensor(5)), (number(2.0), torch.tensor(11)), (number(2.0), torch.tensor(0))]),
    (four_levels, [(row(3),), (row(5) * 9,), (row(2) - 7,)]),
]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("program", "feeds"), PROGRAMS, ids=[p.__name__ for p, _ in PROGRAMS])
def test_a_function_that_calls_itself_goes_as_deep_as_each_run_asks(
    program: Callable[..., Any], feeds: list[tuple[Any, ...]]
) -> None:
    with tfnb.record() as graph:
        given = [tfnb.placeholder(value) for value in feeds[0]]
        floats = [x for x in given if x.dtype.is_floating_point]
        out = tfnb.autograph(program)(*given)
        slopes = tfnb.gradients(out.sum(), floats) if floats else []
    assert not any("stays Python" in note for note in graph.notes)
    for fed in feeds:
        leaves = [value.clone().requires_grad_(value.is_floating_point()) for value in fed]
        expected = program(*leaves)
        wanted = []
        if floats:
            tracked = [leaf for leaf in leaves if leaf.requires_grad]
            needs = expected.sum() if expected.requires_grad else expected.sum() + 0 * tracked[0].sum()
            wanted = torch.autograd.grad(needs, tracked)
        for executor in ("auto", "dataflow"):
            session = tfnb.Session(graph, executor=executor)  # type: ignore[arg-type]
            got, found = session.run([out, slopes], dict(zip(given, fed, strict=True)))
            torch.testing.assert_close(got, expected.detach())
            torch.testing.assert_close(list(found), list(wanted))


@pytest.mark.slow
def test_a_module_whose_method_calls_itself_is_trained() -> None:
    net, plain = Tree(), Tree()
    values, left, right = row(3), torch.tensor([1, -1, -1]), torch.tensor([2, -1, -1])
    with tfnb.record():
        v, lefts, rights = tfnb.placeholder(values), tfnb.placeholder(left), tfnb.placeholder(right)
        out = tfnb.autograph(lambda *args: net(*args))(v, lefts, rights)
        step = tfnb.train.SGD(0.5).minimize(out * out)
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    deeper = row(5), torch.tensor([1, -1, 3, -1, -1]), torch.tensor([2, -1, 4, -1, -1])
    for fed in ((values, left, right), deeper):
        (plain(*fed) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        tfnb.run(step, dict(zip((v, lefts, rights), fed, strict=True)))
        torch.testing.assert_close(net.w.data, plain.w.data)


def test_what_ends_by_sizes_is_recorded_in_place() -> None:
    def folded(x: Any) -> Any:
        if len(x) <= 1:
            return x.sum()
        return folded(x[: len(x) // 2]) + 2 * folded(x[len(x) // 2 :])

    with tfnb.record() as graph:
        x = tfnb.placeholder(row(4), shape=[4])
        out = tfnb.autograph(folded)(x)
    assert not any(node.op == "tfnb.call" for node in graph.nodes)
    torch.testing.assert_close(tfnb.run(out, {x: row(4) * 3}), folded(row(4) * 3))


def test_a_function_that_nobody_marked_is_refused_where_a_run_decides_how_deep() -> None:
    def unmarked(n: Any) -> Any:
        return n if n < 2 else unmarked(n - 1) + unmarked(n - 2)

    with tfnb.record(), pytest.raises(Unsupported, match=r"line \d+ of .*unmarked.*marked @tfnb.function"):
        tfnb.autograph(unmarked)(tfnb.placeholder(number(4.0)))
