"""Variables, a table and a queue that the same steps use, against plain Python: each step is done whole, or not at all.

Steps are refused, run out of time, are cancelled by their session, and are overtaken by others while they wait.
Variables over a connection that repeats messages are in `tests/cluster/alone/test_core.py`; a table is two Variables.
"""

from __future__ import annotations

import tempfile
import threading
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
from tests.state.test_queues import in_thread, until
from tfnb.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    OutOfRange,
    QueueClosed,
    ResourceExhausted,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")

ROOM, KEYS = 3, st.integers(0, 5)


class Steps(RuleBasedStateMachine):
    """The same steps on a session and on a number, a dict and a list."""

    @initialize()
    def make(self) -> None:
        self.number, self.rows, self.line, self.closed = 0.0, dict[int, float](), list[int](), False
        self.saved: tuple[float, dict[int, float], list[int], bool] | None = None
        self.writes = 0
        self.waiting: tuple[threading.Thread, list[Any], int] | None = None  # and the writes before it
        self.folder = tempfile.TemporaryDirectory()
        self.variable = tfnb.Variable(torch.zeros((), dtype=torch.float64), name="v", trainable=False)
        self.table = tfnb.MutableHashTable(ROOM, default=torch.tensor(0.0, dtype=torch.float64), name="t")
        self.queue = tfnb.FIFOQueue(4, torch.int64, (1,), name="q")
        with tfnb.record() as self.graph:
            self.x = tfnb.placeholder(torch.tensor(1.0, dtype=torch.float64), name="x")
            self.k = tfnb.placeholder(torch.tensor([1, 2]), name="k")
            self.add = self.variable.assign_add(self.x)
            self.drop = self.table.remove(self.k)
        with tfnb.record(self.graph):
            taken = self.queue.dequeue(sample=torch.tensor([1]))
            self.move = [self.variable.assign_add(1.0), self.table.insert(taken, self.variable.read()[None]), taken]
        self.session = tfnb.Session(self.graph)

    # -- what a step does to the model ------------------------------------------------------------------------

    def moves(self) -> type[Exception] | None:
        """`move` with an element that is there; the error that it ends with."""
        after = self.rows | {self.line[0]: self.number + 1}
        if len(after) > ROOM:
            return ResourceExhausted
        self.line.pop(0)
        self.number, self.rows = self.number + 1, after
        self.writes += 1
        return None

    def ends(self, error: type[Exception] | None, timeout: float | None = None) -> None:
        """A `move` now ends so."""
        if error is None:
            self.session.run(self.move, timeout=timeout)
            return
        with pytest.raises(error):
            self.session.run(self.move, timeout=timeout)

    # -- steps ------------------------------------------------------------------------------------------------

    @rule(value=st.integers(-9, 9), threads=st.integers(1, 3))
    def adds(self, value: int, threads: int) -> None:
        """Side by side."""
        some = [in_thread(lambda: self.session.run(self.add, {self.x: float(value)})) for _ in range(threads)]
        for thread, found in some:
            thread.join(60)
            assert not isinstance(found[0], BaseException), found
        self.number += value * threads
        self.writes += 1

    @rule(value=st.integers(-9, 9))
    def assigns(self, value: int) -> None:
        self.variable.assign(torch.tensor(float(value), dtype=torch.float64))
        self.number = float(value)
        self.writes += 1

    @rule(keys=st.lists(KEYS, min_size=2, max_size=2), recorded=st.booleans())
    def removes(self, keys: list[int], recorded: bool) -> None:
        if recorded:
            self.session.run(self.drop, {self.k: torch.tensor(keys)})
        else:
            self.table.remove(keys)
        self.rows = {key: value for key, value in self.rows.items() if key not in keys}
        self.writes += 1

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3))
    def inserts(self, keys: list[int]) -> None:
        values = torch.arange(float(len(keys)), dtype=torch.float64)
        after = self.rows | dict(zip(keys, values.tolist(), strict=True))
        if len(after) > ROOM:
            with pytest.raises(ResourceExhausted):
                self.table.insert(keys, values)
            return
        self.table.insert(keys, values)
        self.rows = after
        self.writes += 1

    @rule(key=KEYS)
    def puts(self, key: int) -> None:
        if self.closed:
            with pytest.raises(QueueClosed):
                self.queue.enqueue([key])
            return
        if len(self.line) == 4:
            with pytest.raises(DeadlineExceeded):
                self.queue.enqueue([key], timeout=0.001)
            return
        self.queue.enqueue([key])
        self.line.append(key)
        if self.waiting is not None:
            thread, found, before = self.waiting
            self.waiting = None
            thread.join(60)
            error = Aborted if self.writes > before else None
            full = len(self.rows | {key: 0.0}) > ROOM
            if isinstance(found[0], BaseException):  # what it read may have been written, and have had no room
                assert type(found[0]) in ({Aborted} if error else set()) | (
                    {ResourceExhausted} if full or error else set()
                )
            else:
                assert error is None and self.moves() is None

    @precondition(lambda self: self.waiting is None)
    @rule()
    def moves_now(self) -> None:
        if self.line:
            self.ends(self.moves())
        elif self.closed:
            self.ends(OutOfRange)
        else:
            self.ends(DeadlineExceeded, timeout=0.01)

    @precondition(lambda self: self.waiting is None and not self.line and not self.closed)
    @rule()
    def waits(self) -> None:
        """A step that the next put, a close or its session ends."""
        thread, found = in_thread(lambda: self.session.run(self.move, timeout=60))
        until(lambda: self.queue.level.dequeues == 1, 60)
        self.waiting = thread, found, self.writes

    @rule(which=st.integers(0, 9))
    def closes(self, which: int) -> None:
        if which > 1:  # not too soon
            return
        if self.closed and not which:
            with pytest.raises(QueueClosed):
                self.queue.close()
            return
        self.queue.close(cancel_pending_enqueues=bool(which))
        self.closed = True
        self.ended(OutOfRange)

    @rule()
    def begins_another_session(self) -> None:
        self.session.close()
        self.ended(Cancelled)
        with pytest.raises(FailedPrecondition, match="closed"):
            self.session.run(self.add, {self.x: 1.0})
        self.session = tfnb.Session(self.graph)

    def ended(self, error: type[Exception]) -> None:
        if self.waiting is not None:
            thread, found, _ = self.waiting
            thread.join(60)
            assert isinstance(found[0], error), found
            self.waiting = None

    @rule()
    def saves(self) -> None:
        self.session.save(Path(self.folder.name) / "saved.safetensors")
        self.saved = self.number, dict(self.rows), [*self.line], self.closed

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restores(self) -> None:
        assert self.saved is not None
        self.session.restore(Path(self.folder.name) / "saved.safetensors")
        self.number, self.rows, self.line, self.closed = (
            *self.saved[:1],
            dict(self.saved[1]),
            [*self.saved[2]],
            self.saved[3],
        )
        self.writes += 1
        self.ended(Aborted)

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "session"):
            return
        assert self.variable.value().item() == self.number
        keys, values = self.table.export()
        assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == self.rows
        held = [] if self.queue.machine is None else [int(element[0]) for element in self.queue.machine.first(9)]
        assert held == self.line and self.queue.level.closed == self.closed
        assert self.queue.level.dequeues == (self.waiting is not None)

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.close()
            self.ended(Cancelled)
            self.folder.cleanup()


@pytest.mark.parametrize(
    ("examples", "steps"), [(12, 25), pytest.param(150, 60, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_random_steps_are_done_whole_or_not_at_all(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Steps, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )  # fmt: skip
