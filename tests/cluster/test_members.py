"""Workers that come while a notebook is connected take part from the next step; those that leave cost nothing."""

from __future__ import annotations

import builtins
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
import torch
from distributed import Client

import tfnb
from tests.cluster.conftest import SOON, stop, until, worker_processes
from tests.cluster.test_cuts import Counters
from tfnb.cluster import driver
from tfnb.cluster.wire.messages import Refusal
from tfnb.errors import ParameterServerLost, TfnbError

MODES = {
    "sync": {},
    "backup": {"backup": 1},
    "async": {"mode": "async"},
    "bounded": {"mode": "bounded", "staleness": 1},
}


def kill(member):
    os.kill(member.info["pid"], signal.SIGKILL)


def member_of(cluster, name):
    """The latest task of a name."""
    return cluster._engine.places[name]


def applied(cluster):
    """How many steps each server wrote that holds something."""
    stats = cluster._do("stat", 5, cluster._engine.stats, 5.0).values()
    return {stat["version"] - 1 for stat in stats if stat["variables"]}


def rows(c, is_so, after=40, at=None):
    """Batches until it is so, and ``after`` more; a function of ``at`` is called when that one is drawn."""
    end, drawn = time.monotonic() + SOON, 0
    while not is_so():
        assert time.monotonic() < end, "it took too long"
        if at is not None and drawn == at[0]:
            at[1]()
        drawn += 1
        yield {c.x: torch.ones(4)}
    for _ in range(after):
        yield {c.x: torch.ones(4)}


def computes(cluster, name, pid):
    """Whether another process than ``pid`` computed steps as the task of a name."""
    member = member_of(cluster, name)
    return member.info["pid"] != pid and len(member.seconds) > 0


@pytest.mark.parametrize("mode", MODES)
def test_c60_a_killed_task_is_back_in_mid_training_and_no_step_is_lost_or_doubled(connect, mode, caplog):
    caplog.set_level(logging.INFO, logger="tfnb.fit")
    c = Counters()
    cluster = connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    old = member_of(cluster, "task:1")
    data = rows(c, lambda: computes(cluster, "task:1", old.info["pid"]), at=(30, lambda: kill(old)))
    done = tfnb.fit(c.train, data, **MODES[mode])
    assert cluster.tasks == ("task:0", "task:1")
    assert cluster.step == done.steps + 1 and applied(cluster) == {cluster.step}
    assert c.counts() == [float(cluster.step)] * 2
    said = [line for line in caplog.messages if "task:1 (tcp://" in line]
    assert len(said) == 2 and "left at step" in said[0] and said[0].endswith("1 compute task now")
    assert "joined at step" in said[1] and said[1].endswith("2 compute tasks now")
    assert "joined at step" in str(cluster.status()) and "are lost" not in str(cluster.status())


@pytest.mark.parametrize("mode", MODES)
def test_training_waits_for_the_only_task_to_come_back(connect, mode):
    if mode == "backup":
        pytest.skip("one task has no spare one")
    c = Counters()
    cluster = connect(1)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    old = member_of(cluster, "task:0")
    data = rows(c, lambda: computes(cluster, "task:0", old.info["pid"]), at=(30, lambda: kill(old)))
    done = tfnb.fit(c.train, data, **MODES[mode])
    assert cluster.step == done.steps + 1 and applied(cluster) == {cluster.step}
    assert c.counts() == [float(cluster.step)] * 2


def test_runs_are_bitwise_those_of_here_after_the_only_task_was_replaced(connect, problem):
    p = problem()
    states, losses = p.local(12)
    cluster = connect(1)
    for run in range(12):
        if run == 6:
            kill(member_of(cluster, "task:0"))  # the next run meets the dead one, and waits for its successor
        out = cluster.run(p.program, p.batch(run, 12), run=run, timeout=SOON)
        assert float(out[1]) == losses[run]
    cluster.pull()
    assert cluster.step == 12
    assert all(torch.equal(a, b) for a, b in zip(p.values(), states[12], strict=True))


def test_a_step_asked_of_a_task_runs_on_its_successor(connect):
    cluster = connect(2)
    with tfnb.record("pinned"):
        x = tfnb.placeholder(torch.ones(3), name="x")
        with tfnb.device("task:0"):
            y = x * 2
    pid = member_of(cluster, "task:0").info["pid"]
    assert tfnb.run(y, {x: torch.ones(3)}).tolist() == [2, 2, 2]
    kill(member_of(cluster, "task:0"))
    assert tfnb.run(y, {x: torch.ones(3)}, timeout=SOON).tolist() == [2, 2, 2]
    assert member_of(cluster, "task:0").info["pid"] != pid


def deadly():
    """Register an op that ends its process, or raises what should end it, if it is fed so."""
    if hasattr(builtins, "deadly"):
        return
    library = torch.library.Library("deadly", "DEF")
    library.define("end(Tensor x) -> Tensor")

    def end(x):
        how = int(x.flatten()[0])
        if how == 1:
            raise SystemExit(3)
        if how == 2:
            raise KeyboardInterrupt
        if how == 3:
            ctypes.string_at(0)
        if how == 4:
            os._exit(1)
        return x + 1

    library.impl("end", end, "CPU")
    torch.library.register_fake("deadly::end", torch.empty_like, lib=library)
    builtins.deadly = library  # for as long as the process lives


@pytest.mark.slow
def test_c63_row26_a_kernel_that_raises_an_exit_or_ends_its_process_writes_nothing(own):
    deadly()
    own.run(deadly)
    with tfnb.record("deadly"):
        x = tfnb.placeholder(torch.zeros(3), name="x")
        total = tfnb.Variable(torch.zeros(()), name="total")
        step = total.assign_add(torch.ops.deadly.end(x).sum())
    with tfnb.connect(own, ps=1, timeout=SOON) as cluster:
        for taken, how in enumerate((1.0, 2.0, 3.0, 4.0)):
            pids = {name: member.info["pid"] for name, member in cluster._engine.places.items()}
            with pytest.raises(TfnbError):
                tfnb.run(step, {x: torch.full((3,), how)}, timeout=SOON)
            until(lambda: len(cluster.tasks) == 2)
            if how < 3:
                assert {name: member.info["pid"] for name, member in cluster._engine.places.items()} == pids
            else:
                until(lambda: len(own.run(deadly, on_error="ignore")) == 3)
            assert tfnb.run(step, {x: torch.zeros(3)}, timeout=SOON).item() == 3.0 * (taken + 1)
    assert total.value().item() == 12


# -- clusters that grow and shrink -------------------------------------------------------------------------------------


@pytest.fixture
def own():
    """A cluster of three workers, which the test may scale, and its Client."""
    with worker_processes(3) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_c60_workers_that_are_added_in_mid_training_take_part(own, mode):
    c = Counters()
    with tfnb.connect(own, ps=1, timeout=SOON) as cluster:
        tfnb.run(c.train, {c.x: torch.ones(4)})

        def is_wide():
            return {"task:2", "task:3"} <= {m.name for m in cluster._engine.tasks if m.seconds}

        done = tfnb.fit(c.train, rows(c, is_wide, at=(30, lambda: own.cluster.scale(5))), **MODES[mode])
        assert cluster.tasks == ("task:0", "task:1", "task:2", "task:3")
        assert cluster.step == done.steps + 1 and applied(cluster) == {cluster.step}
        if mode == "sync":
            assert all(member.late == 0 for member in cluster._engine.tasks), "every task's rows count"
    assert c.counts() == [float(done.steps + 1)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_c63_row27_a_cluster_scaled_down_in_mid_training_ends_tasks_before_servers(own, mode):
    c = Counters()
    with tfnb.connect(own, ps=1, timeout=SOON) as cluster:
        tfnb.run(c.train, {c.x: torch.ones(4)})
        data = rows(c, lambda: len(cluster.tasks) == 1, at=(30, lambda: own.cluster.scale(2)))
        done = tfnb.fit(c.train, data, **MODES[mode])
        assert cluster.tasks == ("task:0",) and cluster.step == done.steps + 1
        until(lambda: "left at step" in str(cluster.status()))
        said = [line for line in str(cluster.status()).splitlines() if "left at step" in line]
        assert len(said) == 1 and "task:1" in said[0], said
    assert c.counts() == [float(done.steps + 1)] * 2


@pytest.mark.slow
def test_c63_row27_a_client_that_restarts_all_workers_ends_the_training_with_a_typed_error(own):
    c = Counters()
    cluster = tfnb.connect(own, ps=1, timeout=SOON)
    for _ in range(3):
        tfnb.run(c.train, {c.x: torch.ones(4)})
    cluster.pull()
    with pytest.raises(ParameterServerLost, match="of step 3, ") as lost:
        tfnb.fit(c.train, rows(c, lambda: False, at=(30, partial(own.restart, timeout=SOON))), restarts=0)
    assert "goes on without the cluster" in str(lost.value) and c.counts() == [3.0] * 2
    with pytest.warns(UserWarning, match="the cluster was lost"):
        tfnb.run(c.train, {c.x: torch.ones(4)})
    cluster.close()
    with tfnb.connect(own, ps=1, timeout=SOON):
        assert tfnb.fit(c.train, {c.x: torch.ones(40)}, batch_size=4).steps == 10
    assert c.counts() == [14.0] * 2


REFUSED = {
    "another version": ("import tfnb; tfnb.__version__ = '0.0.7'", "tfnb is 0.0.7 there and "),
    "no tfnb": (
        "import sys\nclass No:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'tfnb':\n            raise ModuleNotFoundError('No module named tfnb')\n"
        "sys.meta_path.insert(0, No())",
        "No module named tfnb",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_c63_row20_a_worker_that_does_not_fit_is_refused_in_one_line_and_training_goes_on(own, tmp_path, kind):
    code, said = REFUSED[kind]
    script = tmp_path / "before.py"
    script.write_text(code)
    c = Counters()
    with tfnb.connect(own, ps=1, timeout=SOON) as cluster:
        tfnb.run(c.train, {c.x: torch.ones(4)})
        command = [sys.executable, "-m", "distributed.cli.dask_worker", own.scheduler.address, "--no-nanny"]
        command += ["--preload", str(script), "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1"]
        by_hand = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
        try:
            done = tfnb.fit(c.train, rows(c, lambda: any("takes no part" in line for line in cluster.news(0)[1])))
            time.sleep(1.5)  # it is not asked again and again
            _, lines = cluster.news(0)
        finally:
            by_hand.kill()
            by_hand.wait(30)
        assert len(lines) == 1 and said in lines[0] and "\n" not in lines[0] and len(lines[0]) < 300, lines
        assert cluster.tasks == ("task:0", "task:1") and applied(cluster) == {done.steps + 1}
    assert c.counts() == [float(done.steps + 1)] * 2


@pytest.mark.slow
def test_a_worker_started_by_hand_takes_part(own):
    c = Counters()
    with tfnb.connect(own, ps=1, timeout=SOON) as cluster:
        tfnb.run(c.train, {c.x: torch.ones(4)})
        command = [sys.executable, "-m", "distributed.cli.dask_worker", own.scheduler.address, "--no-nanny"]
        command += ["--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1"]
        by_hand = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: len(cluster.tasks) == 3)
            done = tfnb.fit(c.train, {c.x: torch.ones(60)}, epochs=20, batch_size=6)
            assert len(member_of(cluster, "task:2").seconds) > 0
        finally:
            by_hand.kill()
            by_hand.wait(30)
        until(lambda: len(cluster.tasks) == 2)
        assert tfnb.fit(c.train, {c.x: torch.ones(60)}, batch_size=6).steps == 10
    assert c.counts() == [float(done.steps + 11)] * 2


def used(member):
    """Threads and open files of a process."""
    process = psutil.Process(member if isinstance(member, int) else member.info["pid"])
    return process.num_threads(), process.num_fds()


@pytest.mark.slow
def test_c13_threads_and_connections_stay_as_they_are_over_many_calls(own):
    c = Counters()
    with tfnb.connect(own, ps=1, timeout=SOON) as cluster:
        processes = [os.getpid(), *cluster._engine.places.values(), *cluster._engine.servers]
        data = {c.x: torch.ones(4000)}

        def work(steps):
            for mode in ("sync", "async"):
                tfnb.fit(c.train, data, batch_size=4, steps=steps, mode=mode)
            for _ in range(steps // 10):
                tfnb.run(c.train, {c.x: torch.ones(4)})

        work(3_000)  # connections and memory to lend are made as they are needed
        before = [used(process) for process in processes]
        work(10_000)
        for (threads, files), process in zip(before, processes, strict=True):
            now = used(process)
            assert now[0] <= threads + 2 and now[1] <= files + 4, (process, now, threads, files)


@pytest.mark.slow
def test_c63_row6_a_task_that_stood_still_until_it_was_given_up_is_replaced_when_it_goes_on(connect, monkeypatch):
    monkeypatch.setattr("tfnb.cluster.engine.peers.GIVEN_UP", 8.0)
    c = Counters()
    cluster = connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    old = member_of(cluster, "task:1")
    pid = old.info["pid"]
    try:
        stop(pid)
        tfnb.fit(c.train, rows(c, lambda: not old.may_answer), mode="async")
        assert cluster.tasks == ("task:0",) and "1 of 2 compute tasks are lost" in str(cluster.status())
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: cluster.tasks == ("task:0", "task:1"))
    assert member_of(cluster, "task:1").info["pid"] != pid and "restarts left: 4 of 5" in str(cluster.status())
    tfnb.fit(c.train, rows(c, lambda: computes(cluster, "task:1", pid)), mode="async")
    assert applied(cluster) == {cluster.step} and c.counts() == [float(cluster.step)] * 2


def test_a_process_that_holds_variables_of_another_notebook_is_not_ended(dask, connect):
    cluster = connect(3)
    with Client(dask.scheduler.address, set_as_default=False) as client:
        other = driver.connect(client, ps=3, timeout=180)
        try:
            shared = {member.peer.addr for member in other._engine.servers}
            member = next(member for member in cluster._engine.tasks if member.peer.addr in shared)
            answer = cluster._do("quit", 30, cluster._engine.quit, member)
            assert answer == Refusal("protocol", "its process holds variables of another notebook")
        finally:
            other.close()
