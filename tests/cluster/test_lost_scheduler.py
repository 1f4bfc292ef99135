"""The scheduler is killed in mid-training (row 9): one typed error soon, whole steps here, another cluster after it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client

import tfnb
from tests.cluster.conftest import worker_processes
from tests.cluster.test_cuts import Counters
from tests.cluster.test_recovery import Each, Net
from tfnb.errors import SchedulerLost

HERE = Path(__file__).parents[2]
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


def there(port: int) -> Any:
    """A client of the scheduler at a port, once it has its workers."""
    client = Client(f"tcp://127.0.0.1:{port}", set_as_default=False)
    client.wait_for_workers(WORKERS, 120)
    return client


def fitted(net: Net, folder: Path | None, each: Any = lambda progress: None, **options: Any) -> tfnb.RunResult:
    """Five passes, with a checkpoint now and then."""
    return tfnb.fit(
        net.train, net.data, epochs=5, batch_size=20, watch={"loss": net.loss}, exact=False, checkpoint=folder,
        checkpoint_every=0.2, callbacks=[Each(each)], **options,
    )  # fmt: skip


def dies(port: str, folder: str) -> None:
    """A notebook that is killed in mid-training."""
    tfnb.connect(there(int(port)), ps=1)

    def each(progress: Any) -> None:
        if progress.step >= 60 and any(Path(folder).glob("ckpt-*.json")):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)

    fitted(Net(), Path(folder), each)


def actors(client: Client) -> int:
    """Those that workers hold."""
    return sum(client.run(lambda dask_worker: len(dask_worker.state.actors)).values())


@pytest.mark.filterwarnings("ignore:no checkpoint of step")  # of one that was being written
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_training_goes_on_bit_for_bit_on_the_next_cluster(tmp_path: Path, has_checkpoint: bool) -> None:
    """From its last checkpoint, where there are some; else from the values that were pulled last."""
    port, whole, net, folder = free_port(), Net(), Net(), tmp_path / "first"
    killed: list[float] = []
    with processes(port) as scheduler, there(port) as client:
        cluster = tfnb.connect(client, ps=1)

        def each(progress: Any) -> None:
            if progress.step >= 60 and not killed and (any(folder.glob("ckpt-*.json")) or cluster.pulled_step):
                os.kill(scheduler.pid, signal.SIGKILL)
                killed.append(time.monotonic())
            time.sleep(0.02)

        with pytest.raises(SchedulerLost, match="at step") as caught:
            fitted(net, folder if has_checkpoint else None, each)
        assert time.monotonic() - killed[0] < SOON
        cluster.close()
    told = re.search(r"resume=True goes on from step (\d+),(.*) here or on another", caught.value.message)
    assert told is not None and (str(folder) in told[2]) == has_checkpoint, caught.value.message
    with worker_processes(WORKERS) as client:
        with tfnb.connect(client, ps=1):
            result = fitted(net, folder if has_checkpoint else None, resume=True)
            assert result.steps == 150 - int(told[1]) < 150
            assert [entry["step"] for entry in result.history][-1] == 150
        with tfnb.connect(client, ps=1):
            fitted(whole, None)
    torch.testing.assert_close(net.state(), whole.state(), rtol=0, atol=0)


def test_a_killed_notebook_leaves_nothing_and_another_one_goes_on_bit_for_bit(tmp_path: Path) -> None:
    port, whole, net = free_port(), Net(), Net()
    with processes(port), there(port) as client:
        code = f"from tests.cluster.test_lost_scheduler import dies; dies({str(port)!r}, {str(tmp_path / 'first')!r})"
        ended = subprocess.run([sys.executable, "-c", code], cwd=HERE, timeout=180, capture_output=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
        end = time.monotonic() + SOON
        while actors(client) and time.monotonic() < end:
            time.sleep(0.1)
        assert actors(client) == 0, "workers free what a killed notebook held"
        with tfnb.connect(client, ps=1):
            fitted(net, tmp_path / "first", resume=tmp_path / "first")
            fitted(whole, tmp_path / "whole")
    torch.testing.assert_close(net.state(), whole.state(), rtol=0, atol=0)
