"""Real kills, stops and interrupts while training: nothing hangs, and variables are at a whole number of steps."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

import tfnb
from tests.cluster.conftest import close_to, one_by_one, stats, stop, until
from tfnb.cluster import connected
from tfnb.cluster.engine.members import Mode
from tfnb.errors import ParameterServerLost, Unavailable, WorkerLost


def kill(member, how=signal.SIGKILL):
    os.kill(member.info["pid"], how)


def train(cluster, p, batches, at=None, do=None, mode="sync"):
    """Train, doing ``do`` when step ``at`` is done; the steps seen."""
    seen = []
    for step, _ in one_by_one(cluster, p.program, batches, mode=mode):
        seen.append(step)
        if step == at and do is not None:
            do()
    return seen


# -- compute tasks ---------------------------------------------------------------------------------------------


def test_c63_row1_training_goes_on_when_a_compute_task_is_killed(connect, problem, nobody_joins):
    p = problem()
    states, _ = p.local(30)
    cluster = connect(3)
    seen = train(cluster, p, p.batches(30), 5, lambda: kill(cluster._engine.tasks[1]))
    assert seen == list(range(1, 31))
    assert cluster.tasks == ("task:0", "task:2")
    assert close_to(p.values(), states[-1]), "the interrupted step was repeated on the others, and written once"
    assert "1 of 3 compute tasks are lost" in str(cluster.status())


def test_kill_inside_a_step_at_random_instants(connect, problem):
    p = problem()
    states, _ = p.local(40)
    cluster = connect(3)
    timer = threading.Timer(random.Random(3).uniform(0.05, 0.3), lambda: kill(cluster._engine.tasks[0]))
    timer.start()
    seen = train(cluster, p, p.batches(40))
    timer.join()
    assert len(seen) == 40 and close_to(p.values(), states[-1])


def test_c61_async_training_goes_on_and_each_batch_counts_once(connect, problem):
    p = problem(tfnb.train.SGD(0.1))
    cluster = connect(3)
    seen = train(cluster, p, p.batches(60), 10, lambda: kill(cluster._engine.tasks[2]), mode="async")
    assert seen == list(range(1, 61))
    held = stats(cluster)
    assert sum(s["applied"] for s in held) == 60 + len(held)


@pytest.mark.slow
def test_a_stopped_compute_task_is_left_behind(connect, problem):
    p = problem()
    states, _ = p.local(12)
    cluster = connect(2)
    member = cluster._engine.tasks[0]
    try:
        seen = train(cluster, p, p.batches(12), 4, lambda: kill(member, signal.SIGSTOP))
        assert len(seen) == 12 and cluster.tasks == ("task:1",)
        assert member.is_silent and "are lost" not in str(cluster.status())
    finally:
        kill(member, signal.SIGCONT)
    until(lambda: len(cluster.tasks) == 2)
    list(cluster.train(p.program, []))
    assert close_to(p.values(), states[-1]), "what the stopped task sends later means nothing"
    assert cluster._engine.places["task:0"].info["pid"] == member.info["pid"], "it is not replaced"


def test_no_compute_task_left(connect, problem, nobody_joins):
    p = problem()
    states, _ = p.local(1000)
    cluster = connect(2)
    with pytest.raises(WorkerLost, match="no compute task is left"):
        train(cluster, p, p.batches(1000), 8, lambda: [kill(m) for m in cluster._engine.tasks])
    assert cluster.pulled_step == cluster.step >= 8 and close_to(p.values(), states[cluster.step])
    cluster.close()
    assert tfnb.run(p.loss, dict(zip(p.feeds, (p.data, p.labels), strict=True))) > 0


# -- servers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow)],
)
def test_c63_row2_a_lost_server_is_an_error_soon(connect, problem, how, monkeypatch):
    monkeypatch.setattr("tfnb.cluster.engine.peers.GIVEN_UP", 4.0)
    p = problem()
    states, _ = p.local(2000)
    cluster = connect(2)
    member, count = cluster._engine.servers[-1], len(cluster.servers)
    fault: list[float] = []
    pulled: list[int] = []

    def strike():
        pulled.append(cluster.pull())
        kill(member, how)
        fault.append(time.monotonic())

    try:
        with pytest.raises(ParameterServerLost) as caught:
            train(cluster, p, p.batches(2000), 20, strike)
        assert time.monotonic() - fault[0] < 100  # 10 on a quiet machine
    finally:
        if how == signal.SIGSTOP:
            kill(member, signal.SIGCONT)
    error, step = caught.value, pulled[0]
    assert step >= 20 and f"parameter server {count} of {count}" in error.message and f"of step {step}" in error.message
    assert error.details["pulled_step"] == step
    assert close_to(p.values(), states[step]), "the last pulled values are kept, of one step on all servers"
    assert connected.connected() is None and all(v.home is None for v in p.graph.variables)
    with pytest.warns(UserWarning, match="runs are here now"):
        assert tfnb.run(p.loss, dict(zip(p.feeds, (p.data, p.labels), strict=True))) > 0, "the notebook goes on here"
    with pytest.raises(ParameterServerLost, match=f"of step {step}"):
        cluster.run(p.program, p.batch(0, 12))
    assert "lost" in str(cluster.status())
    cluster.close()
    assert close_to(p.values(), states[step])


def test_a_server_lost_between_two_calls(connect, problem):
    p = problem()
    states, _ = p.local(3)
    cluster = connect(2)
    train(cluster, p, p.batches(3))
    kill(cluster._engine.servers[0])
    begin = time.monotonic()
    with pytest.raises(ParameterServerLost):
        cluster.run(p.program, p.batch(3, 12))
    assert time.monotonic() - begin < 100  # 10 on a quiet machine
    assert close_to(p.values(), states[3])


@pytest.mark.slow
def test_who_waits_for_a_silent_server_pings_it(connect, problem, monkeypatch):
    monkeypatch.setattr("tfnb.cluster.wire.transport.SHORTEST", 90.0)  # that the call itself may take
    monkeypatch.setattr("tfnb.cluster.engine.peers.GIVEN_UP", 4.0)
    p = problem()
    cluster = connect(2)
    train(cluster, p, p.batches(3))
    member = cluster._engine.servers[0]
    stop(member.info["pid"])
    begin = time.monotonic()
    try:
        with pytest.raises(ParameterServerLost):
            cluster.pull()
        assert time.monotonic() - begin < 60  # 5 on a quiet machine
    finally:
        kill(member, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize(("silent", "misses"), [(60.0, 3), (1.5, 2)])
def test_a_peer_that_nobody_asked_is_not_silent(connect, monkeypatch, silent, misses):
    """Three pings without an answer make a task a suspect; two of one that was asked all the time, as in a training."""
    cluster = connect(2)
    engine, member, pings = cluster._engine, cluster._engine.tasks[0], list[float]()
    call = engine.link.call

    def counted(peer, method, *args, **how):
        pings.extend([time.monotonic()] if method == "ping" else [])
        return call(peer, method, *args, **how)

    stop(member.info["pid"])
    try:
        monkeypatch.setattr(engine.link, "call", counted)
        engine.link.heard[member.peer.addr] = time.monotonic() - silent
        assert not cluster._do("verify", 60, engine.peers.verify, member)
        assert member.is_silent and sum(at < member.lost_at for at in pings) == misses
    finally:
        kill(member, signal.SIGCONT)


class Lateness:
    """Keeps the event loop of the notebook late: each turn of it takes some time, until the block ends."""

    def __init__(self, cluster, seconds):
        self.loop, self.seconds, self.is_over = cluster._engine.link.loop, seconds, False

    def __enter__(self):
        self.loop.call_soon_threadsafe(self.turn)

    def turn(self):
        if not self.is_over:
            time.sleep(self.seconds)
            self.loop.call_soon(self.turn)

    def __exit__(self, *exc):
        self.is_over = True


@pytest.mark.slow
def test_a_notebook_that_is_late_itself_takes_nobody_for_dead(connect, problem):
    """Its pings are not answered in time because it does not hear the answers."""
    p = problem()
    states, _ = p.local(3)
    cluster = connect(2)
    engine = cluster._engine
    members = [*engine.servers, *engine.tasks]

    async def verify():
        engine.link.pool.collect()  # by a new connection, as where others are in use
        return await asyncio.gather(*map(engine.peers.verify, members))

    with Lateness(cluster, 0.4):
        found = engine.link.start(verify)
        time.sleep(8.0)
    assert engine.link.wait(found, 60, "verify") == [True] * len(members)
    assert all(member.is_there for member in members)
    train(cluster, p, p.batches(3))
    assert close_to(p.values(), states[3])


@pytest.mark.slow
def test_a_silent_task_is_found_as_soon_as_the_notebook_is_late_no_more(connect):
    cluster = connect(2)
    engine, member = cluster._engine, cluster._engine.tasks[0]
    stop(member.info["pid"])
    try:
        with Lateness(cluster, 0.4):
            found = engine.link.start(engine.peers.verify, member)
            time.sleep(8.0)
            assert member.alive, "so far nothing is known"
        begin = time.monotonic()
        assert not engine.link.wait(found, 60, "verify") and member.is_silent
        assert time.monotonic() - begin < 30  # 6 on a quiet machine
    finally:
        kill(member, signal.SIGCONT)


def test_closing_with_a_lost_server_warns_and_keeps_the_last_values(connect, problem):
    p = problem()
    states, _ = p.local(3)
    cluster = connect(2)
    train(cluster, p, p.batches(3))
    kill(cluster._engine.servers[0])
    with pytest.warns(UserWarning, match="of step 3"):
        cluster.close()
    assert close_to(p.values(), states[3])
    error = cluster._engine.lost_server(0)  # as another thread finds it, whose step waited for that server
    assert isinstance(error, ParameterServerLost) and "of step 3" in error.message


@pytest.mark.slow
def test_values_are_pulled_now_and_then_while_training(connect, problem, monkeypatch):
    monkeypatch.setattr("tfnb.cluster.notebook.variables_there.REFRESH", 0.05)
    p = problem()
    cluster = connect(2)
    pulled, end = [], time.monotonic() + 60
    for _ in cluster.train(p.program, p.batches(10_000)):
        pulled.append(cluster.pulled_step)
        if len(set(pulled)) > 3 or time.monotonic() > end:
            break
    assert len(set(pulled)) > 3 and pulled == sorted(pulled) and pulled[-1] <= cluster.step


# -- interrupts ---------------------------------------------------------------------------------------------------


class Interrupter:
    """Sends Ctrl-C once, after some time, and lets it through only while the call runs that it is meant for.

    Without garbage collection: Python drops an interrupt that hits a callback of the collector.
    """

    def __enter__(self):
        gc.disable()
        self.armed = False
        self.before = signal.signal(signal.SIGINT, self.handle)
        return self

    def __exit__(self, *exc):
        signal.signal(signal.SIGINT, self.before)
        gc.enable()

    def handle(self, number, frame):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def stops(self, call, seconds):
        """Whether Ctrl-C after so many seconds ended the call, at whatever instant of it."""
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            try:
                self.armed = True
                call()
            finally:
                self.armed = False  # an interrupt just before this line is the last one, and caught below
        except KeyboardInterrupt:
            return True
        finally:
            timer.cancel()
            timer.join()
        return False


MODES = {
    "sync": "sync", "async": "async", "backup": Mode(backup=1), "bounded": Mode("bounded", staleness=1),
}  # fmt: skip


def interrupts(connect, p, times, mode):
    """Interrupt training again and again; after each time the values are those of a whole number of steps."""
    states, _ = p.local(60 if mode == "sync" else 1)
    cluster = connect(2)
    source = random.Random(0)
    hit = 0
    for _ in range(2):  # the first one compiles
        begin = time.monotonic()
        list(cluster.train(p.program, p.batches(60), mode=MODES[mode]))
        whole = time.monotonic() - begin
    with Interrupter() as interrupter:
        for _ in range(times):
            p.reset()
            for variable, value in zip(p.graph.variables, p.start, strict=True):
                variable.set(value)
            before = cluster.step
            steps = cluster.train(p.program, p.batches(60), mode=MODES[mode])
            hit += interrupter.stops(functools.partial(list, steps), source.uniform(0.0, whole))
            steps.close()
            begin = time.monotonic()
            done = cluster.step - before
            assert cluster.pulled_step == cluster.step
            if mode == "sync":
                assert close_to(p.values(), states[done]), f"not a whole number of steps: {done}"
            assert close_to(p.values(), [v.value() for v in p.graph.variables], 0.0)
            assert tfnb.run(p.loss, dict(zip(p.feeds, (p.data, p.labels), strict=True))) > 0
            assert time.monotonic() - begin < 100, "the next cell works"
    return hit


# Python itself drops an interrupt that comes inside of a weak reference's callback, and warns.
DROPPED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@DROPPED
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_c51_interrupts_at_random_instants(connect, problem, mode):
    assert interrupts(connect, problem(), 20, mode) > 5


def test_an_interrupt_while_values_come_home_waits_for_them(connect, problem, monkeypatch):
    p = problem()
    states, _ = p.local(8)
    cluster = connect(2)
    pull, struck = cluster._variables.pull, []

    def strike(*kept):
        if not struck:
            struck.append(True)
            signal.raise_signal(signal.SIGINT)
        return pull(*kept)

    monkeypatch.setattr(cluster._variables, "pull", strike)
    with pytest.raises(KeyboardInterrupt):
        list(cluster.train(p.program, p.batches(8)))
    assert struck and cluster.pulled_step == cluster.step == 8 and close_to(p.values(), states[8])


def test_interrupts_of_single_runs_take_the_step_or_not(connect, problem):
    p = problem()
    states, _ = p.local(40)
    cluster = connect(2)
    source = random.Random(1)
    with Interrupter() as interrupter:
        for _ in range(12):
            step = cluster.step
            run = functools.partial(cluster.run, p.program, p.batch(step, 12), run=step)
            interrupter.stops(run, source.uniform(0.0, 0.03))
            assert cluster.step - step in (0, 1)
    cluster.pull()
    assert close_to(p.values(), states[cluster.step])


# -- a cluster of our own -------------------------------------------------------------------------------------------

OWN = """
    import os, signal, sys, time
    import torch
    import tfnb
    from tfnb.cluster.notebook.steps_there import batches
    from tfnb.execution import lower

    def main():
        v = tfnb.Variable(torch.zeros(2), name="v")
        with tfnb.record("count"):
            x = tfnb.placeholder(torch.ones(4, 2), name="x")
            grad = x.mean(0)
            train = tfnb.train.SGD(1.0).apply_gradients([(grad, v)])
        program = lower(train.graph, [train.value], [x.value])
        cluster = tfnb.connect(2, ps=1, timeout=100)
        print("pids", *(m.info["pid"] for m in (*cluster._engine.tasks, *cluster._engine.servers)), flush=True)
        sockets = os.popen(f"ss -ltnp 2>/dev/null").read()
        try:
            data, step, told = torch.ones(4, 2), 0, False
            for group in cluster.train(program, batches(program, (([data], n) for n in range(10**6)))):
                step += group.steps
                if step >= 3 and not told:
                    told = True
                    print("training", flush=True)
                    if "--die" in sys.argv:
                        os._exit(3)
        except KeyboardInterrupt:
            print("interrupted", cluster.step, flush=True)
        assert v.storage.tolist() == [-cluster.step] * 2, (v.storage, cluster.step)
        tfnb.run(train, {x: data})
        print("alive", len(cluster.tasks), len(cluster.servers), flush=True)
        if "--exit" in sys.argv:
            return
        cluster.close()
        assert v.storage[0] == -cluster.step
        print("closed", flush=True)

    if __name__ == "__main__":
        main()
"""


def gone(pids, seconds):
    """Whether all processes end within ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if all(b"State:\tZ" in _status(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _status(pid):
    try:
        return Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return b"State:\tZ"


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "--exit", "--die"])
def test_c75_ctrl_c_to_the_process_group_and_no_process_is_left(tmp_path, ending):
    """A notebook's kernel gets SIGINT together with its worker processes: they must survive it."""
    script = tmp_path / "own.py"
    script.write_text(textwrap.dedent(OWN))
    child = subprocess.Popen(
        [sys.executable, str(script), ending], stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        said = next(line for line in child.stdout if not line.startswith("connect:"))  # which workers are up
        pids = [int(n) for n in said.split()[1:]]
        assert len(pids) == 3
        assert child.stdout.readline() == "training\n"
        if ending != "--die":
            os.killpg(child.pid, signal.SIGINT)
            assert child.stdout.readline().startswith("interrupted")
            assert child.stdout.readline() == "alive 2 1\n"
        if not ending:
            assert child.stdout.readline() == "closed\n"
        assert child.wait(120) == (3 if ending == "--die" else 0)
        assert gone(pids, 60), "worker processes are left"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.stdout.close()
        child.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize("has_server", [False, True])
def test_c75_an_interrupted_connect_leaves_no_process(started_afresh, has_server):
    """But for the fork server, which imports torch when the interrupt comes, or whose workers do."""
    psutil = pytest.importorskip("psutil")
    resource_tracker.ensure_running()  # Python's own process, which the first worker starts and which stays
    if has_server:
        started_afresh.ensure_running()  # and has imported nothing
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with Interrupter() as interrupter:
        assert interrupter.stops(lambda: tfnb.connect(1).close(), 0.8)
    assert connected.connected() is None
    before.add(started_afresh._forkserver_pid)
    end = time.monotonic() + 60
    while (left := {p.pid for p in psutil.Process().children(recursive=True)} - before) and not gone(left, 1):
        assert time.monotonic() < end, "worker processes are left"
    with tfnb.connect(1) as cluster:
        assert len(cluster.tasks) == 1


@pytest.mark.slow
def test_c66_a_cluster_of_ours_listens_on_loopback_only_and_is_closed(started_afresh):
    psutil = pytest.importorskip("psutil")
    with tfnb.connect(1) as cluster:
        assert cluster.tasks == ("task:0",) and cluster.servers == ("ps:0",)
        assert cluster.dashboard_link == ""
        listening = set()
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # one of an earlier test that ends just now
                listening |= {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"}
        assert listening <= {"127.0.0.1", "::1"}
        pids = [m.info["pid"] for m in (*cluster._engine.tasks, *cluster._engine.servers)]
        threads = cluster._engine.tasks[0].info["threads"]
        assert threads == 1
        assert torch.equal(torch.tensor(len(pids)), torch.tensor(2))
    assert gone(pids, 60)
    assert isinstance(Unavailable("x"), ConnectionError)
