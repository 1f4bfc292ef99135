"""The cluster, the Dask client and Dask's own cluster are closed in any order: no traceback, no hang."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client

import tfnb
from tests.cluster.conftest import worker_processes
from tests.cluster.test_cuts import Counters
from tests.state.test_queues import in_thread
from tfnb.cluster import connected
from tfnb.cluster.server.core import Core
from tfnb.cluster.tasks.task import ClusterTask
from tfnb.errors import Aborted, FailedPrecondition
from tfnb.state.store import Store

STEPS, RATE = 3, 0.5


def trained(cluster: Any) -> tuple[torch.nn.Parameter, Any, Any, Any, Any]:
    """A cluster that took steps, whose values are not here yet, and a queue there that holds an element."""
    weight, queue = torch.nn.Parameter(torch.zeros(3)), tfnb.FIFOQueue(5, torch.float32, (), name="ends")
    with tfnb.record("ending"):
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        step = tfnb.train.SGD(RATE).minimize((x * weight).sum(1).mean())
    own = tfnb.connect(cluster, ps=1, timeout=180)
    queue.enqueue(7.0)
    for _ in range(STEPS):
        tfnb.run(step, {x: torch.ones(2, 3)})
    return weight, queue, step, x, own


def test_a_client_that_is_closed_first_brings_the_values_home(dask, caplog) -> None:
    client = Client(dask.scheduler.address, set_as_default=False)  # in an event loop of its own, which ends with it
    weight, queue, step, x, own = trained(client)
    with torch.no_grad():
        own.pull(), weight[0].fill_(5.0)  # written here, and not sent yet
    client.close()
    assert connected.connected() is None and weight.tolist() == [5.0, -1.5, -1.5]
    own.close(), own.close()
    with pytest.warns(UserWarning, match="the Dask client was closed: the values came home, and runs are here now"):
        tfnb.run(step, {x: torch.ones(2, 3)})
    assert weight.tolist() == [4.5, -2.0, -2.0] and queue.dequeue() == 7
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.slow
@pytest.mark.parametrize("order", [*itertools.permutations(("ours", "client", "workers"))], ids="-".join)
def test_every_order_of_closing(order, caplog, capfd) -> None:
    with worker_processes(2) as client:
        weight, queue, step, x, own = trained(client)
        close = {"ours": own.close, "client": client.close, "workers": client.cluster.close}
        begin = time.monotonic()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for which in order:
                close[which]()
            lost = [str(warning.message) for warning in found if "last values" in str(warning.message)]
            tfnb.run(step, {x: torch.ones(2, 3)})
        assert time.monotonic() - begin < 100  # 5 on a quiet machine; what waits for the closed ones waits longer
    if order[0] == "workers":
        assert len(lost) == 1, ([str(w.message) for w in found], own._engine.lost, own._waiting.is_loss_told)
        assert re.search(r"pulled values, of step 0, [\d.]+ s old: 3 later steps are gone", lost[0])
        assert weight.tolist() == [-0.5] * 3 and queue.size() == 0
    else:
        assert not lost and weight.tolist() == [-2.0] * 3 and queue.dequeue() == 7
    ours = [r.name for r in caplog.records if r.levelno >= logging.ERROR and not r.name.startswith("distributed")]
    assert not ours and "Task exception was never" not in caplog.text + capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("connect", ["2", "Client(n_workers=2, threads_per_worker=1, dashboard_address=None)"])
def test_a_process_that_ends_without_closing_anything(connect, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, tfnb\nfrom distributed import Client\nfrom tests.cluster.test_ending import trained\n"
        f"if __name__ == '__main__':\n    kept = trained({connect})\n    print('trained')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=150, env=_with_tests())
    assert done.returncode == 0 and done.stdout.strip().endswith("trained"), done
    assert "Traceback" not in done.stderr and "never retrieved" not in done.stderr, done.stderr


def _with_tests() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.slow
def test_a_fit_whose_cluster_another_thread_closes_says_so_and_leaves_whole_steps(dask: Client) -> None:
    c, source = Counters(), random.Random(0)
    for _ in range(6):
        cluster = tfnb.connect(dask, ps=2, timeout=180)
        thread, found = in_thread(lambda: tfnb.fit(c.train, {c.x: torch.ones(400_000)}, batch_size=4))
        time.sleep(source.uniform(0.0, 0.3))
        cluster.close()
        thread.join(60)
        assert isinstance(found[0], Aborted | FailedPrecondition) and "closed" in str(found[0]), found
        assert len(set(c.counts())) == 1


KILLED = """
import os, signal, sys, tfnb, torch
from tests.cluster.test_ending import trained
trained(sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["closed", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_notebook_that_ends_leaves_no_threads_and_no_values_in_the_workers(dask, how) -> None:
    def left(dask_worker):
        named = [thread.name for thread in threading.enumerate() if thread.name.startswith("tfnb")]
        return named + [type(thing).__name__ for thing in gc.get_objects() if type(thing) in (Core, Store, ClusterTask)]

    def let_collect(may: bool) -> None:
        gc.collect()
        gc.enable() if may else gc.disable()  # of its own accord it comes, at some time

    address = dask.scheduler.address
    dask.run(let_collect, False)
    try:
        if how == "closed":
            with Client(address, set_as_default=False) as client:
                _, _, step, x, own = trained(client)
                tfnb.fit(step, {x: torch.ones(64, 3)}, batch_size=2)
                assert len([name for names in dask.run(left).values() for name in names if name == "Core"]) == 1
                own.close()
        else:
            subprocess.run([sys.executable, "-c", KILLED, address], timeout=120, env=_with_tests())
        end = time.monotonic() + 60
        while any(found := dask.run(left).values()):
            assert time.monotonic() < end, found
            time.sleep(0.2)
    finally:
        dask.run(let_collect, True)


LEFT_OPEN = """
import atexit, threading
named = lambda: [thread.name for thread in threading.enumerate()]
atexit.register(lambda: print([name for name in named() if name.startswith("tfnb-server")]))
from distributed import Client
from tests.cluster.test_ending import trained
if __name__ == "__main__":
    held = trained(Client(processes=False, n_workers=2, threads_per_worker=1, dashboard_address=":0"))
"""


@pytest.mark.slow
def test_a_process_that_holds_servers_and_ends_waits_for_their_threads(tmp_path) -> None:
    file = tmp_path / "left_open.py"
    file.write_text(LEFT_OPEN)
    ended = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120, env=_with_tests())
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["[]"]), ended.stderr


TOGETHER = """
import gc, time, weakref
from distributed import Client
import tfnb
from tfnb.cluster.tasks.task import ClusterTask
if __name__ == "__main__":
    client = Client(processes=False, n_workers=8, threads_per_worker=1, dashboard_address=":0")
    cluster = tfnb.connect(client, ps=2, timeout=100)
    held = [weakref.ref(thing) for thing in gc.get_objects() if type(thing) is ClusterTask]
    gc.collect(), gc.disable()
    before, end = gc.get_stats()[2]["collections"], time.monotonic() + 60
    cluster.close()
    while any(task() is not None for task in held) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(5)
    print(len(held), gc.get_stats()[2]["collections"] - before)
"""


@pytest.mark.slow
def test_tasks_of_one_process_that_end_together_are_collected_together(tmp_path) -> None:
    """A collection looks at all that is imported, and the process stands still meanwhile."""
    file = tmp_path / "together.py"
    file.write_text(TOGETHER)
    ended = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=200, env=_with_tests())
    tasks, collections = map(int, ended.stdout.split())
    assert tasks == 8 and collections <= 3, ended.stderr
