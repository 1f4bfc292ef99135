"""How tasks work together, in real processes: spare tasks, and fits in other modes one after the other."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import tfnb
from tests.cluster.conftest import stats, stop
from tests.cluster.test_cuts import Counters
from tests.cluster.test_resident import ROWS, counts
from tfnb.errors import InvalidArgument
from tfnb.train import SyncReplicas

PATIENCE = 60.0


def version(cluster):
    """How many writes the first server has seen."""
    return max(stat["version"] for stat in stats(cluster))


def until(is_so, seconds=PATIENCE):
    """Wait until it is so; False where it takes too long."""
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    return is_so()


class Halted:
    """A task that stands still for a while: how many steps are taken meanwhile, and by how many tasks.

    It goes on after ``seconds``, or as soon as there are ``steps``.
    """

    def __init__(self, cluster, task, *, seconds=PATIENCE, steps=1 << 60):
        self.cluster, self.seconds, self.steps = cluster, seconds, steps
        self.pid = cluster._engine.tasks[task].info["pid"]
        self.taken = self.tasks = self.lasted = 0
        self.thread = threading.Thread(target=self.run)

    def run(self):
        assert until(lambda: version(self.cluster) >= 40)
        stop(self.pid)
        try:
            before, begin = version(self.cluster), time.monotonic()
            until(lambda: version(self.cluster) >= before + self.steps, self.seconds)
            self.taken, self.tasks = version(self.cluster) - before, len(self.cluster.tasks)
            self.lasted = time.monotonic() - begin
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def rows(self, c):
        """Data, until some steps after it went on."""
        while self.thread.is_alive():
            yield {c.x: torch.ones(4)}
        for _ in range(60):
            yield {c.x: torch.ones(4)}

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "servers", "options"),
    [
        (3, 1, {"backup": 1}),
        (2, 2, {"backup": 1}),
        (2, 2, {"mode": SyncReplicas(1, 2, atomic=False)}),
    ],
)
def test_c57_a_slow_task_holds_no_step_up_and_what_it_computes_late_is_dropped(connect, tasks, servers, options):
    c = Counters()
    cluster = connect(tasks)
    assert len(cluster.servers) == servers
    with Halted(cluster, 1, steps=4) as halted:
        done = tfnb.fit(c.train, halted.rows(c), **options)
    assert halted.taken >= 4 and halted.tasks == tasks, "the others went on, before anybody took it for lost"
    assert done.steps == cluster.step and counts(cluster) == {done.steps}
    assert c.counts() == [float(done.steps)] * 2
    late = sum(member.late for member in cluster._engine.tasks)
    assert late > 0 and "too late to count" in str(cluster.status())
    assert all(stat["staged"] == 0 for stat in stats(cluster))


def dropping_out():
    """A net that draws in each step, its step, its placeholders and its loss."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)).double()
    with tfnb.record("dropping_out"):
        x, y = tfnb.placeholder(ROWS[:5, None].double().expand(5, 4), name="x"), tfnb.placeholder(ROWS[:5].long() % 3)
        loss = torch.nn.functional.cross_entropy(net(x), y)
        train = tfnb.train.Adam(1e-3).minimize(loss)
    return net, train, (x, y), loss


@pytest.mark.slow
@pytest.mark.parametrize("is_drawn", [False, True], ids=["arrays", "batches"])
def test_each_row_counts_once_whichever_spare_task_stands_still(connect, is_drawn):
    """Rows, draws and their order are those of as many tasks as make a step, bit for bit, with a last short batch."""
    torch.manual_seed(1)
    data, labels = torch.randn(101, 4, dtype=torch.float64), torch.randint(0, 3, (101,))

    def trained(tasks, *, halts=(), **options):
        net, train, (x, y), loss = dropping_out()
        cluster = connect(tasks)
        batches = [{x: data[at : at + 10], y: labels[at : at + 10]} for at in range(0, 101, 10)]
        fed = {"data": batches * 100} if is_drawn else {"data": {x: data, y: labels}, "epochs": 100, "batch_size": 10}
        halting = threading.Thread(target=lambda: [stand_still(cluster, *halt) for halt in halts])
        halting.start()
        done = tfnb.fit(train, watch={"loss": loss}, **fed, **options)
        halting.join()
        late = sum(member.late for member in cluster._engine.tasks)
        assert done.steps == 1100 == cluster.step
        cluster.close()
        return [p.detach().clone() for p in net.parameters()], done.history, late

    def stand_still(cluster, task, steps):
        """Until so many steps were taken without it."""
        pid, before = cluster._engine.tasks[task].info["pid"], version(cluster)
        stop(pid)
        try:
            assert until(lambda: version(cluster) >= before + steps), "the others go on"
        finally:
            os.kill(pid, signal.SIGCONT)

    expected, history, late = trained(2)
    assert late == 0
    found, _, late = trained(3, backup=1, halts=[(1, 60), (0, 80), (2, 60)])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and late > 0
    found, told, _ = trained(3, backup=1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [entry["loss"] for entry in told] == pytest.approx([entry["loss"] for entry in history], rel=1e-12)


@pytest.mark.slow
def test_c55_nobody_gets_further_ahead_of_a_halted_task_than_asked(connect):
    c = Counters()
    cluster = connect(2)
    with Halted(cluster, 1, seconds=0.6) as halted:
        done = tfnb.fit(c.train, halted.rows(c), mode="bounded", staleness=3)
    assert halted.taken <= 9, "from 4 steps behind to 4 ahead, and what the other one had sent"
    assert c.counts() == [float(done.steps)] * 2 and counts(cluster) == {done.steps} and cluster.step == done.steps


@pytest.mark.slow
def test_c56_others_wait_for_a_halted_task_only_until_it_misses_a_ping(connect):
    """They go on long before it is found dead; what it computes later counts once, as a loop that begins anew."""
    c = Counters()
    cluster = connect(2)
    with Halted(cluster, 1, steps=8) as halted:
        done = tfnb.fit(c.train, halted.rows(c), mode="bounded", staleness=1)
    assert halted.taken >= 8
    assert halted.tasks == 2 or halted.lasted > 4, "it was found dead: only where the machine is busy, and late"
    assert c.counts() == [float(done.steps)] * 2 and counts(cluster) == {done.steps} and cluster.step == done.steps


class Changes:
    """A callback that changes the mode at some steps."""

    def __init__(self, at):
        self.at = at

    def on_step(self, progress):
        if progress.step in self.at:
            progress.change(**self.at[progress.step])


CHANGES = {
    30: {"mode": "async"}, 60: {"mode": "bounded", "staleness": 1}, 90: {"mode": "sync"}, 91: {"mode": "async"},
    120: {"mode": "sync", "backup": 1},
}  # fmt: skip


@pytest.mark.slow
def test_c62_a_callback_changes_the_mode_in_mid_training_and_no_step_is_lost_or_doubled(connect):
    c = Counters()
    cluster = connect(2)
    seen = []

    class Pulls(Changes):
        """It also reads the values, at any instant of a change."""

        def on_step(self, progress):
            super().on_step(progress)
            if progress.step % 70 == 0:
                seen.append((cluster.pull(), *c.counts()))

    steps = 1600  # a callback hears of them half a second's at a time
    late = {at * 10: how for at, how in CHANGES.items()}
    done = tfnb.fit(c.train, {c.x: ROWS}, steps=steps, batch_size=4, callbacks=[Pulls(late)])
    assert done.steps == cluster.step == steps and c.counts() == [steps] * 2 and counts(cluster) == {steps}
    assert all(step == a == b for step, a, b in seen), "all servers at one step"
    status = str(cluster.status())
    assert all(f"mode={mode} from step" in status for mode in ("async", "bounded staleness=1", "sync backup=1"))
    with pytest.raises(InvalidArgument, match="unknown mode 'sinc'"):
        tfnb.fit(c.train, {c.x: ROWS}, steps=90, batch_size=4, callbacks=[Changes({3: {"mode": "sinc"}})])
    assert {float(cluster.pull())} == set(c.counts()) == {float(n) for n in counts(cluster)}


def test_c62_a_changed_training_on_one_task_is_bitwise_the_local_one(connect, problem):
    p = problem()
    x, y = p.feeds
    one = {at: how for at, how in CHANGES.items() if "backup" not in how}
    options = {"steps": 120, "batch_size": 13, "callbacks": [Changes(one)], "watch": [p.loss]}
    here = tfnb.fit(p.train, {x: p.data, y: p.labels}, **options)
    expected = p.values()
    p.reset()
    connect(1)
    there = tfnb.fit(p.train, {x: p.data, y: p.labels}, **options)
    assert all(torch.equal(a, b) for a, b in zip(p.values(), expected, strict=True))
    assert [mine == pytest.approx(theirs, rel=1e-12) for mine, theirs in zip(there.history, here.history, strict=True)]


def test_sync_replicas_name_what_they_need(connect, problem):
    c = Counters()
    cluster = connect(2)
    for mode in (SyncReplicas(2, 3), SyncReplicas(3)):
        with pytest.raises(InvalidArgument, match=r"SyncReplicas asks for \w=3 tasks, and the cluster has 2"):
            tfnb.fit(c.train, {c.x: ROWS}, steps=4, mode=mode)
    for mode in (SyncReplicas(2, 2), SyncReplicas(1), SyncReplicas(3, distinct=False), SyncReplicas(3, elastic=True)):
        tfnb.fit(c.train, {c.x: ROWS}, steps=10, batch_size=4, mode=mode)
    assert cluster.step == 40 and c.counts() == [40.0] * 2
    for bad in ((0,), (True,), (2, 1), (1, 0)):
        with pytest.raises(InvalidArgument, match="SyncReplicas"):
            SyncReplicas(*bad)


@pytest.mark.parametrize("mode", ["sync", "allreduce"])
def test_the_rows_of_a_short_batch_go_to_fewer_tasks_where_one_of_a_single_row_breaks_batch_norm(connect, mode):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    rows, twin = torch.randn(10, 4, dtype=torch.float64), copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for first, *others in ((rows[:2], rows[2:4]), (rows[4:6], rows[6:8]), (rows[8:],)):
        parts = [(twin, first), *((copy.deepcopy(twin), part) for part in others)]
        losses = [net(part).square().mean() / len(parts) for net, part in parts]
        grads = [torch.autograd.grad(loss, [*net.parameters()]) for loss, (net, _) in zip(losses, parts, strict=True)]
        for parameter, *of_parts in zip(twin.parameters(), *grads, strict=True):
            parameter.grad = sum(of_parts)
        optimizer.step()
    with tfnb.record("short"):
        x = tfnb.placeholder(rows[:4])
        train = tfnb.train.SGD(0.1).minimize(model(x).square().mean())
    connect(2)
    tfnb.fit(train, {x: rows}, batch_size=4, shuffle=False, mode=mode, exact=False)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)


def test_c62_each_fit_has_a_mode_of_its_own_and_goes_on_where_the_last_one_ended(connect, problem):
    """On one task every mode is the local run: with slots and step counts of Adam that go on, bit for bit."""
    p = problem()
    x, y = p.feeds
    fed, options = {x: p.data, y: p.labels}, {"epochs": 2, "batch_size": 13}
    modes = [{}, {"mode": "async"}, {"mode": "bounded", "staleness": 0}, {"mode": "async"}, {}]
    for seed in range(len(modes)):
        tfnb.fit(p.train, fed, seed=seed, **options)
    expected = p.values()
    p.reset()
    cluster = connect(1)
    for seed, mode in enumerate(modes):
        tfnb.fit(p.train, fed, seed=seed, **options, **mode)
        assert cluster.step == 10 * (seed + 1)
    assert all(torch.equal(a, b) for a, b in zip(p.values(), expected, strict=True))


@pytest.mark.slow
def test_c62_modes_one_after_the_other_on_several_tasks_lose_and_double_nothing(connect):
    c = Counters()
    cluster = connect(2)
    modes = [{}, {"backup": 1}, {"mode": "bounded", "staleness": 1}, {"mode": "async"}, {"backup": 1}, {}]
    for number, mode in enumerate(modes, 1):
        tfnb.fit(c.train, {c.x: ROWS}, steps=40, batch_size=4, **mode)
        assert cluster.step == 40 * number and c.counts() == [40.0 * number] * 2
    assert counts(cluster) == {40 * len(modes)}


@pytest.mark.parametrize("drawn", [False, True], ids=["arrays", "drawn"])
def test_spare_tasks_change_nothing_where_all_rows_are_the_same(connect, problem, drawn):
    """Whoever is first, a step is the mean over as many rows as here: also a short batch, and one of a single row."""
    p = problem()
    x, y = p.feeds
    data, labels = p.data[:1].repeat(27, 1), p.labels[:1].repeat(27)
    fed = {x: data, y: labels}
    options = {"epochs": 6, "batch_size": 13}
    here = tfnb.fit(p.train, fed, watch=[p.loss], **options)
    expected = p.values()
    p.reset()
    connect(3)
    if drawn:
        sizes = [13, 13, 1] * 6
        there = tfnb.fit(p.train, ({x: data[:n], y: labels[:n]} for n in sizes), watch=[p.loss], backup=1)
    else:
        there = tfnb.fit(p.train, fed, watch=[p.loss], backup=1, **options)
    for a, b in zip(p.values(), expected, strict=True):
        assert bool(((a - b).abs() <= 1e-12 * (1.0 + b.abs())).all())
    assert there.steps == here.steps == 18
    if not drawn:
        for mine, theirs in zip(there.history, here.history, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)


def test_a_step_of_spare_tasks_is_made_of_as_many_rows_as_asked_for(connect):
    """Each step adds the mean of its rows to w; with two tasks of three it is made of two shares."""
    w = tfnb.Variable(torch.zeros((), dtype=torch.float64), name="w")
    with tfnb.record("rows"):
        x = tfnb.placeholder(torch.ones(4, dtype=torch.float64), name="x")
        train = tfnb.train.SGD(1.0).apply_gradients([(x.mean(), w)])
        seen = x.mean()
    connect(3)
    data = torch.arange(60, dtype=torch.float64)
    done = tfnb.fit(train, {x: data}, steps=200, batch_size=4, backup=1, watch={"mean": seen})
    sizes = [15] * 13 + [5]  # steps of each pass over the data
    total = sum(entry["mean"] * steps for entry, steps in zip(done.history, sizes, strict=True))
    assert -float(w.storage) == pytest.approx(total, rel=1e-9), "what is watched is what counts"


@pytest.mark.parametrize(
    ("backup", "text"), [(2, "backup=2 leaves no task.*has 2 compute tasks.*at most 1"), (9, "backup=9 leaves no task")]
)
def test_more_spare_tasks_than_there_are(connect, backup, text):
    c = Counters()
    cluster = connect(2)
    with pytest.raises(InvalidArgument, match=text):
        tfnb.fit(c.train, {c.x: ROWS}, steps=4, batch_size=4, backup=backup)
    assert cluster.step == 0


@pytest.mark.parametrize(("tasks", "mode"), [(1, "async"), (2, "async"), (2, "sync")])
def test_the_card_tells_the_steps_of_each_task_and_how_old_its_gradients_are(connect, problem, tasks, mode):
    p, cluster = problem(), connect(tasks)
    list(cluster.train(p.program, p.batches(60), mode=mode))
    totals = [member.pace.totals for member in cluster._engine.tasks]
    assert all(each.steps > 0 and each.computed > 0 for each in totals)
    assert sum(each.steps for each in totals) == 60 * (tasks if mode == "sync" else 1)
    sent = sum(each.sent for each in totals)
    assert sent == (60 * len(cluster._engine.shards) if mode == "async" else 0)
    assert (sum(each.overtaken for each in totals) > 0) == (tasks == 2 and mode == "async")
    status = cluster.status()
    for row, each in zip(status.rows, totals, strict=False):
        assert f"{each.steps} step" in row.work and row.work in status.live_html() and row.work in str(status)
    assert "<details>" in status._repr_html_() and "<details>" not in status.live_html()
    held = {name for row in status.rows for name, _ in row.holds}
    assert {"0.weight", "2.bias"} <= held and all(name in status.live_html() for name in held)
    assert "epoch" not in status.live_html() and "lanes" not in status.live_html()
    exchanged = cluster._overview._exchanges()
    servers = {server.name for server in cluster._engine.servers}
    assert {*exchanged} == {(f"task:{task}", server) for task in range(tasks) for server in servers}
    gradients = sum(v.kept.nbytes for v in p.graph.variables if v.trainable)  # pushed, and as much pulled
    assert all(count > 0 for count in exchanged.values())
    assert sum(exchanged.values()) >= 60 * gradients * (tasks if mode == "sync" else 1)
    assert all({name for name, _, _ in row.links} == servers for row in status.rows[:tasks])
