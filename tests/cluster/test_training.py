"""What the notebook makes of what the tasks of a training tell: values of whole steps, and an end whatever fails."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
import torch

import tfnb
from tests.cluster.test_cuts import Counters
from tfnb.cluster.engine.members import Member, Mode
from tfnb.cluster.engine.training import Training
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes.joins import Join
from tfnb.cluster.modes.leases import Offer, TaskPause
from tfnb.cluster.modes.rounds import CutAt
from tfnb.cluster.wire.messages import Ok, Peer
from tfnb.errors import Cancelled, Internal
from tfnb.placement.row_guards import RowGuards


class Quiet(Training):
    """A training that lends to nobody: what tasks tell is fed by hand."""

    def _begin(self, work):
        work.close()


def listening(tasks, mode="sync", ways=("mean",)):
    """A training on two tasks, and how to tell it of steps of a piece: of which part of how many, rows and values."""
    members = [Member(f"task:{task}", Peer("a", "k", task), None) for task in tasks]
    engine = SimpleNamespace(
        link=SimpleNamespace(client="c"), names=itertools.count(), step=0, interrupts=0, tasks=members,
        forget=lambda _: None, later=lambda work: work.close(),
    )  # fmt: skip
    placed = SimpleNamespace(
        writes=(0,), fetched=(0,) * len(ways), compute=SimpleNamespace(id="p"), late=None, guards=RowGuards(),
        joins=[Join(way) for way in ways], outer=None,
    )  # fmt: skip
    training = Quiet(engine, placed, Mode(mode), None, list(tasks), float("inf"))
    training.feed(e.Start())

    def tell(task, number, start, steps, rows, value, parts, place=None):
        told = [torch.full((steps,), value)] * len(ways)
        some = [True] * len(ways)
        meta = {"at": 0, "groups": [[number, start, steps, task if place is None else place, parts, rows, some]]}
        loop = training._loop(task)
        loop.seen = 0
        training._hear(task, loop, Ok({**meta, "late": 0, "seconds": 0.0}, told))

    return training, tell


def batches(count):
    return [SimpleNamespace(tensors=(), rows=2, run_index=i, split=(), number=i) for i in range(count)]


def values(training):
    assert all(v.numbers is None or len(v.numbers) == v.steps for v in training.results)
    return [(v.steps, v.values[0].tolist() if v.values else None) for v in training.results]


def test_the_value_of_a_step_of_which_a_task_was_lost_before_it_told_its_part_is_not_known():
    training, tell = listening([0, 1])
    training.feed(Offer(batches(3)))
    tell(0, 1, 0, 2, 6, 1.0, 2)
    tell(1, 1, 0, 1, 2, 5.0, 2)
    assert values(training) == [(1, [2.0])], "6 rows with 1 and 2 rows with 5"
    training.feed(e.TaskLoss(1))
    training.feed(CutAt(2))  # the servers have written the second step, too
    assert values(training)[1:] == [(1, None)], "not the mean over the rows of one task"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_was_told_of_a_finished_piece_is_kept_no_longer(mode):
    training, tell = listening([0], mode)
    for _ in range(5):
        training.feed(Offer(batches(2)))
        piece = training.machine.out[0] if mode == "sync" else training.machine.out[0][0]
        tell(0, piece.number, 0, 2, 2, 1.0, 1)
    assert len(training.results) == 5 and not training._heard and not training._steps_of


def test_a_value_whose_rows_lie_on_another_axis(connect):
    torch.manual_seed(0)
    data = torch.randn(13, 4, dtype=torch.float64)
    w = tfnb.Variable(torch.ones(4, dtype=torch.float64), name="w")
    with tfnb.record("across"):
        x = tfnb.placeholder(data[:4], name="x")
        train = tfnb.train.SGD(0.1).minimize((x * w.read()).square().mean())
        across, every = x.t() * 2, x @ x.t()
    cluster = connect(2)
    assert tfnb.fit((train, across, every), {x: data}, batch_size=7, epochs=2, timeout=60).steps == 4
    assert cluster.step == 4


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_error_in_the_notebook_s_side_of_a_training_ends_it(connect, monkeypatch, mode):
    c = Counters()
    connect(2)
    tfnb.run(c.train, {c.x: torch.ones(4)})

    def broken(*args):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_found", broken)
        with pytest.raises(Internal, match="planted"):
            tfnb.fit(c.train, {c.x: torch.ones(400)}, steps=10_000, batch_size=4, mode=mode, timeout=90)
    assert len(set(c.counts())) == 1, "all servers are at one step"
    assert tfnb.fit(c.train, {c.x: torch.ones(400)}, steps=20, batch_size=4, mode=mode).steps == 20


@pytest.mark.parametrize("is_drawn", [False, True], ids=["arrays", "drawn"])
@pytest.mark.parametrize("options", [{"mode": "async"}, {"mode": "sync"}, {"mode": "bounded", "staleness": 1}])
def test_epoch_means_are_over_the_rows_of_the_epoch_whatever_task_is_quicker(connect, options, is_drawn):
    data = torch.arange(26, dtype=torch.float64).reshape(13, 2) ** 2
    w = tfnb.Variable(torch.zeros(2, dtype=torch.float64), name="w")
    with tfnb.record("means"):
        x = tfnb.placeholder(data[:4], name="x")
        seen = x.mean()
        train = tfnb.train.SGD(0.1).minimize((x * w.read()).mean())
    connect(2)
    rows = [{x: data[:12]}, {x: data[12:]}] if is_drawn else {x: data}
    sizes = {} if is_drawn else {"batch_size": 12}
    done = tfnb.fit(train, rows, epochs=8, shuffle=False, watch={"seen": seen}, **sizes, **options)
    assert [entry["epoch"] for entry in done.history] == list(range(1, 9)) and done.steps == 16
    assert [entry["seen"] for entry in done.history] == pytest.approx([data.mean().item()] * 8, rel=1e-12)


def test_a_loop_is_asked_until_it_stands_unless_it_is_to_go_on_again():
    training, _ = listening([0], "async")
    training.feed(Offer(batches(2)))
    loop, fed, stands = training._loop(0), [], iter([False, False, True, False, False])
    training.feed = fed.append

    async def asked(member, method, meta, tensors):
        await asyncio.sleep(0)
        paused = meta["wanted"] and next(stands)
        return Ok({"at": 0, "groups": [], "late": 0, "seconds": 0.0, "paused": paused})

    training._asked = asked

    async def play():
        await training._pause(0, is_wanted=True)
        assert fed == [TaskPause(0)]
        asks = asyncio.create_task(training._pause(0, is_wanted=True))
        await asyncio.sleep(0)
        await training._pause(0, is_wanted=False)
        await asyncio.wait_for(asks, 30)
        assert fed == [TaskPause(0)] and loop.wishes == 3

    asyncio.run(play())


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_interrupt_that_comes_before_a_training_listens_ends_it(connect, problem, mode):
    p = problem()
    cluster = connect(2)
    placed, engine = cluster._steps.place(p.program, parallel=True), cluster._engine

    async def play():
        begun = asyncio.ensure_future(engine.train(placed, Mode(mode), None, None))
        await asyncio.sleep(0)
        await engine.interrupt()
        training = await begun
        await asyncio.wait_for(training.wait(lambda: False), 60)
        return training.end.cause, len(engine._trainings)

    assert cluster._do("this", 90, play) == (e.UserStop(), 0)
    list(cluster.train(p.program, p.batches(3), mode=mode))
    assert cluster.step == 3


def test_an_interrupt_ends_a_run_that_waits_for_a_task_to_come_or_for_its_place(connect, problem):
    p = problem()
    cluster = connect(1)
    placed, engine = cluster._steps.place(p.program, parallel=False), cluster._engine
    (batch,) = p.batches(1)

    async def play():
        member = engine.tasks[0]
        member.lose()
        try:
            begun = [asyncio.ensure_future(engine.single.run(placed, batch, None)) for _ in range(2)]
            await asyncio.sleep(0.2)
            await engine.interrupt()
            return await asyncio.wait_for(asyncio.gather(*begun, return_exceptions=True), 30)
        finally:
            member.alive = True

    assert [type(end) for end in cluster._do("this", 90, play)] == [Cancelled, Cancelled]
    assert cluster.step == 0
