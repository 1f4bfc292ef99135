"""The machine of asynchronous training: events in, instructions out. No socket, no clock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfnb.cluster.modes import events as e
from tfnb.cluster.modes.leases import (
    LARGEST,
    AppliedCounts,
    Continue,
    Count,
    Give,
    GradientChange,
    Leases,
    LoopEnd,
    LoopFailure,
    Offer,
    Pause,
    PieceProgress,
    PieceSizes,
    Report,
    Standstill,
    StopLoop,
    StreamPiece,
    TaskPause,
)
from tfnb.cluster.server.ledger import WINDOW
from tfnb.cluster.wire.messages import GIVEN_UP, Failure

BAD = Failure("InvalidArgument", "kernel")


def leases(tasks=(0, 1), shards=(0,), **kwargs):
    machine = Leases(list(tasks), list(shards), itertools.count(1), **kwargs)
    machine.on(e.Start(), 0.0)
    return machine


def play(machine, *events, now=0.0):
    """All instructions of a sequence of events, in order."""
    return [instruction for event in events for instruction in machine.on(event, now)]


def given_to(instructions):
    """(task, steps) of each piece."""
    return [(i.task, list(i.piece.steps)) for i in instructions if isinstance(i, Give)]


def test_a_piece_goes_to_the_task_that_it_is_meant_for_unless_that_has_no_room():
    machine = leases()
    assert machine.takers == [0, 1, 0, 1]
    given = play(machine, Offer("ab", 1), Offer("cd", 1), Offer("ef", 1), Offer("gh", 0))
    assert given_to(given) == [(1, ["a", "b"]), (1, ["c", "d"]), (0, ["e", "f"]), (0, ["g", "h"])]
    assert machine.takers == []
    assert given_to(play(machine, PieceProgress(1, given[0].piece.number, 2))) == []
    assert machine.takers == [1]
    assert given_to(play(machine, Offer("ij", 7))) == [(1, ["i", "j"])], "a task that is gone"


def test_each_task_has_two_pieces_ahead():
    machine = leases()
    assert machine.wants == 4
    given = play(machine, *(Offer(range(4 * i, 4 * i + 4)) for i in range(4)))
    assert given_to(given) == [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7]), (0, [8, 9, 10, 11]), (1, [12, 13, 14, 15])]
    assert machine.wants == 0
    first, second = given[0].piece, given[2].piece
    assert (first.stream, first.first, second.stream, second.first) == (first.stream, 0, first.stream, 4)
    assert play(machine, PieceProgress(0, first.number, 3)) == [Report(first.number, 0, 3, (0,))]
    assert machine.wants == 0
    assert play(machine, PieceProgress(0, first.number, 4)) == [Report(first.number, 3, 4, (0,))]
    assert machine.wants == 1


def test_it_ends_when_everything_is_applied():
    machine = leases(tasks=[0])
    (give,) = play(machine, Offer("ab"), e.DataEnd())
    assert play(machine, PieceProgress(0, give.piece.number, 1)) == [Report(give.piece.number, 0, 1, (0,))]
    assert play(machine, PieceProgress(0, give.piece.number, 2))[-1] == e.Finish()


def test_the_rest_of_a_dead_tasks_pieces_is_lent_again_under_its_numbers():
    machine = leases()
    given = play(machine, Offer("abc"), Offer("xyz"))
    lost = given[0].piece
    play(machine, PieceProgress(0, lost.number, 1))
    (again,) = play(machine, e.TaskLoss(0))
    assert (again.task, again.piece.steps) == (1, "bc")
    assert (again.piece.stream, again.piece.first) == (lost.stream, lost.first + 1)
    assert play(machine, PieceProgress(0, lost.number, 3)) == [], "what it sends late means nothing"


def test_a_step_that_kills_each_task_stops_training_and_one_that_is_merely_hit_does_not():
    machine = leases(tasks=range(5))
    play(machine, *(Offer("ab", task) for task in range(5)))
    play(machine, *(e.TaskLoss(task) for task in range(4)))
    assert machine.cause is None, "each of them over a step of its own"
    machine = leases(tasks=[0], patience=60.0)
    (give,) = play(machine, Offer("ab"))
    for task in (1, 2):
        (give,) = play(machine, e.TaskLoss(task - 1), e.TaskJoin(task))
        assert give.piece.steps == "ab"
    (give,) = play(machine, PieceProgress(2, give.piece.number, 1), e.TaskLoss(2), e.TaskJoin(3))[1:]
    assert give.piece.steps == "b", "its first step got through"
    play(machine, e.TaskLoss(3), e.TaskJoin(4))
    (count,) = play(machine, e.TaskLoss(4))
    assert isinstance(count, Count)
    assert isinstance(machine.cause, e.TasksLost) and "seems to kill" in machine.cause.message


def test_a_silent_task_kills_no_step_and_training_waits_for_it():
    machine = leases(tasks=[0])
    (first,) = play(machine, Offer("ab"))
    for task in range(5):
        assert play(machine, e.TaskLoss(task, is_silent=True)) == [] and machine.state == "open"
        assert play(machine, e.Tick(), now=GIVEN_UP - 1) == []
        (give,) = play(machine, e.TaskJoin(task + 1, follows=task))
        assert (give.piece.steps, give.piece.stream, give.piece.lost) == ("ab", first.piece.stream, ())
    assert machine.cause is None
    play(machine, e.TaskLoss(5, is_silent=True))
    play(machine, e.Tick(), now=GIVEN_UP + 1)
    assert machine.cause == e.TasksLost(), "nobody came"


def doubted(asked):
    """The operations that servers are asked about."""
    return [operation for piece in asked.pieces for operation in piece.operations]


def test_a_task_whose_loop_broke_goes_on_with_another_stream():
    machine = leases(tasks=[0])
    (give,) = play(machine, Offer("ab"))
    (again,) = play(machine, LoopFailure(0, BAD, is_fatal=False))
    assert (again.piece.stream, again.piece.first) == (give.piece.stream, 0)
    (new,) = play(machine, Offer("c"))
    assert new.piece.stream != give.piece.stream
    (asked,) = play(machine, LoopFailure(0, BAD, is_fatal=True))
    assert [piece.steps for piece in asked.pieces] == ["ab", "c"]
    assert doubted(asked) == [(again.piece.stream, 0), (again.piece.stream, 1), (new.piece.stream, 0)]
    assert play(machine, AppliedCounts({})) == [e.Finish(cause=BAD)]


def test_without_a_task_it_ends_at_once_and_servers_say_what_counts():
    machine = Leases([], [0], itertools.count(1))
    assert play(machine, e.Start()) == [e.Finish(cause=e.TasksLost("no compute task is left"))]
    machine = leases(tasks=[0], shards=[0, 1])
    (give,) = play(machine, Offer("ab"))
    stream = give.piece.stream
    assert [doubted(one) for one in play(machine, e.TaskLoss(0))] == [[(stream, 0), (stream, 1)]]
    *told, end = play(machine, AppliedCounts({(stream, 0): [0, 1], (stream, 1): [1]}))
    assert [(r.start, r.stop, r.tasks) for r in told] == [(0, 1, ())]
    assert end == e.Finish(cause=e.TasksLost("no compute task is left"), torn=((1,),))


def test_interrupt_ends_the_loops_and_drops_the_rest():
    machine = leases()
    play(machine, Offer("ab"), Offer("xy"))
    assert play(machine, e.Interrupt(), Offer("z")) == [StopLoop(0), StopLoop(1)]
    assert play(machine, LoopEnd(0)) == []
    assert play(machine, PieceProgress(1, 4, 1), LoopEnd(1)) == [Report(4, 0, 1, (1,)), e.Finish(cause=e.UserStop())]


def test_a_loop_that_failed_before_it_was_told_to_end_leaves_its_steps_in_doubt():
    machine = leases(shards=[0, 1])
    given = play(machine, Offer("ab"), Offer("xy"))
    stream = given[1].piece.stream
    play(machine, e.Interrupt(), LoopEnd(0))
    counted = play(machine, LoopEnd(1, has_failed=True))
    assert [doubted(one) for one in counted] == [[(stream, 0), (stream, 1)]]


def test_the_time_for_which_a_task_stands_is_none_of_its_piece():
    machine = leases(tasks=[0, 1], lends_twice=True)
    first, second = play(machine, Offer(range(4), 0), Offer(range(4), 1))
    play(machine, e.Drain(), TaskPause(0), now=1.0)
    play(machine, TaskPause(1), now=2.0)
    play(machine, e.Resume(), now=61.0)
    assert play(machine, PieceProgress(0, first.piece.number, 4), now=62.0) == [Report(first.piece.number, 0, 4, (0,))]
    assert machine.sizes.seconds == 0.5, "two seconds for four steps"
    assert play(machine, PieceProgress(1, second.piece.number, 4), now=63.0) == [
        Report(second.piece.number, 0, 4, (1,))
    ]
    assert machine.sizes.seconds == 1.0


def test_a_step_that_one_shard_lacks_is_completed_by_another_task():
    machine = leases(shards=[0, 1])
    given = play(machine, Offer("ab"), Offer("xy"))
    stream = given[0].piece.stream
    play(machine, e.Interrupt(), e.TaskLoss(0))
    assert [doubted(one) for one in play(machine, LoopEnd(1))] == [[(stream, 0), (stream, 1)]]
    (mend,) = play(machine, AppliedCounts({(stream, 0): [0]}))
    assert (mend.task, mend.piece.steps, mend.piece.stream, mend.piece.first) == (1, "a", stream, 0)
    assert play(machine, e.Interrupt()) == [], "it is not taken back"
    end = play(machine, PieceProgress(1, mend.piece.number, 1))
    assert end == [Report(mend.piece.number, 0, 1, (1,)), e.Finish(cause=e.UserStop())]


def test_a_hold_waits_until_all_stand_and_for_what_lost_its_task():
    machine = leases()
    given = play(machine, Offer("ab"), Offer("xy"))
    assert play(machine, e.Drain()) == [Pause(0), Pause(1)]
    assert play(machine, Offer("c"), TaskPause(0)) == []
    assert play(machine, TaskPause(1)) == [Standstill()]
    *woken, third = play(machine, e.Resume())
    assert woken == [Continue(0), Continue(1)]
    play(machine, e.Drain(), TaskPause(0))
    assert play(machine, e.TaskLoss(1)) == [Continue(0)]
    _, again = play(machine, PieceProgress(0, given[0].piece.number, 2))
    assert given_to([again]) == [(0, ["x", "y"])]
    play(machine, PieceProgress(0, third.piece.number, 1))
    assert play(machine, PieceProgress(0, again.piece.number, 2))[-1] == Standstill(), "nothing is left"


def test_the_deadline_ends_the_loops_and_a_lost_server_ends_at_once():
    machine = leases(tasks=[0], deadline=5.0)
    play(machine, Offer("ab"))
    assert play(machine, e.Tick(), now=9.0) == [StopLoop(0)]
    assert play(machine, LoopEnd(0), now=9.0) == [e.Finish(cause=e.TimedOut())]
    machine = leases()
    play(machine, Offer("ab"))
    assert play(machine, e.ShardLost(1)) == [e.Finish(cause=e.ServerLost(1))]


def test_what_a_task_has_lies_within_the_window_of_a_ledger():
    assert 2 * LARGEST <= WINDOW


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 300)), max_size=20), st.integers(1, 10**6), st.integers(1, 9)
)
def test_sizes_of_pieces(measured, left, tasks):
    sizes = PieceSizes()
    for seconds, steps in measured:
        sizes.took(seconds, steps)
        assert 1 <= sizes.next(left, tasks) <= min(LARGEST, left)


def test_a_step_over_which_a_task_and_its_successor_are_lost_stops_and_names_them():
    machine = Leases([0, 1], [0], itertools.count(1))
    first = play(machine, e.Start(), Offer("abcd"))[0]
    task = first.task
    play(machine, PieceProgress(task, first.piece.number, 1), e.TaskLoss(task), e.TaskJoin(2, follows=task))
    holder = next(task for task, pieces in machine.out.items() if any(piece.lost for piece in pieces))
    (piece,) = machine.out[holder]
    assert piece.lost == (task,) and piece.steps == "bcd"
    machine.places[holder] = task  # as if the successor had got it
    play(machine, e.TaskLoss(holder))
    assert machine.state != "open" and machine.cause.tasks == (task,)


def test_a_step_after_which_another_one_was_applied_is_not_to_blame():
    machine = Leases([0], [0], itertools.count(1), patience=5.0)
    (give,) = play(machine, e.Start(), Offer("abcdef"))
    for task in range(5):
        play(machine, PieceProgress(task, give.piece.number, 1), e.TaskLoss(task))
        (give,) = play(machine, e.TaskJoin(task + 1, follows=task))
    assert machine.state == "open" and give.piece.steps == "f" and give.piece.lost == (0,)


def test_training_without_a_task_waits_for_one():
    machine = Leases([0], [0], itertools.count(1), patience=5.0)
    play(machine, e.Start(), Offer("ab"))
    assert play(machine, e.TaskLoss(0), now=1.0) == [] and play(machine, e.Tick(), now=5.9) == []
    assert [(i.task, i.piece.steps) for i in play(machine, e.TaskJoin(1), now=5.9)] == [(1, "ab")]
    assert play(machine, e.Tick(), now=100.0) == []


def test_a_late_piece_is_lent_to_an_idle_task_as_well_and_the_first_of_both_counts():
    machine = leases(lends_twice=True)
    slow, quick = play(machine, Offer("abcd"), Offer("xy"))
    assert play(machine, PieceProgress(1, quick.piece.number, 2), now=0.2)[1:] == []
    assert play(machine, e.Tick(), now=0.3) == [], "it may take twice as long as others did"
    play(machine, PieceProgress(0, slow.piece.number, 1), now=0.4)
    (copy,) = play(machine, e.Tick(), now=2.0)
    assert (copy.task, copy.piece.steps, copy.piece.first) == (1, "bcd", slow.piece.first + 1)
    assert copy.piece.stream == slow.piece.stream, "under the same numbers, so that a server applies each once"
    assert play(machine, e.Tick(), now=9.0) == [], "there is one copy"
    assert play(machine, PieceProgress(1, copy.piece.number, 1), now=9.0) == [Report(copy.piece.number, 0, 1, (1,))]
    late = play(machine, PieceProgress(0, slow.piece.number, 3), now=9.1)
    assert late == [Report(slow.piece.number, 2, 3, (0,))], "its second step was reported"
    told = play(machine, PieceProgress(1, copy.piece.number, 3), now=9.2)
    assert told == [Report(copy.piece.number, 2, 3, (1,)), StopLoop(0)]
    assert not machine.is_idle and machine.takers == [1, 1], "the slow task is waited for, and gets nothing new"
    assert play(machine, PieceProgress(0, slow.piece.number, 4)) == []
    assert play(machine, LoopEnd(0)) == [] and machine.is_idle
    assert given_to(play(machine, Offer("pq", 0))) == [(0, ["p", "q"])]


def test_of_a_piece_with_a_copy_one_is_enough():
    for lost in (0, 1):
        machine = leases(lends_twice=True)
        slow, quick = play(machine, Offer("ab"), Offer("xy"))
        play(machine, PieceProgress(1, quick.piece.number, 2))
        (copy,) = play(machine, e.Tick(), now=5.0)
        pieces = {0: slow.piece, 1: copy.piece}
        assert play(machine, e.TaskLoss(lost), now=5.0) == [], "the other one has it"
        told = play(machine, PieceProgress(1 - lost, pieces[1 - lost].number, 2), now=6.0)
        assert told == [Report(pieces[1 - lost].number, 0, 2, (1 - lost,))] and machine.is_idle


def test_no_copies_unless_asked_for():
    machine = leases()
    _, quick = play(machine, Offer("ab"), Offer("xy"))
    play(machine, PieceProgress(1, quick.piece.number, 2))
    assert play(machine, e.Tick(), now=20.0) == []


class World:
    """Tasks that apply steps on shards, one shard after the other, as the machine tells them."""

    def __init__(self, machine, tasks, shards):
        self.machine, self.shards, self.now = machine, shards, 0.0
        self.alive, self.lines = set(tasks), {task: [] for task in tasks}
        self.applied: dict[tuple[int, int], dict[int, object]] = {}  # operation -> shard -> step
        self.reported: list[object] = []
        self.pieces: dict[int, StreamPiece] = {}
        self.asked: list[Count] = []
        self.stopping: set[int] = set()
        self.pausing: set[int] = set()
        self.paused: set[int] = set()
        self.is_held = False
        self.end: list[e.Finish] = []

    def feed(self, event):
        for instruction in self.machine.on(event, self.now):
            match instruction:
                case Give(task, piece):
                    assert task in self.alive and len(self.lines[task]) < 2
                    copy = StreamPiece(piece.number, piece.stream, piece.first, piece.steps)
                    self.pieces[piece.number] = copy
                    self.lines[task].append(copy)
                case StopLoop(task):
                    self.stopping.add(task)
                case Pause(task):
                    self.pausing.add(task)
                case Continue(task):
                    self.pausing.discard(task)
                    self.paused.discard(task)
                case Count():
                    assert not any(self.lines[task] for task in self.alive)
                    self.asked.append(instruction)
                case Report(number, start, stop):
                    self.reported += [self.operation(number, i) for i in range(start, stop)]
                case Standstill():
                    self.is_held = True
                    assert sorted(self.reported) == sorted(self.applied), "a hold is at a cut"
                    assert self.cut() == set(self.reported)
                case e.Finish():
                    self.end.append(instruction)

    def operation(self, number, i):
        piece = self.machine_piece(number)
        return piece.stream, piece.first + i

    def machine_piece(self, number):
        return self.pieces.get(number) or self.doubted[number]

    @property
    def doubted(self):
        return {piece.number: piece for piece in self.counted}

    counted: tuple = ()

    def cut(self):
        return {operation for operation, found in self.applied.items() if len(found) == len(self.shards)}

    def apply(self, piece, i, shards):
        for shard in shards:
            held = self.applied.setdefault((piece.stream, piece.first + i), {})
            assert held.setdefault(shard, piece.steps[i]) == piece.steps[i]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_c61_each_step_is_applied_once_and_counted_exactly_under_kills(data):  # noqa: C901 (one table of events)
    """Random kills in mid-push, failures, holds, interrupts: what is reported is what all shards applied."""
    shards = data.draw(st.sampled_from([(0,), (0, 1), (0, 1, 2)]))
    tasks = list(range(data.draw(st.integers(0, 3))))
    total = data.draw(st.integers(0, 12))
    patience = data.draw(st.sampled_from([0.0, 20.0]))
    about = {"deadline": 50.0, "patience": patience, "lends_twice": data.draw(st.booleans())}
    machine = Leases(list(tasks), shards, itertools.count(1), **about)
    world = World(machine, tasks, shards)
    offered = 0
    world.feed(e.Start())
    for _ in range(600):
        if world.end:
            break
        if world.asked:
            asked = world.asked.pop()
            world.counted, operations = asked.pieces, doubted(asked)
            world.feed(AppliedCounts({operation: list(world.applied.get(operation, ())) for operation in operations}))
            continue
        if machine.wants and offered < total:
            size = data.draw(st.integers(1, total - offered))
            world.feed(Offer(tuple(range(offered, offered + size))))
            offered += size
            continue
        if offered == total and machine.state == "open" and not machine.is_ended:
            world.feed(e.DataEnd())
            continue
        kind = data.draw(
            st.sampled_from(
                ["work"] * 8 + ["hear", "die", "break", "fatal", "interrupt", "hold", "resume", "join", "grow", "late"]
            )
        )
        if kind == "interrupt":
            world.feed(e.Interrupt())
        elif kind == "hold" and not machine.is_hold_wanted:
            world.feed(e.Drain())
        elif world.is_held and kind in ("resume", "work"):
            world.is_held = False
            world.feed(e.Resume())
        elif kind == "late":
            world.now += 15.0
            world.feed(e.Tick())
        elif kind == "join" and set(tasks) - world.alive:
            task = data.draw(st.sampled_from(sorted(set(tasks) - world.alive)))
            world.alive.add(task)
            world.feed(e.TaskJoin(task))
        elif kind == "grow" and len(tasks) < 6:
            tasks.append(len(tasks))
            world.alive.add(tasks[-1])
            world.lines[tasks[-1]] = []
            world.feed(e.TaskJoin(tasks[-1]))
        elif world.stopping - world.alive:
            world.stopping &= world.alive
        elif idle := sorted(task for task in world.stopping if not world.lines[task]):
            world.stopping.discard(idle[0])
            world.feed(LoopEnd(idle[0]))
        elif busy := sorted(task for task in world.alive if world.lines[task]):
            task = data.draw(st.sampled_from(busy))
            piece = world.lines[task][0]
            if task in world.stopping:
                world.stopping.discard(task)
                world.feed(PieceProgress(task, piece.number, piece.done))
                world.lines[task] = []
                world.feed(LoopEnd(task))
            elif kind in ("die", "break", "fatal"):
                if piece.done < piece.count and task not in world.paused:
                    world.apply(piece, piece.done, data.draw(st.sets(st.sampled_from(shards))))
                if kind == "die":
                    world.alive.discard(task)
                elif kind in ("break", "fatal"):
                    world.feed(PieceProgress(task, piece.number, piece.done))
                world.lines[task] = []
                world.pausing.discard(task), world.paused.discard(task)
                world.feed(e.TaskLoss(task) if kind == "die" else LoopFailure(task, BAD, kind == "fatal"))
            elif task in world.pausing:
                world.pausing.discard(task)
                world.paused.add(task)
                world.feed(PieceProgress(task, piece.number, piece.done))
                world.feed(TaskPause(task))
            elif task not in world.paused:
                world.apply(piece, piece.done, shards)
                piece.done += 1
                if piece.done == piece.count:
                    world.lines[task].pop(0)
                if kind == "hear" or piece.done == piece.count:
                    world.feed(PieceProgress(task, piece.number, piece.done))
    assert len(world.end) == 1, "it ends, once"
    assert len(set(world.reported)) == len(world.reported)
    assert set(world.reported) == world.cut()
    torn = [found for found in world.applied.values() if 0 < len(found) < len(shards)]
    assert sorted(map(sorted, torn)) == sorted(map(sorted, world.end[0].torn)), "what some shards lack is said"
    if world.end[0].cause is None:
        assert sorted(found[shards[0]] for found in world.applied.values()) == list(range(total))


@pytest.mark.parametrize("state", ["planned", "over"])
def test_late_messages_mean_nothing(state):
    machine = Leases([0], [0], itertools.count(1), state=state)
    assert (
        play(
            machine,
            PieceProgress(0, 1, 1),
            LoopEnd(0),
            TaskPause(0),
            AppliedCounts({}),
            LoopFailure(0, BAD, is_fatal=True),
        )
        == []
    )


def test_steps_that_are_pushed_together_have_one_operation():
    machine = leases(shards=[0, 1], n_push=3)
    given = play(machine, Offer("abcdefgh"), Offer("xyz"), Offer("uv"))
    first, _, third = (give.piece for give in given)
    assert (len(first.operations), third.stream, third.first) == (3, first.stream, 3), "the last push is of two steps"
    assert play(machine, PieceProgress(0, first.number, 3)) == [Report(first.number, 0, 3, (0,))]
    (give,) = play(machine, e.TaskLoss(0))
    again = give.piece
    assert (again.steps, again.first, [*map(list, map(again.pushed_by, range(2)))]) == ("defgh", 1, [[0, 1, 2], [3, 4]])


def test_a_push_that_one_shard_lacks_is_completed_as_a_whole():
    machine = leases(shards=[0, 1], n_push=2)
    given = play(machine, Offer("abcde"), Offer("xy"))
    stream = given[0].piece.stream
    play(machine, e.Interrupt(), e.TaskLoss(0))
    play(machine, LoopEnd(1))
    told, mend = play(machine, AppliedCounts({(stream, 0): [0, 1], (stream, 1): [0]}))
    assert (told.start, told.stop) == (0, 2)
    assert (mend.task, mend.piece.steps, mend.piece.operations) == (1, "cd", [(stream, 1)])
    end = play(machine, PieceProgress(1, mend.piece.number, 2))
    assert end == [Report(mend.piece.number, 0, 2, (1,)), e.Finish(cause=e.UserStop())]


def test_one_task_takes_the_first_steps_and_the_next_one_if_it_is_lost():
    machine = leases(tasks=(0, 1, 2), warm_start=5, n_push=2, sizes=PieceSizes(unit=2))
    given, steps = [], iter(range(100))
    while machine.takers:
        assert machine.takers == [0]
        offer = Offer([next(steps) for _ in range(machine.next_size(None))], machine.takers[0])
        given += play(machine, offer)
    assert given_to(given) == [(0, [0, 1]), (0, [2, 3])]
    play(machine, PieceProgress(0, given[0].piece.number, 2))
    assert machine.takers == [0]
    (give,) = play(machine, Offer([next(steps) for _ in range(machine.next_size(None))], 0))
    assert given_to([give]) == [(0, [4, 5])] and machine.takers == [], "whole pushes, and no more"
    taken = play(machine, e.TaskLoss(0))
    assert given_to(taken) == [(1, [2, 3]), (1, [4, 5])]
    play(machine, PieceProgress(1, taken[0].piece.number, 2))
    assert machine.takers == []
    play(machine, PieceProgress(1, taken[1].piece.number, 2))
    assert [sorted(machine.takers[:2]), sorted(machine.takers[2:])] == [[1, 2], [1, 2]]


def test_a_task_that_is_to_end_its_loop_is_waited_for_before_doubtful_pushes_are_counted():
    """It is told once, and what some servers lack of another task's push goes to one that can do it."""
    machine = leases(tasks=(0, 1, 2), shards=(0, 1), lends_twice=True)
    had = {each.task: each.piece for each in play(machine, Offer("ab", 0), Offer("xy", 1), Offer("pq", 2))}
    play(machine, PieceProgress(1, had[1].number, 2), now=0.1)
    (copy,) = play(machine, e.Tick(), now=5.0)
    play(machine, PieceProgress(2, had[2].number, 2), Offer("mn", 2), now=5.0)
    assert StopLoop(0) in play(machine, PieceProgress(1, copy.piece.number, 2), now=5.1)
    lent = machine.out[2][0]
    assert play(machine, e.Interrupt(), now=5.2) == [StopLoop(2)], "the first one is told already"
    assert play(machine, e.TaskLoss(2), now=5.2) == [], "its loop may still end with a push"
    (count,) = play(machine, LoopEnd(0), now=5.3)
    assert [piece.operations[0] for piece in count.pieces] == [(lent.stream, lent.first)]
    mend, *_ = play(machine, AppliedCounts({(lent.stream, lent.first): [0]}), now=5.4)
    assert mend.task == 0 and not machine.stopping
    done = play(machine, PieceProgress(0, mend.piece.number, 1), LoopEnd(0), now=5.5)
    assert done[-1] == e.Finish(cause=e.UserStop(), torn=())


def test_a_loss_over_a_piece_that_another_task_has_as_well_is_not_that_of_the_next_piece():
    machine = leases(tasks=(0, 1), lends_twice=True)
    had = {each.task: each.piece for each in play(machine, Offer("ab", 0), Offer("xy", 1))}
    play(machine, PieceProgress(1, had[1].number, 2), now=0.1)
    play(machine, e.Tick(), now=5.0)
    play(machine, Offer("cd", 0), Offer("ef", 1), now=5.0)
    play(machine, e.TaskLoss(0), e.TaskJoin(2, follows=0), e.TaskLoss(2), now=5.1)
    assert machine.state == "open" and machine.cause is None, "one attempt of it was lost"


def test_nothing_is_asked_for_while_one_task_has_all_steps_of_the_warm_start():
    machine, steps = leases(tasks=(0, 1, 2), warm_start=8, n_push=2, sizes=PieceSizes(unit=2)), iter(range(100))
    while machine.takers:
        play(machine, Offer([next(steps) for _ in range(machine.next_size(None))], machine.takers[0]))
    assert machine.wants == 0


def test_the_others_begin_once_gradients_as_old_as_theirs_would_do():
    about = {"warm_start": 1000, "n_push": 2, "sizes": PieceSizes(unit=2)}
    machine = leases(tasks=(0, 1, 2), is_warmth_measured=True, **about)
    (give,) = play(machine, Offer(range(machine.next_size(None)), 0))
    assert machine.measures and machine.takers == [0]
    play(machine, PieceProgress(0, give.piece.number, 2), GradientChange(0, 0.3))
    assert machine.measures and machine.takers == [0], "the pushes of two others change 0.6 of a gradient"
    play(machine, e.TaskLoss(2), GradientChange(0, 0.3))
    assert not machine.measures and sorted(machine.takers) == [0, 0, 1, 1]
    fixed = leases(tasks=(0, 1, 2), **about)
    play(fixed, GradientChange(0, 0.0))
    assert not fixed.measures and fixed.takers == [0]
