"""The scheduler is killed in mid-training (row 9): one typed error soon, whole steps here, another cluster after it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from distributed import Client

import tfnb
from tests.cluster.test_cuts import Counters
from tfnb.errors import SchedulerLost

SOON = 30.0  # seconds, on a busy machine; the client tries to reach its scheduler again before it gives up
WORKERS = 3
pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def processes(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A scheduler at a port, with workers under nannies: the scheduler's process."""
    address, quiet = f"tcp://127.0.0.1:{port}", {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port)]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--host", "127.0.0.1"]
    scheduler = subprocess.Popen([*dask, "--no-dashboard"], **quiet)
    workers = subprocess.Popen([*worker, "--nworkers", str(WORKERS), "--nthreads", "1", "--no-dashboard"], **quiet)
    try:
        yield scheduler
    finally:
        for one in (workers, scheduler):
            one.terminate()
        for one in (workers, scheduler):
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait(20)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_c63_row9_a_killed_scheduler_is_one_error_and_a_new_one_serves_the_same_notebook(mode):
    port, counters = free_port(), Counters()
    with processes(port) as scheduler, Client(f"tcp://127.0.0.1:{port}", set_as_default=False) as client:
        client.wait_for_workers(WORKERS, 120)
        cluster = tfnb.connect(client, ps=1)

        def rows():
            for step in range(1 << 40):
                if step == 200:
                    os.kill(scheduler.pid, signal.SIGKILL)
                    killed.append(time.monotonic())
                yield {counters.x: torch.ones(4)}

        killed: list[float] = []
        with pytest.raises(SchedulerLost, match=r"the Dask scheduler was lost at step \d+"):
            tfnb.fit(counters.train, rows(), mode=mode)
        assert time.monotonic() - killed[0] < SOON
        here = cluster.pulled_step
        assert counters.counts() == [here] * len(counters.counts())  # whole steps, as they were pulled last
        with pytest.warns(UserWarning, match="runs are here now"):
            tfnb.run(counters.train, {counters.x: torch.ones(4)})
        assert counters.counts() == [here + 1] * len(counters.counts())
        cluster.close()
    with processes(port), Client(f"tcp://127.0.0.1:{port}", set_as_default=False) as client:
        client.wait_for_workers(WORKERS, 120)
        with tfnb.connect(client, ps=1):
            tfnb.fit(counters.train, ({counters.x: torch.ones(4)} for _ in range(20)), mode=mode)
        assert counters.counts() == [here + 21] * len(counters.counts())
