"""Barriers: against a plain Python model, in graphs, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import tfnb
from tests.state.homes import Here, There
from tests.state.test_queues import in_thread, until
from tfnb.errors import Cancelled, DeadlineExceeded, InvalidArgument, OutOfRange, QueueClosed, ShapeError
from tfnb.graph.queue import Queue
from tfnb.state.queue_machine import Attempt

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")


class Model:
    """A dict of keys, a list of whole tuples, and a list of takes."""

    def __init__(self) -> None:
        self.closed, self.count = False, 0
        self.begun: dict[int, tuple[int, dict[int, Any]]] = {}
        self.whole: list[tuple[int, int, Any, Any]] = []
        self.takes: list[dict[str, Any]] = []

    def insert(self, part: int, keys: list[int], values: list[Any]) -> str:
        if self.closed and any(key not in self.begun for key in keys):
            return "refused"
        for key, value in zip(keys, values, strict=True):
            if key not in self.begun:
                self.begun[key] = (self.count, {})
                self.count += 1
            number, parts = self.begun[key]
            if part in parts:
                return "double"
            parts[part] = value
            if len(parts) == 2:
                del self.begun[key]
                self.whole = sorted([*self.whole, (number, key, parts[0], parts[1])])
        return "done"

    def settle(self) -> None:
        while self.takes:
            head = self.takes[0]
            if self.whole and len(head["got"]) < head["count"]:
                head["got"].append(self.whole.pop(0))
            elif len(head["got"]) == head["count"]:
                self.takes.pop(0)["end"] = "done"
            elif self.closed and (head["some"] or len(head["got"]) + len(self.begun) < head["count"]):
                self.takes.pop(0)["end"] = "done" if head["some"] and head["got"] else "end"
                if head["end"] == "end":
                    self.back(head)
            else:
                return

    def back(self, take: dict[str, Any]) -> None:
        self.whole, take["got"] = sorted([*self.whole, *take["got"]]), []


class Barriers(Here, RuleBasedStateMachine):
    """The same calls on a barrier and its model."""

    @initialize(seed=st.integers(0, 99))
    def make(self, seed: int) -> None:
        self.model = Model()
        self.open(Queue("b", float("inf"), [(torch.int64, ())] * 3, kind="barrier", options={"parts": 2}), seed)
        self.pairs: list[tuple[dict[str, Any], Attempt]] = []
        self.number = 0

    @rule(part=st.integers(0, 1), keys=st.lists(st.integers(0, 4), max_size=3, unique=True))
    def insert(self, part: int, keys: list[int]) -> None:
        values = [self.number + place for place in range(len(keys))]
        self.number += len(keys)
        rows = [torch.tensor(found, dtype=torch.int64) for found in (keys, values)]
        attempt = self.ask("enqueue", {"many": True, "part": part}, rows)
        ends = {QueueClosed: "refused", InvalidArgument: "double", type(None): "done"}
        assert attempt.is_over and ends[type(attempt.error)] == self.model.insert(part, keys, values)
        self.model.settle()

    @rule(count=st.integers(1, 3), some=st.booleans())
    def take(self, count: int, some: bool) -> None:
        asked = {"count": count, "some": some, "got": [], "end": ""}
        self.pairs.append((asked, self.ask("dequeue", {"count": count, "up_to": some})))
        self.model.takes.append(asked)
        self.model.settle()

    @rule(which=st.integers(0, 99))
    def withdraw(self, which: int) -> None:
        if self.model.takes:
            asked = self.model.takes.pop(which % len(self.model.takes))
            (attempt,) = [attempt for found, attempt in self.pairs if found is asked]
            self.pairs = [(found, attempt) for found, attempt in self.pairs if found is not asked]
            self.model.back(asked)
            self.withdrawn(attempt)
            self.model.settle()

    @rule(which=st.integers(0, 19))
    def close(self, which: int) -> None:
        if which > 2:  # not too soon
            return
        attempt, was_closed = self.ask("close", {"cancel_pending_enqueues": which == 0}), self.model.closed
        assert attempt.is_over and (attempt.error is None) == (which == 0 or not was_closed)
        self.model.closed = True
        if which == 0:
            self.model.begun = {}
        self.model.settle()

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "described"):
            return
        order = self.held.elements
        assert (len(order), order.coming()) == (len(self.model.whole), len(self.model.begun))
        assert [plain(element) for element in order] == self.model.whole
        for asked, attempt in self.pairs:
            assert attempt.is_over == bool(asked["end"])
            assert isinstance(attempt.error, OutOfRange) == (asked["end"] == "end")
            assert [plain(element) for element in self.taken(attempt)] == asked["got"]


def plain(element: Any) -> Any:
    number, key, *parts = element
    return int(number), int(key), *map(int, parts)


@pytest.mark.parametrize(
    ("examples", "steps"), [(80, 25), pytest.param(300, 60, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("home", [Here, There])
def test_random_inserts_give_the_tuples_of_a_plain_model(home: type, examples: int, steps: int) -> None:
    machine = Barriers if home is Here else type("There", (home, Barriers), {})
    examples //= 1 if home is Here else 4  # each takes a thread and an event loop
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )


def pairs(name: str = "pairs") -> tfnb.Barrier:
    return tfnb.Barrier([torch.float32, torch.int64], [(2,), ()], name=name)


def test_parts_come_in_any_order_and_are_taken_by_key() -> None:
    barrier = pairs()
    barrier.insert_many(1, [3, 4], [30, 40])
    barrier.insert_many(0, [4], [[4.0, 5.0]])
    assert (barrier.ready_size(), barrier.incomplete_size()) == (1, 1)
    thread, found = in_thread(lambda: barrier.take_many(2, timeout=60))
    until(lambda: barrier.ready_size() == 0)
    barrier.insert_many(0, [3], [[3.0, 3.5]])
    thread.join(60)
    numbers, keys, (xs, ys) = found[0]
    assert (numbers.tolist(), keys.tolist(), ys.tolist()) == ([1, 0], [4, 3], [40, 30])
    assert xs.tolist() == [[4.0, 5.0], [3.0, 3.5]]


def test_a_close_ends_a_take_that_those_that_were_begun_cannot_satisfy() -> None:
    barrier = pairs("done")
    barrier.insert_many(1, [3], [30])
    thread, found = in_thread(lambda: barrier.take_many(2, timeout=60))
    until(lambda: barrier.machine.lines["dequeue"])
    barrier.close()
    thread.join(60)
    assert isinstance(found[0], OutOfRange) and barrier.incomplete_size() == 1
    with pytest.raises(QueueClosed, match="queue done is closed"):
        barrier.insert_many(1, [3, 9], [31, 90])
    barrier.insert_many(0, [3], [[1.0, 2.0]])
    assert barrier.take_many(5, allow_small_batch=True)[1].tolist() == [3]
    with pytest.raises(Cancelled, match="already closed"):
        barrier.close()


def test_what_does_not_fit_is_refused() -> None:
    barrier = pairs("b")
    with pytest.raises(InvalidArgument, match="barrier b has parts 0 to 1, not 2"):
        barrier.insert_many(2, [1], [1])
    with pytest.raises(ShapeError, match=r"component 1 of queue b has shape \[2\]"):
        barrier.insert_many(0, [1], [[1.0]])
    with pytest.raises(ShapeError, match="as many rows as one another"):
        barrier.insert_many(1, [1, 2], [1])
    barrier.insert_many(1, [1], [1])
    with pytest.raises(InvalidArgument, match="key 1 has part 1 already") as caught:
        barrier.insert_many(1, [2, 1], [2, 1])
    assert caught.value.enqueued == 1 and barrier.incomplete_size() == 2
    with pytest.raises(DeadlineExceeded, match=r"dequeue on queue b .*0 whole elements"):
        barrier.take_many(1, timeout=0.05)
    with pytest.raises(InvalidArgument, match="a whole shape for each part"):
        tfnb.Barrier([torch.float32, torch.int64])


def test_recorded_calls_act_when_they_are_run(tmp_path: Path) -> None:
    barrier = pairs("recorded")
    with tfnb.record() as graph:
        keys = tfnb.placeholder(torch.tensor([1, 2]), name="keys")
        xs = tfnb.placeholder(torch.ones(2, 2), name="xs")
        first, second = barrier.insert_many(0, keys, 2 * xs), barrier.insert_many(1, keys, keys * 10)
        numbers, taken, (left, right) = barrier.take_many(2)
        some = barrier.take_many(9, allow_small_batch=True)[1]
        ready, begun, close = barrier.ready_size(), barrier.incomplete_size(), barrier.close()
    feeds = {keys: torch.tensor([5, 6, 7]), xs: torch.arange(6.0).reshape(3, 2)}
    assert barrier.incomplete_size() == 0
    tfnb.run(first, feeds)
    assert tfnb.run([ready, begun]) == [0, 3]
    tfnb.run(second, {keys: torch.tensor([7, 5])})
    found = tfnb.run([numbers, taken, left, right])
    assert [part.tolist() for part in found] == [[0, 2], [5, 7], [[0.0, 2.0], [8.0, 10.0]], [50, 70]]
    tfnb.run(close)
    tfnb.run(second, {keys: torch.tensor([6])})
    assert tfnb.run(some).tolist() == [6]
    graph.save(tmp_path / "graph.json")
    again = tfnb.Graph.load(tmp_path / "graph.json")
    with tfnb.Session(again) as session:
        session.run([first.name, second.name], {"keys": torch.tensor([1, 2]), "xs": torch.ones(2, 2)})
        assert session.run(taken.name).tolist() == [1, 2]
