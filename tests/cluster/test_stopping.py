"""Tasks that compute for long: a deadline stops them, the cluster goes on, and nothing waits for what is gone."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import tfnb
from tests.state.test_queues import in_thread
from tfnb.errors import DeadlineExceeded, WorkerLost


def endless():
    """A loop of so many short kernels that nobody waits for its end."""
    with tfnb.record("endless"):
        n = tfnb.placeholder(torch.tensor(3), shape=(), name="n")
        end = tfnb.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * 1.0001), (torch.tensor(0), torch.ones(3)))
    return n, end[1]


def one_kernel():
    """A product that takes long for a long feed, and that nothing can stop."""
    with tfnb.record("kernel"):
        x = tfnb.placeholder(torch.ones(2), name="x")
        a = x[:, None] + x[None]
        b = (a @ a).sum()
    return x, b


def test_what_runs_on_a_task_stops_at_the_deadline(connect):
    own = connect(1)
    n, x = endless()
    assert tfnb.run(x, {n: 5}).shape == (3,)
    pids = [member.info["pid"] for member in own._engine.tasks]
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        tfnb.run(x, {n: 10**9}, timeout=1)
    assert tfnb.run(x, {n: 5}, timeout=100).shape == (3,), "the next call is served"
    assert time.monotonic() - begin < 100  # the loop would take hours
    assert [member.info["pid"] for member in own._engine.tasks] == pids, "in the same process"


def test_ctrl_c_stops_what_runs_on_a_task(connect):
    own = connect(1)
    n, x = endless()
    tfnb.run(x, {n: 5})
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        tfnb.run(x, {n: 10**9})
    timer.join()
    begin = time.monotonic()
    assert tfnb.run(x, {n: 5}).shape == (3,)
    assert time.monotonic() - begin < 100, "the next cell works"


@pytest.mark.slow
def test_a_task_that_does_not_stop_gets_another_process(connect, monkeypatch):
    own = connect(1)
    monkeypatch.setattr("tfnb.cluster.modes.plan.STOPS_WITHIN", 0.5)
    x, b = one_kernel()
    w = tfnb.Variable(torch.zeros(2), name="w")
    with tfnb.record("counting"):
        bump = w.assign_add(1)
    tfnb.run(bump), tfnb.run(b, {x: torch.ones(9)})
    pid = own._engine.tasks[0].info["pid"]
    with pytest.raises(DeadlineExceeded):
        tfnb.run(b, {x: torch.ones(9000)}, timeout=1)
    with pytest.warns(UserWarning, match="task:0 did not stop computing within .* its process was replaced"):
        assert tfnb.run(bump).tolist() == [2, 2], "the servers kept what they hold"
    assert own._engine.places["task:0"].info["pid"] != pid and own.tasks == ("task:0",)
    assert tfnb.run(bump).tolist() == [3, 3]


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("when", ["during", "before"])
def test_fit_ends_when_no_task_is_left(connect, problem, mode, when, nobody_joins):
    p = problem(tfnb.train.SGD(0.1))
    cluster = connect(2)
    tfnb.run(p.loss, dict(zip(p.feeds, (p.data, p.labels), strict=True)))

    def strike():
        for member in cluster._engine.tasks:
            os.kill(member.info["pid"], signal.SIGKILL)

    def batches():
        for step in range(100_000):
            if step == 20:
                strike()
            at = torch.arange(12) % 60
            yield dict(zip(p.feeds, (p.data[at], p.labels[at]), strict=True))

    if when == "before":
        strike()
        end = time.monotonic() + 100
        while cluster.tasks and time.monotonic() < end:
            time.sleep(0.05)
    begin = time.monotonic()
    with pytest.raises(WorkerLost, match="no compute task is left"):
        tfnb.fit(p.train, batches(), mode=mode)
    assert time.monotonic() - begin < 100


@pytest.mark.slow
def test_ctrl_c_ends_a_restore_that_waits_for_a_run_of_another_thread(connect, tmp_path, monkeypatch):
    v = tfnb.Variable(torch.ones(3), name="v")
    with tfnb.record("kept") as kept:
        step = v.assign_add(torch.ones(3))
    connect(1)
    session = tfnb.Session(kept)
    session.run(step)
    session.save(tmp_path / "file")
    session.run(step)
    n, x = endless()
    tfnb.run(x, {n: 5})
    thread, ended = in_thread(lambda: tfnb.run(x, {n: 10**9}, timeout=9))
    time.sleep(0.5)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        session.restore(tmp_path / "file")
    assert thread.is_alive() and not ended, "nobody else is stopped"
    monkeypatch.setattr("tfnb.cluster.notebook.waiting.STEP", 0.5)
    with pytest.raises(DeadlineExceeded, match="the restore changed nothing: it waits for a run of another thread"):
        session.restore(tmp_path / "file")
    thread.join(60)
    assert isinstance(ended[0], DeadlineExceeded) and v.value().tolist() == [3.0] * 3
    session.run(step)
    session.restore(tmp_path / "file")
    session.run(step)
    assert v.value().tolist() == [3.0] * 3
