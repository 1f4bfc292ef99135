"""What commits do in place: rows of tables, and steps of SGD that take the factors of large gradients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument
from tfnb.execution import lower
from tfnb.passes import peak

WIDE = 600  # a weight of this many rows and columns takes more than a megabyte


def _net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE, bias=False), nn.Tanh()).to(dtype)


def _updates(graph: tfnb.Graph, fetches: Any, feeds: Any = ()) -> list[str]:
    program = lower(graph, [f.value for f in fetches], [f.value for f in feeds])
    return [node.op for node in program.graph.nodes if "sgd" in node.op]


@pytest.mark.parametrize(
    ("compile", "momentum"), [("off", 0.0), ("off", 0.9), pytest.param("now", 0.9, marks=pytest.mark.slow)]
)
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


@pytest.mark.parametrize("write", ["scatter_update", "scatter_add", "scatter_sub"])
@pytest.mark.parametrize("rows", [[2], [3, 0], []])
def test_rows_written_at_the_commit_are_torchs(write: str, rows: list[int]) -> None:
    table = tfnb.Variable(torch.randn(4, 3), name="table")
    more = torch.randn(len(rows), 3)
    with tfnb.record() as graph:
        at, values = tfnb.placeholder(torch.tensor([1, 2])), tfnb.placeholder(torch.ones(2, 3))
        step = tfnb.group(getattr(table, write)(at, values * 2))
    wanted = table.value()
    index = torch.tensor(rows, dtype=torch.int64)
    if write == "scatter_update":
        wanted.index_copy_(0, index, more * 2)
    else:
        wanted.index_add_(0, index, more * 2, alpha=1 if write == "scatter_add" else -1)
    if rows:
        tfnb.Session(graph, compile="off").run(step, {at: index, values: more})
        assert torch.equal(table.value(), wanted)


@pytest.mark.parametrize("bad", [4, -1])
@pytest.mark.parametrize("many", [False, True])
def test_a_row_that_is_not_there_is_an_error_before_anything_is_written(bad: int, many: bool) -> None:
    table = tfnb.Variable(torch.zeros(4), name="table", trainable=False)
    count = tfnb.Variable(torch.tensor(0), name="count", trainable=False)
    with tfnb.record() as graph:
        at = tfnb.placeholder(torch.tensor(1), shape=())
        rows = torch.stack([at, at * 0]) if many else (at + 0).reshape(1)
        write = table.scatter_update(rows, torch.ones(2 if many else 1))  # the line
        step = tfnb.group(write, count.assign_add(torch.tensor(1)))
    session = tfnb.Session(graph, compile="off")
    with pytest.raises(InvalidArgument, match=rf"index {bad} is out of bounds[\s\S]*# the line"):
        session.run(step, {at: torch.tensor(bad)})
    assert not table.value().any() and count.value() == 0
    session.run(step, {at: torch.tensor(3)})
    assert table.value()[3] == 1 and count.value() == 1


def test_rows_that_several_threads_write_are_all_there() -> None:
    table = tfnb.Variable(torch.zeros(400, dtype=torch.int64), name="table", trainable=False)
    with tfnb.record() as graph:
        slot = tfnb.placeholder(torch.tensor(0), shape=())
        step = tfnb.group(table.scatter_update(slot.reshape(1), (slot * 2 + 1).reshape(1)))
    call = tfnb.Session(graph, compile="off").make_callable(step, [slot])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: call(torch.tensor(i)), range(400)))
    assert torch.equal(table.value(), torch.arange(400) * 2 + 1)
