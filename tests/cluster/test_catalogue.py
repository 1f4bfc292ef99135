"""Faults in real processes: kernels that end their process, a Dask cluster that is restarted, what is never freed."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.cluster.conftest import WORKERS, workers
from tests.cluster.test_cuts import Counters
from tests.cluster.test_members import until
from tfnb.errors import ParameterServerLost, StepAborted, WorkerLost

_LIBRARIES: list[Any] = []  # registered as long as they are held


def define() -> None:
    """An op that does not return where its input is large."""
    with suppress(RuntimeError):  # a process has it already
        library = torch.library.Library("tfnbfaults", "FRAGMENT")
        library.define("leave(Tensor x, str how) -> Tensor")
        library.impl("leave", _leave, "CompositeExplicitAutograd")
        library.impl("leave", lambda x, how: torch.empty_like(x), "Meta")
        _LIBRARIES.append(library)


def _leave(x: torch.Tensor, how: str) -> torch.Tensor:
    if float(x[0]) > 1:
        if how == "exit":
            raise SystemExit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        ctypes.string_at(0)
    return x * 2


def test_c63_row26_a_kernel_that_wants_to_end_its_process(connect, dask) -> None:
    define(), dask.run(define)
    with tfnb.record("leaving") as graph:
        x = tfnb.placeholder(torch.ones(4), name="x")
        ways = {how: torch.ops.tfnbfaults.leave(x, how) for how in ("exit", "interrupt", "crash")}
        count = tfnb.Variable(torch.zeros(()), name="count", trainable=False)
        more = count.assign_add(1.0)
    cluster, session = connect(3), tfnb.Session(graph)
    session.run(more)
    pids = {member.info["pid"] for member in cluster._engine.tasks}
    for how, said in (("exit", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt")):
        with pytest.raises(StepAborted, match=f"a kernel raised {said}; nothing was written"):
            session.run([ways[how], more], {x: torch.full((4,), 9.0)})
        assert session.run(ways[how], {x: torch.ones(4)}).tolist() == [2.0] * 4
    assert {member.info["pid"] for member in cluster._engine.tasks} == pids and len(cluster.tasks) == 3
    with pytest.raises(WorkerLost, match="it seems to kill them: task:"):
        session.run([ways["crash"], more], {x: torch.full((4,), 9.0)}, timeout=100)
    until(lambda: len(cluster.tasks) == 3)
    session.run(more)
    assert count.value() == 2 and not cluster._engine.lost


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_c63_row27_a_dask_cluster_that_is_restarted_in_mid_training(connect, dask, mode: str) -> None:
    counters = Counters(shards=1)
    connect(3)
    restart = threading.Thread(target=lambda: dask.restart(wait_for_workers=False))
    rows = counters.rows(100_000, lambda step: restart.start() if step == 30 else None)
    with pytest.raises(ParameterServerLost, match="The local variables hold the last pulled values, of step") as lost:
        tfnb.fit(counters.train, rows, mode=mode, timeout=100)
    assert counters.counts() == [lost.value.details["pulled_step"]]
    with tfnb.connect(dask, ps=1, timeout=100):  # at once: workers still come and go
        tfnb.fit(counters.train, counters.rows(20), mode=mode, timeout=60)
    assert counters.counts() == [lost.value.details["pulled_step"] + 20]
    restart.join(60)
    workers(dask, WORKERS)


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    return threading.active_count(), len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.slow
def test_c13_threads_and_connections_stay_as_they_are(connect, dask) -> None:
    counters, feed = Counters(), torch.ones(4)
    connect(2)

    def work(runs: int, fits: int) -> list[tuple[int, int]]:
        for _ in range(fits):
            for mode in ("sync", "async"):
                tfnb.fit(counters.train, counters.rows(20), mode=mode)
        for _ in range(runs):
            tfnb.run(counters.train, {counters.x: feed})
        time.sleep(0.5)  # what ended is forgotten
        return [held(), *dask.run(held).values()]

    before = work(20, 2)
    after = work(100, 5)
    for (threads, files), (threads_now, files_now) in zip(before, after, strict=True):
        assert threads_now <= threads + 1 and files_now <= files + 3, (before, after)
