"""A compute task that is stopped, or starved, and lives: others compute its rows, and it joins again as it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import tfnb
from tests.cluster.conftest import SOON, close_to, stats, stop, until
from tests.cluster.test_cuts import Counters
from tests.cluster.test_faults import Interrupter
from tests.cluster.test_members import member_of, rows
from tests.cluster.test_silent_servers import MODES, NAMES, call_of, starved, stopped
from tests.cluster.test_streams import call
from tests.over_tasks import on
from tfnb.cluster.wire.messages import SILENCE, Ok, Refusal
from tfnb.errors import DeadlineExceeded


@contextmanager
def striking(member, strike):
    """A way to begin: ``strike`` gets the process of a member, in a thread. At the end of the block it goes on."""
    striker = threading.Thread(target=strike, args=[member.info["pid"]])
    try:
        yield striker.start
    finally:
        if striker.ident is not None:
            striker.join()
        os.kill(member.info["pid"], signal.SIGCONT)


def is_back(cluster, old):
    """Whether a task joined again, as the process that it was, and computes."""
    member = member_of(cluster, old.name)
    return member is not old and member.info["pid"] == old.info["pid"] and len(member.seconds) > 0


def check_returned(cluster, old):
    """It was said to be silent, and to answer again; nothing was ended for it."""
    said = [line for line in cluster.news(0)[1] if line.startswith(f"{old.name} (")]
    silent, again = said[-2:]
    assert "has not answered for " in silent and "others compute its rows" in silent, said
    assert "answers again after" in again and "joined at step" in again and again.endswith("2 compute tasks now"), said
    after = float(again.partition(" after ")[2].partition(" s ")[0])
    assert after >= SILENCE - 1
    assert cluster.tasks == ("task:0", "task:1") and member_of(cluster, old.name).info["pid"] == old.info["pid"]
    assert "restarts left: 5 of 5" in str(cluster.status()) and "are lost" not in str(cluster.status())


def check_counts(c, cluster):
    """Every row was counted once, on all servers, and nothing comes later."""
    for _ in range(2):
        cluster.pull()
        assert c.counts() == [float(cluster.step)] * 2
        assert {stat["version"] - 1 for stat in stats(cluster) if stat["variables"]} == {cluster.step}
        time.sleep(0.5)


def check_fit(cluster, options, seconds=0.0):
    """A fit during which task:1 is stopped, for so long or until it is said to be silent."""
    c = Counters()
    tfnb.run(c.train, {c.x: torch.ones(4)})
    old, first = member_of(cluster, "task:1"), cluster.step
    with striking(old, stopped(cluster, seconds)) as strike:
        done = tfnb.fit(c.train, rows(c, lambda: is_back(cluster, old), at=(30, strike)), **options)
    assert cluster.step == first + done.steps
    check_counts(c, cluster)
    check_returned(cluster, old)


@pytest.mark.parametrize("options", MODES, ids=NAMES)
def test_a_stopped_task_joins_again(connect, options):
    check_fit(connect(2), options)


@pytest.mark.slow
def test_a_task_that_was_stopped_for_long_joins_again(connect):
    """Longer than a server lets requests wait."""
    check_fit(connect(2), {"mode": "sync"}, 15.0)


@pytest.mark.slow
@pytest.mark.parametrize("options", MODES, ids=NAMES)
def test_a_task_without_a_nanny_joins_again(without_nanny, options):
    check_fit(without_nanny, options)


@pytest.mark.slow
def test_weights_are_those_without_the_stop(connect, problem):
    p = problem()
    cluster = connect(2)
    old, drawn = member_of(cluster, "task:1"), []

    def data():
        end = time.monotonic() + SOON
        while not is_back(cluster, old):
            assert time.monotonic() < end, "it took too long"
            if len(drawn) == 30:
                strike()
            time.sleep(0.005)
            yield batch()
        for _ in range(40):
            yield batch()

    def batch():
        drawn.append(dict(zip(p.feeds, p.batch(len(drawn), 12), strict=True)))
        return drawn[-1]

    with striking(old, stopped(cluster)) as strike:
        done = tfnb.fit(p.train, data())
    assert done.steps == len(drawn) == cluster.step
    found = p.values()
    cluster.close()
    p.reset()
    tfnb.fit(p.train, drawn)
    assert close_to(found, p.values())


@pytest.mark.slow
@pytest.mark.parametrize("options", MODES, ids=NAMES)
def test_a_starved_task_is_not_dead(connect, options):
    c, cluster = Counters(), connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    old, ends = member_of(cluster, "task:1"), []

    def strike(pid):
        starved(20.0)(pid)
        ends.append(pid)

    with striking(old, strike) as begin:
        done = tfnb.fit(c.train, rows(c, lambda: ends, at=(30, begin)), **options)
        until(lambda: len(cluster.tasks) == 2)
    assert cluster.step == done.steps + 1
    check_counts(c, cluster)
    assert member_of(cluster, "task:1").info["pid"] == old.info["pid"]
    assert "restarts left: 5 of 5" in str(cluster.status())
    assert tfnb.fit(c.train, {c.x: torch.ones(40)}, batch_size=4, **options).steps == 10
    check_counts(c, cluster)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["run", "sync", "async"])
def test_the_only_task_is_waited_for(connect, what):
    c, cluster = Counters(), connect(1)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    old = member_of(cluster, "task:0")
    with striking(old, stopped(cluster)) as strike:
        if what == "run":
            strike()
            time.sleep(0.5)
            for _ in range(10):
                tfnb.run(c.train, {c.x: torch.ones(4)})
        else:
            tfnb.fit(c.train, rows(c, lambda: is_back(cluster, old), at=(30, strike)), mode=what)
    check_counts(c, cluster)
    assert member_of(cluster, "task:0") is not old and "restarts left: 5 of 5" in str(cluster.status())


def test_the_status_tells_of_a_silent_task_and_who_dies_then_is_dead(connect):
    c, cluster = Counters(), connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    old = member_of(cluster, "task:1")
    stop(old.info["pid"])
    try:
        assert not cluster._do("verify", 60, cluster._engine.peers.verify, old)
        until(lambda: any("others compute its rows" in line for line in cluster.news(0)[1]))
        (line,) = [line for line in str(cluster.status()).splitlines() if line.startswith("  task:1 ")]
        assert "silent" in line and " s, and waited for" in line and "lost" not in str(cluster.status())
        assert cluster.tasks == ("task:0",) and "restarts left: 5 of 5" in str(cluster.status())
    finally:
        os.kill(old.info["pid"], signal.SIGKILL)
    until(lambda: cluster.tasks == ("task:0", "task:1"))
    assert member_of(cluster, "task:1").info["pid"] != old.info["pid"]
    assert any("task:1" in line and "left at step" in line for line in cluster.news(0)[1])


def test_a_run_whose_deadline_ends_before_the_only_task_is_back_says_so_and_the_next_one_waits_for_it(connect):
    c, cluster = Counters(), connect(1)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    old = member_of(cluster, "task:0")
    stop(old.info["pid"])
    try:
        assert not cluster._do("verify", 60, cluster._engine.peers.verify, old)
        for _ in range(2):
            with pytest.raises(
                DeadlineExceeded, match=r"step 2 did not end within 1.0 s; it waited for\s+a compute task to come back"
            ):
                tfnb.run(c.train, {c.x: torch.ones(4)}, timeout=1.0)
        assert "silent" in str(cluster.status())  # the loop of the cluster is free
    finally:
        os.kill(old.info["pid"], signal.SIGCONT)
    tfnb.run(c.train, {c.x: torch.ones(4)}, timeout=60)
    check_counts(c, cluster)


def test_a_step_over_tasks_names_the_one_that_it_waited_for_until_its_deadline(connect):
    cluster = connect(2)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4))
        with on(0):
            half = x * 0.5
        with on(1):
            y = half + 1
    assert tfnb.run(y, {x: torch.ones(2)}).tolist() == [1.5, 1.5]
    old = member_of(cluster, "task:1")
    stop(old.info["pid"])
    try:
        assert not cluster._do("verify", 60, cluster._engine.peers.verify, old)
        with pytest.raises(DeadlineExceeded, match=r"within 1.0 s; it waited for\s+task:1 to come back"):
            tfnb.run(y, {x: torch.ones(2)}, timeout=1.0)
    finally:
        os.kill(old.info["pid"], signal.SIGCONT)
    assert tfnb.run(y, {x: torch.zeros(1)}, timeout=60).tolist() == [1.0]


def test_a_task_that_was_reset_refuses_earlier_calls_and_goes_on(connect):
    c, cluster = Counters(), connect(1)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    link, peer = cluster._engine.link, member_of(cluster, "task:0").peer
    early, reset = link.op(), link.op()
    for _ in range(2):  # it is repeated where its answer was lost
        assert isinstance(call(link, peer, "reset", op=reset), Ok)
        assert call(link, peer, "waits", op=early) == Refusal("stale", "task:0 was reset after this call")
    assert isinstance(call(link, peer, "waits"), Ok)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    assert tfnb.fit(c.train, {c.x: torch.ones(40)}, batch_size=4).steps == 10
    check_counts(c, cluster)


@pytest.mark.parametrize("what", ["sync", "async", "run", "bounded"])
def test_ctrl_c_and_close_do_not_wait_for_a_silent_task(connect, what):
    c, cluster = Counters(), connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    old = member_of(cluster, "task:1")
    try:
        stop(old.info["pid"])
        assert not cluster._do("verify", 60, cluster._engine.peers.verify, old)
        with Interrupter() as interrupter:
            begin = time.monotonic()
            assert interrupter.stops(call_of(c, what), 2.0)
            assert time.monotonic() - begin < 2.0 + 8.0  # some tenths on a quiet machine
        tfnb.run(c.train, {c.x: torch.ones(4)})
        check_counts(c, cluster)
        begin = time.monotonic()
        cluster.close()
        assert time.monotonic() - begin < 10.0  # one second on a quiet machine
    finally:
        os.kill(old.info["pid"], signal.SIGCONT)
