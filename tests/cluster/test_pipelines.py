"""Pipelines over real tasks: the bits of microbatches in one process, and what a pipeline refuses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.cluster.test_kills_in_parts import AT_TASKS, kill_at, pid_of
from tests.cluster.test_parts_there import assert_nothing_left, members
from tests.over_tasks import on
from tfnb.errors import InvalidArgument, NonFinite, Unimplemented, WorkerLost


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products here by one thread, as on tasks: MKL's sums depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ROWS = 25  # of batches of 16: microbatches of 4 rows, then of 3, 2, 2, 2


class Net:
    """A step in stages, always from the same weights, with dropout and batch norm, and its data.

    Requests are soft, so that the same graph trains in one process.
    """

    def __init__(
        self, *, stages: int = 3, dtype: torch.dtype = torch.float64, make: Any = None, on: Any = on
    ) -> None:  # fmt: skip
        torch.manual_seed(7)
        more = [nn.BatchNorm1d(6, dtype=dtype), nn.Identity(), nn.Identity()]
        self.layers = [nn.Sequential(nn.Linear(6, 6, dtype=dtype), more[at % 3]) for at in range(stages)]
        self.model = nn.Sequential(*self.layers)
        data = torch.randn(ROWS, 6, dtype=dtype), torch.randn(ROWS, 6, dtype=dtype)
        with tfnb.record() as self.graph:
            x = h = tfnb.placeholder(torch.ones(2, 6, dtype=dtype), name="x")
            y = tfnb.placeholder(torch.ones(2, 6, dtype=dtype), name="y")
            for at, layer in enumerate(self.layers):
                with on(at):
                    h = F.dropout(torch.tanh(layer(h)), 0.2)
            with on(stages - 1):
                self.loss = F.mse_loss(h, y)
                self.count = (h > y).sum()
            optimizer = (make or (lambda: tfnb.train.Adam(0.01)))()
            self.train = optimizer.minimize(self.loss)
        self.data = dict(zip((x, y), data, strict=True))

    def fit(self, **options: Any) -> Any:
        about = {"microbatches": 4, "batch_size": 16, "epochs": 2, "watch": {"loss": self.loss, "n": self.count}}
        about["exact"] = False  # batch norm in training is no mean over rows
        return tfnb.fit(self.train, **{"data": self.data, **about, **options})

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def assert_same(one: Net, other: Net) -> None:
    for name, value in one.state.items():
        assert torch.equal(value, other.state[name]), name


def test_a_shard_with_the_number_of_a_stage_is_not_the_stage(connect) -> None:
    """The only Variables are those of the first stage, and lie on shard 0, which is no part of task 0."""
    data, found = torch.randn(24, 6, dtype=torch.float64), []
    for make in (lambda: None, lambda: connect(2)):
        torch.manual_seed(7)
        layer = nn.Linear(6, 6, dtype=torch.float64)
        with tfnb.record():
            x = tfnb.placeholder(data[:2], name="x")
            with on(0):
                h = layer(x)
            with on(1):
                loss = torch.tanh(h).square().mean()
            train = tfnb.train.SGD(0.1).minimize(loss)
        mode = "sync" if make() is None else "pipeline"
        found.append(tfnb.fit(train, {x: data}, batch_size=8, microbatches=2, mode=mode, watch=loss).history)
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_has_the_bits_of_microbatches_in_one_process(connect, dask, schedule, dtype) -> None:
    here, there = Net(dtype=dtype), Net(dtype=dtype)
    expected = here.fit(validation=here.data)
    connect(3)
    found = there.fit(mode="pipeline", schedule=schedule, validation=there.data)
    assert found.steps == expected.steps == 4
    assert found.history == expected.history
    assert_same(here, there)
    assert_nothing_left(dask)


def test_callbacks_an_interrupted_training_and_batches_of_an_iterable(connect) -> None:
    """Two calls, the second with resume; steps are told with their values; a rate that a callback sets holds next."""
    here, there = Net(), Net()

    class Seen:
        def __init__(self, net: Net, last: int) -> None:
            self.net, self.last, self.losses = net, last, []

        def on_step(self, progress: Any) -> None:
            self.losses.append(progress.values["loss"].item())
            if progress.step == self.last:
                progress.stop()

    def losses(net: Net, **options: Any) -> list[float]:
        first, rest = Seen(net, 3), Seen(net, 99)
        net.fit(callbacks=first, **options)
        assert net.fit(callbacks=rest, resume=True, **options).steps == 1
        x, y = net.data
        items = [{x: net.data[x][:8], y: net.data[y][:8]}, {x: net.data[x][8:17], y: net.data[y][8:17]}]
        net.fit(callbacks=rest, data=items, batch_size=None, epochs=1, **options)
        return [*first.losses, *rest.losses]

    expected = losses(here)
    connect(3)
    assert losses(there, mode="pipeline") == expected
    assert len(expected) == 3 + 1 + 2
    assert_same(here, there)


def test_a_step_that_is_not_finite_names_the_stage_and_writes_nothing(connect) -> None:
    net = Net()
    connect(3)
    net.fit(mode="pipeline", check="nan")
    before = net.state
    net.data[next(iter(net.data))][7, 2] = float("inf")
    with pytest.raises(NonFinite, match=r"(?s)batch_norm.* in iteration 2 of its loop") as found:
        net.fit(mode="pipeline", check="nan", shuffle=False)
    assert found.value.task == "task:0" and found.value.line is not None
    for name, value in net.state.items():
        assert torch.equal(value, before[name]), name


def test_what_a_pipeline_refuses(connect) -> None:
    net, plain = Net(), nn.Linear(6, 6)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2, 6), name="x")
        train = tfnb.train.SGD(0.1).minimize(plain(x).square().mean())
    connect(3)
    with pytest.raises(InvalidArgument, match=r"takes a step in stages, and none of its nodes asks for a task"):
        tfnb.fit(train, {x: torch.ones(8, 6)}, mode="pipeline", microbatches=2)
    with pytest.raises(Unimplemented, match=r"of mode='pipeline', and a cluster is connected"):
        net.fit()
    with pytest.raises(InvalidArgument, match=r"does not go on in mode='sync'"):
        net.fit(mode="pipeline", callbacks=lambda progress: progress.change("sync"))
    watch = tfnb.watch(net.loss)
    with pytest.raises(Unimplemented, match=r"take tfnb.watch off"):
        net.fit(mode="pipeline")
    watch.stop()


class Unplaced(Net):
    """A step whose stages are made by `tfnb.place`; in a process without tasks they are dropped."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)))
        with tfnb.record() as self.graph:
            x, y = tfnb.placeholder(torch.ones(4, 6), name="x"), tfnb.placeholder(torch.ones(4, 6), name="y")
            h = self.model(x)
            self.loss, self.count = F.mse_loss(h, y), (h > y).sum()
            self.train = tfnb.train.Adam(0.01).minimize(self.loss)
        self.data = dict(zip((x, y), (torch.randn(ROWS, 6), torch.randn(ROWS, 6)), strict=True))
        self.stages = tfnb.place([self.loss, self.train], stages=3, soft=True).stages


def test_stages_that_place_makes_train_as_one_device_does(connect) -> None:
    here, there = Unplaced(), Unplaced()
    assert [str(stage.place) for stage in there.stages] == ["task:0", "task:1", "task:2"]
    expected = here.fit()
    connect(3)
    found = there.fit(mode="pipeline")
    for one, other in zip(found.history, expected.history, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)  # the two were measured, and cut, apart
    for name, value in here.state.items():
        torch.testing.assert_close(there.state[name], value)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(3))
def test_a_stage_killed_in_mid_training_is_replaced_and_each_step_counts_once(connect, dask, stage: int) -> None:
    here, there = Net(), Net()
    expected = here.fit()
    cluster = connect(3)
    killed: list[int] = []

    def kill(progress: Any) -> None:
        if progress.step == 2:
            killed.append(pid_of(members(cluster)[stage]))
            os.kill(killed[-1], signal.SIGKILL)

    class Killer:
        on_step = staticmethod(kill)

    found = there.fit(mode="pipeline", callbacks=Killer())
    assert killed and found.steps == expected.steps == cluster.step == 4
    assert found.history == expected.history
    assert_same(here, there)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["wants a value", "told a value", "computed"])
def test_a_stage_killed_inside_of_a_step_without_a_successor_is_one_typed_error(
    connect, dask, nobody_joins, state: str
) -> None:
    there, cluster = Net(), connect(3)
    there.fit(mode="pipeline")
    before = there.state
    (found,) = (one for one in AT_TASKS if one.name == state)
    victim = members(cluster)[1]
    pid = pid_of(victim)
    dask.run(kill_at, victim.peer, found, pid, workers=[victim.peer.addr])
    with pytest.raises(WorkerLost, match=r"task:2, and task:1 is gone; nothing of it was written") as e:
        there.fit(mode="pipeline")
    assert e.value.step == cluster.step == 4
    for name, value in there.state.items():
        assert torch.equal(value, before[name]), name
