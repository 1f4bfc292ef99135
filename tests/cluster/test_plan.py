"""The step machines: events in, instructions out. No socket, no clock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfnb.cluster import plan
from tfnb.cluster.messages import Failed
from tfnb.cluster.plan import (
    Abort,
    Commit,
    Committed,
    Count,
    Counted,
    Done,
    End,
    Error,
    Finish,
    Held,
    Hold,
    Interrupt,
    Interrupted,
    Joined,
    Lease,
    Leases,
    Lost,
    Missed,
    Offer,
    Prepare,
    Prepared,
    Report,
    Resume,
    Revoke,
    Revoked,
    Run,
    ServerLost,
    ShardError,
    ShardLost,
    Start,
    Step,
    TasksLost,
    Tick,
    TimedOut,
    divide,
)  # fmt: skip

BAD = Failed("InvalidArgument", "kernel")


def step(tasks=(0, 1), shards=(0,), rows=8, **kwargs):
    return Step(list(tasks), list(shards), itertools.count(1), rows, **kwargs)


def play(machine, *events, now=0.0):
    """All instructions of a sequence of events, in order."""
    return [instruction for event in events for instruction in machine.on(event, now)]


def test_a_step_runs_commits_and_finishes():
    machine = step()
    assert play(machine, Start()) == [Run(1, 0, 0, 0, 4), Run(1, 1, 1, 4, 8)]
    assert play(machine, Done(1, 1, "b")) == []
    assert play(machine, Done(1, 0, "a")) == [Commit(1, 0, (0, 1))]
    assert play(machine, Committed(1, 0)) == [Finish(("a", "b"), (4, 4))]


def test_several_shards_prepare_before_any_commits():
    machine = step(tasks=[5], shards=(0, 1), rows=None)
    assert play(machine, Start()) == [Run(1, 5, 0, 0, 0)]
    assert play(machine, Done(1, 5, "a")) == [Prepare(1, 0, (0,)), Prepare(1, 1, (0,))]
    assert play(machine, Prepared(1, 1), Prepared(1, 0)) == [Commit(1, 0, (0,)), Commit(1, 1, (0,))]
    assert play(machine, Committed(1, 0), Committed(1, 1)) == [Finish(("a",), (0,))]


def test_a_step_of_one_task_has_all_rows():
    machine = step(tasks=[3, 4], rows=7, whole=True)
    assert play(machine, Start()) == [Run(1, 3, 0, 0, 7)]
    assert play(machine, Lost(3)) == [Abort(1), Run(2, 4, 0, 0, 7)]
    assert play(machine, Done(2, 4, "a"), Committed(2, 0))[-1] == Finish(("a",), (7,))


def test_a_step_that_writes_nothing_finishes_without_commit():
    machine = step(tasks=[0], shards=(), rows=None)
    assert play(machine, Start(), Done(1, 0, "a"))[-1] == Finish(("a",), (0,))


def test_a_lost_task_makes_the_step_run_again_on_the_rest_under_a_new_number():
    machine = step(tasks=[0, 1, 2], rows=9)
    play(machine, Start(), Done(1, 0, "old"))
    assert play(machine, Lost(1)) == [Abort(1), Run(2, 0, 0, 0, 5), Run(2, 2, 1, 5, 9)]
    assert play(machine, Done(1, 2, "late")) == []
    assert play(machine, Done(2, 0, "a"), Done(2, 2, "c")) == [Commit(2, 0, (0, 1))]


def test_a_task_lost_after_it_staged_does_not_disturb_the_commit():
    machine = step()
    play(machine, Start(), Done(1, 0, "a"), Done(1, 1, "b"))
    assert play(machine, Lost(0)) == []
    assert play(machine, Committed(1, 0)) == [Finish(("a", "b"), (4, 4))]


def test_no_task_left_and_a_poisonous_step_stop():
    machine = step(tasks=[0])
    play(machine, Start())
    (abort, end) = play(machine, Lost(0))
    assert isinstance(end.cause, TasksLost) and abort == Abort(1)
    machine = step(tasks=range(9))
    play(machine, Start())
    (*_, end) = play(machine, Lost(0), Lost(1), Lost(2))
    assert "kill" in end.cause.message


def test_the_first_failure_ends_the_step_and_later_messages_mean_nothing():
    machine = step()
    play(machine, Start())
    assert play(machine, Error(1, 0, BAD)) == [Abort(1), Finish(cause=BAD)]
    assert play(machine, Error(1, 1, BAD), Done(1, 1, "b"), Lost(0), Interrupt()) == []


def test_a_missed_call_is_tried_again_a_few_times():
    machine = step(tasks=[0])
    play(machine, Start())
    for number in range(1, plan.RETRIES + 1):
        assert play(machine, Missed(number, 0, BAD))[0] == Abort(number)
    assert play(machine, Missed(number + 1, 0, BAD))[-1] == Finish(cause=BAD)


@pytest.mark.parametrize("when", ["planned", "running", "preparing"])
def test_c51_interrupt_before_the_commit_cancels(when):
    machine = step(tasks=[0], shards=(0, 1))
    if when != "planned":
        play(machine, Start())
    if when == "preparing":
        play(machine, Done(1, 0, "a"))
    assert play(machine, Interrupt())[-1] == Finish(cause=Interrupted())


def test_interrupt_and_deadline_never_cut_a_commit():
    machine = step(tasks=[0], deadline=1.0)
    play(machine, Start(), Done(1, 0, "a"))
    assert play(machine, Interrupt(), Tick(), now=9.0) == []
    assert play(machine, Committed(1, 0)) == [Finish(("a",), (8,))]


def test_deadline_cancels():
    machine = step(deadline=1.0)
    play(machine, Start())
    assert play(machine, Tick(), now=0.5) == []
    assert play(machine, Tick(), now=1.0) == [Abort(1), Finish(cause=TimedOut())]


def test_a_lost_server_ends_every_state():
    for events in ([Start()], [Start(), Done(1, 0, "a")], [Start(), Done(1, 0, "a"), Prepared(1, 0), Prepared(1, 1)]):
        machine = step(tasks=[0], shards=(0, 1))
        play(machine, *events)
        assert play(machine, ShardLost(1))[-1] == Finish(cause=ServerLost(1))


def test_a_shard_that_cannot_prepare_stops_the_step_before_any_write():
    machine = step(tasks=[0], shards=(0, 1))
    play(machine, Start(), Done(1, 0, "a"), Prepared(1, 0))
    assert play(machine, ShardError(1, 1, BAD)) == [Abort(1), Finish(cause=BAD)]


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
    machine = Step(list(tasks), shards, itertools.count(1), rows, whole, deadline=50.0)
    calls: list = []  # instructions without an answer
    committed: dict[int, list] = {shard: [] for shard in shards}
    finished: list[Finish] = []
    now, dead = 0.0, set()

    def feed(event):
        for instruction in machine.on(event, now):
            match instruction:
                case Finish():
                    finished.append(instruction)
                case Abort():
                    pass
                case Commit(number, shard, workers):
                    committed[shard].append((number, workers))
                    calls.append(instruction)
                case _:
                    calls.append(instruction)

    feed(Start())
    for _ in range(200):
        if finished:
            break
        kind = data.draw(st.sampled_from(["answer"] * 6 + ["error", "miss", "lose", "interrupt", "time", "late"]))
        if kind == "lose" and len(dead) < len(tasks):
            task = data.draw(st.sampled_from([t for t in tasks if t not in dead]))
            dead.add(task)
            feed(Lost(task))
        elif kind == "interrupt":
            feed(Interrupt())
        elif kind == "time":
            now += data.draw(st.floats(0, 20))
            feed(Tick())
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
                    feed(Missed(number, task, BAD))
                case Run(number, task), _:
                    feed(Done(number, task, (number, task)))
                case Prepare(number, shard), "error":
                    feed(ShardError(number, shard, BAD))
                case Prepare(number, shard), _:
                    feed(Prepared(number, shard))
                case Commit(number, shard), _:
                    feed(Committed(number, shard))
        else:
            now += 100.0
            feed(Tick())
    assert len(finished) == 1, "the step ends, once"
    rounds = {tuple(found) for found in committed.values()}
    assert len(rounds) <= 1, "all shards commit the same"
    if finished[0].cause is None:
        assert all(len(found) == (1 if shards else 0) for found in committed.values())
        assert {number for number, _ in finished[0].values} == {machine.number}
    else:
        assert rounds <= {()}, "a step that failed committed nothing"


# -- asynchronous ----------------------------------------------------------------------------------------------


def leases(tasks=(0, 1), shards=(0,), **kwargs):
    machine = Leases(list(tasks), list(shards), itertools.count(1), **kwargs)
    machine.on(Start(), 0.0)
    return machine


def test_batches_are_leased_to_idle_tasks_and_reported():
    machine = leases()
    assert machine.wants == 2
    assert play(machine, Offer("x"), Offer("y")) == [Lease(1, 0, "x"), Lease(2, 1, "y")]
    assert machine.wants == 0
    assert play(machine, Done(2, 1, "vy")) == [Report(2, "vy")]
    assert play(machine, Offer("z"), End()) == [Lease(3, 1, "z")]
    assert play(machine, Done(1, 0, "vx"), Done(3, 1, "vz"))[-1] == Finish()


def test_a_batch_of_a_dead_task_is_leased_again_under_its_number():
    machine = leases()
    play(machine, Offer("x"), Offer("y"))
    assert play(machine, Lost(0)) == []
    assert play(machine, Done(2, 1, "vy")) == [Report(2, "vy"), Lease(1, 1, "x")]


def test_without_a_task_it_ends_at_once_and_servers_say_what_counts():
    machine = Leases([], [0], itertools.count(1))
    assert play(machine, Start()) == [Finish(cause=TasksLost("no compute task is left"))]
    machine = leases(tasks=[0, 1], shards=[0, 1])
    play(machine, Offer("x"), Offer("y"))
    assert play(machine, Lost(0), Lost(1)) == [Count((1, 2))]
    end = Finish(cause=TasksLost("no compute task is left"), torn=((1,),))
    assert play(machine, Counted({1: [0, 1], 2: [1]})) == [Report(1, None), end]


def test_interrupt_takes_back_what_computes_and_drops_the_rest():
    machine = leases()
    play(machine, Offer("x"), Offer("y"))
    assert play(machine, Interrupt(), Offer("z")) == [Revoke(1, 0), Revoke(2, 1)]
    assert play(machine, Revoked(1, 0)) == []
    assert play(machine, Done(2, 1, "vy")) == [Report(2, "vy"), Finish(cause=Interrupted())]


def test_an_error_stops_new_leases_and_is_the_cause():
    machine = leases()
    play(machine, Offer("x"), Offer("y"))
    assert play(machine, Error(1, 0, BAD)) == []
    assert play(machine, Done(2, 1, "vy")) == [Report(2, "vy"), Count((1,))]
    assert play(machine, Counted({})) == [Finish(cause=BAD)]


def test_a_batch_that_one_shard_lacks_is_completed_by_another_task():
    machine = leases(shards=[0, 1])
    play(machine, Offer("x"), Offer("y"), Interrupt(), Lost(0))
    assert play(machine, Revoked(2, 1)) == [Count((1,))]
    assert play(machine, Counted({1: [0]})) == [Lease(1, 1, "x")]
    assert play(machine, Interrupt()) == [], "it is not taken back"
    assert play(machine, Done(1, 1, "v")) == [Report(1, "v"), Finish(cause=Interrupted())]


def test_a_hold_waits_for_what_was_begun():
    machine = leases()
    play(machine, Offer("x"), Offer("y"))
    assert play(machine, Hold(), Offer("z"), Done(1, 0, "v")) == [Report(1, "v")]
    assert play(machine, End(), Done(2, 1, "v")) == [Report(2, "v"), Held()]
    assert play(machine, Resume()) == [Lease(3, 0, "z")]
    assert play(machine, Done(3, 0, "v")) == [Report(3, "v"), Finish()]


def test_a_task_that_joins_gets_a_batch():
    machine = leases(tasks=[0])
    assert play(machine, Offer("x"), Offer("y"), Joined(1)) == [Lease(1, 0, "x"), Lease(2, 1, "y")]


def test_the_deadline_takes_back_what_computes_and_a_lost_server_ends_at_once():
    machine = leases(deadline=5.0)
    play(machine, Offer("x"))
    assert play(machine, Tick(), now=9.0) == [Revoke(1, 0)]
    assert play(machine, Revoked(1, 0), now=9.0) == [Finish(cause=TimedOut())]
    machine = leases()
    play(machine, Offer("x"))
    assert play(machine, ShardLost(1)) == [Finish(cause=ServerLost(1))]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_c61_each_batch_is_applied_once_and_counted_exactly_under_kills(data):  # noqa: C901 (one table of events)
    """Random kills in mid-push, misses, errors, holds, interrupts: what is reported is what all shards applied."""
    shards = data.draw(st.sampled_from([(0,), (0, 1), (0, 1, 2)]))
    tasks = list(range(data.draw(st.integers(0, 4))))
    total = data.draw(st.integers(0, 8))
    machine = Leases(list(tasks), shards, itertools.count(1), deadline=50.0)
    offered, out, dead = 0, {}, set()
    applied: dict[int, dict[int, int]] = {}  # lease -> shard -> batch
    reported: list[int] = []
    finished: list[Finish] = []
    asked: list[tuple[int, ...]] = []
    revoked: set[int] = set()
    is_held, now = False, 0.0

    def apply(number, batch, some):
        for shard in some:
            assert applied.setdefault(number, {}).setdefault(shard, batch) == batch

    def cut():
        return {number for number, found in applied.items() if len(found) == len(shards)}

    def feed(event):
        nonlocal is_held
        for instruction in machine.on(event, now):
            match instruction:
                case Lease(number, task, batch):
                    assert task not in dead and task not in out, "a task has one batch at a time"
                    out[task] = (number, batch)
                case Revoke(number, task):
                    assert out[task][0] == number
                    revoked.add(task)
                case Count(numbers):
                    asked.append(numbers)
                case Report(number):
                    reported.append(number)
                case Held():
                    is_held = True
                    assert not out and set(reported) == cut(), "a hold is at a cut"
                case Finish():
                    finished.append(instruction)

    feed(Start())
    for _ in range(400):
        if finished:
            break
        if asked:
            feed(Counted({number: list(applied.get(number, ())) for number in asked.pop()}))
            continue
        if is_held and data.draw(st.booleans()):
            is_held = False
            feed(Resume())
            continue
        if machine.wants and offered < total:
            offered += 1
            feed(Offer(offered))
            continue
        if offered == total and machine.state == "open":
            feed(End())
            continue
        kind = data.draw(
            st.sampled_from(
                ["answer"] * 6 + ["push and die", "die", "miss", "error", "interrupt", "hold", "join", "late"]
            )
        )
        if kind == "interrupt":
            feed(Interrupt())
        elif kind == "hold" and not is_held:
            feed(Hold())
        elif kind == "late":
            now += 20.0
            feed(Tick())
        elif kind == "join" and dead:
            feed(Joined(dead.pop()))
        elif out:
            task = data.draw(st.sampled_from(sorted(out)))
            number, batch = out.pop(task)
            some = data.draw(st.sets(st.sampled_from(shards)))
            if kind in ("push and die", "die"):
                apply(number, batch, some if kind == "push and die" else ())
                dead.add(task)
                revoked.discard(task)
                feed(Lost(task))
            elif kind == "miss":
                apply(number, batch, some)
                feed(Missed(number, task, BAD))
            elif kind == "error":
                apply(number, batch, some)
                feed(Error(number, task, BAD))
            elif task in revoked:
                revoked.discard(task)
                feed(Revoked(number, task))
            else:
                apply(number, batch, shards)
                feed(Done(number, task, "v"))
        elif is_held:
            is_held = False
            feed(Resume())
    assert len(finished) == 1, "it ends, once"
    assert len(set(reported)) == len(reported)
    assert set(reported) == cut()
    torn = [found for number, found in applied.items() if 0 < len(found) < len(shards)]
    assert sorted(map(sorted, torn)) == sorted(map(sorted, finished[0].torn)), "what some shards lack is said"
    if finished[0].cause is None:
        assert sorted({batch for found in applied.values() for batch in found.values()}) == list(range(1, total + 1))
