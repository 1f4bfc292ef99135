"""Queues here and on a server against a plain Python model: random attempts, batches, closes and cancellations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.state.distance import Distance
from tfnb.errors import Cancelled, OutOfRange, QueueClosed
from tfnb.graph.queue import Queue
from tfnb.state.orders import Arrival, Order, RankedOrder, ShuffledOrder
from tfnb.state.queue_machine import Attempt, QueueMachine
from tfnb.state.queue_operations import attempt_on


@dataclass(eq=False)
class Asked:
    """One attempt, as simple as can be."""

    kind: str
    items: list[Any] = field(default_factory=list)  # to be put, or taken
    count: int = 1
    up_to: bool = False
    done: int = 0
    outcome: str = ""


class Model:
    """The contract by itself: two lists of attempts, looked at again and again."""

    def __init__(self, kind: str, capacity: float, least: int, chosen: deque[Any]) -> None:
        self.kind, self.capacity, self.least, self.chosen = kind, capacity, least, chosen
        self.closed = False
        self.stored: list[Any] = []
        self.puts: list[Asked] = []
        self.takes: list[Asked] = []

    def spare(self) -> int:
        if self.kind == "priority" and not self.closed:
            wanted = min(self.takes[0].count - len(self.takes[0].items), self.capacity)
            return len(self.stored) if len(self.stored) >= wanted else 0
        return max(0, len(self.stored) - (0 if self.closed else self.least))

    def next(self) -> Any:
        """What comes next; chance is not foreseen, so of a shuffled queue it is what the real one gave."""
        if self.kind == "shuffle":
            first = self.chosen.popleft()
        else:
            first = min(self.stored, key=lambda item: item[0]) if self.kind == "priority" else self.stored[0]
        self.stored.remove(first)
        return first

    def submit(self, asked: Asked) -> None:
        if asked.kind == "cancel":
            for pending in self.puts:
                pending.outcome = "cancelled"
            self.puts, self.closed, asked.outcome = [], True, "done"
        elif (asked.kind == "put" and not asked.items) or (asked.kind == "take" and not asked.count):
            asked.outcome = "done"
        elif asked.kind == "take":
            self.takes.append(asked)
        elif self.closed:
            asked.outcome = "refused"
        else:
            self.puts.append(asked)

    def withdraw(self, asked: Asked) -> None:
        (self.takes if asked.kind == "take" else self.puts).remove(asked)
        self.back(asked)

    def back(self, asked: Asked) -> None:
        if asked.kind == "take":
            self.stored[:0] = asked.items
            asked.items = []

    def settle(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        if self.takes and (spare := self.spare()):
            head = self.takes[0]
            head.items += [self.next() for _ in range(min(spare, head.count - len(head.items)))]
            if len(head.items) == head.count:
                self.takes.pop(0).outcome = "done"
        elif self.puts and self.puts[0].kind == "close":
            self.closed, self.puts[0].outcome = True, "done"
            for late in self.puts[1:]:
                late.outcome = "refused"
            self.puts = []
        elif self.puts and len(self.stored) < self.capacity:
            head = self.puts[0]
            while head.done < len(head.items) and len(self.stored) < self.capacity:
                self.stored.append(head.items[head.done])
                head.done += 1
            if head.done == len(head.items):
                self.puts.pop(0).outcome = "done"
        elif self.takes and self.closed:
            head = self.takes.pop(0)
            head.outcome = "done" if head.up_to and head.items else "end"
            if head.outcome == "end":
                self.back(head)
        else:
            return False
        return True


class Told(ShuffledOrder):
    """It tells what chance chose."""

    def __init__(self) -> None:
        super().__init__(2, seed=3)
        self.chosen = deque[Any]()

    def take(self) -> Any:
        self.chosen.append(super().take())
        return self.chosen[-1]


ORDER = {"fifo": Arrival, "priority": RankedOrder, "shuffle": Told}


class Attempts(RuleBasedStateMachine):
    """The same attempts on a queue and its model."""

    @initialize(kind=st.sampled_from(sorted(ORDER)), capacity=st.sampled_from([3, 5, float("inf")]))
    def make(self, kind: str, capacity: float) -> None:
        order: Order = ORDER[kind]()  # type: ignore[abstract]
        self.queue, self.told = QueueMachine("q", capacity, order), list[Attempt]()
        self.model = Model(kind, capacity, getattr(order, "least", 0), getattr(order, "chosen", deque()))
        self.pairs: dict[Asked, Attempt] = {}
        self.withdrawn: list[tuple[Asked, Attempt]] = []
        self.number = 0

    def made(self, kind: Any, items: list[Any], **how: Any) -> Attempt:
        """An attempt on the real queue."""
        return Attempt(self.queue, kind, self.told.append, elements=items, **how)

    def stored(self) -> list[Any]:
        """What the real queue holds, in its order."""
        return list(self.queue.elements)

    def taken(self, attempt: Attempt) -> list[Any]:
        """What an attempt took."""
        return attempt.taken

    def enqueued(self, attempt: Attempt) -> int:
        """How many elements an attempt put so far."""
        return attempt.enqueued

    def settle(self) -> None:
        """All that was asked for has been seen."""

    def ask(self, asked: Asked, attempt: Attempt) -> None:
        self.pairs[asked] = attempt
        self.model.submit(asked)
        self.queue.submit(attempt)
        self.settle()
        self.model.settle()

    @rule(ranks=st.lists(st.integers(0, 2), max_size=4))
    def put(self, ranks: list[int]) -> None:
        items = [(rank, self.number + place) for place, rank in enumerate(ranks)]
        self.number += len(items)
        self.ask(Asked("put", items), self.made("enqueue", items))

    @rule(count=st.integers(0, 4), up_to=st.booleans())
    def take(self, count: int, up_to: bool) -> None:
        self.ask(Asked("take", count=count, up_to=up_to), self.made("dequeue", [], count=count, up_to=up_to))

    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        if which < 3:  # not too soon
            self.ask(Asked("close"), self.made("close", []))
        elif which == 9:
            self.ask(Asked("cancel"), self.made("close", [], cancel_pending=True))

    @rule(which=st.integers(0, 99))
    def withdraw(self, which: int) -> None:
        waiting = [asked for asked in self.pairs if not asked.outcome]
        if waiting:
            asked = waiting[which % len(waiting)]
            self.withdrawn.append((asked, attempt := self.pairs.pop(asked)))
            self.model.withdraw(asked)
            self.queue.withdraw([attempt])
            self.settle()
            self.model.settle()

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        for asked, attempt in self.pairs.items():
            assert attempt.is_over == bool(asked.outcome)
            assert outcome(attempt) == asked.outcome
            assert self.taken(attempt) == (asked.items if asked.kind == "take" else [])
            assert self.enqueued(attempt) == asked.done
        stored = self.stored()
        if self.model.kind == "fifo":
            assert stored == self.model.stored
        elif self.model.kind == "priority":
            assert stored == sorted(self.model.stored, key=lambda item: item[0])
        else:
            assert sorted(stored) == sorted(self.model.stored)
        assert len(set(self.told)) == len(self.told) and all(attempt.is_over for attempt in self.told)

    @invariant()
    def elements_are_conserved(self) -> None:
        if not hasattr(self, "queue"):
            return
        everyone = [*self.pairs.values(), *(attempt for _, attempt in self.withdrawn)]
        put = [tuple(map(int, i)) for attempt in everyone for i in attempt.elements[: self.enqueued(attempt)]]
        taken = [item for attempt in everyone for item in self.taken(attempt)]
        assert sorted([*taken, *self.stored()]) == sorted(put)
        assert self.queue.level.absorbed == sum(len(self.taken(a)) for a in everyone if not a.is_over)


def outcome(attempt: Attempt) -> str:
    if not attempt.is_over:
        return ""
    error = attempt.error
    kinds = {QueueClosed: "refused", Cancelled: "cancelled", OutOfRange: "end"}
    if error is None:
        return "done"
    assert error.enqueued == attempt.enqueued and "q" in str(error)
    return kinds[type(error)]


class AttemptsThere(Attempts):
    """The same attempts, by messages of which some are lost and some come twice or late."""

    @initialize(kind=st.sampled_from(["fifo", "priority"]), capacity=st.sampled_from([3, 5, float("inf")]),
                loss=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 99))  # fmt: skip
    def make(self, kind: str, capacity: float, loss: float, seed: int) -> None:  # type: ignore[override]
        self.distance = Distance(loss, seed)
        self.described = Queue("q", capacity, [(torch.int64, ())] * 2, kind=kind)
        self.queue = self.described.machine = self.distance.home(self.described, None)  # type: ignore[assignment]
        self.told: list[Attempt] = []
        self.model = Model(kind, capacity, 0, None)  # type: ignore[arg-type]
        self.pairs, self.withdrawn, self.number = {}, [], 0
        self.settle()

    def made(self, kind: Any, items: list[Any], **how: Any) -> Attempt:
        attrs = {"cancel_pending_enqueues": True} if how.pop("cancel_pending", False) else how
        if kind == "enqueue":
            attrs = {"many": True}
        columns = [torch.tensor([item[i] for item in items], dtype=torch.int64) for i in range(2)]
        return attempt_on(self.described, kind, self.told.append, attrs, columns if kind == "enqueue" else ())

    def stored(self) -> list[Any]:
        return [tuple(map(int, element)) for element in self.distance.machine(self.described).elements]

    def taken(self, attempt: Attempt) -> list[Any]:
        if attempt.is_over:
            found = attempt.outputs if attempt.kind == "dequeue" and attempt.error is None else None
            return [] if not found else [tuple(row) for row in torch.stack(list(found), 1).tolist()]
        real = self.real(attempt)
        return [] if real is None else [tuple(map(int, element)) for element in real.taken]

    def enqueued(self, attempt: Attempt) -> int:
        real = None if attempt.is_over else self.real(attempt)
        return attempt.enqueued if real is None else real.enqueued

    def real(self, attempt: Attempt) -> Attempt | None:
        """The attempt that stands there for one that waits here."""
        number = self.queue.channel.number_of(attempt)  # type: ignore[attr-defined]
        (channel,) = self.distance.core.objects.channels.values()
        return channel.open[number].attempt if number in channel.open else None

    def settle(self) -> None:
        self.distance.settle()

    def teardown(self) -> None:
        if hasattr(self, "distance"):
            self.distance.close()


RUNS = {  # a machine, how many of its runs, and of how many steps; each run there takes a thread and an event loop
    "here, some": (Attempts, 150, 30), "here, many": (Attempts, 600, 60),
    "there, some": (AttemptsThere, 25, 20), "there, many": (AttemptsThere, 300, 40),
}  # fmt: skip


@pytest.mark.parametrize(
    "runs", [pytest.param(runs, marks=[pytest.mark.slow] if "many" in runs else []) for runs in RUNS]
)
def test_random_attempts_end_as_in_a_plain_model(runs: str) -> None:
    machine, examples, steps = RUNS[runs]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )  # fmt: skip
