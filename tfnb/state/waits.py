"""The wait-for graph of the steps and calls of this process that use queues. Semantics S-67.

A deadlock is declared only where every producer of what is waited for is ours, and waits itself: an operation that a
running step would still do behind a wait. What nobody here would serve may come from the user's other threads: a wait
for that goes on to its deadline, with a notice after two seconds.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tfnb.errors import DeadlockError, InvalidArgument, TfnbError
from tfnb.recording.marks.notes import user_level
from tfnb.state.queue_machine import Attempt, QueueHost

POLL = 0.1  # seconds between looks at whether the step was stopped
LOOK = 1.0  # seconds between looks at who waits for whom
NOTICE = 2.0  # seconds until a notice

Past = Mapping[QueueHost, Mapping[str, set[str]]]  # who did what to which queue so far


def check_timeout(timeout: float) -> None:
    """Raises InvalidArgument for an invalid number of seconds.

    >>> check_timeout(0.5)
    >>> check_timeout("2 s")
    Traceback (most recent call last):
    tfnb.errors.InvalidArgument: timeout is in seconds, at least 0, not '2 s'
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise InvalidArgument(f"timeout is in seconds, at least 0, not {timeout!r}")


_WANTS = {"dequeue": "an element", "enqueue": "room", "close": "the enqueues before it"}
_PRODUCER = {"dequeue": "enqueue", "enqueue": "dequeue", "close": "dequeue"}  # of what an operation waits for


class Inbox(queue.SimpleQueue[Any]):
    """Events for the thread of a step. ``wake``: called after each put while that thread waits somewhere else."""

    wake: Callable[[], None] | None = None

    def put(self, event: object) -> None:  # type: ignore[override]  # it never blocks
        """Add an event, from any thread."""
        super().put(event)
        if (wake := self.wake) is not None:
            wake()


@dataclass(frozen=True, eq=False, slots=True)
class QueueOperation:
    """An operation on a queue that waits there, or that a runner would still do ``behind`` attempts that wait."""

    what: str
    kind: str
    machine: QueueHost
    behind: Collection[Attempt] = ()
    attempt: Attempt | None = None

    @property
    def stands(self) -> bool:
        """Whether the operation stands in a line of its queue."""
        return self.attempt is not None and self.attempt.is_placed


@dataclass(eq=False, slots=True)
class Runner:
    """A step, or a single call, that uses queues, while running; the ends of its attempts arrive in the ``inbox``.

    may: what it does to queues in all. attempts: those that wait; later: what it would do behind them. Other threads
    ask for all three while it waits.
    """

    may: Callable[[], Collection[tuple[QueueHost, str]]] = tuple
    attempts: Callable[[], Iterable[Attempt]] = tuple
    later: Callable[[], Iterable[QueueOperation]] = tuple
    name: str = field(default_factory=lambda: f"thread {threading.current_thread().name}")
    inbox: Inbox = field(default_factory=Inbox)
    since: float | None = None  # when it began to wait
    looked: float = 0.0
    noticed: bool = False
    deadlock: TfnbError | None = None
    is_blocked: bool = False  # a part of a step that waits for other parts, and may wait for queues
    part: Callable[[], tuple[int, int, int] | None] = lambda: None  # its round, and messages that it sent and took

    def __enter__(self) -> None:
        WAITS.runners[self] = None

    def __exit__(self, *error: object) -> None:
        del WAITS.runners[self]
        self.may = self.attempts = self.later = tuple  # what they know of, such as tensors, ends with it
        self.part = lambda: None

    @property
    def is_idle(self) -> bool:
        """Whether the runner waits, and none of its attempts has ended."""
        return self.since is not None and not any(attempt.is_over for attempt in self.attempts())

    def operations(self) -> Iterator[QueueOperation]:
        """The operations that are not over: waiting attempts, and operations behind them."""
        waiting = [attempt for attempt in self.attempts() if not attempt.is_over]
        before: dict[Attempt, list[Attempt]] = {}
        for attempt in waiting:
            for follower in tuple(attempt.followers):
                before.setdefault(follower, []).append(attempt)
        for attempt in waiting:
            what = attempt.what or f"{attempt.kind} by {self.name}"
            yield QueueOperation(what, attempt.kind, attempt.machine, before.get(attempt, ()), attempt)
        yield from self.later()


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """Edges of a wait-for graph: pairs of a waiting operation or queue, and the operation or queue waited for."""

    edges: tuple[tuple[str, str], ...]

    def dot(self) -> str:
        """The graph in the DOT language."""
        quoted = [tuple(part.replace("\\", "\\\\").replace('"', '\\"') for part in edge) for edge in self.edges]
        return "\n".join(["digraph {", *(f'  "{a}" -> "{b}";' for a, b in quoted), "}"])

    def __str__(self) -> str:
        return "\n".join(f"  {a} waits for {b}" for a, b in self.edges)


class Waits:
    """The runners of this process. Each adds or removes itself in one dict operation, so a copy needs no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.runners: dict[Runner, None] = {}

    def of(self, names: Collection[str]) -> WaitGraph:
        """The wait-for graph of the runners of these names."""
        with self._lock:
            runners = list(self.runners)
            theirs = [one for runner in runners if runner.name in names for one in runner.operations()]
            others = [runner for runner in runners if runner.name not in names]
            return wait_graph(theirs, [(*may, runner.name) for runner in others for may in runner.may()])

    def wait(self, runner: Runner, attempt: Attempt, timeout: float | None) -> None:
        """Wait until an attempt is over, or ``timeout`` seconds; raises DeadlockError."""
        end = None if timeout is None else time.monotonic() + timeout
        while not attempt.is_over:
            left = POLL if end is None else end - time.monotonic()
            if left <= 0:
                return
            self.next(runner, left)

    def next(self, runner: Runner, most: float = POLL) -> Any:
        """The next event of the inbox; None after a while. Raises DeadlockError, and warns of a long wait."""
        now = time.monotonic()
        if runner.since is None:
            with self._lock:
                runner.since = runner.looked = now
        try:
            event = runner.inbox.get(timeout=min(POLL, most))
        except queue.Empty:
            event = None
        if runner.deadlock is not None:
            raise runner.deadlock
        if event is not None:
            with self._lock:
                runner.since, runner.noticed = None, False
            return event
        if now - runner.looked >= LOOK:
            runner.looked = now
            for home in {attempt.machine for attempt in runner.attempts()}:
                home.look()
            self.look()
        if now - runner.since >= NOTICE and not runner.noticed:
            runner.noticed = True
            graph = self.of([runner.name])
            warnings.warn(f"still waiting:\n{graph}", stacklevel=user_level(None))
        return None

    def look(
        self, elsewhere: Iterable[Runner] = (), awake: Collection[Runner] = (), past: Past = MappingProxyType({})
    ) -> None:
        """Detect deadlocks, and hand an error to each runner with a stuck attempt.

        elsewhere: runners of other processes. awake: those here that go on soon. past: of queues that are elsewhere.
        """
        with self._lock:
            runners = [*self.runners, *elsewhere]
            idle = [runner for runner in runners if runner.is_idle and runner not in awake]
            busy = [runner for runner in runners if runner not in idle]
            free = {may for runner in busy for may in runner.may()}
            free |= {(attempt.machine, attempt.kind) for runner in busy for attempt in runner.attempts()}
            found = stuck([operation for runner in idle for operation in runner.operations()], free, past)
            if not found or not all(runner.is_idle for runner in idle):
                return
            graph = wait_graph(found)
            attempts = {operation.attempt for operation in found if operation.stands}
            for runner in idle:
                if not attempts.isdisjoint(runner.attempts()):
                    runner.deadlock = DeadlockError(f"nothing can make progress:\n{graph}", details=graph)
                    runner.inbox.put(None)


WAITS = Waits()


def stuck(
    operations: Iterable[QueueOperation],
    free: Collection[tuple[QueueHost, str]] = (),
    past: Past = MappingProxyType({}),
) -> list[QueueOperation]:
    """Operations that can never end: each waits for a producer, and every producer is itself stuck behind one of them.

    free: what runners do that do not wait. Whoever used a queue before and is not among the operations may do it again.
    What has no producer here is not stuck: it may come from anywhere.
    """
    everyone = found = list(operations)
    while len(left := _blocked(found, everyone, free, past)) < len(found):
        found = left
    return found


def _blocked(
    found: Sequence[QueueOperation],
    everyone: Iterable[QueueOperation],
    free: Collection[tuple[QueueHost, str]],
    past: Past,
) -> list[QueueOperation]:
    """The operations of ``found`` that only other operations of ``found`` could unblock."""
    kept, attempts = set(found), {one.attempt for one in found}
    open_ = {(one.machine, one.kind) for one in everyone if one not in kept}.union(free)
    behind: dict[tuple[QueueHost, str], set[str]] = {}  # who would do what to which queue, and cannot
    for one in found:
        if not one.stands:
            behind.setdefault((one.machine, one.kind), set()).add(one.what)

    def is_blocked(one: QueueOperation) -> bool:
        if not one.stands:
            return bool(one.behind) and attempts.issuperset(one.behind)
        machine, producer = one.machine, _PRODUCER[one.kind]
        here = behind.get((machine, producer), set())
        return (
            bool(here)
            and open_.isdisjoint([(machine, producer), (machine, "close")])
            and here >= past.get(machine, machine.past)[producer]
        )

    return [one for one in found if is_blocked(one)]


def wait_graph(operations: Iterable[QueueOperation], others: Iterable[tuple[QueueHost, str, str]] = ()) -> WaitGraph:
    """The wait-for graph of operations, queues and producers. others: queue, kind and name of other operations."""
    edges: dict[tuple[str, str], None] = {}
    everyone, others = list(operations), list(others)
    named = {operation.attempt: operation.what for operation in everyone}
    for operation in everyone:
        held = operation.machine
        if not operation.stands:
            edges.update({(operation.what, named[attempt]): None for attempt in operation.behind if attempt in named})
            continue
        place = f"{_WANTS[operation.kind]} of queue {held.name} ({held.level})"
        edges[operation.what, place] = None
        producer = _PRODUCER[operation.kind]
        serve = [o.what for o in everyone if not o.stands and o.machine is held and o.kind == producer]
        serve += [name for machine, kind, name in others if machine is held and kind == producer]
        edges.update({(place, what): None for what in serve or [held.others]})
    return WaitGraph(tuple(edges))
