"""All-reduce, alone: whatever happens to ranks, each step counts once, and no rank is kept waiting by another one."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfnb.cluster.modes import events as e
from tfnb.cluster.modes.leases import Give, LoopFailure, Offer, PieceProgress, Report, Standstill
from tfnb.cluster.modes.ranks import Ranks, Save, SaveResult, Stood
from tfnb.cluster.modes.rounds import Cut
from tfnb.cluster.tasks.collectives import Bucket, Group, Rendezvous, formed, store
from tfnb.cluster.wire.messages import Failure
from tfnb.errors import Cancelled, Unimplemented
from tfnb.graph import Dim, Spec

BAD = Failure("InvalidArgument", "kernel")


def ranks(*tasks):
    machine = Ranks(list(tasks), [0], itertools.count(1))
    machine.on(e.Start(), 0.0)
    return machine


def play(machine, *events, now=0.0):
    """All instructions of a sequence of events, in order."""
    return [instruction for event in events for instruction in machine.on(event, now)]


def test_the_rank_that_is_ahead_saves_in_a_cut_and_all_begin_from_there():
    machine = ranks(0, 1, 2)
    number = play(machine, Offer("abcd"))[0].piece.number
    play(machine, *(PieceProgress(task, number, 2) for task in range(3)))
    assert play(machine, e.TaskLoss(1)) == [Cut(4)]
    assert play(machine, Stood(0, 2)) == [], "another one has not told"
    assert play(machine, Stood(2, 3)) == [Save(2, 3)], "it applied one more before the loss"
    told = play(machine, SaveResult(machine.saver))
    assert told[0] == Report(number, 2, 3, (0, 1, 2)) and machine.saved == 3
    assert [(i.task, i.piece.steps) for i in told[1:]] == [(0, "d"), (2, "d")]


def test_a_saver_that_is_lost_has_another_one_in_its_place():
    machine = ranks(0, 1, 2)
    play(machine, Offer("abcd"), e.TaskLoss(1), Stood(0, 2))
    assert play(machine, Stood(2, 3)) == [Save(2, 3)]
    assert play(machine, e.TaskLoss(2)) == [Save(0, 2)], "step 3 was of no rank that lives, and nobody was told of it"
    assert [i.piece.steps for i in play(machine, SaveResult(machine.saver)) if isinstance(i, Give)] == ["cd"]


def test_steps_that_were_told_and_are_on_no_rank_any_more_end_it_by_name():
    machine = ranks(0, 1)
    number = play(machine, Offer("abcd"))[0].piece.number
    play(machine, PieceProgress(0, number, 2), PieceProgress(1, number, 2), e.TaskLoss(0))
    (end,) = play(machine, e.TaskLoss(1))
    assert end.cause.tag == "WorkerLost" and "the last 2 steps" in end.cause.message


def test_a_hold_stands_behind_what_was_given_and_saves_once():
    machine = ranks(0, 1)
    number = play(machine, Offer("ab"))[0].piece.number
    assert play(machine, e.Drain(), Offer("cd")) == [], "nothing more is given"
    assert play(machine, PieceProgress(0, number, 2), PieceProgress(1, number, 2))[-1] == Save(0, 2)
    assert play(machine, SaveResult(machine.saver)) == [Standstill()]
    assert [i.piece.steps for i in play(machine, e.Resume())] == ["cd", "cd"]
    machine = ranks(0, 1)
    assert play(machine, e.Drain()) == [Standstill()], "the servers hold all that there is"


def test_a_failure_ends_it_when_its_values_are_saved():
    machine = ranks(0)
    play(machine, Offer("abcd"), LoopFailure(0, BAD, is_fatal=True))
    assert play(machine, Stood(0, 3)) == [Save(0, 3)]
    assert play(machine, SaveResult(machine.saver))[-1] == e.Finish(cause=BAD)


def test_the_failure_of_a_rank_counts_also_where_another_rank_told_first_that_it_missed_a_sum():
    machine = ranks(0, 1)
    play(machine, Offer("abcd"), LoopFailure(0, Failure("Unavailable", "no sum"), is_fatal=False))
    play(machine, LoopFailure(1, BAD, is_fatal=True), Stood(0, 2))
    assert play(machine, Stood(1, 2)) == [machine.saver]
    assert play(machine, SaveResult(machine.saver))[-1] == e.Finish(cause=BAD)


def test_a_save_from_before_a_cut_is_not_taken_for_a_later_one():
    machine = ranks(0, 1)
    number = play(machine, Offer("ab"))[0].piece.number
    *_, early = play(machine, e.Drain(), PieceProgress(0, number, 2), PieceProgress(1, number, 2))
    play(machine, e.TaskLoss(1))
    (save,) = play(machine, Stood(0, 2))
    assert save == early and play(machine, SaveResult(early)) == [], "it may have written nothing"
    assert Standstill() in play(machine, SaveResult(save))


def test_a_rank_that_saves_is_given_nothing_until_its_values_are_written():
    machine = ranks(0)
    number = play(machine, Offer("ab"))[0].piece.number
    play(machine, PieceProgress(0, number, 2))
    (save,) = play(machine, e.Drain())
    assert play(machine, e.Resume(), Offer("cd")) == []
    assert [i.piece.steps for i in play(machine, SaveResult(save))] == ["cd"]


def test_a_save_from_before_a_cut_counts_where_its_rank_is_lost_in_the_cut():
    """The servers hold all steps that were told, so the loss of the last rank that had applied them loses none."""
    machine = ranks(0)
    number = play(machine, Offer("a"))[0].piece.number
    play(machine, PieceProgress(0, number, 1))
    (early,) = play(machine, e.Drain())
    play(machine, e.TaskJoin(1))
    assert machine.state == "cutting" and play(machine, SaveResult(early)) == []
    assert not any(isinstance(i, e.Finish) for i in play(machine, e.TaskLoss(0, is_silent=True)))
    assert machine.saved == machine.reported == 1


def test_a_rank_joins_at_once_though_a_piece_is_in_progress():
    machine = ranks(0)
    play(machine, Offer("abcd"))
    assert play(machine, e.TaskJoin(1)) == [Cut(4)] and machine.waits == {0}


def test_who_looks_while_there_is_no_rank_keeps_one_that_comes_from_beginning():
    machine = ranks(0)
    play(machine, Offer("ab"), e.TaskLoss(0, is_silent=True))
    assert machine.state == "waiting" and play(machine, e.Drain()) == [Standstill()]
    assert not any(isinstance(i, Give) for i in play(machine, e.TaskJoin(1)))
    assert [i.piece.steps for i in play(machine, e.Resume())] == ["ab"]


class World:
    """Ranks that apply the same steps, as sums let them, and servers that hold what was saved."""

    def __init__(self, draw, tasks):
        self.draw, self.machine = draw, Ranks(list(range(tasks)), [0], itertools.count(1))
        self.names, self.reported, self.servers = itertools.count(tasks), [], []
        self.values, self.given, self.alive = {}, {}, set(range(tasks))
        self.ended: dict[int, list[int]] = {}
        self.todo, self.pieces, self.end, self.is_held = [], {}, None, False
        self.cuts, self.issued = 0, {}  # cuts so far, and how many there were when a save was asked for
        self.feed(e.Start())

    def feed(self, event):
        for did in self.machine.on(event, 0.0):
            match did:
                case Give(task, piece):
                    if task in self.alive:
                        self.values.setdefault(task, list(self.servers))
                        self.given.setdefault(task, []).extend((piece.number, i, s) for i, s in enumerate(piece.steps))
                    self.pieces[piece.number] = piece.steps
                case Report(number, start, stop):
                    self.reported += self.pieces[number][start:stop]
                case Standstill():
                    self.is_held = True
                    assert self.servers == self.reported, "who looks sees all that was told, and nothing else"
                case e.Finish():
                    self.end = did
                case Cut():
                    self.cuts += 1
                    applied = {task: self.done(task) for task in self.alive & self.values.keys()}
                    self.todo.append((applied, set(self.machine.waits)))
                    self.ended, self.values, self.given = self.values, {}, {}
                case _:
                    self.issued[id(did)] = self.cuts
                    self.todo.append(did)

    def answer(self):
        """Carry out an instruction that waits."""
        did = self.todo.pop(0)
        match did:
            case (dict() as applied, waits):
                for task in self.draw(st.permutations(sorted(waits))):
                    self.feed(Stood(task, applied.get(task)))
            case Save(task) if task in self.alive:
                is_open = self.machine.state == "open"
                if self.cuts - self.issued[id(did)] > (not is_open) * (did is not self.machine.saver):
                    return self.feed(SaveResult(did, BAD))  # of a loop whose values are gone
                self.servers = list((self.values if is_open else self.ended)[task])
                self.feed(SaveResult(did))

    def done(self, task):
        return self.machine.first - 1 + len(self.values[task]) - self.machine.base

    def step(self):
        """A sum: every member takes part, or nobody has it; then some of them apply it, the others a little later."""
        members = self.machine.members
        behind = [t for t in members if t in self.values and len(self.values[t]) < self.front]
        if behind:
            task = self.draw(st.sampled_from(behind))
        elif all(t in self.alive and self.next(t) is not None for t in members) and members:
            task = self.draw(st.sampled_from(members))
        else:
            return
        if task in self.alive and (found := self.next(task)) is not None:
            self.values[task].append(found[2])

    @property
    def front(self):
        return max((len(v) for v in self.values.values()), default=0)

    def next(self, task):
        at = len(self.values.get(task, ())) - self.machine.base
        steps = self.given.get(task, [])
        return steps[at] if 0 <= at < len(steps) else None

    def tell(self, task):
        """A task tells the steps that it has applied."""
        done = len(self.values.get(task, ())) - self.machine.base
        applied = [number for number, *_ in self.given.get(task, [])[: max(0, done)]]
        for number in sorted(set(applied)):  # a cut may begin in between
            self.feed(PieceProgress(task, number, applied.count(number)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_step_counts_once_whoever_is_lost_or_joins(data):  # noqa: C901 (one line for each act)
    tasks = data.draw(st.integers(1, 3))
    world, steps, losses = World(data.draw, tasks), iter(range(100)), 0
    offered = []
    for _ in range(data.draw(st.integers(0, 60))):
        if world.end is not None:
            break
        act = data.draw(st.sampled_from(["offer", "step", "step", "step", "tell", "lose", "join", "hold", "answer"]))
        live = sorted(world.alive)
        if act == "offer" and world.machine.wants:
            piece = list(itertools.islice(steps, data.draw(st.integers(1, 3))))
            offered += piece
            world.feed(Offer(piece))
        elif act == "step" and world.machine.state == "open":
            world.step()
        elif act == "tell" and live:
            world.tell(data.draw(st.sampled_from(live)))
        elif act == "lose" and len(live) > 1 and losses < 4:
            losses += 1
            world.alive.discard(task := data.draw(st.sampled_from(live)))
            world.feed(e.TaskLoss(task, is_silent=True))
        elif act == "join":
            world.alive.add(task := next(world.names))
            world.feed(e.TaskJoin(task))
        elif act == "hold":
            world.feed(e.Resume() if world.machine.is_hold_wanted else e.Drain())
        elif act == "answer" and world.todo:
            world.answer()
        assert world.reported == offered[: len(world.reported)]
        assert world.servers == offered[: len(world.servers)]
    world.feed(e.Resume())
    world.feed(e.DataEnd())
    for _ in range(500):
        if world.end is not None:
            break
        if world.todo:
            world.answer()
        elif world.machine.state == "open":
            world.step()
            for task in sorted(world.alive):
                world.tell(task)
    assert world.end is not None
    if world.end.cause is None:
        assert world.servers == world.reported == offered
    else:
        assert world.end.cause.tag == "WorkerLost" and len(world.servers) < len(world.reported)


def test_a_bucket_brings_gradients_by_rows_and_what_is_no_gradient_from_the_first_rank_alone():
    specs = [Spec(torch.bfloat16, (2,)), Spec(torch.int64, ()), Spec(torch.bool, (1,))]
    brought = [torch.tensor([2.0, 4.0], dtype=torch.bfloat16), torch.tensor(7), torch.tensor([True])]
    one, other = (Bucket(["grad", "value", "value"], specs) for _ in range(2))
    one.fill(brought, 0.75, is_first=True)
    other.fill(brought, 0.25, is_first=False)
    for dtype, flat in one.flats.items():
        flat += other.flats[dtype]
    assert one.is_ready(2) and not one.is_ready(3)
    for found, expected in zip(one.values(), brought, strict=True):
        torch.testing.assert_close(found, expected)
    other.clear(0)
    assert not other.is_ready(1)
    for kind, spec in (
        ("rows", specs[0]),
        ("grad", Spec(torch.float32, (Dim("B"),))),
        ("grad", Spec(torch.cfloat, ())),
    ):
        with pytest.raises(Unimplemented, match="sync"):
            Bucket([kind], [spec])


def test_a_group_with_an_abandoned_call_is_destroyed_without_waiting_for_the_call():
    """It may be any thread that drops the last reference, such as an event loop that collects garbage."""
    held, is_wanted = store("127.0.0.1"), [True]
    meetings = [Rendezvous("abandoned", "127.0.0.1", held.port, rank, 2) for rank in range(2)]
    forming = [
        formed(meeting, "127.0.0.1", None if meeting.rank else held, lambda: is_wanted[0]) for meeting in meetings
    ]
    groups = [future.result(30) for future in forming]
    other = groups.pop()  # its connection stays
    is_wanted[0] = False
    assert _is_abandoned(groups[0])
    del forming

    def drop() -> None:
        groups.clear()
        gc.collect()

    dropping = threading.Thread(target=drop, daemon=True)
    dropping.start()
    dropping.join(30)
    assert not dropping.is_alive() and other.size == 2


def _is_abandoned(group: Group) -> bool:
    """Whether a sum ended before the other rank came; keeps no reference to the group."""
    try:
        group.sum([torch.ones(3)])
    except Cancelled:
        return True
    return False
