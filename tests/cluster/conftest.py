"""One Dask cluster of processes for the whole folder, and small problems to train on it.

Tests connect to it with as many servers as they like; its nannies replace the workers that tests kill.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import distributed.comm.core
import pytest
import torch
import torch.nn.functional as F
from dask import config as dask_config
from distributed import Client, LocalCluster
from distributed.utils import get_mp_context
from torch import nn

import tfnb
from tfnb.cluster import connected
from tfnb.cluster.driver import Cluster
from tfnb.cluster.notebook.steps_there import batches
from tfnb.execution import Program, lower
from tfnb.graph import resources
from tfnb.state.queue_operations import QueueHandle

WORKERS = 4
SOON = 120.0  # seconds that a slow machine has
LASTING = weakref.WeakSet[QueueHandle]()  # queues that no collection frees: each looks at all that is imported
distributed.comm.core.random = random.Random()  # its retries would move Python's numbers, which hypothesis watches


@pytest.fixture(scope="session")
def dask() -> Iterator[Client]:
    """A client of four worker processes."""
    with worker_processes(WORKERS) as client:
        yield client


def one_by_one(cluster: Cluster, program: Program, data: Any, **options: Any) -> Generator[tuple[int, Any], None, None]:
    """Train: the cluster's step and the fetched values of each step, which are told in groups."""
    step = cluster.step
    with closing(cluster.train(program, data, **options)) as groups:
        for group in groups:
            for values in group.each():
                step += 1
                yield step, values


@contextmanager
def worker_processes(count: int, **options: Any) -> Iterator[Client]:
    """A client of that many, forked from one that has imported what they need: up in seconds."""
    gc.collect()  # queues of tests before, which may ask for servers that are not here
    settings = {
        "distributed.deploy.lost-worker-timeout": "24h",  # so long after a death a worker that is starting is closed
        "distributed.worker.multiprocessing-method": "forkserver",
    }
    with (
        dask_config.set(settings), _imported("distributed", "tfnb.cluster.tasks.task", "tests.cluster.settled"),
        LocalCluster(
            n_workers=count, threads_per_worker=1, processes=True, dashboard_address=None,
            preload=["tfnb.cluster.tasks.task"], silence_logs=50, **{"host": "127.0.0.1", **options},
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):  # fmt: skip
        yield client


@contextmanager
def _imported(*modules: str) -> Iterator[None]:
    """What the fork server imports before it forks; Dask sets a list of its own once, before that."""
    get_mp_context().set_forkserver_preload(list(modules))
    yield


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread of the process stands still: each goes on for an instant after it."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 60
    states: set[str] = set()
    while states != {"T"} and time.monotonic() < end:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        states = {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}
    assert states == {"T"}, states


def kill(member: Any) -> None:
    """SIGKILL to the process of a task or server of a cluster."""
    os.kill(member.info["pid"], signal.SIGKILL)


class KillingCallback:
    """A callback of steps that kills the last task, or the last server, of a cluster, once, after so many steps."""

    def __init__(self, cluster: Cluster, member: str, after: int = 40) -> None:
        self._cluster, self._member, self._after = cluster, member, after
        self.is_done = False

    def on_step(self, progress: Any) -> None:
        """Kill, if it is time."""
        if progress.step >= self._after and not self.is_done:
            self.is_done = True
            engine = self._cluster._engine
            kill((engine.tasks if self._member == "task" else engine.servers)[-1])


def until(is_so: Callable[[], object], seconds: float = SOON) -> None:
    """Wait until it is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def workers(client: Client, least: int) -> int:
    """How many workers answer, as soon as there are ``least``: a killed one has its successor some seconds later."""
    end = time.monotonic() + 180
    while True:
        found = len(client.run(lambda: 0, on_error="ignore"))
        if found >= least:
            return found
        assert time.monotonic() < end, f"{found} of {least} workers"
        time.sleep(0.2)


@pytest.fixture
def connect(dask: Client) -> Iterator[Callable[..., Cluster]]:
    """``connect(tasks)``: that many compute tasks; all other workers, at least one, are servers."""
    gc.collect()  # queues of tests before, which would move to servers, and keep a training from going on by itself
    made: list[Cluster] = []
    if not LASTING.issuperset(resources.all_of(QueueHandle)):
        gc.collect()  # queues of earlier tests would go to these servers, too
        LASTING.update(resources.all_of(QueueHandle))

    def connect(tasks: int = 3) -> Cluster:
        made.append(tfnb.connect(dask, ps=workers(dask, WORKERS) - tasks, timeout=180))
        assert len(made[-1].tasks) == tasks
        return made[-1]

    yield connect
    for cluster in made:
        cluster.close()
    assert connected.connected() is None
    assert dask.status == "running", "we close only what we opened"


@pytest.fixture
def without_nanny() -> Iterator[Cluster]:
    """A cluster whose task:1 runs in a worker process that no nanny starts again."""
    with worker_processes(2) as client:
        command = [sys.executable, "-m", "distributed.cli.dask_worker", client.scheduler.address, "--no-nanny"]
        command += ["--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1"]
        by_hand = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with tfnb.connect(client, ps=1, timeout=SOON) as cluster:
                until(lambda: len(cluster.tasks) == 2)
                assert not next(task for task in cluster._engine.tasks if task.name == "task:1").info["nanny"]
                yield cluster
        finally:
            os.kill(by_hand.pid, signal.SIGCONT)
            by_hand.kill()
            by_hand.wait(30)


@pytest.fixture
def started_afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[forkserver.ForkServer]:
    """Worker processes start as those of a user do: from a fork server that `tfnb.connect` starts."""
    own = forkserver.ForkServer()
    for name in ("ensure_running", "get_inherited_fds", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(own, name))
    yield own
    own._stop()


@pytest.fixture
def nobody_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster connected later sees no worker that comes, and waits for none."""
    monkeypatch.setattr("tfnb.cluster.members.supervisor.LOOK", 3600.0)
    monkeypatch.setattr("tfnb.cluster.members.registered.Registration.heed", lambda self, heard: None)
    monkeypatch.setattr("tfnb.cluster.engine.engine.REPLACED_WITHIN", 0.0)


def epoch() -> int:
    """Of the connected cluster."""
    return int(connected.connected()._engine.epoch)  # type: ignore[attr-defined, union-attr]


def stats(cluster: Cluster) -> list[dict[str, Any]]:
    """What each server says of itself."""
    return list(cluster._do("stat", 60, cluster._engine.stats, 60.0).values())


@dataclass
class Problem:
    """A small classifier, its batches, and the local run that others are measured against."""

    graph: tfnb.Graph
    program: Program
    data: torch.Tensor
    labels: torch.Tensor
    train: Any
    loss: Any
    feeds: tuple[Any, Any]
    start: list[torch.Tensor]

    def batch(self, run: int, size: int) -> list[torch.Tensor]:
        at = torch.arange(run * size, run * size + size) % len(self.data)
        return [self.data[at], self.labels[at]]

    def batches(self, steps: int, size: int = 12, last: int | None = None):
        """``steps`` batches; the last one may be short."""
        found = [(self.batch(run, size), run) for run in range(steps)]
        if last is not None:
            found[-1] = ([t[:last] for t in found[-1][0]], steps - 1)
        return batches(self.program, found)

    def values(self) -> list[torch.Tensor]:
        return [v.storage.clone() for v in self.graph.variables]

    def reset(self) -> None:
        for v, value in zip(self.graph.variables, self.start, strict=True):
            v.storage.copy_(value)

    def local(self, steps: int, **kwargs: Any) -> tuple[list[list[torch.Tensor]], list[float]]:
        """States before and after each local step, and the losses; the variables are put back."""
        before = self.values()
        states, losses = [self.values()], []
        for batch in self.batches(steps, **kwargs):
            out, pending = self.program.compute(
                list(batch.tensors), [v.storage for v in self.program.variables], batch.run_index
            )
            self.program.commit(pending)
            states.append(self.values())
            losses.append(float(out[1]))
        for v, value in zip(self.graph.variables, before, strict=True):
            v.storage.copy_(value)
        return states, losses


def close_to(a: list[torch.Tensor], b: list[torch.Tensor], rtol: float = 1e-6) -> bool:
    """Whether two states are equal within ``rtol`` of each tensor's size."""
    return all(bool(((x - y).abs() <= rtol * (1.0 + y.abs())).all()) for x, y in zip(a, b, strict=True))


@pytest.fixture
def problem() -> Callable[..., Problem]:
    """``problem(optimizer)``."""

    def make(optimizer: Any = None, *, dtype: torch.dtype = torch.float64, hidden: int = 8) -> Problem:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3)).to(dtype)
        data, labels = torch.randn(60, 4, dtype=dtype), torch.randint(0, 3, (60,))
        with tfnb.record("problem") as g:
            x, y = tfnb.placeholder(data[:5], name="x"), tfnb.placeholder(labels[:5], name="y")
            loss = F.cross_entropy(model(x), y)
            train = (optimizer or tfnb.train.Adam(1e-2)).minimize(loss)
        program = lower(g, (train.value, loss.value), (x.value, y.value))
        made = Problem(g, program, data, labels, train, loss, (x, y), [])
        made.start = made.values()
        return made

    return make
