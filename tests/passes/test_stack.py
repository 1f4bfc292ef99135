"""Stacked products: fewer kernels, the same numbers within rounding, and what must stay as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

import tfnb
from tests.graph.build import evaluate
from tests.graph.strategies import graphs
from tfnb.graph import Contents, Graph
from tfnb.graph.check import check
from tfnb.kernels.rows import FEWEST, ITERATIONS
from tfnb.passes import optimize, peak, stack

STEPS = 6


@given(contents=graphs(stateful=False))
def test_the_pass_keeps_every_value(contents: Contents) -> None:
    after = stack(Graph("g", contents), [], []).contents
    check(after)
    feed = {"x": torch.randn(2, 3)}
    want, got = evaluate(contents, feed), evaluate(after, feed)
    for node in contents.nodes:
        for value in map(node.value, range(len(node.outputs))):
            torch.testing.assert_close(got[value], want[value], equal_nan=True)


class Unrolled(nn.Module):
    """Layers of a recurrent cell, step by step in Python."""

    def __init__(self, layers: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.entry = nn.ModuleList(nn.Linear(48, 48, bias=bias) for _ in range(layers))
        self.back = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(layers))

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        for entry, back in zip(self.entry, self.back, strict=True):
            hidden, seen = torch.zeros_like(xs[0]), []
            for x in xs:
                hidden = torch.tanh(entry(x) + back(hidden))
                seen.append(hidden)
            xs = torch.stack(seen)
        return xs[-1].square().sum()


def ran(
    model: nn.Module, samples: list[torch.Tensor], fresh: list[torch.Tensor], shapes: list[Any],
    loss: Callable[..., torch.Tensor] | None = None,
) -> Counter[str]:  # fmt: skip
    """Op counts of loss and gradients, which equal autograd's on fresh data."""
    model = model.double()
    parameters = list(model.parameters())
    with tfnb.record() as g:
        xs = [tfnb.placeholder(s.double(), shape=shape) for s, shape in zip(samples, shapes, strict=True)]
        y = (loss or model)(*xs)
        grads = tfnb.gradients(y, parameters)
    got = tfnb.run([y, *grads], dict(zip(xs, [f.double() for f in fresh], strict=True)))
    want = (loss or model)(*[f.double() for f in fresh])
    torch.testing.assert_close(got, [want.detach(), *torch.autograd.grad(want, parameters)])
    return Counter(node.op for node in optimize(g, [y.value, *(d.value for d in grads)], [x.value for x in xs]).nodes)


@pytest.mark.parametrize("rows", [4, 1, 0])
@pytest.mark.parametrize("varies", [True, False])
def test_an_unrolled_layer_has_one_product_for_its_inputs_and_for_each_gradient(varies: bool, rows: int) -> None:
    fresh = torch.randn(STEPS, rows if varies else 3, 48)
    shape = (STEPS, None, 48) if varies else (STEPS, 3, 48)
    counts = ran(Unrolled(), [torch.randn(STEPS, 3, 48)], [fresh], [shape])
    products = counts["aten.mm.default"] + counts["aten.addmm.default"]
    assert products <= 1 + STEPS + (STEPS - 1) + 2  # inputs at once, a step forward, a step back, two gradients
    assert counts["aten.sum.dim_IntList"] == 1


def test_layers_upon_one_another_are_stacked_each() -> None:
    one = ran(Unrolled(1), [torch.randn(STEPS, 3, 48)], [torch.randn(STEPS, 3, 48)], [(STEPS, 3, 48)])
    two = ran(Unrolled(2, bias=False), [torch.randn(STEPS, 3, 48)], [torch.randn(STEPS, 3, 48)], [(STEPS, 3, 48)])
    assert one["aten.chunk.default"] == 1
    assert two["aten.chunk.default"] == 3  # the inputs of each layer, and the cotangents of the first one's outputs


def test_a_long_layer_is_stacked_some_steps_at_a_time() -> None:
    x = torch.randn(2 * ITERATIONS + FEWEST + 1, 2, 32)
    w = torch.randn(32, 32)
    with tfnb.record() as g:
        fed = tfnb.placeholder(x, shape=tuple(x.shape))
        h = sum((row @ w).tanh() * place for place, row in enumerate(fed))
    values = [h.value], [fed.value]
    found = optimize(g, *values)
    assert [len(n.inputs) for n in found.nodes if n.op == "aten.cat.default"] == [ITERATIONS, ITERATIONS, FEWEST + 1]
    everything = len(x) * 2 * 32 * 4  # of the rows of one product
    assert peak(found, *values) < everything
    expected = sum((row @ w).tanh() * place for place, row in enumerate(x))
    torch.testing.assert_close(tfnb.run(h, {fed: x}), expected, rtol=1e-5, atol=1e-4)  # a sum of large terms


def test_of_large_products_no_more_are_made_at_once_than_come_after_them() -> None:
    x, w = torch.randn(2 * ITERATIONS, 16, 32), torch.randn(32, 256)
    with tfnb.record() as g:
        fed = tfnb.placeholder(x, shape=tuple(x.shape))
        rows = [(row @ w).tanh() for row in fed]  # all are held at the end
        h = sum(row * row.sum() for row in rows)
    values = [h.value], [fed.value]
    found = optimize(g, *values)
    made = [len(n.inputs) for n in found.nodes if n.op == "aten.cat.default"]
    assert made == [ITERATIONS, ITERATIONS // 2, ITERATIONS // 4, FEWEST] and made[-1] == ITERATIONS // 8
    one = 16 * 256 * 4
    assert peak(found, *values) < (len(x) + FEWEST) * one
    expected = sum((row @ w).tanh() * (row @ w).tanh().sum() for row in x)
    torch.testing.assert_close(tfnb.run(h, {fed: x}), expected, rtol=1e-4, atol=1e-3)


def test_many_rows_of_a_small_weight_are_not_copied() -> None:
    counts = ran(Unrolled(), [torch.randn(STEPS, 300, 48)], [torch.randn(STEPS, 300, 48)], [(STEPS, 300, 48)])
    assert "aten.chunk.default" not in counts and "aten.cat.default" not in counts


def test_other_terms_of_a_sum_stay() -> None:
    layer = nn.Linear(32, 32)

    def loss(x: torch.Tensor) -> torch.Tensor:
        each = sum(layer(x[i]).sin().sum() * (i + 1) for i in range(5))
        return each + (layer.weight**3).sum() + (layer.weight @ layer.weight).sum()

    counts = ran(layer, [torch.randn(5, 2, 32)], [torch.randn(5, 2, 32)], [(5, 2, 32)], loss)
    assert counts["aten.cat.default"] == 3  # inputs forward; inputs and cotangents backward, or fewer where shared


def test_fetched_and_fed_products_stay() -> None:
    w = torch.randn(32, 32)
    with tfnb.record():
        x, weight = tfnb.placeholder(torch.randn(5, 2, 32), shape=(5, 2, 32)), tfnb.placeholder(w, shape=(32, 32))
        products = [row @ weight for row in x]
        total = sum(p.tanh() for p in products)
    data = torch.randn(5, 2, 32)
    want = [row @ w for row in data]
    got = tfnb.run([total, products[0], products[3]], {x: data, weight: w})
    torch.testing.assert_close(got, [sum(p.tanh() for p in want), want[0], want[3]])
    got[1].zero_()
    torch.testing.assert_close(got[2], want[3])
    fed = tfnb.run(total, {x: data, weight: w, products[2]: torch.zeros(2, 32)})
    torch.testing.assert_close(fed, sum(p.tanh() for i, p in enumerate(want) if i != 2))


def test_a_product_and_what_is_added_are_one_kernel() -> None:
    w, b = torch.randn(3, 4), torch.randn(4)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(2, 3))
        y, z = x @ w + b, x @ w * 2 + torch.ones(4, dtype=torch.float64)
    ops = [node.op for node in optimize(g, [y.value, z.value], [x.value]).nodes]
    assert "aten.add.Tensor" in ops  # of another dtype
    data = torch.randn(5, 3)
    torch.testing.assert_close(tfnb.run([y, z], {x: data}), [data @ w + b, data @ w * 2 + torch.ones(4).double()])
    only = [node.op for node in optimize(g, [y.value], [x.value]).nodes]
    assert "aten.addmm.default" in only and "aten.add.Tensor" not in only
