"""The step machines: events in, instructions out. No socket, no clock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfnb.cluster.modes import events as e
from tfnb.cluster.modes import plan
from tfnb.cluster.modes.plan import (
    AbortStep,
    CallFailure,
    Commit,
    Error,
    Prepare,
    Run,
    ShardCommit,
    ShardError,
    ShardReady,
    StepMachine,
    TaskAnswer,
    divide,
)
from tfnb.cluster.wire.messages import Failure

BAD = Failure("InvalidArgument", "kernel")


def step(tasks=(0, 1), shards=(0,), rows=8, **kwargs):
    return StepMachine(list(tasks), list(shards), itertools.count(1), rows, **kwargs)


def play(machine, *events, now=0.0):
    """All instructions of a sequence of events, in order."""
    return [instruction for event in events for instruction in machine.on(event, now)]


def test_a_step_runs_commits_and_finishes():
    machine = step()
    assert play(machine, e.Start()) == [Run(1, 0, 0, 0, 4), Run(1, 1, 1, 4, 8)]
    assert play(machine, TaskAnswer(1, 1, "b")) == []
    assert play(machine, TaskAnswer(1, 0, "a")) == [Commit(1, 0, (0, 1))]
    assert play(machine, ShardCommit(1, 0)) == [e.Finish(("a", "b"), (4, 4))]


def test_several_shards_prepare_before_any_commits():
    machine = step(tasks=[5], shards=(0, 1), rows=None)
    assert play(machine, e.Start()) == [Run(1, 5, 0, 0, 0)]
    assert play(machine, TaskAnswer(1, 5, "a")) == [Prepare(1, 0, (0,)), Prepare(1, 1, (0,))]
    assert play(machine, ShardReady(1, 1), ShardReady(1, 0)) == [Commit(1, 0, (0,)), Commit(1, 1, (0,))]
    assert play(machine, ShardCommit(1, 0), ShardCommit(1, 1)) == [e.Finish(("a",), (0,))]


def test_a_step_of_one_task_has_all_rows():
    machine = step(tasks=[3, 4], rows=7, whole=True)
    assert play(machine, e.Start()) == [Run(1, 3, 0, 0, 7)]
    assert play(machine, e.TaskLoss(3)) == [AbortStep(1), Run(2, 4, 0, 0, 7)]
    assert play(machine, TaskAnswer(2, 4, "a"), ShardCommit(2, 0))[-1] == e.Finish(("a",), (7,))


def test_a_step_that_writes_nothing_finishes_without_commit():
    machine = step(tasks=[0], shards=(), rows=None)
    assert play(machine, e.Start(), TaskAnswer(1, 0, "a"))[-1] == e.Finish(("a",), (0,))


def test_a_lost_task_makes_the_step_run_again_on_the_rest_under_a_new_number():
    machine = step(tasks=[0, 1, 2], rows=9)
    play(machine, e.Start(), TaskAnswer(1, 0, "old"))
    assert play(machine, e.TaskLoss(1)) == [AbortStep(1), Run(2, 0, 0, 0, 5), Run(2, 2, 1, 5, 9)]
    assert play(machine, TaskAnswer(1, 2, "late")) == []
    assert play(machine, TaskAnswer(2, 0, "a"), TaskAnswer(2, 2, "c")) == [Commit(2, 0, (0, 1))]


def test_a_task_lost_after_it_staged_does_not_disturb_the_commit():
    machine = step()
    play(machine, e.Start(), TaskAnswer(1, 0, "a"), TaskAnswer(1, 1, "b"))
    assert play(machine, e.TaskLoss(0)) == []
    assert play(machine, ShardCommit(1, 0)) == [e.Finish(("a", "b"), (4, 4))]


def test_no_task_left_and_a_poisonous_step_stop():
    machine = step(tasks=[0])
    play(machine, e.Start())
    (abort, end) = play(machine, e.TaskLoss(0))
    assert isinstance(end.cause, e.TasksLost) and abort == AbortStep(1)
    machine = step(tasks=range(9))
    play(machine, e.Start())
    (*_, end) = play(machine, e.TaskLoss(0), e.TaskLoss(1), e.TaskLoss(2))
    assert "kill" in end.cause.message


def test_silent_tasks_are_left_out_and_kill_no_step():
    machine = step(tasks=range(9))
    play(machine, e.Start())
    for task in range(8):
        abort, *runs = play(machine, e.TaskLoss(task, is_silent=True))
        assert isinstance(abort, AbortStep) and task not in {run.task for run in runs}
    assert machine.lost == [] and machine.ranges == {8: (0, machine.rows)}
    machine = step(once=True)
    play(machine, e.Start())
    (_, end) = play(machine, e.TaskLoss(0, is_silent=True))
    assert end.cause.tasks == (0,) and machine.lost == [], "it is tried again on another task"


def test_the_first_failure_ends_the_step_and_later_messages_mean_nothing():
    machine = step()
    play(machine, e.Start())
    assert play(machine, Error(1, 0, BAD)) == [AbortStep(1), e.Finish(cause=BAD)]
    assert play(machine, Error(1, 1, BAD), TaskAnswer(1, 1, "b"), e.TaskLoss(0), e.Interrupt()) == []


def test_a_missed_call_is_tried_again_a_few_times():
    machine = step(tasks=[0])
    play(machine, e.Start())
    for number in range(1, plan.RETRIES + 1):
        assert play(machine, CallFailure(number, 0, BAD))[0] == AbortStep(number)
    assert play(machine, CallFailure(number + 1, 0, BAD))[-1] == e.Finish(cause=BAD)


@pytest.mark.parametrize("when", ["planned", "running", "preparing"])
def test_c51_interrupt_before_the_commit_cancels(when):
    machine = step(tasks=[0], shards=(0, 1))
    if when != "planned":
        play(machine, e.Start())
    if when == "preparing":
        play(machine, TaskAnswer(1, 0, "a"))
    assert play(machine, e.Interrupt())[-1] == e.Finish(cause=e.UserStop())


def test_interrupt_and_deadline_never_cut_a_commit():
    machine = step(tasks=[0], deadline=1.0)
    play(machine, e.Start(), TaskAnswer(1, 0, "a"))
    assert play(machine, e.Interrupt(), e.Tick(), now=9.0) == []
    assert play(machine, ShardCommit(1, 0)) == [e.Finish(("a",), (8,))]


def test_deadline_cancels():
    machine = step(deadline=1.0)
    play(machine, e.Start())
    assert play(machine, e.Tick(), now=0.5) == []
    assert play(machine, e.Tick(), now=1.0) == [AbortStep(1), e.Finish(cause=e.TimedOut())]


def test_a_lost_server_ends_every_state():
    for events in (
        [e.Start()],
        [e.Start(), TaskAnswer(1, 0, "a")],
        [e.Start(), TaskAnswer(1, 0, "a"), ShardReady(1, 0), ShardReady(1, 1)],
    ):
        machine = step(tasks=[0], shards=(0, 1))
        play(machine, *events)
        assert play(machine, e.ShardLost(1))[-1] == e.Finish(cause=e.ServerLost(1))


def test_a_shard_that_cannot_prepare_stops_the_step_before_any_write():
    machine = step(tasks=[0], shards=(0, 1))
    play(machine, e.Start(), TaskAnswer(1, 0, "a"), ShardReady(1, 0))
    assert play(machine, ShardError(1, 1, BAD)) == [AbortStep(1), e.Finish(cause=BAD)]


@given(st.integers(1, 200), st.integers(1, 9))
def test_c79_rows_are_divided_completely_and_evenly(rows, parts):
    ranges = divide(rows, parts)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == rows
    sizes = [stop - start for start, stop in ranges]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and len(ranges) == min(parts, rows)


class Servers:
    """Shards that keep what a step staged and committed; used to judge a random run of the machine."""

    def __init__(self, shards):
        self.staged = {shard: {} for shard in shards}
        self.committed = {shard: [] for shard in shards}
        self.floor = 0


@given(st.data())
def test_c50_a_step_under_any_events_is_written_once_or_not_at_all(data):  # noqa: C901 (one table of events)
    """Random answers, losses, retries, interrupts: it ends, and every shard has the same one round or none."""
    shards = data.draw(st.sampled_from([(), (0,), (0, 1), (0, 1, 2)]))
    tasks = list(range(data.draw(st.integers(1, 4))))
    rows, whole = data.draw(st.sampled_from([None, 1, 5, 8])), data.draw(st.booleans())
    machine = StepMachine(list(tasks), shards, itertools.count(1), rows, whole, deadline=50.0)
    calls: list = []  # instructions without an answer
    committed: dict[int, list] = {shard: [] for shard in shards}
    finished: list[e.Finish] = []
    now, dead = 0.0, set()

    def feed(event):
        for instruction in machine.on(event, now):
            match instruction:
                case e.Finish():
                    finished.append(instruction)
                case AbortStep():
                    pass
                case Commit(number, shard, workers):
                    committed[shard].append((number, workers))
                    calls.append(instruction)
                case _:
                    calls.append(instruction)

    feed(e.Start())
    for _ in range(200):
        if finished:
            break
        kind = data.draw(st.sampled_from(["answer"] * 6 + ["error", "miss", "lose", "interrupt", "time", "late"]))
        if kind == "lose" and len(dead) < len(tasks):
            task = data.draw(st.sampled_from([t for t in tasks if t not in dead]))
            dead.add(task)
            feed(e.TaskLoss(task))
        elif kind == "interrupt":
            feed(e.Interrupt())
        elif kind == "time":
            now += data.draw(st.floats(0, 20))
            feed(e.Tick())
        elif calls:
            call = calls.pop(data.draw(st.integers(0, len(calls) - 1)))
            match call, kind:
                case Run(number, task, _, start, stop), _ if rows is not None and whole and (start, stop) != (0, rows):
                    raise AssertionError("a whole step without all of its rows")
                case Run(number, task), _ if task in dead:
                    pass
                case Run(number, task), "error":
                    feed(Error(number, task, BAD))
                case Run(number, task), "miss":
                    feed(CallFailure(number, task, BAD))
                case Run(number, task), _:
                    feed(TaskAnswer(number, task, (number, task)))
                case Prepare(number, shard), "error":
                    feed(ShardError(number, shard, BAD))
                case Prepare(number, shard), _:
                    feed(ShardReady(number, shard))
                case Commit(number, shard), _:
                    feed(ShardCommit(number, shard))
        else:
            now += 100.0
            feed(e.Tick())
    assert len(finished) == 1, "the step ends, once"
    rounds = {tuple(found) for found in committed.values()}
    assert len(rounds) <= 1, "all shards commit the same"
    if finished[0].cause is None:
        assert all(len(found) == (1 if shards else 0) for found in committed.values())
        assert {number for number, _ in finished[0].values} == {machine.number}
    else:
        assert rounds <= {()}, "a step that failed committed nothing"
