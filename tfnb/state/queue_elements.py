"""Elements of a queue as the data of a training: elements drawn for steps that do not count return to the queue.

A training draws ahead, by many elements for the tasks of a cluster. `back_to` puts back what was drawn behind a
position, and a file has it in the queue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tfnb.errors import Cancelled, OutOfRange
from tfnb.state.input_sources import Position, Source
from tfnb.state.queue_machine import Attempt
from tfnb.state.queue_operations import machine_of, outcome
from tfnb.state.queues import TensorQueue
from tfnb.state.waits import Runner

Drawn = tuple[tuple[int, int], Attempt, Runner]  # the position behind an element, what takes it, and who waits


class QueueElements(Source):
    """A source that takes the elements of a queue, until that is closed and empty."""

    def __init__(self, queue: TensorQueue) -> None:
        self.name, self.queue, self._parts, self._root = queue.name, queue, (), self
        self._drawn = deque[Drawn]()
        self._lock = threading.Lock()  # while what is drawn changes; nobody waits for an element with it
        self._is_taken_back = False  # the attempt that was begun last
        self._start({"epoch": 0, "count": 0})

    def _rest(self) -> Iterator[Any]:
        while True:
            try:
                parts = self._next()
            except OutOfRange as end:
                if end.__cause__ is not None:  # who fills it failed
                    raise end.__cause__ from None
                return
            yield self.queue._one(parts)

    def _next(self) -> Sequence[torch.Tensor]:
        """Wait for the next element; the element counts as drawn as soon as the queue dequeues it."""
        while True:
            with self._lock:
                self._is_taken_back = False
                attempt, runner = self.queue._begin("dequeue", {}, ())
                behind = self._position["epoch"], self._position["count"] + 1
                self._drawn.append((behind, attempt, runner))
            try:
                return self.queue._wait(attempt, runner, {})
            except BaseException as error:
                with self._lock:
                    self._drawn = deque(drawn for drawn in self._drawn if drawn[1] is not attempt)
                    if not (isinstance(error, Cancelled) and self._is_taken_back):
                        raise

    @contextmanager
    def standing(self) -> Iterator[None]:
        """A block in which no element is drawn: a dequeue that still waits is withdrawn, and begins anew afterwards."""
        with self._lock:
            if self._drawn:
                _, attempt, runner = self._drawn[-1]
                if not attempt.is_over:
                    self._is_taken_back = True
                    attempt.machine.withdraw([attempt])
                    runner.inbox.put(None)  # it looks
            yield

    def after(self, position: Position) -> list[Sequence[torch.Tensor]]:
        """The elements that were drawn behind a position, in their order."""
        behind = [attempt for at, attempt, _ in self._drawn if at > (position["epoch"], position["count"])]
        ended = [one for one in behind if one.is_over and one.error is None]
        # Ctrl-C may have broken off one that had just ended: that has given back what it took
        return [outcome(self.queue, one, {}) for one in ended if one.taken or one.outputs]

    def counted(self, position: Position) -> None:
        """Steps up to this position are applied: elements drawn before the position are never returned."""
        with self._lock:
            while self._drawn and self._drawn[0][0] <= (position["epoch"], position["count"]):
                self._drawn.popleft()

    def back_to(self, position: Position) -> None:
        """Put elements drawn behind a position back in front of the queue."""
        with self._lock:
            if back := self.after(position):
                machine_of(self.queue).put_front(back)
            self._drawn.clear()
            self._start(dict(position))
