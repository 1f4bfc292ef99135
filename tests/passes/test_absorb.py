"""Steps of SGD take the factors of large gradients: the same step as torch's, and the gradients are not made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.execution import lower
from tfnb.passes import peak

WIDE = 600  # a weight of this many rows and columns takes more than a megabyte


def _net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE, bias=False), nn.Tanh()).to(dtype)


def _updates(graph: tfnb.Graph, fetches: Any, feeds: Any = ()) -> list[str]:
    program = lower(graph, [f.value for f in fetches], [f.value for f in feeds])
    return [node.op for node in program.graph.nodes if "sgd" in node.op]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("compile", ["off", "now"])
def test_the_step_is_that_of_torch(compile: Any, momentum: float) -> None:
    ours, theirs, data = _net(), _net(), torch.randn(8, WIDE, dtype=torch.float64)
    with tfnb.record() as graph:
        x = tfnb.placeholder(data)
        loss = ours(x).square().mean()
        step = tfnb.train.SGD(0.1, momentum).minimize(loss)
    assert sorted(_updates(graph, [step], [x])) == ["tfnb.sgd.default", *2 * ["tfnb.sgd_product.default"]]
    optimizer, session = torch.optim.SGD(theirs.parameters(), 0.1, momentum), tfnb.Session(graph, compile=compile)
    for rows in (data, torch.randn(5, WIDE, dtype=torch.float64), data):
        got = session.run([loss, step], {x: rows})[0]
        optimizer.zero_grad()
        want = theirs(rows).square().mean()
        want.backward()
        optimizer.step()
        torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=0.0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_step_holds_no_gradient() -> None:
    ours, data = _net(torch.float32), torch.randn(8, WIDE)
    with tfnb.record() as graph:
        x = tfnb.placeholder(data, shape=(8, WIDE))
        loss = ours(x).square().mean()
        fetches = [loss, tfnb.train.SGD(0.1).minimize(loss)]
        gradients = [loss, *tfnb.gradients(loss, [ours[0].weight])]

    def held(of: Any) -> int:
        values = [item.value for item in of]
        return peak(lower(graph, values, [x.value]).graph, values, [x.value])

    weight = 4 * WIDE * WIDE
    assert held(fetches) < weight / 4 < weight < held(gradients)


def test_a_factor_that_is_fed_holds_no_memory_of_the_step() -> None:
    ours, many = _net(torch.float32), WIDE // 3
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(many, WIDE), shape=(many, WIDE))
        step = tfnb.train.SGD(0.1).minimize(ours(x).square().mean())
    assert _updates(graph, [step], [x]).count("tfnb.sgd_product.default") == 1  # that of the first layer alone


def test_other_updates_make_their_gradient() -> None:
    net, data = _net(torch.float32), torch.randn(8, WIDE)
    weight = net[2].weight
    small = nn.Linear(WIDE, 64, bias=False)
    rate = tfnb.variable(torch.tensor(0.1), name="rate")
    with tfnb.record() as graph:
        x = tfnb.placeholder(data, shape=(8, WIDE))
        loss = net(x).square().mean()
        (grad,) = tfnb.gradients(loss, [weight])
        clipped = tfnb.train.SGD(0.1).apply_gradients([(grad.clamp(-1, 1), weight)])
        used = tfnb.train.SGD(0.1).apply_gradients([(grad, weight)])
        with_rate = tfnb.train.SGD(rate).apply_gradients([(grad, weight)])
        heavy = [tfnb.train.SGD(0.1, **more).apply_gradients([(grad, weight)]) for more in (
            {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}, {"weight_decay": 0.1},
            {"maximize": True},
        )]  # fmt: skip
        few = small(x).sum()
        of_few = tfnb.train.SGD(0.1).minimize(few, [small.weight])
    plain = ["tfnb.sgd.default"]
    assert _updates(graph, [used], [x]) == ["tfnb.sgd_product.default"]
    assert _updates(graph, [used, grad], [x]) == plain  # somebody fetches it
    assert _updates(graph, [used, clipped], [x]) == 2 * plain  # or computes with it
    for other in (clipped, with_rate, of_few, *heavy):
        assert _updates(graph, [other], [x]) == plain


def test_factors_that_are_variables_are_read_before_they_are_written() -> None:
    wanted_rows = torch.randn(4, WIDE, dtype=torch.float64)
    a, b = (nn.Parameter(torch.randn(WIDE, WIDE, dtype=torch.float64) / WIDE) for _ in range(2))
    thin = nn.Parameter(torch.randn(4, WIDE, dtype=torch.float64))
    copies = [p.detach().clone().requires_grad_() for p in (a, b, thin)]
    with tfnb.record() as graph:
        y = (thin @ a @ b - wanted_rows).square().mean()
        step = tfnb.train.SGD(0.5).minimize(y)
    assert _updates(graph, [step]).count("tfnb.sgd_product.default") == 2
    (copies[2] @ copies[0] @ copies[1] - wanted_rows).square().mean().backward()
    wanted = [p.detach() - 0.5 * p.grad for p in copies]
    tfnb.run(step)
    for got, want in zip((a, b, thin), wanted, strict=True):
        torch.testing.assert_close(got.detach(), want, rtol=1e-10, atol=1e-12)


def test_a_fed_tensor_may_be_memory_that_the_step_writes() -> None:
    weight = nn.Parameter(torch.randn(WIDE, WIDE, dtype=torch.float64))
    before = weight.detach().clone()
    with tfnb.record() as graph:
        x = tfnb.placeholder(before[:4].clone(), shape=(4, WIDE))
        step = tfnb.train.SGD(0.1).minimize((x @ weight.mT).sum())
    assert _updates(graph, [step], [x]) == ["tfnb.sgd_product.default"]
    tfnb.run(step, {x: weight.data[:4]})
    torch.testing.assert_close(weight.detach(), before - 0.1 * before[:4].sum(0), rtol=1e-10, atol=1e-12)
