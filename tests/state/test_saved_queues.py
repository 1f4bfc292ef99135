"""What queues hold is in the file of `Session.save`, of one moment with the Variables and the positions of sources."""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tfnb
from tests.state.saved_queues import fifo, positions_of_files_saved_meanwhile
from tests.state.test_queues import in_thread, until
from tfnb.errors import (
    Aborted,
    Cancelled,
    CheckpointCorrupt,
    CheckpointIncompatible,
    InvalidArgument,
    NotFound,
    OutOfRange,
    QueueClosed,
)
from tfnb.graph.variable_locks import LOCKS
from tfnb.state import checkpoint
from tfnb.state.queue_elements import QueueElements
from tfnb.state.queue_machine import UNDER_WAY, give_back
from tfnb.state.source_puts import position_behind, put_next, standing

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")


def held(queue: Any) -> list[int]:
    return [int(element[0]) for element in queue.machine.first(1000)]


# -- each kind ------------------------------------------------------------------------------------------------------


class Fifo:
    """One kind: how it is made, filled, and what it gives from then on."""

    def __init__(self) -> None:
        self.queue: Any = tfnb.FIFOQueue(9, [torch.float32, torch.bool], [None, (2,)], name="q")

    def fill(self) -> None:
        for n in range(3):
            self.queue.enqueue((torch.full((n,), 0.5 * n), torch.tensor([True, n > 1])))

    def record(self) -> Any:
        return self.queue.dequeue(sample=(torch.zeros(2), torch.zeros(2, dtype=torch.bool)))

    def rest(self) -> list[Any]:
        return [[part.tolist() for part in self.queue.dequeue()] for _ in range(self.queue.size())]


class Shuffle(Fifo):
    def __init__(self) -> None:
        self.queue = tfnb.RandomShuffleQueue(50, 0, torch.int64, (), seed=4, name="q")

    def fill(self) -> None:
        self.queue.enqueue_many(torch.arange(20))
        self.queue.dequeue_many(4)

    def record(self) -> Any:
        return self.queue.dequeue()

    def rest(self) -> list[Any]:
        return [int(self.queue.dequeue()) for _ in range(self.queue.size())]


class Padding(Fifo):
    def __init__(self) -> None:
        self.queue = tfnb.PaddingFIFOQueue(9, torch.complex64, (None,), name="q")

    def fill(self) -> None:
        for n in (3, 1, 2):
            self.queue.enqueue(torch.arange(n) * 1j)

    def record(self) -> Any:
        return self.queue.dequeue_many(2)

    def rest(self) -> list[Any]:
        return self.queue.dequeue_many(3).tolist()


class Priority(Shuffle):
    def __init__(self) -> None:
        self.queue = tfnb.PriorityQueue(9, torch.int64, (), name="q")

    def fill(self) -> None:
        for n, priority in enumerate((5, 1, 5, 1, 3)):
            self.queue.enqueue((priority, n))

    def rest(self) -> list[Any]:
        return [int(self.queue.dequeue()[1]) for _ in range(self.queue.size())]


class Parts(Shuffle):
    """A barrier with a whole element and two that are begun, closed."""

    def __init__(self) -> None:
        self.queue = tfnb.Barrier([torch.float32, torch.int64], [(), ()], name="q")

    def fill(self) -> None:
        self.queue.insert_many(0, [7, 5, 6], torch.tensor([0.7, 0.5, 0.6]))
        self.queue.insert_many(1, [5], torch.tensor([50]))
        self.queue.close()

    def record(self) -> Any:
        return self.queue.take_many(1)

    def rest(self) -> list[Any]:
        self.queue.insert_many(1, [7], torch.tensor([70]))
        keys, *parts = self.queue.take_many(2)
        found = [str(keys), str(parts)]
        with pytest.raises(tfnb.errors.QueueClosed):
            self.queue.insert_many(0, [8], torch.tensor([0.8]))
        return [found, self.queue.incomplete_size()]


class Mean(Shuffle):
    def __init__(self) -> None:
        self.queue = tfnb.ConditionalAccumulator(torch.float64, (2,), name="q")

    def fill(self) -> None:
        self.queue.set_global_step(3)
        for value, step in ((1.0, 3), (9.0, 2), (4.0, 5)):
            self.queue.apply_grad(torch.full((2,), value, dtype=torch.float64), local_step=step)

    def record(self) -> Any:
        return self.queue.take_grad(1)

    def rest(self) -> list[Any]:
        accepted = self.queue.apply_grad(torch.full((2,), 7.0, dtype=torch.float64), local_step=2)
        return [accepted, self.queue.count(), self.queue.take_grad(2).tolist()]


class Rows(Shuffle):
    def __init__(self) -> None:
        self.queue = tfnb.SparseConditionalAccumulator(torch.float32, (5, 2), name="q")

    def fill(self) -> None:
        for rows in ([0, 3], [3, 4]):
            self.queue.apply_grad(tfnb.IndexedSlices(torch.ones(2, 2), torch.tensor(rows), (5, 2)))

    def record(self) -> Any:
        return self.queue.take_grad(1)

    def rest(self) -> list[Any]:
        mean = self.queue.take_grad(2)
        return [mean.indices.tolist(), mean.values.tolist()]


class Tokens(Shuffle):
    """One of three is held."""

    def __init__(self) -> None:
        self.queue = tfnb.TokenQueue(60.0, name="q")

    def fill(self) -> None:
        self.queue.give(7, 3)
        self.queue.take()

    def record(self) -> Any:
        return self.queue.take()

    def rest(self) -> list[Any]:
        self.queue.finish(1)
        return [[int(part) for part in self.queue.take()] for _ in range(2)]


KINDS: list[Callable[[], Fifo]] = [Fifo, Shuffle, Padding, Priority, Parts, Mean, Rows, Tokens]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["the same queue", "another process's"])
def test_each_kind_gives_what_it_gave_before(tmp_path: Path, kind: Callable[[], Fifo], where: str) -> None:
    one = kind()
    with tfnb.record() as graph:
        one.record()
    one.fill()
    tfnb.Session(graph).save(tmp_path / "file")
    expected = one.rest()
    if where != "the same queue":
        one = kind()
        with tfnb.record() as graph:
            one.record()
    tfnb.Session(graph).restore(tmp_path / "file")
    assert one.rest() == expected


def test_a_loaded_graph_has_its_queues_as_they_were(tmp_path: Path) -> None:
    queues = [fifo("q"), fifo("q")]
    with tfnb.record() as graph:
        both = [queue.dequeue() for queue in queues]
    for n, queue in enumerate(queues):
        queue.enqueue_many([n, n + 10])
    graph.save(tmp_path / "graph.json")
    saved = tfnb.Session(graph).save(tmp_path / "file")
    assert "queues: q (2), q_1 (2)" in str(saved)
    loaded = tfnb.Session(tfnb.Graph.load(tmp_path / "graph.json")).restore(tmp_path / "file")
    names = [one.node.name for one in both]
    assert [[int(n) for n in loaded.run(names)] for _ in range(2)] == [[0, 1], [10, 11]]
    assert held(queues[0]) == [0, 10], "those are others"


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "kind", "shape", "missing", "group", "facts", "size"])
def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "file"
    queue, v = fifo("q"), tfnb.Variable(1.0, name="v")
    with tfnb.record() as graph:
        v.assign_add(1.0)
        queue.dequeue()
    session = tfnb.Session(graph)
    queue.enqueue_many([1, 2])
    session.save(path)
    queue.enqueue(3)
    v.assign(5.0)
    tensors, meta = checkpoint.load(path)
    expected: type[Exception] = CheckpointCorrupt
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-3])
        case "group":
            tensors.pop("@q/0")
        case "facts":
            tensors["@q/facts"] = tensors["@q/facts"][:-9]
        case "size":
            meta["queues"]["q"]["found"]["size"] = 7
        case "missing":
            meta["queues"]["qq"], expected = meta["queues"].pop("q"), NotFound
        case "kind":
            meta["queues"]["q"]["kind"], expected = "priority", CheckpointIncompatible
        case "shape":
            meta["queues"]["q"]["components"], expected = [["int64", [3]]], CheckpointIncompatible
    if damage != "cut":
        checkpoint.save(path, tensors, meta)
    with pytest.raises(expected, match="damaged or truncated" if damage == "cut" else "queue.*q|q .near: qq"):
        session.restore(path)
    assert held(queue) == [1, 2, 3] and v.value() == 5
    if damage == "missing":
        session.restore(path, strict=False)
        assert held(queue) == [1, 2, 3] and v.value() == 1


def _as(dtype: torch.dtype) -> Callable[[Any], None]:
    def change(tensors: Any) -> None:
        tensors["@q/0"] = tensors["@q/0"].to(dtype)

    return change


def _told(before: str, after: str) -> Callable[[Any], None]:
    def change(tensors: Any) -> None:
        text = bytes(tensors["@q/facts"].tolist()).decode()
        assert before in text, text
        tensors["@q/facts"] = torch.tensor(list(text.replace(before, after).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Shuffle, _as(torch.int32)), (Shuffle, _told('"lengths": [1, ', '"lengths": [2, ')),
        (Shuffle, _told("[0, [], 16]", "[0, [2], 8]")), (Shuffle, _told("[0, [], 16]", "[0, [], 17]")),
        (Shuffle, _told('"random": [3', '"random": [9')), (Fifo, _told("[1, [2], 3]", "[1, [3], 2]")),
        (Fifo, _told("[1, [2], 3]", "[1, [2, 1], 3]")),
        (Parts, _told('"begun": [[7, 0, [0]]', '"begun": [[7, 0, [1]]')), (Parts, _as(torch.float64)),
        (Mean, _told("[0, [2], 1]", "[0, [1, 2], 1]")), (Mean, _told('"count": 2', '"count": 0')),
        (Rows, _told("[0, [3], 1]", "[0, [1, 3], 1]")), (Tokens, _told('"held": [[1', '"held": [["one"')),
    ],
)  # fmt: skip
def test_contents_that_the_queue_cannot_have_are_refused(
    tmp_path: Path, kind: Callable[[], Fifo], change: Callable[[Any], None]
) -> None:  # fmt: skip
    one, v = kind(), tfnb.Variable(1.0, name="v")
    with tfnb.record() as graph:
        v.assign_add(1.0)
        one.record()
    one.fill()
    session, path = tfnb.Session(graph), tmp_path / "file"
    tensors, meta = checkpoint.load(session.save(path))
    change(tensors)
    checkpoint.save(path, tensors, meta)
    v.assign(5.0)
    before = session.state.moment().queues["q"].found
    with pytest.raises(CheckpointCorrupt, match="damaged contents of queue q"):
        session.restore(path)
    now = session.state.moment().queues["q"].found
    assert v.value() == 5 and {**now["facts"], "held": 0} == {**before["facts"], "held": 0}


@pytest.mark.parametrize(
    "about",
    [{"streams": {"seed": 1}}, {"sources": {"data": 3}}, {"training": []}, {"queues": []}, {"queues": {"q": 1}}],
)
def test_positions_that_are_none_are_refused(tmp_path: Path, about: Any) -> None:
    queue, v = fifo("q"), tfnb.Variable(1.0, name="v")
    with tfnb.record() as graph:
        v.assign_add(queue.dequeue(sample=torch.tensor(1)))
    session, path = tfnb.Session(graph), tmp_path / "file"
    session.reads(tfnb.Source([1, 2]))
    tensors, meta = checkpoint.load(session.save(path))
    checkpoint.save(path, tensors, meta | about)
    v.assign(5.0)
    queue.enqueue(3)
    with pytest.raises(CheckpointCorrupt):
        session.restore(path)
    assert v.value() == 5 and held(queue) == [3]


def test_a_file_of_many_elements_is_not_refused_for_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(sys.modules["tfnb.graph.tensor_files"], "HEADER_CAP", 3000)
    queue = tfnb.FIFOQueue(5000, [torch.int64, torch.float32], [None, ()], name="q")
    with tfnb.record() as graph:
        queue.dequeue(sample=(torch.tensor([1]), torch.tensor(1.0)))
    session = tfnb.Session(graph)
    for n in range(2000):
        queue.enqueue((torch.full((n % 300,), n), float(n)))
    session.save(tmp_path / "file")
    for _ in range(2000):
        queue.dequeue()
    session.restore(tmp_path / "file")
    assert [(len(part), float(n)) for part, n in queue.machine.first(2000)] == [(n % 300, n) for n in range(2000)]


def test_a_file_that_could_not_be_restored_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tfnb.graph.tensor_files"], "HEADER_CAP", 3000)
    path = tmp_path / "file"
    checkpoint.save(path, {"v": torch.ones(1)}, {})
    with pytest.raises(tfnb.errors.CheckpointWriteError, match=r"100 tensors.* at most 3000 can be read again"):
        checkpoint.save(path, {f"v{n}": torch.ones(1) for n in range(100)}, {})
    assert checkpoint.load(path)[0]["v"].tolist() == [1]


def test_an_older_file_without_queues_leaves_them(tmp_path: Path) -> None:
    queue = fifo("q")
    with tfnb.record() as graph:
        queue.dequeue()
    session = tfnb.Session(graph)
    tensors, meta = checkpoint.load(session.save(tmp_path / "file"))
    del meta["queues"]
    checkpoint.save(tmp_path / "file", tensors, meta)
    queue.enqueue(3)
    session.restore(tmp_path / "file")
    assert held(queue) == [3]


# -- steps under way --------------------------------------------------------------------------------------------------


def test_what_a_step_took_that_is_not_over_is_in_its_queue(tmp_path: Path) -> None:
    a, b = fifo("a"), fifo("b", 1)
    a.enqueue_many([1, 2])
    b.enqueue(0)
    with tfnb.record() as graph:
        move = b.enqueue(a.dequeue() * 10)
    session = tfnb.Session(graph)
    thread, found = in_thread(lambda: session.run(move, timeout=30))
    until(lambda: b.level.enqueues == 1)
    session.save(tmp_path / "file")
    assert held(a) == [2]
    assert b.dequeue() == 0
    thread.join(30)
    assert (held(a), held(b)) == ([2], [10]), found
    session.restore(tmp_path / "file")
    assert (held(a), held(b)) == ([1, 2], [0])


def test_a_step_that_took_what_was_there_before_a_restore_writes_and_puts_nothing(tmp_path: Path) -> None:
    a, b, c = fifo("a"), fifo("b"), fifo("c")
    total = tfnb.Variable(0, name="total")
    with tfnb.record() as graph:
        move = b.enqueue(a.dequeue() + c.dequeue(sample=torch.tensor(1)))
        total.assign_add(a.dequeue())
    session = tfnb.Session(graph)
    a.enqueue_many([1, 2])
    session.save(tmp_path / "file")
    thread, found = in_thread(lambda: session.run(move, timeout=30))
    until(lambda: c.level.dequeues == 1)
    session.restore(tmp_path / "file")
    thread.join(30)
    assert isinstance(found[0], Aborted) and "restored" in str(found[0])
    assert (held(a), held(b), held(c)) == ([1, 2], [], [])


def test_a_step_that_computes_while_its_queue_is_restored_writes_nothing(tmp_path: Path) -> None:
    queue, total = fifo("q"), tfnb.Variable(0, name="total")
    with tfnb.record() as graph:
        taken = queue.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    queue.enqueue_many([1, 2])
    session.save(tmp_path / "file")  # without total
    with tfnb.record(graph):
        add = total.assign_add(taken)
    with LOCKS.write(total):  # the step waits for it behind all else
        thread, found = in_thread(lambda: session.run(add, timeout=30))
        until(lambda: queue.level.size == 1)
        session.restore(tmp_path / "file", strict=False)
    thread.join(30)
    assert isinstance(found[0], Aborted) and total.value() == 0 and held(queue) == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a stop came in the collector
@pytest.mark.parametrize("writes", [True, False])
def test_a_step_that_ends_too_late_leaves_its_elements(writes: bool) -> None:
    """Most deadlines of about the time that it takes come when all is computed."""
    queue, v = fifo("q", 1000), tfnb.Variable(0, name="v")
    with tfnb.record() as graph:
        taken = queue.dequeue(sample=torch.tensor(1))
        step = v.assign_add(taken) if writes else taken
    queue.enqueue_many(torch.ones(1000, dtype=torch.int64))
    session, rng, late = tfnb.Session(graph), random.Random(0), 0
    session.run(step)
    usual = 9.0
    for _ in range(20):
        begin = time.perf_counter()
        session.run(step, timeout=9)
        usual = min(usual, time.perf_counter() - begin)
    for done in range(21, 600):
        try:
            session.run(step, timeout=usual * rng.uniform(0.3, 1.2))
        except tfnb.errors.DeadlineExceeded:
            late += 1
        assert queue.size() == 1000 - done - 1 + late and not UNDER_WAY
        assert not writes or v.value() == done + 1 - late
    assert late


def test_whoever_waits_takes_what_is_restored(tmp_path: Path) -> None:
    queue = fifo("q")
    with tfnb.record() as graph:
        queue.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    queue.enqueue_many([1, 2, 3])
    session.save(tmp_path / "file")
    queue.dequeue_many(2)
    thread, found = in_thread(lambda: queue.dequeue_many(2, timeout=30).tolist())
    until(lambda: queue.level.absorbed == 1)
    session.restore(tmp_path / "file")
    thread.join(30)
    assert found == [[1, 2]] and held(queue) == [3]


def test_files_saved_while_steps_move_elements_have_each_once(tmp_path: Path) -> None:
    assert len(positions_of_files_saved_meanwhile(tmp_path, 1500, 0.003)) > 3


@pytest.mark.parametrize("taken", [0, 3, 17, 20])
def test_a_runner_goes_on_where_the_file_says(tmp_path: Path, taken: int) -> None:
    def make() -> tuple[Any, Any, Any]:
        queue = fifo("q", 4)
        with tfnb.record() as graph:
            got = queue.dequeue(sample=torch.tensor(1))
        session = tfnb.Session(graph)
        tfnb.QueueRunner(queue, tfnb.Source(range(20), name="numbers"), session=session)
        return session, got, queue

    session, got, queue = make()
    first = [int(session.run(got)) for _ in range(taken)]
    time.sleep(0.02)
    session.save(tmp_path / "file")
    rest = [int(n) for n in queue]
    assert first + rest == [*range(20)]
    session.restore(tmp_path / "file")  # the runner was over, and begins again
    assert [int(n) for n in queue] == rest
    again, _, queue = make()
    again.restore(tmp_path / "file")
    assert [int(n) for n in queue] == rest


def test_a_runner_whose_coordinator_was_joined_goes_on_after_a_restore(tmp_path: Path) -> None:
    queue = fifo("q", 4)
    with tfnb.record() as graph:
        queue.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    runner = tfnb.QueueRunner(queue, tfnb.Source(range(9), name="numbers"), session=session)
    session.save(tmp_path / "file")
    for _ in range(3):
        assert [int(queue.dequeue(timeout=2)) for _ in range(9)] == [*range(9)]
        runner.coordinator.join()
        assert queue.level.closed and not runner.coordinator.should_stop()
        session.restore(tmp_path / "file")
    runner.coordinator.request_stop()
    with pytest.raises(OutOfRange):
        queue.dequeue(timeout=2)


def test_a_runner_that_waits_for_room_follows_a_restore(tmp_path: Path) -> None:
    queue = fifo("q", 2)
    with tfnb.record() as graph:
        queue.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    runner = tfnb.QueueRunner(queue, tfnb.Source(range(9), name="numbers"), session=session)
    runner.start()
    until(lambda: queue.level.enqueues == 1)
    session.save(tmp_path / "file")
    assert checkpoint.load(tmp_path / "file")[1]["sources"]["numbers"]["count"] == 2
    assert [int(queue.dequeue()) for _ in range(4)] == [0, 1, 2, 3]
    until(lambda: queue.level.enqueues == 1)
    session.restore(tmp_path / "file")
    assert [int(n) for n in queue] == [*range(9)]


def test_a_full_queue_does_not_hold_up_another_one_of_its_source(tmp_path: Path) -> None:
    full, other = fifo("full", 2), fifo("other", 2)
    with tfnb.record() as graph:
        full.dequeue(sample=torch.tensor(1)), other.dequeue(sample=torch.tensor(1))
    session, source = tfnb.Session(graph), tfnb.Source(range(200), name="numbers")
    runners = [tfnb.QueueRunner(queue, source, session=session) for queue in (full, other)]
    runners[0].start()
    until(lambda: full.level.enqueues == 1)
    runners[1].start()
    taken = [int(other.dequeue(timeout=10)) for _ in range(40)]
    for n in range(20):
        moment = session.state.moment()
        there = [int(t) for queue in ("full", "other") for t in moment.queues[queue].tensors]
        assert sorted(taken + there) == [*range(moment.positions["sources"]["numbers"]["count"])], n
        taken.append(int((other, full)[n % 4 == 0].dequeue(timeout=10)))
    for runner in runners:
        runner.coordinator.request_stop()
        runner.coordinator.join(stop_grace_period_secs=10)
    rest = held(full) + held(other)
    assert sorted(taken + rest) == [*range(source.position["count"])]
    assert sorted(taken + rest + list(source)) == [*range(200)]


def test_a_queue_that_is_closed_right_after_it_asked_for_an_element_stops_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full, other, source = fifo("full", 1), fifo("other", 1), tfnb.Source(range(9), name="numbers")
    full.enqueue(100), other.enqueue(200)
    wait = full._wait

    def late(*args: Any) -> Any:  # as on a busy machine
        try:
            return wait(*args)
        except Cancelled:
            other.close()
            asker.join(30)
            raise

    monkeypatch.setattr(full, "_wait", late)
    thread, ended = in_thread(lambda: put_next(full, source))
    until(lambda: full.level.enqueues == 1)
    asker, refused = in_thread(lambda: put_next(other, source))
    assert other.dequeue() == 200
    asker.join(30)
    assert isinstance(refused[0], QueueClosed) and full.dequeue() == 100
    thread.join(30)
    assert ended == [None] and held(full) == [0] and source.position["count"] == 1


def test_snapshots_have_what_queues_hold() -> None:
    queue, v = fifo("q"), tfnb.Variable(torch.zeros(()), name="v")
    with tfnb.record() as graph:
        move = v.assign_add(queue.dequeue(sample=torch.tensor(1)))
    snapshots, session = tfnb.Snapshots(move), tfnb.session.default_session(graph)
    queue.enqueue_many([1, 2, 3])
    session.run(move)
    snapshots.take(1)
    for _ in range(2):
        session.run(move)
        session.run(move)
        assert v.value() == 6 and not held(queue)
        snapshots.restore(1)
        assert v.value() == 1 and held(queue) == [2, 3]


def test_a_queue_of_no_node_is_kept_where_the_session_reads_it(tmp_path: Path) -> None:
    queue = fifo("aside")
    with tfnb.record() as graph:
        tfnb.placeholder(torch.zeros(2))
    session = tfnb.Session(graph)
    session.reads(queue)
    queue.enqueue_many([4, 5])
    session.save(tmp_path / "file")
    queue.dequeue()
    session.restore(tmp_path / "file")
    assert held(queue) == [4, 5]


def test_a_cell_that_makes_a_runner_may_run_again(tmp_path: Path) -> None:
    with tfnb.record() as graph:
        tfnb.placeholder(torch.zeros(2))
    session = tfnb.Session(graph)
    for last in (3, 5):
        queue = fifo("q", 9)
        runner = tfnb.QueueRunner(queue, tfnb.Source(range(last)), session=session)
        assert [int(n) for n in queue] == [*range(last)]
        runner.coordinator.join()
    session.save(tmp_path / "file")
    assert checkpoint.load(tmp_path / "file")[1]["sources"]["data"]["count"] == 5


@pytest.mark.parametrize("again", [False, True])
def test_a_queue_that_is_made_after_the_restore_holds_what_it_held(tmp_path: Path, again: bool) -> None:
    """The queue is used by no node, only by a runner of the session."""

    def make() -> tuple[Any, Any, Any]:
        with tfnb.record() as graph:
            x = tfnb.placeholder(torch.tensor(0), name="x")
            x + 1
        return tfnb.Session(graph), fifo("q", 4), tfnb.Source(range(12), name="numbers")

    session, queue, source = make()
    tfnb.QueueRunner(queue, source, session=session)
    assert [int(queue.dequeue()) for _ in range(3)] == [0, 1, 2]
    until(lambda: queue.level.enqueues == 1)
    session.save(tmp_path / "file")
    session, queue, source = make()
    session.restore(tmp_path / "file")
    if again:  # what nobody asked for yet goes into the next file, too
        session.save(tmp_path / "file")
        session, queue, source = make()
        session.restore(tmp_path / "file")
    tfnb.QueueRunner(queue, source, session=session)
    assert held(queue) == [3, 4, 5, 6] and [int(n) for n in queue] == [*range(3, 12)]
    queue = fifo("q", 4)
    tfnb.QueueRunner(queue, tfnb.Source(range(2), name="numbers"), session=session)  # the cell runs again
    assert [int(n) for n in queue] == [0, 1]
    session.save(tmp_path / "file")
    assert list(checkpoint.load(tmp_path / "file")[1]["queues"]) == ["q"]


def test_a_queue_of_another_kind_does_not_take_up_what_was_restored(tmp_path: Path) -> None:
    queue = fifo("q")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(0), name="x")
        x + 1
    session = tfnb.Session(graph)
    session.reads(queue)
    session.save(tmp_path / "file")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(0), name="x")
        x + 1
    session = tfnb.Session(graph).restore(tmp_path / "file")
    with pytest.raises(CheckpointIncompatible, match="queue q is of kind priority"):
        session.reads(tfnb.PriorityQueue(9, torch.int64, (), name="q"))


def test_two_sources_of_one_name_in_one_runner_are_refused() -> None:
    with tfnb.record() as graph:
        tfnb.placeholder(torch.tensor(0), name="x") + 1
    sources = [tfnb.Source(range(3)), tfnb.Source(range(5))]
    with pytest.raises(InvalidArgument, match="another source named 'data'"):
        tfnb.QueueRunner(fifo("q"), sources, session=tfnb.Session(graph))
    one = tfnb.Source(range(3))
    tfnb.QueueRunner(fifo("q"), [one, one], session=tfnb.Session(graph))


def test_a_queue_that_is_restored_forgets_why_it_was_closed(tmp_path: Path) -> None:
    queue = fifo("q")
    with tfnb.record() as graph:
        queue.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    queue.enqueue(1)
    session.save(tmp_path / "file")
    runner = tfnb.QueueRunner(queue, tfnb.Source([2, "three"]), session=session)
    runner.start()
    with pytest.raises(tfnb.errors.TfnbError):
        runner.coordinator.join()
    session.restore(tmp_path / "file")
    queue.close()
    assert [int(n) for n in queue] == [1]


def test_the_position_right_after_a_restore_is_the_restored_one(tmp_path: Path) -> None:
    queue = fifo("q", 2)
    with tfnb.record() as graph:
        queue.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    source = tfnb.Source(range(1000), name="numbers")
    runner = tfnb.QueueRunner(queue, source, session=session)
    runner.start()
    until(lambda: queue.level.enqueues == 1)
    session.save(tmp_path / "file")
    for n in range(3):
        for _ in range(3):
            queue.dequeue()
        until(lambda: queue.level.enqueues == 1)
        session.restore(tmp_path / "file")
        moment = session.state.moment()  # the runner has hardly heard of it
        at, (first, *others) = moment.positions["sources"]["numbers"]["count"], map(int, moment.queues["q"].tensors)
        assert (first, at) == (0, 1 + len(others)), n
        until(lambda: queue.level.enqueues == 1)
    with standing([source]):
        source.seek({"epoch": 0, "count": 500})
        assert position_behind(source, []) == {"epoch": 0, "count": 500}
    runner.coordinator.request_stop()
    runner.coordinator.join()


def test_a_queue_that_was_reset_is_in_no_file(tmp_path: Path) -> None:
    gone, queue = tfnb.FIFOQueue(3, torch.int64, (), name="gone", container="short"), fifo("q")
    with tfnb.record() as graph:
        gone.dequeue(), queue.dequeue()
    session = tfnb.Session(graph)
    gone.enqueue(1), queue.enqueue(2)
    tfnb.reset("short")
    session.save(tmp_path / "file")
    queue.dequeue()
    session.restore(tmp_path / "file")
    assert held(queue) == [2] and list(checkpoint.load(tmp_path / "file")[1]["queues"]) == ["q"]


# -- trainings over a queue -----------------------------------------------------------------------------------------


class Summing:
    """A training that adds up the elements of a queue."""

    def __init__(self) -> None:
        self.queue = fifo("numbers", 1000)
        self.total = tfnb.Variable(0, name="total")
        with tfnb.record() as self.graph:
            self.x = tfnb.placeholder(torch.tensor(1))
            self.step = self.total.assign_add(self.x)

    def fit(self, **options: Any) -> Any:
        return tfnb.fit(self.step, self.queue, feeds=self.x, **options)

    def rest(self) -> list[int]:
        return [int(self.queue.dequeue()) for _ in range(self.queue.size())]


class Files:
    """Saves after some steps, and breaks off after the last of them."""

    def __init__(self, graph: Any, folder: Path, steps: set[int]) -> None:
        self.session, self.folder, self.steps = tfnb.session.default_session(graph), folder, steps

    def on_step(self, progress: Any) -> None:
        if progress.step in self.steps:
            self.session.save(self.folder / str(progress.step))
        if progress.step == max(self.steps):
            raise RuntimeError("mine")


def test_a_training_that_is_broken_off_gives_back_what_no_step_counts_of(tmp_path: Path) -> None:
    one = Summing()
    one.queue.enqueue_many(torch.arange(1, 41))
    with pytest.raises(RuntimeError, match="mine"):
        one.fit(callbacks=[Files(one.graph, tmp_path, {4, 9})])
    assert one.total.value() == 45 and one.rest() == [*range(10, 41)]
    for steps in (4, 9):
        again = Summing()
        again.queue.close()  # as it is in the file it is open
        session = tfnb.session.default_session(again.graph)
        session.reads(again.queue)
        session.restore(tmp_path / str(steps))
        assert again.total.value() == steps * (steps + 1) // 2 and not again.queue.level.closed
        assert again.rest() == [*range(steps + 1, 41)]
        again = Summing()
        assert again.fit(resume=tmp_path / str(steps), steps=20).steps == 20 - steps
        assert again.total.value() == 20 * 21 // 2 and again.rest() == [*range(21, 41)]


@pytest.mark.parametrize("is_fed", [False, True], ids=["all there", "fed meanwhile"])
def test_a_training_of_another_thread_has_each_element_once_in_each_file(is_fed: bool) -> None:
    """An element is in the queue, or a step counts of it, whenever another thread asks."""
    one, count, moments = Summing(), 300, []
    session = tfnb.session.default_session(one.graph)
    session.reads(one.queue)
    numbers = torch.arange(1, count + 1)
    if not is_fed:
        one.queue.enqueue_many(numbers)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread, ended = in_thread(lambda: one.fit(steps=count))
        feeder, _ = in_thread(lambda: [one.queue.enqueue(n) for n in numbers] if is_fed else None)
        while thread.is_alive():
            moments.append(session.state.moment())
        feeder.join(60)
    finally:
        sys.setswitchinterval(before)
    assert ended[0].steps == count and moments
    for moment in moments:
        left, total = list(map(int, moment.queues["numbers"].tensors)), int(moment.values["total"])
        done = next(n for n in range(count + 1) if n * (n + 1) // 2 >= total)
        assert done * (done + 1) // 2 == total and left == [*range(done + 1, done + 1 + len(left))]
        assert is_fed or len(left) == count - done


def test_a_file_does_not_hold_up_a_training_that_waits_for_elements() -> None:
    one, times = Summing(), []
    session = tfnb.session.default_session(one.graph)
    session.reads(one.queue)
    thread, ended = in_thread(lambda: one.fit(steps=1))
    for _ in range(5):
        until(lambda: one.queue.level.dequeues == 1)
        session.state.moment()
        begin = time.perf_counter()
        until(lambda: one.queue.level.dequeues == 1)
        times.append(time.perf_counter() - begin)
    one.queue.enqueue(1)
    thread.join(30)
    assert ended[0].steps == 1 and min(times[1:]) < 0.05, times


def test_a_file_while_an_element_that_was_just_drawn_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = fifo("q")
    source, found = QueueElements(queue), list[Any]()

    def broken_off(attempt: Any, *_: Any) -> None:  # by Ctrl-C in the last moment, while another thread saves
        assert attempt.is_over and held(queue) == []
        give_back([attempt])
        with source.standing():
            found.append(source.after({"epoch": 0, "count": 0}))
        raise KeyboardInterrupt

    queue.enqueue(1)
    monkeypatch.setattr(queue, "_wait", broken_off)
    with pytest.raises(KeyboardInterrupt):
        next(iter(source))
    assert found == [[]] and held(queue) == [1]


# -- random interleavings -----------------------------------------------------------------------------------------


class Saved(RuleBasedStateMachine):
    """Queues and a Variable against lists and a number, with files among all that happens."""

    @initialize()
    def make(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.a, self.b = fifo("a", 5), tfnb.PriorityQueue(3, torch.int64, (), name="b")
        self.total = tfnb.Variable(0, name="total")
        with tfnb.record() as graph:
            self.x = tfnb.placeholder(torch.tensor(1), name="x")
            self.put = self.a.enqueue(self.x)
            taken = self.a.dequeue(sample=torch.tensor(1))
            self.move = self.b.enqueue((taken % 3, taken))
            self.add = self.total.assign_add(self.b.dequeue(sample=(torch.tensor(1), torch.tensor(1)))[1])
        self.session = tfnb.Session(graph)
        self.line, self.ranked, self.sum, self.count = list[int](), list[int](), 0, 0
        self.files: list[tuple[Path, Any]] = []
        self.waiting: tuple[threading.Thread, list[Any]] | None = None

    @property
    def now(self) -> Any:
        """What a file has: a step that waits has taken nothing."""
        line = ([self.taken] if self.waiting is not None else []) + self.line
        return line, [*self.ranked], self.sum

    @precondition(lambda self: len(self.line) < 5)
    @rule(recorded=st.booleans())
    def puts(self, recorded: bool) -> None:
        self.count += 1
        if recorded:
            self.session.run(self.put, {self.x: self.count})
        else:
            self.a.enqueue(self.count)
        self.line.append(self.count)

    @precondition(lambda self: self.line and self.waiting is None)
    @rule()
    def moves(self) -> None:
        if len(self.ranked) < 3:
            self.session.run(self.move)
            self.rank(self.line.pop(0))
            return
        self.waiting = in_thread(lambda: self.session.run(self.move, timeout=60))
        until(lambda: self.b.level.enqueues == 1, 60)
        self.taken = self.line.pop(0)

    def rank(self, number: int) -> None:
        self.ranked.append(number)
        self.ranked.sort(key=lambda n: n % 3)

    @precondition(lambda self: self.ranked)
    @rule()
    def adds(self) -> None:
        self.session.run(self.add)
        self.sum += self.ranked.pop(0)
        if self.waiting is not None:
            self.ended(None)
            self.rank(self.taken)

    def ended(self, error: type[Exception] | None) -> None:
        assert self.waiting is not None
        thread, found = self.waiting
        self.waiting = None
        thread.join(60)
        assert isinstance(found[0], error) if error else found == [None], found

    @rule()
    def saves(self) -> None:
        path = Path(self.folder.name) / str(len(self.files))
        self.session.save(path)
        self.files.append((path, self.now))

    @precondition(lambda self: self.files)
    @rule(which=st.integers(0, 99))
    def restores(self, which: int) -> None:
        path, (line, ranked, total) = self.files[which % len(self.files)]
        self.session.restore(path)
        if self.waiting is not None:
            self.ended(Aborted)
        self.line, self.ranked, self.sum = [*line], [*ranked], total

    @precondition(lambda self: self.waiting is None)
    @rule()
    def begins_another_session(self) -> None:
        self.session = tfnb.Session(self.session.graph)

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "session"):
            return
        found = [int(element[0]) for element in self.a.machine.first(9)] if self.a.machine is not None else []
        ranks = [int(element[1]) for element in self.b.machine.first(9)] if self.b.machine is not None else []
        assert (found, ranks, int(self.total.value())) == (self.line, self.ranked, self.sum)

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.close()
            if self.waiting is not None:
                self.waiting[0].join(60)
            self.folder.cleanup()


@pytest.mark.parametrize(
    ("examples", "steps"), [(12, 25), pytest.param(150, 60, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_files_among_random_puts_and_takes(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Saved, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )  # fmt: skip


# -- found by readers -----------------------------------------------------------------------------------------------


def test_what_one_stopped_step_took_of_equal_ranks_keeps_its_order(tmp_path: Path) -> None:
    queue = tfnb.PriorityQueue(9, torch.int64, (), name="urgent")
    for number in range(3):
        queue.enqueue((1, number))
    empty = fifo("empty")
    with tfnb.record() as graph:
        taken = [queue.dequeue()[1], queue.dequeue()[1], empty.dequeue()]
    session = tfnb.Session(graph)
    thread, _ = in_thread(lambda: session.run(taken, timeout=0.5))
    until(lambda: queue.size() == 1)
    session.save(tmp_path / "under way.safetensors")
    thread.join()
    assert [int(e[1]) for e in queue.machine.first(9)] == [0, 1, 2]
    session.restore(tmp_path / "under way.safetensors")
    assert [int(e[1]) for e in queue.machine.first(9)] == [0, 1, 2]


def test_a_step_that_put_a_part_keeps_what_it_took() -> None:
    a, b = fifo("a"), fifo("b", 2)
    a.enqueue_many(torch.arange(3))
    with tfnb.record() as graph:
        move = b.enqueue_many(a.dequeue_many(3) * 10)
    with pytest.raises(tfnb.errors.DeadlineExceeded):
        tfnb.Session(graph).run(move, timeout=0.2)
    assert (held(a), held(b)) == ([], [0, 10])


def test_what_waits_to_close_or_to_put_ends_with_a_restore(tmp_path: Path) -> None:
    queue = fifo("q", 2)
    with tfnb.record() as graph:
        queue.dequeue()
    session = tfnb.Session(graph)
    queue.enqueue_many(torch.arange(2))
    session.save(tmp_path / "open.safetensors")
    put, put_ended = in_thread(lambda: queue.enqueue(7))
    time.sleep(0.1)
    close, close_ended = in_thread(queue.close)
    time.sleep(0.1)
    session.restore(tmp_path / "open.safetensors")
    assert queue.dequeue() == 0
    put.join(5), close.join(5)
    assert not queue.machine.level.closed and held(queue) == [1, 7]
    assert put_ended == [None] and isinstance(close_ended[0], Aborted)
    queue.close()
    session.save(tmp_path / "closed.safetensors")
    session.restore(tmp_path / "open.safetensors")
    put, put_ended = in_thread(lambda: queue.enqueue(8))
    time.sleep(0.1)
    session.restore(tmp_path / "closed.safetensors")
    put.join(5)
    assert held(queue) == [1, 7] and isinstance(put_ended[0], tfnb.errors.QueueClosed)


def test_a_queue_that_a_cell_made_anew_is_the_only_one_of_its_name_in_the_file(tmp_path: Path) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(0))
        y = x + 1
    session = tfnb.Session(graph)
    session.save(tmp_path / "none.safetensors")
    for count in (0, 3):
        queue = tfnb.FIFOQueue(9, torch.int64, ())
        queue.enqueue_many(torch.arange(count))
        session.reads(queue)
    session.save(tmp_path / "one.safetensors")
    assert list(checkpoint.load(tmp_path / "one.safetensors")[1]["queues"]) == ["queue"]
    queue.dequeue()
    session.restore(tmp_path / "one.safetensors")
    assert held(queue) == [0, 1, 2] and int(session.run(y, {x: torch.tensor(1)})) == 2
    session.restore(tmp_path / "none.safetensors")  # which knows nothing of it
    assert held(queue) == [0, 1, 2]


def test_a_variable_may_have_a_name_like_that_of_a_queue_in_files(tmp_path: Path) -> None:
    held_by = tfnb.Variable(torch.tensor([1.0]), name="@x")
    with tfnb.record() as graph:
        held_by.read() + 0
    session = tfnb.Session(graph)
    session.save(tmp_path / "v.safetensors")
    held_by.assign(torch.tensor([2.0]))
    session.restore(tmp_path / "v.safetensors")
    assert held_by.value().tolist() == [1.0]
