"""A first-in first-out queue as a state machine: attempts stand in two lines, and only the head of each may proceed.

Semantics S-68 to S-77, S-83. Nobody waits in here: an attempt that cannot proceed stays in its line, and tells when it
ended. Every call may come from any thread; what ends is told without the lock being held.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from tfnb.errors import Cancelled, OutOfRange, QueueClosed, TfnbError

Kind = Literal["enqueue", "dequeue", "close", "size"]
_LINE = {"enqueue": "enqueue", "close": "enqueue", "dequeue": "dequeue", "size": "size"}


class Attempt:
    """One operation on a queue. ``then(attempt)`` is called once, when it has a ``result`` or an ``error``.

    It stands in its line when ``after``, the program's operation before it, ended, or stands in the same line.
    """

    __slots__ = (
        "cancel_pending", "element", "error", "fifo", "followers", "is_over", "is_placed", "kind", "result", "since",
        "then", "what",
    )  # fmt: skip

    def __init__(
        self, fifo: Fifo, kind: Kind, then: Callable[[Attempt], None], *, element: tuple[torch.Tensor, ...] = (),
        cancel_pending: bool = False, what: Any = None,
    ) -> None:  # fmt: skip
        self.fifo, self.kind, self.then, self.element, self.what = fifo, kind, then, element, what
        self.cancel_pending = cancel_pending
        self.result: tuple[torch.Tensor, ...] | int | None = None
        self.error: TfnbError | None = None
        self.is_over = self.is_placed = False
        self.followers: list[Attempt] = []
        self.since = time.monotonic()

    @property
    def line(self) -> str:
        """Which line it stands in."""
        return _LINE[self.kind]


class Fifo:
    """A queue of at most ``capacity`` elements.

    >>> queue, done = Fifo("q", 1), []
    >>> for word in "ab":
    ...     queue.submit(Attempt(queue, "enqueue", done.append, element=(word,)))
    >>> len(done), queue.size
    (1, 1)
    >>> queue.submit(Attempt(queue, "dequeue", done.append))
    >>> [attempt.kind for attempt in done], done[1].result, queue.size
    (['enqueue', 'dequeue', 'enqueue'], ('a',), 1)
    """

    def __init__(self, name: str, capacity: float) -> None:
        self.name, self.capacity = name, capacity
        self.closed = False
        self.elements: deque[tuple[torch.Tensor, ...]] = deque()
        self.lines: dict[str, OrderedDict[Attempt, None]] = {"enqueue": OrderedDict(), "dequeue": OrderedDict()}
        self.past: dict[str, set[str]] = {kind: set() for kind in _LINE}  # who did what so far
        self._lock = threading.Lock()
        self._placing: deque[Attempt] = deque()
        self._over: list[Attempt] = []  # to be told

    @property
    def size(self) -> int:
        """Elements stored now."""
        return len(self.elements)

    def front(self) -> tuple[torch.Tensor, ...] | None:
        """The element that comes next, which stays."""
        with self._lock:
            return self.elements[0] if self.elements else None

    def submit(self, attempt: Attempt, after: Attempt | None = None) -> None:
        """Take up an attempt."""
        with self._lock:
            if after is None or after.is_over or (after.is_placed and after.line == attempt.line):
                self._placing.append(attempt)
            else:
                after.followers.append(attempt)
            over = self._settled()
        _tell(over)

    def withdraw(self, attempts: Sequence[Attempt]) -> None:
        """Take back attempts that are not over: they leave no trace, and nobody is told of them."""
        with self._lock:
            for attempt in attempts:
                attempt.then = _nobody
                self._end(attempt, error=Cancelled(f"an attempt on queue {self.name} was taken back"))
            over = self._settled()
        _tell(over)

    def give_back(self, elements: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Elements that were taken stand in front again, in their order, also where the queue is full by now."""
        with self._lock:
            self.elements.extendleft(reversed(elements))
            over = self._settled()
        _tell(over)

    def put_back(self, element: tuple[torch.Tensor, ...], place: int) -> None:
        """An element that was taken stands at ``place`` from the front again, also where the queue is full by now."""
        with self._lock:
            self.elements.insert(place, element)
            over = self._settled()
        _tell(over)

    # -- with the lock held -----------------------------------------------------------------------------------

    def _settled(self) -> list[Attempt]:
        """Do all that can be done; the attempts that are over now."""
        while self._placing or self._proceeds():
            while self._placing:
                self._place(self._placing.popleft())
        over, self._over = self._over, []
        return over

    def _place(self, attempt: Attempt) -> None:
        """Put an attempt into its line, or end it; those that may stand behind it follow."""
        if attempt.is_over:
            return
        attempt.is_placed = True
        self._placing.extend(f for f in attempt.followers if f.line == attempt.line)
        attempt.followers = [f for f in attempt.followers if f.line != attempt.line]
        if attempt.kind == "size":
            self._end(attempt, result=self.size)
        elif attempt.kind == "close" and attempt.cancel_pending:
            self._cancel_pending()
            self.closed = True
            self._end(attempt)
        elif self.closed and attempt.line == "enqueue":
            self._refuse(attempt)
        else:
            self.lines[attempt.line][attempt] = None

    def _proceeds(self) -> bool:
        """Let the head of a line proceed; False if neither can."""
        put, take = (next(iter(self.lines[line]), None) for line in ("enqueue", "dequeue"))
        if take is not None and self.elements:
            self._end(take, result=self.elements.popleft())
        elif put is not None and put.kind == "close":
            self.closed = True
            self._end(put)
            for late in list(self.lines["enqueue"]):
                self._refuse(late)
        elif put is not None and self.size < self.capacity:
            self.elements.append(put.element)
            self._end(put)
        elif take is not None and self.closed:
            text = f"queue {self.name} is closed and has insufficient elements (requested 1, current size 0)"
            self._end(take, error=OutOfRange(text))
        else:
            return False
        return True

    def _refuse(self, attempt: Attempt) -> None:
        already = " already" if attempt.kind == "close" else ""
        self._end(attempt, error=QueueClosed(f"queue {self.name} is{already} closed"))

    def _cancel_pending(self) -> None:
        for pending in list(self.lines["enqueue"]):
            self._end(pending, error=Cancelled(f"queue {self.name} was closed, and its pending enqueues cancelled"))

    def _end(self, attempt: Attempt, *, result: Any = None, error: TfnbError | None = None) -> None:
        if attempt.is_over:
            return
        attempt.result, attempt.error, attempt.is_over = result, error, True
        if error is None:
            self.past[attempt.kind].add(attempt.what or "a call")
        if attempt.line in self.lines:
            self.lines[attempt.line].pop(attempt, None)
        self._over.append(attempt)
        self._placing.extend(attempt.followers)
        attempt.followers = []


def give_back(done: Sequence[Attempt]) -> None:
    """Undo what a step that wrote nothing took. A step that put elements moved them: those stay where they are now."""
    if any(attempt.kind == "enqueue" for attempt in done):
        return
    for fifo in dict.fromkeys(attempt.fifo for attempt in done):
        fifo.give_back([a.result for a in done if a.fifo is fifo and isinstance(a.result, tuple)])


def _tell(over: Sequence[Attempt]) -> None:
    for attempt in over:
        attempt.then(attempt)


def _nobody(attempt: Attempt) -> None:
    pass
