"""A server that holds queues is killed in mid-training: each element counts once, and what others did is told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb
from tests.cluster.test_recovery import Each, _all_workers  # noqa: F401  # used by pytest
from tests.state.test_queues import in_thread
from tfnb.errors import ParameterServerLost

COUNT = 120
pytestmark = pytest.mark.filterwarnings("ignore:still waiting")


def kill_home(cluster: Any, queue: Any) -> None:
    """SIGKILL the server of a queue."""
    shard, _ = cluster._queues._here[queue]
    os.kill(cluster._engine.shards[shard].info["pid"], signal.SIGKILL)


class Summing:
    """A step that adds an element to a sum, and one that puts an element."""

    def __init__(self) -> None:
        self.total = tfnb.Variable(torch.zeros((), dtype=torch.float64), name="total")
        self.last = tfnb.Variable(torch.zeros((), dtype=torch.float64), name="last")
        with tfnb.record("summing"):
            self.x = tfnb.placeholder(torch.zeros((), dtype=torch.float64), name="x")
            self.train = [self.total.assign_add(self.x), self.last.assign(self.last * 1.01 + self.x)]

    def fit(self, queue: Any, on_step: Callable[[Any], None], **options: Any) -> tfnb.RunResult:
        return tfnb.fit(self.train, queue, feeds=self.x, watch=(), callbacks=[Each(on_step)], exact=False, **options)

    def sums(self) -> tuple[float, float]:
        return float(self.total.value()), float(self.last.value())


KINDS: dict[str, Callable[[], Any]] = {
    "fifo": lambda: tfnb.FIFOQueue(1000, torch.float64, (), name="fifo"),
    "padding": lambda: tfnb.PaddingFIFOQueue(1000, torch.float64, (), name="padding"),
    "shuffle": lambda: tfnb.RandomShuffleQueue(1000, 20, torch.float64, (), seed=3, name="shuffle"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_element_of_a_queue_on_a_killed_server_counts_once(connect: Any, kind: str) -> None:
    found = []
    for kills in ((), (20, 60)):
        problem, queue, left = Summing(), KINDS[kind](), list(kills)
        cluster = connect(2)
        queue.enqueue_many(torch.arange(COUNT, dtype=torch.float64))
        queue.close()

        def told(progress: Any, left: list[int] = left, cluster: Any = cluster, queue: Any = queue) -> None:
            if left and progress.step >= left[0]:
                left.pop(0)
                kill_home(cluster, queue)

        before = len(tfnb.recovery_log())
        result = problem.fit(queue, told)
        assert result.steps == COUNT and len(tfnb.recovery_log()) - before == len(kills)
        assert queue.size() == 0
        found.append(problem.sums())
        cluster.close()
    assert found[0] == found[1] and found[0][0] == COUNT * (COUNT - 1) / 2


def test_what_this_process_puts_and_takes_beside_a_training_stays_done(connect: Any) -> None:
    problem, cluster = Summing(), connect(2)
    queue = tfnb.FIFOQueue(10, torch.float64, (), name="filled")  # of little room: who puts waits
    other = tfnb.FIFOQueue(1000, torch.float64, (), name="other")
    other.enqueue_many(torch.arange(50, dtype=torch.float64))

    def fill() -> None:
        queue.enqueue_many(torch.arange(COUNT, dtype=torch.float64))
        queue.close()

    thread, failed = in_thread(fill)
    seen: list[float] = []

    def told(progress: Any) -> None:
        if not progress.again:
            seen.append(float(other.dequeue()))
            other.enqueue(torch.tensor(1000.0 + len(seen), dtype=torch.float64))
        if progress.step in (30, 70) and not progress.again:
            kill_home(cluster, (queue, other)[progress.step == 70])

    result = problem.fit(queue, told)
    thread.join(60)
    assert result.steps == COUNT and problem.sums()[0] == COUNT * (COUNT - 1) / 2, failed
    assert seen == [*range(50), *(1001.0 + n for n in range(COUNT - 50))]
    assert other.size() == 50 and float(other.dequeue()) == 1001.0 + COUNT - 50


def jobs_and_take() -> tuple[Any, Any]:
    """A queue, and a step that takes an element of it."""
    jobs = tfnb.FIFOQueue(100, torch.float64, (), name="jobs")
    with tfnb.record("beside"):
        taken = jobs.dequeue(sample=torch.tensor(0.0, dtype=torch.float64)) * 1
    return jobs, taken


def test_what_steps_of_run_took_since_the_copy_comes_again_and_is_told(connect: Any, capsys: Any) -> None:
    problem, queue, (jobs, taken) = Summing(), KINDS["fifo"](), jobs_and_take()
    cluster = connect(2)
    queue.enqueue_many(torch.arange(COUNT, dtype=torch.float64))
    queue.close()
    jobs.enqueue_many(torch.arange(5, dtype=torch.float64))
    seen: list[float] = []

    def told(progress: Any) -> None:
        if progress.step == 40 and not progress.again:
            seen.append(float(tfnb.run(taken)))
            kill_home(cluster, jobs)

    problem.fit(queue, told)
    assert problem.sums()[0] == COUNT * (COUNT - 1) / 2 and seen == [0.0]
    undone = dict(tfnb.recovery_log()[-1].undone).get("jobs", 0)
    assert jobs.size() == 4 + undone
    assert ("queue jobs" in capsys.readouterr().out.lower()) == bool(undone)


def test_a_queue_of_which_nobody_knows_what_it_held_ends_the_training(connect: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tfnb.cluster.notebook.variables_there.REFRESH", 600.0)
    problem, queue, (jobs, taken) = Summing(), KINDS["fifo"](), jobs_and_take()
    cluster = connect(2)
    queue.enqueue_many(torch.arange(COUNT, dtype=torch.float64))
    jobs.enqueue_many(torch.arange(5, dtype=torch.float64))

    def told(progress: Any) -> None:
        if progress.step == 10:
            tfnb.run(taken)
            assert jobs.dequeue_many(2).tolist() == [1, 2]  # which two, the step that came before decided
            kill_home(cluster, jobs)

    with pytest.raises(ParameterServerLost, match="nobody knows what queues jobs held"):
        problem.fit(queue, told)
