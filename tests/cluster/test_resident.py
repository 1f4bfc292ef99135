"""Trainings whose tasks loop by themselves: exact with real kills, equal to local fits, and quiet in the notebook."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch

import tfnb
from tests.cluster.conftest import stats, until
from tests.cluster.test_cuts import Counters
from tfnb.cluster.wire.messages import Ok

ROWS = torch.ones(400)


def counts(cluster):
    """What each server says of how many steps it wrote."""
    return {stat["version"] - 1 for stat in stats(cluster)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"mode": "sync"}, {"mode": "async"}, {"mode": "sync", "backup": 1}, {"mode": "bounded", "staleness": 2}],
    ids=["sync", "async", "backup", "bounded"],
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_c61_a_task_lost_at_a_random_instant_costs_and_doubles_no_step(connect, options, how):
    c = Counters()
    cluster = connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})
    pid = cluster._engine.tasks[1].info["pid"]
    source, steps = random.Random(7), 1000  # many: it comes before the end

    def strike():
        """In the middle, however quick the machine is."""
        while cluster.pull() < 100:
            time.sleep(0.01)
        time.sleep(source.uniform(0.0, 0.05))
        os.kill(pid, how)

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        done = tfnb.fit(c.train, {c.x: ROWS}, steps=steps, batch_size=4, **options)
    finally:
        striker.join()
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    assert cluster.tasks[0] == "task:0"
    if how == signal.SIGSTOP:  # it was silent, and joins again
        until(lambda: len(cluster.tasks) == 2)
        assert cluster._engine.places["task:1"].info["pid"] == pid and len(cluster._engine.tasks) == 3
    assert done.steps == steps and cluster.step == steps + 1
    assert c.counts() == [steps + 1.0] * 2
    time.sleep(0.5)
    cluster.pull()
    assert c.counts() == [steps + 1.0] * 2 and counts(cluster) == {steps + 1}, "nothing comes later"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_array_fit_on_one_task_is_bitwise_the_local_one(connect, problem, mode):
    p = problem()
    x, y = p.feeds
    here = tfnb.fit(p.train, {x: p.data, y: p.labels}, epochs=4, batch_size=13, watch=[p.loss], seed=3)
    expected = p.values()
    p.reset()
    connect(1)
    there = tfnb.fit(p.train, {x: p.data, y: p.labels}, epochs=4, batch_size=13, watch=[p.loss], seed=3, mode=mode)
    assert all(torch.equal(a, b) for a, b in zip(p.values(), expected, strict=True))
    for mine, theirs in zip(there.history, here.history, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12), "means, summed in other portions"


@pytest.mark.parametrize("tasks", [3, 2])
def test_c52_an_array_fit_on_several_tasks_and_servers_within_rounding(connect, problem, tasks):
    p = problem()
    x, y = p.feeds
    here = tfnb.fit(p.train, {x: p.data, y: p.labels}, epochs=4, batch_size=13, watch=[p.loss], seed=3)
    expected = p.values()
    p.reset()
    cluster = connect(tasks)
    there = tfnb.fit(p.train, {x: p.data, y: p.labels}, epochs=4, batch_size=13, watch=[p.loss], seed=3)
    assert there.steps == here.steps == cluster.step == 20
    for a, b in zip(p.values(), expected, strict=True):
        assert bool(((a - b).abs() <= 1e-12 * (1.0 + b.abs())).all())
    for mine, theirs in zip(there.history, here.history, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)


@pytest.mark.slow
def test_arrays_that_are_too_large_for_the_tasks_are_drawn_here(connect, monkeypatch):
    c = Counters()
    connect(2)
    monkeypatch.setattr("tfnb.cluster.notebook.steps_there.AHEAD", 100)
    monkeypatch.setattr("tfnb.cluster.engine.sources.MOST", 40)
    assert tfnb.fit(c.train, {c.x: ROWS}, steps=150, batch_size=4).steps == 150
    assert c.counts() == [150.0, 150.0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_s158_one_request_for_each_server_and_step(connect, mode):
    c = Counters()
    cluster = connect(2)
    before = [stat["requests"] for stat in stats(cluster)]
    tfnb.fit(c.train, {c.x: ROWS}, steps=200, batch_size=4, mode=mode)
    after = [stat["requests"] for stat in stats(cluster)]
    per_step = 2 if mode == "sync" else 1
    between_servers = 1 if mode == "sync" else 0
    for first, last in zip(before, after, strict=True):
        assert last - first <= 200 * (per_step + between_servers) + 100


@pytest.mark.slow
def test_a_notebook_asks_each_task_a_few_times_a_second_and_pings_only_who_is_silent(connect):
    w = tfnb.Variable(torch.zeros(()), name="w")
    with tfnb.record("slow"):
        x = tfnb.placeholder(torch.ones(2), name="x")
        square = x.mean() + torch.zeros(900, 900)
        for _ in range(3):
            square = square @ square / 900
        train = tfnb.train.SGD(0.1).minimize(w.read() * square.mean())
    cluster = connect(2)
    tfnb.fit(train, {x: ROWS}, steps=5, batch_size=2, mode="async")
    calls, begin = cluster._engine.link.latencies, time.monotonic()
    calls.clear()
    tfnb.fit(train, {x: ROWS}, steps=60, batch_size=2, mode="async")
    passed = time.monotonic() - begin
    assert len(calls["watch"]) <= 2 * (4.5 * passed + 4)
    assert len(calls["ping"]) <= len(cluster.servers) * (passed + 1), "tasks answer all the time; servers are asked"


def test_a_variable_that_the_data_iterator_writes_counts_from_that_batch_on(connect):
    w = tfnb.Variable(torch.zeros((), dtype=torch.float64), name="w")
    rate = tfnb.Variable(torch.ones((), dtype=torch.float64), name="rate", trainable=False)
    with tfnb.record("rates"):
        x = tfnb.placeholder(torch.ones(4, dtype=torch.float64), name="x")
        train = w.assign_sub(rate.read() * x.mean())
    connect(2)

    def rows():
        for step in range(60):
            if step in (20, 40):
                rate.storage.mul_(10)
            yield {x: torch.ones(4, dtype=torch.float64)}

    with pytest.warns(UserWarning, match="the step writes w itself(.|\n)*tasks sum over all rows in mid-step"):
        tfnb.fit(train, rows())
    assert w.value() == -(20 + 200 + 2000)


@pytest.mark.parametrize("options", [{"backup": 1}, {"exact": False}])
def test_what_fit_says_of_sync_holds_with_backup_tasks_too(connect, options):
    w = tfnb.Variable(torch.zeros(()), name="w")
    with tfnb.record(f"said_{len(options)}"):
        x = tfnb.placeholder(torch.ones(4), name="x")
        train = w.assign_sub(x.max())
    connect(2)
    with pytest.warns(UserWarning, match="the step writes w itself(.|\n)*what the first task makes of its rows"):
        tfnb.fit(train, {x: torch.ones(8)}, batch_size=4, mode="sync", **options)


@pytest.mark.parametrize(("mode", "more"), [("async", {}), ("bounded", {"staleness": 2})])
def test_no_task_loses_what_another_one_adds(connect, mode, more):
    count, product = (tfnb.Variable(torch.zeros((), dtype=torch.float64), name=name) for name in ("count", "product"))
    with tfnb.record(f"added_{mode}"):
        n = tfnb.placeholder(torch.tensor(1.0, dtype=torch.float64), name="n")
        added = count.assign_add(n)
        made = product.assign(torch.stack([product.read(), n]).sum())
    connect(3)
    feeds = [{n: torch.tensor(float(i), dtype=torch.float64)} for i in range(300)]
    tfnb.fit(added, feeds, mode=mode, **more)  # a warning would be an error
    assert count.value() == sum(range(300))
    with pytest.warns(UserWarning, match="makes the new value of product of the one that it read(.|\n)*assign_add"):
        tfnb.fit(made, feeds[:9], mode=mode, **more)


@pytest.mark.slow
def test_a_run_and_a_fit_inside_of_a_fit(connect):
    """Also where one task is at a step of the one and waits for another task, which is at a step of the other."""
    outer, inner = Counters(), Counters()
    cluster = connect(2)
    longest = 0.0

    def rows():
        nonlocal longest
        for step in range(60):
            if step % 10 == 5:
                begin = time.monotonic()
                tfnb.run(inner.train, {inner.x: torch.ones(4)})
                tfnb.fit(inner.train, {inner.x: ROWS}, steps=10, batch_size=4)
                longest = max(longest, time.monotonic() - begin)
            yield {outer.x: torch.ones(4)}

    for mode in ("sync", "async"):
        tfnb.fit(outer.train, rows(), mode=mode)
    assert outer.counts() == [120.0] * 2 and inner.counts() == [132.0] * 2
    assert cluster.step == 252
    assert longest < 9, "nobody waits until a request is to be asked again"


def test_tasks_and_servers_forget_a_training(connect):
    c = Counters()
    cluster = connect(2)
    for mode in ("sync", "async"):
        tfnb.fit(c.train, {c.x: ROWS}, steps=20, batch_size=4, mode=mode)
    end = time.monotonic() + 60
    while cluster._engine._told and time.monotonic() < end:
        time.sleep(0.05)
    member = cluster._engine.tasks[0]

    async def watch():
        return await cluster._link.call(member.peer, "watch", {"loop": "x", "seen": 0}, epoch=cluster._engine.epoch)

    assert not isinstance(cluster._do("watch", 60, watch), Ok)
    assert all(stat["staged"] == 0 and stat["waiting"] == 0 for stat in stats(cluster))


def test_a_piece_that_comes_after_the_end_of_its_loop_is_refused(connect):
    cluster = connect(2)
    peer, epoch = cluster._engine.tasks[0].peer, cluster._engine.epoch

    async def late():
        await cluster._link.call(peer, "leave", {"loop": "x", "seen": 0}, epoch=epoch)
        return await cluster._link.call(peer, "lend", {"loop": "x"}, epoch=epoch)

    assert cluster._do("lending", 60, late).reason == "stale"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_callback_ends_a_training_and_what_tasks_have_begun_counts(connect, mode):
    c = Counters()
    cluster = connect(2)
    epochs: list[int] = []

    class Stops:
        def on_step(self, progress):
            if progress.step >= 30:
                progress.stop("enough")

        def on_epoch(self, progress):
            epochs.append(progress.epoch)

    done = tfnb.fit(c.train, {c.x: ROWS}, steps=100_000, batch_size=40, mode=mode, callbacks=[Stops()])
    assert done.stopped == "enough" and 30 <= done.steps < 100_000
    assert done.steps == cluster.step and c.counts() == [float(done.steps)] * 2
    assert epochs[:2] == [1, 2]
    assert tfnb.fit(c.train, {c.x: ROWS}, batch_size=40, mode=mode).steps == 10
