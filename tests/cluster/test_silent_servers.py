"""A server that is stopped, or starved, and lives: training waits for it, and goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import tfnb
from tests.cluster.conftest import close_to, stats, stop, until
from tests.cluster.test_cuts import Counters
from tests.cluster.test_faults import Interrupter

ROWS = torch.ones(400)
STEPS = 300
MODES = [{"mode": "sync"}, {"mode": "async"}, {"mode": "bounded", "staleness": 2}, {"mode": "sync", "backup": 1}]
NAMES = ["sync", "async", "bounded", "backup"]


@contextmanager
def struck(cluster, strike, *, at=20):
    """A block during which, once the cluster is at some step, ``strike`` gets the process of its last server."""
    pid, first, begun = cluster._engine.servers[-1].info["pid"], cluster.step, threading.Event()

    def wait_and_strike():
        while cluster.step < first + at:
            time.sleep(0.002)
        begun.set()
        strike(pid)

    striker = threading.Thread(target=wait_and_strike)
    striker.start()
    try:
        yield
        assert begun.is_set()
    finally:
        striker.join()
        os.kill(pid, signal.SIGCONT)


def stopped(cluster, seconds=0.0):
    """Stop a process for so long, and at least until it is said that it is silent."""

    def strike(pid):
        stop(pid)
        time.sleep(seconds)
        until(lambda: any("has not answered for" in line for line in cluster.news(0)[1]))
        os.kill(pid, signal.SIGCONT)

    return strike


def starved(seconds, share=0.05):
    """Let a process run for ``share`` of each second."""

    def strike(pid):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stop(pid)
            time.sleep(1.0 - share)
            os.kill(pid, signal.SIGCONT)
            time.sleep(share)

    return strike


def waited_for(cluster):
    """What was said of a silent server."""
    return [line for line in cluster.news(0)[1] if "is waited for until" in line]


def check(c, cluster, steps):
    """Every row was counted once, on all servers, and nothing comes later."""
    cluster.pull()
    assert c.counts() == [float(steps)] * 2
    time.sleep(0.5)
    cluster.pull()
    assert c.counts() == [float(steps)] * 2
    assert {stat["version"] - 1 for stat in stats(cluster)} == {steps}


LONG = [({"mode": mode}, 30.0) for mode in ("sync", "async")]  # a server tells others to ask again, a message stalls


@pytest.mark.parametrize(
    ("options", "seconds"), [*((mode, 0.0) for mode in MODES), *LONG], ids=[*NAMES, "sync, for long", "async, for long"]
)
def test_a_fit_waits_for_a_stopped_server_and_counts_every_row_once(connect, options, seconds):
    c, cluster = Counters(), connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    with struck(cluster, stopped(cluster, seconds)):
        done = tfnb.fit(c.train, {c.x: ROWS}, steps=STEPS, batch_size=4, **options)
    assert done.steps == STEPS and cluster.step == STEPS + 1
    check(c, cluster, STEPS + 1)
    (line,) = waited_for(cluster)
    assert "ps:" in line and "Dask lists its worker" in line
    assert any("answers again" in line for line in cluster.news(0)[1])
    assert len(cluster.tasks) == 2, "nobody was restarted"


def test_weights_are_those_without_the_stop(connect, problem):
    p = problem()
    x, y = p.feeds
    fit = {"data": {x: p.data, y: p.labels}, "epochs": 60, "batch_size": 12, "seed": 3}
    tfnb.fit(p.train, **fit)
    expected = p.values()
    p.reset()
    cluster = connect(2)
    with struck(cluster, stopped(cluster)):
        tfnb.fit(p.train, **fit)
    assert close_to(p.values(), expected) and len(waited_for(cluster)) == 1


def test_runs_wait_for_a_stopped_server(connect):
    c, cluster = Counters(), connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    with struck(cluster, stopped(cluster)):
        for _ in range(60):
            tfnb.run(c.train, {c.x: torch.ones(4)})
    check(c, cluster, 61)
    assert len(waited_for(cluster)) == 1


@pytest.mark.parametrize("options", MODES, ids=NAMES)
def test_a_starved_server_is_not_dead(connect, options):
    c, cluster = Counters(), connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    with struck(cluster, starved(8.0)):
        done = tfnb.fit(c.train, {c.x: ROWS}, steps=STEPS, batch_size=4, **options)
    assert done.steps == STEPS
    check(c, cluster, STEPS + 1)
    assert len(cluster.tasks) == 2, "nobody was restarted"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_starved_server_moves_a_large_net(connect, mode):
    """100 MB go to each server and come from it in every step."""
    w = tfnb.Variable(torch.zeros(25_000_000), name="w")
    with tfnb.record("large"):
        x = tfnb.placeholder(torch.ones(2), name="x")
        train = tfnb.train.SGD(1.0).minimize((w.read().mean() * x).mean() * 25e6)
    cluster = connect(2)
    tfnb.run(train, {x: torch.ones(2)})
    with struck(cluster, starved(30.0), at=2):
        assert tfnb.fit(train, {x: torch.ones(40)}, steps=20, batch_size=2, mode=mode).steps == 20
    assert torch.allclose(w.value(), torch.full((), -21.0)) and len(cluster.tasks) == 2


def call_of(c, what):
    """Something that uses the servers for long."""
    if what == "run":
        return lambda: [tfnb.run(c.train, {c.x: torch.ones(4)}) for _ in range(10_000)]
    how = {"staleness": 2} if what == "bounded" else {}
    return lambda: tfnb.fit(c.train, {c.x: ROWS}, steps=100_000, batch_size=4, mode=what, **how)


@pytest.mark.filterwarnings("ignore:the values stay on the servers")
@pytest.mark.parametrize("what", ["sync", "async", "run", "bounded"])
def test_ctrl_c_ends_the_wait_at_once(connect, what):
    c, cluster = Counters(), connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    pid = cluster._engine.servers[-1].info["pid"]
    striker = threading.Timer(1.0, stop, [pid])
    try:
        striker.start()
        with Interrupter() as interrupter:
            begin = time.monotonic()
            assert interrupter.stops(call_of(c, what), 7.0)
            assert time.monotonic() - begin < 7.0 + 8.0  # one second on a quiet machine
    finally:
        striker.join()
        os.kill(pid, signal.SIGCONT)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    check(c, cluster, cluster.step)
    assert len(cluster.tasks) == 2, "nobody was restarted"


@pytest.mark.filterwarnings("ignore:closed without the last values")
@pytest.mark.parametrize("what", ["sync", "async"])
def test_close_ends_the_wait_at_once(connect, what):
    c, cluster = Counters(), connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    pid, ends = cluster._engine.servers[-1].info["pid"], []

    def fit():
        try:
            call_of(c, what)()
        except Exception as error:
            ends.append(error)

    thread = threading.Thread(target=fit)
    try:
        thread.start()
        time.sleep(1.0)
        stop(pid)
        time.sleep(5.0)
        begin = time.monotonic()
        cluster.close()
        thread.join(30)
        assert ends and time.monotonic() - begin < 10.0  # one second on a quiet machine
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.filterwarnings("ignore:closed without the last values")
def test_an_address_that_refuses_connections_has_no_process(connect, dask):
    cluster = connect(2)
    engine, member = cluster._engine, cluster._engine.servers[-1]
    link = engine.link
    assert not link.wait(link.start(link.refuses, member.peer.addr), 60, "a probe")
    assert link.wait(link.start(link.refuses, "tcp://127.0.0.1:9"), 60, "a probe")
    stop(member.info["pid"])
    try:
        assert not link.wait(link.start(link.refuses, member.peer.addr), 60, "a probe"), "its kernel accepts"
    finally:
        os.kill(member.info["pid"], signal.SIGCONT)
    member.peer = member.peer._replace(addr="tcp://127.0.0.1:9")  # while Dask lists its worker
    begin = time.monotonic()
    assert not link.wait(link.start(engine.peers.verify, member), 60, "verify")
    assert not member.alive and time.monotonic() - begin < 40  # 10 on a quiet machine
