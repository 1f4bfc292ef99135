"""Replicas of pipelines over real tasks: the bits of the same call in one process, losses, and what is refused."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import Client
from torch import nn

import tfnb
from tests.cluster.conftest import stats, worker_processes, workers
from tests.cluster.test_kills_in_parts import pid_of
from tests.cluster.test_parts_there import assert_nothing_left, members
from tests.cluster.test_pipelines import Net, assert_same, one_thread
from tests.cluster.test_stage_servers import Each, homes, kill_itself
from tests.over_tasks import on
from tfnb.cluster.driver import Cluster
from tfnb.errors import DeadlineExceeded, InvalidArgument, NonFinite, WorkerLost

__all__ = ["one_thread"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:task.* no stage of this pipeline")  # there are five workers
STAGES, REPLICAS = 2, 2


class Two(Net):
    """The net in two stages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(on=lambda at: on(min(at, 1)), **options)

    def fit(self, **options: Any) -> Any:
        return super().fit(**{"mode": "pipeline", "replicas": REPLICAS, **options})


@pytest.fixture(scope="module")
def five() -> Iterator[Client]:
    """A client of five worker processes: a server, and two replicas of two stages."""
    with worker_processes(1 + STAGES * REPLICAS) as client:
        yield client


@pytest.fixture
def replicas(five: Client) -> Iterator[Callable[[Any], Cluster]]:
    """``replicas(ps)``: four tasks and a server, or five tasks that are servers."""
    made: list[Cluster] = []

    def connected(ps: Any) -> Cluster:
        workers(five, 1 + STAGES * REPLICAS)
        made.append(tfnb.connect(five, ps=ps, timeout=180))
        return made[-1]

    yield connected
    for cluster in made:
        cluster.close()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("ps", [1, "stages"])
def test_replicas_have_the_bits_of_replicas_in_one_process(replicas: Any, five: Client, ps: Any, schedule: str) -> None:
    """With dropout, batch norm, a short last batch, and validation, which the first replica computes."""
    here, there = Two(), Two()
    expected = here.fit(validation=here.data)
    cluster = replicas(ps)
    found = there.fit(schedule=schedule, validation=there.data)
    assert found.steps == expected.steps == cluster.step == 4
    assert found.history == expected.history
    assert_same(here, there)
    plans = [placed for _, placed in cluster._steps._placed.values() if len(placed.parts) == STAGES * REPLICAS]
    assert len(plans) == 1 and cluster._engine.windows.may_take(plans[0]) == (ps == "stages")
    if ps == "stages":
        assert set().union(*homes(cluster, there).values()) == {0, 1}  # the tasks of the first replica
    assert_nothing_left(five)


@pytest.mark.filterwarnings("ignore:.*recorded for B != 1")  # of batch norm: two rows are one microbatch
def test_replicas_where_the_sizes_of_batches_vary(replicas: Any) -> None:
    """Batches with fewer rows than microbatches, and than replicas; callbacks, and a training that goes on."""

    def losses(net: Two) -> list[float]:
        x, y = net.data
        items = [{x: net.data[x][:rows], y: net.data[y][:rows]} for rows in (9, 2, 16, 3)]
        told: list[float] = []

        def seen(progress: Any) -> None:
            told.append(progress.values["loss"].item())
            if progress.step == 2:
                progress.stop()

        for resume in (False, True):
            net.fit(data=items, batch_size=None, epochs=1, resume=resume, callbacks=Each(seen))
        return told

    here, there = Two(), Two()
    expected = losses(here)
    replicas(1)
    assert losses(there) == expected and len(expected) == 4
    assert_same(here, there)


def test_a_checkpoint_goes_on_with_another_number_of_replicas(replicas: Any, tmp_path: Any) -> None:
    here, there, other = (Two(make=lambda: tfnb.train.SGD(0.1, momentum=0.9)) for _ in range(3))
    here.fit(epochs=16, replicas=1)
    cluster = replicas("stages")
    stop = Each(lambda progress: progress.step == 3 and progress.stop())
    there.fit(epochs=16, checkpoint=tmp_path, callbacks=stop)
    done = cluster.step  # what stages had begun counts, too
    cluster.close()
    assert 3 <= done < 32
    again = replicas("stages")
    assert other.fit(epochs=16, replicas=1, resume=tmp_path).steps == 32 - done == again.step
    for one, two in zip(here.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-10, atol=1e-12)


def test_numbers_of_tasks_that_do_not_fit_are_refused_with_what_does(replicas: Any) -> None:
    net = Two()
    replicas(1)
    text = r"replicas=3 of 2 stages take 6 tasks.* there are 4 \(task:0, .*\): connect\(6\), or use replicas=2"
    with pytest.raises(InvalidArgument, match=text):
        net.fit(replicas=3)
    with pytest.raises(InvalidArgument, match=r"replicas=2 of 3 stages take 6 tasks.*connect\(6\), or leave out"):
        Net().fit(mode="pipeline", replicas=2)


def test_a_step_that_is_not_finite_names_the_task_of_the_replica_and_writes_nothing(replicas: Any) -> None:
    net = Two()
    replicas(1)
    before = net.state
    net.data[next(iter(net.data))][5, 2] = float("inf")  # of the second of four microbatches
    with pytest.raises(NonFinite, match=r"replica_1\.\w+") as found:
        net.fit(check="nan", shuffle=False)
    assert found.value.task == "task:2" and found.value.line is not None
    for name, value in net.state.items():
        assert (value == before[name]).all(), name


class Pair(Net):
    """Two stages without random numbers and statistics, of each step the same batch: only their number counts."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.layers = [nn.Linear(6, 6).double() for _ in range(2)]
        self.model = nn.Sequential(*self.layers)
        with tfnb.record() as self.graph:
            x, y = (tfnb.placeholder(torch.ones(2, 6).double(), name=name) for name in "xy")
            with on(0):
                h = torch.tanh(self.layers[0](x))
            with on(1):
                self.loss = self.count = F.mse_loss(self.layers[1](h), y)
            self.train = tfnb.train.SGD(0.1, momentum=0.9).minimize(self.loss)
        self.data = {x: torch.randn(9, 6).double(), y: torch.randn(9, 6).double()}

    def fit(self, steps: int = 2, **options: Any) -> Any:
        about = {"data": [self.data] * steps, "batch_size": None, "epochs": 1, "watch": {"loss": self.loss}}
        return super().fit(**{"mode": "pipeline", "replicas": REPLICAS, **about, **options})


@pytest.mark.parametrize("ps", [1, "stages"])
def test_ctrl_c_and_a_deadline_leave_whole_steps(replicas: Any, ps: Any) -> None:
    here, there = Pair(), Pair()
    cluster = replicas(ps)
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    begin = Each(lambda progress: progress.step == 3 and interrupt.start())
    with pytest.raises(KeyboardInterrupt):
        there.fit(100_000, callbacks=begin)
    assert all(core["staged"] == 0 for core in stats(cluster))
    with pytest.raises(DeadlineExceeded):
        there.fit(100_000, timeout=1)
    there.fit(2)
    steps = cluster.step
    cluster.close()
    assert 5 <= steps < 100_000
    here.fit(steps)
    assert_same(here, there)


@pytest.mark.slow
@pytest.mark.parametrize("task", range(STAGES * REPLICAS))
@pytest.mark.parametrize("ps", [1, "stages"])
def test_a_killed_task_of_a_replica_is_replaced_and_each_step_counts_once(replicas: Any, ps: Any, task: int) -> None:
    here, there = Two(), Two()
    expected = here.fit()
    cluster = replicas(ps)
    killed: list[int] = []

    def kill(progress: Any) -> None:
        if progress.step == 2 and not killed:
            killed.append(pid_of(members(cluster)[task]))
            os.kill(killed[-1], signal.SIGKILL)

    found = there.fit(callbacks=Each(kill))
    assert killed and found.steps == expected.steps == 4
    assert found.history == expected.history
    assert_same(here, there)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "is_before"), [("_computed", True), ("_agree", True), ("_agree", False)])
def test_a_task_of_the_second_replica_killed_within_a_window(
    replicas: Any, five: Client, method: str, is_before: bool
) -> None:
    """It holds no shard that is written, and all stages wait for its word."""
    here, there = Two(), Two()
    expected = [here.fit(epochs=epochs).history for epochs in (2, 8)]
    cluster = replicas("stages")
    first = there.fit(epochs=2).history
    address = members(cluster)[2].peer.addr
    five.run(kill_itself, method, is_before, 3, workers=[address])
    assert [first, there.fit(epochs=8).history] == expected
    assert members(cluster)[2].peer.addr != address
    assert_same(here, there)
    assert_nothing_left(five)


@pytest.mark.slow
def test_a_lost_task_without_a_successor_is_one_typed_error(replicas: Any, nobody_joins: Any) -> None:
    here, there, cluster = Pair(), Pair(), replicas(1)

    def kill(progress: Any) -> None:
        if progress.step == 2:
            os.kill(pid_of(members(cluster)[3]), signal.SIGKILL)

    with pytest.raises(WorkerLost, match=r"task:3 is gone"):
        there.fit(9, callbacks=Each(kill))
    steps = cluster.step
    cluster.close()
    assert 2 <= steps < 9
    here.fit(steps)
    assert_same(here, there)
