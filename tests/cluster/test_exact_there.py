"""`fit` on a cluster with a loss that is no mean over rows: the values are those of one machine."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.cluster.conftest import WORKERS, until, worker_processes, workers
from tfnb.errors import InvalidArgument


class Spread:
    """A layer, a count of its steps, and a loss of deviations and largest values over all rows."""

    def __init__(self, kind: str = "spread") -> None:
        torch.manual_seed(0)  # of the numbers that dropout draws
        gen = torch.Generator().manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)).double()
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=gen, dtype=torch.float64))
        self.rows = torch.randn(60, 3, generator=gen, dtype=torch.float64)
        self.count = tfnb.Variable(torch.zeros(1, dtype=torch.float64), name=f"count_{kind}")
        with tfnb.record(kind):
            self.x = tfnb.placeholder(self.rows[:8], name="x")
            out = self.layer(self.x)
            self.loss = out.std(0).sum() + out.amax(0).square().sum().sqrt()
            counted = self.count.assign_add(torch.ones(1, dtype=torch.float64))
            self.train = tfnb.group(
                tfnb.train.Momentum(0.05, 0.9).minimize(self.loss, list(self.layer.parameters())), counted
            )

    @property
    def state(self) -> list[torch.Tensor]:
        return [value.detach().clone() for value in self.layer.state_dict().values()]

    def fit(self, **options: Any) -> tfnb.RunResult:
        about = {"batch_size": 13, "epochs": 2, "watch": {"loss": self.loss}, "shuffle": False, **options}
        return tfnb.fit(self.train, about.pop("data", {self.x: self.rows}), **about)


@pytest.fixture(scope="module")
def here() -> tuple[list[torch.Tensor], list[float]]:
    net = Spread()
    result = net.fit()
    return net.state, [entry["loss"] for entry in result.history]


@pytest.fixture(autouse=True)
def _all_workers(dask: Any) -> Iterator[None]:
    """Those that tests kill are started again."""
    yield
    workers(dask, WORKERS)


def ensure_same(net: Spread, result: tfnb.RunResult, here: tuple[list[torch.Tensor], list[float]]) -> None:
    torch.testing.assert_close(net.state, here[0], rtol=1e-11, atol=1e-12)
    assert [entry["loss"] for entry in result.history] == pytest.approx(here[1], rel=1e-11)
    assert float(net.count.value()) == result.steps == 10


def test_the_values_are_those_of_one_machine(connect: Callable[..., Any], here: Any) -> None:
    """Batches of 13 rows and one of 8, twice; deviations, largest values, batch norm and dropout."""
    connect(3)
    net = Spread()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensure_same(net, net.fit(exact=True), here)


def test_a_loss_that_is_no_mean_is_exact_without_being_asked(connect: Callable[..., Any], here: Any) -> None:
    """It is told, once; the second training of the recording is exact, too."""
    connect(2)
    net = Spread("told")
    with pytest.warns(UserWarning, match=r"no mean over rows.*So tasks sum over all rows in mid-step"):
        net.fit(epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.fit(epochs=1)
    ensure_same_state(net, here)


def ensure_same_state(net: Spread, here: tuple[list[torch.Tensor], list[float]]) -> None:
    """The second pass began with the random numbers behind those of the first."""
    torch.testing.assert_close(net.state, here[0], rtol=1e-11, atol=1e-12)


def test_a_watched_variable_leaves_the_sums_exact(connect: Callable[..., Any], here: Any) -> None:
    connect(2)
    net = Spread("watched")
    result = net.fit(exact=True, watch={"loss": net.loss, "count": net.count})
    ensure_same(net, result, here)


def rooted(name: str) -> tuple[nn.Module, Any, dict[Any, torch.Tensor]]:
    """A root of a mean over rows: the layer, a step, and data."""
    torch.manual_seed(0)
    layer, rows = nn.Linear(3, 1).double(), torch.randn(40, 3, dtype=torch.float64)
    with tfnb.record(name):
        x = tfnb.placeholder(rows[:8])
        step = tfnb.train.SGD(0.001).minimize(layer(x).square().mean().sqrt())
    return layer, step, {x: rows}


def test_a_change_of_mode_names_a_loss_that_is_no_mean_and_exact_sums_keep_theirs(connect: Callable[..., Any]) -> None:
    connect(2)
    _, step, data = rooted("root")
    with pytest.warns(UserWarning, match="So tasks sum over all rows"):
        tfnb.fit(step, data, batch_size=8, epochs=1)

    def change(progress: tfnb.train.Progress) -> None:
        progress.change("allreduce" if progress.epoch == 1 else "sync")

    with pytest.warns(UserWarning, match="no mean over rows"):
        tfnb.fit(step, data, batch_size=8, epochs=2, mode="async", callbacks=[change])
    with pytest.warns(UserWarning, match="does not change to mode=allreduce.*tasks sum over all rows in mid-step"):
        tfnb.fit(step, data, batch_size=8, epochs=2, exact=True, callbacks=[change])


def test_a_change_to_the_mode_that_a_training_has_says_nothing(connect: Callable[..., Any]) -> None:
    connect(2)
    _, step, data = rooted("same")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback = lambda progress: progress.change("sync")  # noqa: E731
        tfnb.fit(step, data, batch_size=8, epochs=1, exact=True, callbacks=[callback])


@pytest.mark.slow
@pytest.mark.parametrize("is_iterated", [False, True])
def test_a_task_that_joins_a_training_of_one_sums_with_it(*, is_iterated: bool) -> None:
    """While there is one task it loops by itself, and the loss is not yet told to be no mean over rows."""
    (plain, *alone), (layer, step, data), tasks = rooted("alone"), rooted("joined"), []
    ((x, rows),) = data.items()
    batches = [{x: rows[at : at + 8]} for at in range(0, len(rows), 8)]
    given: dict[str, Any] = {"data": batches} if is_iterated else {"data": data, "batch_size": 8, "shuffle": False}
    with worker_processes(2) as client, tfnb.connect(client, ps=1) as cluster:

        def grow(progress: tfnb.train.Progress) -> None:
            if progress.epoch == 2:
                client.cluster.scale(3)
                until(lambda: len(cluster.tasks) == 2)
            tasks.append(len(cluster.tasks))

        tfnb.fit(step, **given, epochs=6, callbacks=[grow])
    tfnb.fit(*alone, batch_size=8, shuffle=False, epochs=6)
    assert tasks[0] == 1 and tasks[-1] == 2
    torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=1e-11, atol=1e-12)


class Adversaries:
    """A GAN, both of whose optimizers step in one step, and a buffer that counts numbers of the batch."""

    def __init__(self) -> None:
        gen = torch.Generator().manual_seed(4)
        self.make, self.judge = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
        with torch.no_grad():
            for parameter in (*self.make.parameters(), *self.judge.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=gen, dtype=torch.float64))
        self.make.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.rows = torch.randn(28, 2, generator=gen, dtype=torch.float64)
        self.optimizers = [torch.optim.Adam(net.parameters(), 0.05) for net in (self.judge, self.make)]

    def step(self, z: torch.Tensor) -> None:
        one, other = self.optimizers
        made, ones = self.make(z), torch.ones(z.shape[0], 1, dtype=torch.float64)
        one.zero_grad()
        F.binary_cross_entropy_with_logits(self.judge(made.detach()), 0 * ones).backward()
        one.step()
        other.zero_grad()
        F.binary_cross_entropy_with_logits(self.judge(made), ones).backward()
        other.step()
        self.make.count += (z > 0).sum()

    @property
    def state(self) -> list[torch.Tensor]:
        return [x.detach().clone() for net in (self.make, self.judge) for x in net.state_dict().values()]


def test_variables_that_are_written_from_the_rows_are_exact_without_being_asked(connect: Callable[..., Any]) -> None:
    plain, net = Adversaries(), Adversaries()
    for rows in plain.rows.split(8):
        plain.step(rows)
    with tfnb.record("adversaries"):
        z = tfnb.placeholder(net.rows[:8])
        net.step(z)
        step = tfnb.effects()
    connect(3)
    with pytest.warns(UserWarning, match=r"weight.*not along a gradient.*So tasks sum over all rows in mid-step"):
        tfnb.fit(step, {z: net.rows}, batch_size=8, shuffle=False)
    torch.testing.assert_close(net.state, plain.state, rtol=1e-11, atol=1e-12)


def test_batches_of_an_iterator_with_fewer_rows_than_tasks(connect: Callable[..., Any]) -> None:
    def rows(net: Spread) -> Iterator[dict[Any, torch.Tensor]]:
        for start, stop in ((0, 8), (8, 10), (10, 12), (12, 30)):
            yield {net.x: net.rows[start:stop]}

    expected, found = Spread("few_here"), Spread("few")
    tfnb.fit(expected.train, rows(expected))
    connect(3)
    tfnb.fit(found.train, rows(found), exact=True)
    torch.testing.assert_close(found.state, expected.state, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("member", ["task", "server"])
def test_a_killed_process_changes_no_value(connect: Callable[..., Any], here: Any, member: str) -> None:
    cluster = connect(3)
    net, kills = Spread(f"killed_{member}"), iter([True])

    def on_step(progress: Any) -> None:
        if progress.step == 4 and next(kills, False):
            engine = cluster._engine
            victim = engine.tasks[1] if member == "task" else engine.servers[0]
            os.kill(victim.info["pid"], signal.SIGKILL)

    killer = type("Killer", (), {"on_step": staticmethod(on_step)})()
    ensure_same(net, net.fit(exact=True, callbacks=[killer]), here)
    assert next(kills, None) is None


@pytest.mark.slow
def test_the_others_take_the_rows_of_a_task_that_does_not_come_back(without_nanny: Any, here: Any) -> None:
    net, kills = Spread("gone"), iter([True])

    def on_step(progress: Any) -> None:
        if progress.step == 4 and next(kills, False):
            victim = next(task for task in without_nanny._engine.tasks if task.name == "task:1")
            os.kill(victim.info["pid"], signal.SIGKILL)

    killer = type("Killer", (), {"on_step": staticmethod(on_step)})()
    ensure_same(net, net.fit(exact=True, callbacks=[killer]), here)
    assert next(kills, None) is None and without_nanny.tasks == ("task:0",)


def test_ops_that_one_task_does_with_all_rows_are_named_with_their_lines(connect: Callable[..., Any]) -> None:
    connect(2)
    rows = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends = []
    for exact in (True, False):
        weight = tfnb.Variable(torch.ones(3, dtype=torch.float64), name=f"weight_{exact}")
        with tfnb.record(f"sorted_{exact}"):
            x = tfnb.placeholder(rows[:4], name="x")
            scaled = x * weight
            loss = (scaled.sort(0).values[0] + scaled.var(0)).sum()
            train = tfnb.train.SGD(0.1).minimize(loss)
        if exact:
            with pytest.warns(
                UserWarning, match=r"exact=True: sort \(.*line \d+: .*\) cannot be divided by rows"
            ) as said:
                tfnb.fit(train, {x: rows}, batch_size=4, shuffle=False, exact=True)
            assert "var (" not in str(said[0].message)
        else:
            for start in (0, 4, 8):
                tfnb.Session(x.graph, compile="off").run(train, {x: rows[start : start + 4]})
        ends.append(weight.value())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mode": "async"}, "no task waits for the others"), ({"backup": 1}, "no task waits for the others"),
        ({"mode": "allreduce"}, "mode='sync'"), ({"microbatches": 2}, "one after the other"),
    ],
)  # fmt: skip
def test_modes_in_which_tasks_do_not_meet_are_refused(options: dict[str, Any], why: str) -> None:
    net = Spread("refused")
    with pytest.raises(InvalidArgument, match=why):
        net.fit(exact=True, **options)
