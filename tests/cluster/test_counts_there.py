"""Counts, sums and means over rows that a step writes: servers join those of the tasks to those of one machine."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tfnb
from tfnb.cluster.notebook.steps_there import Steps

ROWS, BATCH = 53, 16  # a last batch of 5 rows, which tasks divide unevenly


class Counting(nn.Module):
    """A net that counts while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3).double()
        self.register_buffer("hits", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seconds", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("center", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("codes", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("book", torch.zeros(3, 5, dtype=torch.float64))
        self.register_buffer("rows", torch.zeros((), dtype=torch.float64))
        self.register_buffer("kept", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.fc(x)
        loss = F.cross_entropy(out, y)
        with torch.no_grad():
            one_hot = F.one_hot(out.argmax(-1), 3).double()
            self.hits += (out.argmax(-1) == y).sum()
            self.seen += x.shape[0]
            self.seconds -= x.shape[0]
            self.total += loss
            self.center.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.codes.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            self.book.mul_(0.9).add_(one_hot.t() @ x, alpha=0.1)
            self.rows.mul_(0.9).add_(0.1 * x.shape[0])
            self.kept += x[x[:, 0] > 0].shape[0]
        return loss


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, 5, dtype=torch.float64), torch.randint(0, 3, (ROWS,))


def recorded(net: nn.Module) -> tuple[Any, dict[Any, Tensor]]:
    xs, ys = data()
    before = copy.deepcopy(net.state_dict())
    with tfnb.record():
        x, y = tfnb.placeholder(xs[:4]), tfnb.placeholder(ys[:4])
        optimizer = torch.optim.SGD(net.parameters(), 0.2)
        net(x, y).backward()
        step = optimizer.step()
    net.load_state_dict(before)
    return step, {x: xs, y: ys}


def plain(net: nn.Module, passes: int) -> nn.Module:
    xs, ys = data()
    optimizer = torch.optim.SGD(net.parameters(), 0.2)
    for _ in range(passes):
        for at in range(0, ROWS, BATCH):
            optimizer.zero_grad()
            net(xs[at : at + BATCH], ys[at : at + BATCH]).backward()
            optimizer.step()
    return net


@pytest.mark.parametrize("tasks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["sync", "allreduce"])
def test_what_tasks_count_is_joined(
    connect: Callable[..., Any], mode: str, tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("one step after the other")

    monkeypatch.setattr(Steps, "_stepwise", refuse)
    torch.manual_seed(1)
    net = Counting()
    expected = plain(copy.deepcopy(net), 2).state_dict()
    connect(tasks)
    step, feeds = recorded(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tfnb.fit(step, feeds, epochs=2, batch_size=BATCH, shuffle=False, mode=mode)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)
    assert int(net.seen) == 2 * ROWS and int(net.kept) == 2 * int((data()[0][:, 0] > 0).sum())


def test_half_the_rows_of_all_is_no_sum_of_halves(connect: Callable[..., Any]) -> None:
    net = nn.Linear(5, 1).double()
    net.register_buffer("pairs", torch.tensor(0))
    connect(2)
    with tfnb.record():
        x = tfnb.placeholder(data()[0][:4])
        net.pairs += x.shape[0] // 2
        tfnb.train.SGD(0.1).minimize(net(x).square().mean())
        everything = tfnb.effects()
    net.pairs.zero_()
    with pytest.warns(UserWarning, match="the step writes pairs itself"):
        tfnb.fit(everything, [{x: data()[0][:rows]} for rows in (7, 9, 6)], mode="sync")
    assert int(net.pairs) == 3 + 4 + 3


def test_no_count_of_asynchronous_tasks_is_lost(connect: Callable[..., Any]) -> None:
    net = Counting()
    connect(2)
    step, feeds = recorded(net)
    tfnb.fit(step, feeds, epochs=3, batch_size=BATCH, mode="async")
    assert int(net.seen) == 3 * ROWS and net.seconds.tolist() == [-3 * ROWS] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [tfnb.train.Downpour(n_fetch=2, n_push=2), tfnb.train.LocalSGD(every=2)], ids=["downpour", "local"]
)
def test_tasks_that_take_local_steps_say_that_counts_are_their_own(connect: Callable[..., Any], mode: Any) -> None:
    net = Counting()
    connect(2)
    step, feeds = recorded(net)
    with pytest.warns(UserWarning, match="the step writes hits, seen, seconds, total and 5 more itself"):
        tfnb.fit(step, feeds, epochs=1, batch_size=BATCH, mode=mode)


@pytest.mark.parametrize("mode", ["sync", "allreduce"])
def test_a_watched_value_behind_a_count_is_that_of_all_rows_or_named(connect: Callable[..., Any], mode: str) -> None:
    net = Counting()
    connect(2)
    xs, ys = data()
    with tfnb.record():
        x, y = tfnb.placeholder(xs[:4]), tfnb.placeholder(ys[:4])
        loss = net(x, y)
        share = net.center.square().sum() + net.total
        step = tfnb.train.SGD(0.2).minimize(loss)
    told = {"sync": "sum over all rows in mid-step", "allreduce": "share is fetched or watched, and is no mean"}
    with pytest.warns(UserWarning, match=told[mode]):
        found = tfnb.fit(step, {x: xs, y: ys}, steps=1, batch_size=16, shuffle=False, mode=mode, watch={"share": share})
    if mode == "sync":
        assert found.history[0]["share"] == pytest.approx(float(net.center.square().sum() + net.total), rel=1e-12)


def test_watched_numbers_of_a_step_without_gradients_are_named_where_tasks_do_not_join_them(
    connect: Callable[..., Any],
) -> None:
    net = nn.Linear(5, 1).double()
    connect(2)
    with tfnb.record():
        x = tfnb.placeholder(data()[0][:4])
        root = net(x).square().mean().sqrt()
        tfnb.Variable(torch.tensor(0)).assign_add((x[:, 0] > 0).sum())
        counted = tfnb.effects()
    with pytest.warns(UserWarning, match="root is fetched or watched, and is no mean over rows"):
        tfnb.fit(counted, {x: data()[0]}, batch_size=16, watch={"root": root})


@pytest.mark.parametrize(
    "mode", ["sync", pytest.param(tfnb.train.LocalSGD(every=2), marks=pytest.mark.slow)], ids=["sync", "local"]
)
def test_watched_numbers_that_parts_do_not_tell_are_named(connect: Callable[..., Any], mode: Any) -> None:
    net = nn.Linear(5, 1).double()
    connect(2)
    with tfnb.record():
        x = tfnb.placeholder(data()[0][:4])
        out = net(x)
        watch = {"root": out.square().mean().sqrt(), "place": out.argmax(), "positive": (out > 0).sum()}
        step = tfnb.train.SGD(0.1).minimize(out.square().mean())
    with pytest.warns(UserWarning) as told:
        found = tfnb.fit(step, {x: data()[0]}, batch_size=16, mode=mode, watch=watch)
    text = [str(each.message) for each in told]
    assert [each.split(" is fetched or watched, and ")[1][:20] for each in text] == [
        "is a whole number th", "is no mean over rows",
    ]  # fmt: skip
    assert math.isnan(found.history[0]["place"]) and found.history[0]["positive"] > 0
