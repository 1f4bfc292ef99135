"""Asynchronous training is counted exactly, and whoever reads the values sees one count on all servers."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

import tfnb
from tests.cluster.conftest import stats
from tfnb.cluster.engine.training import Training
from tfnb.cluster.server import trainings
from tfnb.cluster.server.courses import HOLD
from tfnb.cluster.wire.messages import Ask, NotSent, Ok
from tfnb.errors import Aborted, DeadlineExceeded, NonFiniteGradient


class Counters:
    """One Variable on each of so many shards; every batch takes 1 from each."""

    def __init__(self, pause: int = 0, shards: int = 2) -> None:
        self.variables = [tfnb.Variable(torch.zeros(200, dtype=torch.float64), name=f"count{i}") for i in range(shards)]
        with tfnb.record("counters"):
            self.x = tfnb.placeholder(torch.ones(4), name="x")
            one = self.x.mean().double()
            for _ in range(pause):
                one = (
                    one * torch.ones(300, 300, dtype=torch.float64).matmul(torch.ones(300, 300).double())
                ).mean() / 300
            grads = [one.expand(200) * (one if i % 2 else 1.0) for i in range(shards)]
            self.train = tfnb.train.SGD(1.0).apply_gradients(list(zip(grads, self.variables, strict=True)))

    def counts(self) -> list[float]:
        return [-float(v.storage[0]) for v in self.variables]

    def rows(self, count, do=lambda step: None):
        for step in range(count):
            do(step)
            yield {self.x: torch.ones(4)}


def served(cluster):
    """How many batches each server applied."""
    return [stat["version"] - 1 for stat in stats(cluster)]  # one creation


@pytest.mark.parametrize(
    "options",
    [{"mode": "async"}, {"mode": "bounded", "staleness": 0}, {"backup": 1}],
    ids=["async", "bounded", "backup"],
)
def test_a_pull_in_mid_training_sees_one_count(connect, options):
    c = Counters()
    cluster = connect(2)
    seen, stop = [], threading.Event()

    def pull():
        while not stop.wait(0.01):
            cluster.pull()
            with cluster._variables.held.showing:  # else the end of the training may pull between the two
                seen.append((cluster.pulled_step, *c.counts()))

    other = threading.Thread(target=pull)

    def rows():
        for step, row in enumerate(c.rows(20_000)):
            if step == 5:
                other.start()
            if step >= 150 and len({pulled for pulled, *_ in seen}) > 3:  # on a busy machine pulls come later
                stop.set()
                return
            yield row

    try:
        steps = tfnb.fit(c.train, rows(), **options).steps
    finally:
        stop.set()
        other.join()
    assert len({step for step, *_ in seen}) > 3 and len(seen) <= steps, "each task takes a step between two pulls"
    assert all(step == a == b for step, a, b in seen), seen
    assert c.counts() == [steps, steps] and cluster.step == steps and {*served(cluster)} == {steps}


@pytest.mark.slow
def test_a_pull_notices_a_hold_that_ended_too_early(connect, monkeypatch):
    """As where the notebook stands still for seconds: a hold is over before the values come, and steps go on."""
    c = Counters()
    cluster = connect(2)
    servers = [member.peer.addr for member in cluster._engine.servers]
    noticed, seen, given_up, stop = [], [], [], threading.Event()
    stands_at = Training._stands_at

    async def stands(training, latest):
        is_so = await stands_at(training, latest)
        noticed.extend([] if is_so else [latest])
        return is_so

    monkeypatch.setattr(Training, "_stands_at", stands)

    def pull():
        while not stop.wait(0.01):
            try:
                cluster.pull()
            except Aborted as error:
                given_up.append(error.message)
            with cluster._variables.held.showing:
                seen.append((cluster.pulled_step, *c.counts()))

    def rows():
        for step, row in enumerate(c.rows(20_000)):
            if step >= 150 and len(noticed) > 2 and len({pulled for pulled, *_ in seen}) > 3:
                return
            yield row

    cluster.client.run(set_hold, 0.0, workers=servers)
    other = threading.Thread(target=pull)
    other.start()
    try:
        steps = tfnb.fit(c.train, rows()).steps
    finally:
        stop.set()
        other.join()
        cluster.client.run(set_hold, HOLD, workers=servers)
    assert len(noticed) > 2 and all(step == a == b for step, a, b in seen), seen
    assert all("steps went on during each of 5 pulls" in text for text in given_up)
    assert c.counts() == [steps, steps] and cluster.step == steps


def set_hold(seconds):
    """On a worker: how long a hold lasts there."""
    trainings.HOLD = seconds  # type: ignore[attr-defined]


def test_what_a_server_must_hear_is_told_again(connect):
    """Also where an earlier call to it had failed: its address is not dialled then before it is known to live."""
    cluster = connect(2)
    engine, link, asks = cluster._engine, cluster._link, [Ask(0, "stat"), Ask(1, "stat")]

    async def told(tell, *until):
        link.suspect.add(engine.shards[1].peer.addr)
        return await tell(asks, *until)

    once = link.wait(link.start(told, engine.peers.tell, time.monotonic() + 60), 90, "once")
    assert isinstance(once[0], Ok) and isinstance(once[1], NotSent)
    assert all(isinstance(end, Ok) for end in link.wait(link.start(told, engine.peers.settled_on), 90, "again"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_pull_while_trainings_begin_and_end(connect, mode):
    c = Counters()
    cluster = connect(2)
    seen, stop = [], threading.Event()

    def pull():
        while not stop.is_set():
            cluster.pull()
            with cluster._variables.held.showing:  # else the end of the training may pull between the two
                seen.append((cluster.pulled_step, *c.counts()))

    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(pull)
        try:
            for _ in range(40):
                tfnb.fit(c.train, c.rows(2), mode=mode)
        finally:
            stop.set()
        pulling.result()
    assert len({step for step, *_ in seen}) > 5
    assert all(step == a == b for step, a, b in seen), seen
    assert cluster.pull() == 80 and c.counts() == [80.0, 80.0]


@pytest.mark.parametrize("end", ["kill all", "error", "deadline", "break"])
def test_the_count_is_what_the_servers_applied(connect, end):
    c = Counters(pause=5)
    cluster = connect(2)
    pids = [member.info["pid"] for member in cluster._engine.tasks]

    def do(step):
        if step == 21 and end == "kill all":
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    def rows():
        for step, row in enumerate(c.rows(300 if end == "kill all" else 10_000, do)):
            if step == 21 and end == "error":
                row[c.x][0] = float("inf")
            yield row

    if end == "kill all":  # their nannies start them again, and training goes on
        assert tfnb.fit(c.train, rows(), mode="async").steps == 300
        assert cluster.step == 300
    elif end == "deadline":
        tfnb.run(c.train, {c.x: torch.ones(4)})
        with pytest.raises(DeadlineExceeded) as caught:
            tfnb.fit(c.train, rows(), mode="async", timeout=2)
        assert f"variables are at step {cluster.step}" in str(caught.value)
    elif end == "error":
        with pytest.raises(NonFiniteGradient, match=r"variable count\d, float64\[200\], that task:\d computed"):
            tfnb.fit(c.train, rows(), mode="async")
    else:
        session = tfnb.Session(c.train.graph)
        with closing(
            session.train(c.train, (c.x,), (row.values() for row in rows()), mode="async", timeout=None)
        ) as steps:
            taken = 0
            for group in steps:
                taken += group.steps
                if taken > 20:
                    break
    assert {*served(cluster)} == {cluster.step}
    assert c.counts() == [cluster.step] * 2
    time.sleep(0.5)
    assert {*served(cluster)} == {cluster.step}, "nothing comes later"
