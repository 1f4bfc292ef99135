"""How a step runs on a cluster, as pure machines: ``machine.on(event, now) -> [instruction]``.

`Step` is one synchronous step: divide the rows over the live tasks, run, prepare, commit; when a task dies before
the commit, divide again and repeat. `Leases` is asynchronous training: whole batches are leased to tasks, and a batch
whose task died is leased again under the same operation number, so that a server applies it once. It ends, and it can
be held, at a cut: every lease is then applied on all servers or on none.
No clock, socket, thread or Dask: time arrives as an argument, and `engine` carries out what is said here.

Every attempt has a round number of its own, so that late messages of an earlier attempt mean nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from tfnb.cluster.messages import Failed

RETRIES = 3  # of a step whose tasks live but whose calls failed
POISON = 3  # attempts of one step that each lost a task
STOPS_WITHIN = 5.0  # seconds that a task has, at least, to stop computing


def patience(seconds: Sequence[float]) -> float:
    """Seconds that a task has to stop what it computes, by how long it computed lately.

    >>> patience([]), patience([1.0, 4.0, 90.0])
    (5.0, 12.0)
    """
    return max(STOPS_WITHIN, 3 * median(seconds)) if seconds else STOPS_WITHIN


# -- why a machine stopped ------------------------------------------------------------------------------------


class Interrupted(NamedTuple):
    """The user stopped it; nothing of the step was written."""


class TimedOut(NamedTuple):
    """Its deadline passed; nothing of the step was written."""


class TasksLost(NamedTuple):
    """No compute task is left, or the step itself kills them."""

    message: str


class ServerLost(NamedTuple):
    """A parameter server is gone."""

    shard: int


Cause = Interrupted | TimedOut | TasksLost | ServerLost | Failed


# -- events ---------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """Begin."""


class Done(NamedTuple):
    """A task answered; ``values`` are its fetches."""

    number: int
    task: int
    values: Any


class Error(NamedTuple):
    """A task's program raised, or a server refused what it sent."""

    number: int
    task: int
    failure: Failed


class Missed(NamedTuple):
    """A call to a task, or from it to a server, failed, and both are alive."""

    number: int
    task: int
    failure: Failed


class Lost(NamedTuple):
    """A compute task is dead."""

    task: int


class ShardLost(NamedTuple):
    """A server is dead."""

    shard: int


class Prepared(NamedTuple):
    """A shard has computed what it will write."""

    number: int
    shard: int


class Committed(NamedTuple):
    """A shard has written."""

    number: int
    shard: int


class ShardError(NamedTuple):
    """A shard could not prepare or commit."""

    number: int
    shard: int
    failure: Failed


class Interrupt(NamedTuple):
    """Ctrl-C."""


class Tick(NamedTuple):
    """Time has passed."""


class Joined(NamedTuple):
    """A task is there, in the place of one that was lost."""

    task: int


class Revoked(NamedTuple):
    """A task gave a lease back; no server saw anything of it."""

    number: int
    task: int


class Hold(NamedTuple):
    """Begin nothing, and say when every lease is over."""


class Resume(NamedTuple):
    """The end of a hold."""


class Counted(NamedTuple):
    """For each lease in doubt the shards that applied it."""

    shards: Mapping[int, Collection[int]]


class Offer(NamedTuple):
    """A batch to train on."""

    batch: Any


class End(NamedTuple):
    """There are no more batches."""


Event = (
    Start
    | Done
    | Error
    | Missed
    | Lost
    | ShardLost
    | Prepared
    | Committed
    | ShardError
    | Interrupt
    | Tick
    | Joined
    | Revoked
    | Hold
    | Resume
    | Counted
    | Offer
    | End
)


# -- instructions ---------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Let a task compute rows ``start`` to ``stop`` as worker number ``worker`` of this round."""

    number: int
    task: int
    worker: int
    start: int
    stop: int


class Prepare(NamedTuple):
    """Let a shard compute the update of these workers."""

    number: int
    shard: int
    workers: tuple[int, ...]


class Commit(NamedTuple):
    """Let a shard write it."""

    number: int
    shard: int
    workers: tuple[int, ...]


class Abort(NamedTuple):
    """Let everybody forget this round."""

    number: int


class Lease(NamedTuple):
    """Let a task compute and push a batch under operation ``number``."""

    number: int
    task: int
    batch: Any


class Revoke(NamedTuple):
    """Let a task stop a lease, unless servers may have seen something of it."""

    number: int
    task: int


class Count(NamedTuple):
    """Ask every shard which of these leases it applied; no task works on them any more."""

    numbers: tuple[int, ...]


class Held(NamedTuple):
    """Every lease that was begun is over."""


class Report(NamedTuple):
    """An asynchronous batch is applied; ``values`` is None where its task is gone."""

    number: int
    values: Any


class Finish(NamedTuple):
    """The machine is at its end: with values of each worker and their rows, or with a cause.

    ``torn``: shards that applied a lease which others did not, and no task is left to complete it.
    """

    values: tuple[Any, ...] = ()
    rows: tuple[int, ...] = ()
    cause: Cause | None = None
    torn: tuple[tuple[int, ...], ...] = ()


Instruction = Run | Prepare | Commit | Abort | Lease | Revoke | Count | Held | Report | Finish


def divide(rows: int, parts: int) -> list[tuple[int, int]]:
    """Consecutive ranges of nearly equal length, none empty.

    >>> divide(7, 3), divide(2, 3)
    ([(0, 3), (3, 5), (5, 7)], [(0, 1), (1, 2)])
    """
    parts = max(1, min(parts, rows))
    short, longer = divmod(rows, parts)
    stops = [short * (i + 1) + min(i + 1, longer) for i in range(parts)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


@dataclass
class Step:
    """One step with everything or nothing written.

    ``rows``: rows of the batch, None where it has none. ``whole``: one task computes all of them. ``shards``: those
    that the step writes. ``numbers``: fresh round numbers. States: planned, running, preparing, committing, over.
    """

    tasks: list[int]
    shards: Sequence[int]
    numbers: Iterator[int]
    rows: int | None = None
    whole: bool = False
    deadline: float = float("inf")
    state: str = "planned"
    number: int = -1
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)  # task -> rows, in worker order
    values: dict[int, Any] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)  # shards
    missed: int = 0
    lost: int = 0

    def on(self, event: Event, now: float) -> list[Instruction]:
        """What to do next."""
        match self.state, event:
            case "planned" | "running", Lost(task) if task in self.tasks:
                return self._lose(task)
            case "planned", Start():
                return self._run()
            case "running", Done(number, task, values) if number == self.number:
                return self._done(task, values)
            case "running", Error(number, _, failure) if number == self.number:
                return self._stop(failure)
            case "running", Missed(number, _, failure) if number == self.number:
                return self._again(failure)
            case "preparing", Prepared(number, shard) if number == self.number:
                return self._prepared(shard)
            case "committing", Committed(number, shard) if number == self.number:
                return self._committed(shard)
            case "preparing" | "committing", ShardError(number, _, failure) if number == self.number:
                return self._stop(failure)
            case "running" | "preparing" | "committing", ShardLost(shard):
                return self._stop(ServerLost(shard))
            case "planned" | "running" | "preparing", Interrupt():  # a commit is never cut
                return self._stop(Interrupted())
            case "planned" | "running" | "preparing", Tick() if now >= self.deadline:
                return self._stop(TimedOut())
        return []  # a late message of another round, or of a step that is over

    @property
    def workers(self) -> tuple[int, ...]:
        """Worker numbers of this round."""
        return tuple(range(len(self.ranges)))

    def _run(self) -> list[Instruction]:
        if not self.tasks:
            return self._stop(TasksLost("no compute task is left"))
        self.state, self.number = "running", next(self.numbers)
        parts = 1 if self.whole else len(self.tasks)
        ranges = [(0, 0)] if self.rows is None else divide(self.rows, parts)
        self.ranges = dict(zip(self.tasks, ranges, strict=False))
        self.values = {}
        return [Run(self.number, t, w, *r) for w, (t, r) in enumerate(self.ranges.items())]

    def _done(self, task: int, values: Any) -> list[Instruction]:
        self.values[task] = values
        if len(self.values) < len(self.ranges):
            return []
        if len(self.shards) > 1:
            self.state = "preparing"
            return [Prepare(self.number, shard, self.workers) for shard in self.shards]
        return self._commit()

    def _prepared(self, shard: int) -> list[Instruction]:
        self.answered.add(shard)
        return self._commit() if len(self.answered) == len(self.shards) else []

    def _commit(self) -> list[Instruction]:
        if not self.shards:
            return self._finish()
        self.state, self.answered = "committing", set()
        return [Commit(self.number, shard, self.workers) for shard in self.shards]

    def _committed(self, shard: int) -> list[Instruction]:
        self.answered.add(shard)
        return self._finish() if len(self.answered) == len(self.shards) else []

    def _finish(self) -> list[Instruction]:
        self.state = "over"
        rows = tuple(stop - start for start, stop in self.ranges.values())
        return [Finish(tuple(self.values[task] for task in self.ranges), rows)]

    def _lose(self, task: int) -> list[Instruction]:
        self.tasks.remove(task)
        if self.state == "planned" or task not in self.ranges:
            return []
        self.lost += 1
        if self.lost >= POISON:
            return self._stop(TasksLost(f"{self.lost} attempts of this step each lost a task: it seems to kill them"))
        return [Abort(self.number), *self._run()] if self.tasks else self._stop(TasksLost("no compute task is left"))

    def _again(self, failure: Failed) -> list[Instruction]:
        self.missed += 1
        return self._stop(failure) if self.missed > RETRIES else [Abort(self.number), *self._run()]

    def _stop(self, cause: Cause) -> list[Instruction]:
        begun, self.state = self.state != "planned", "over"
        return [*([Abort(self.number)] if begun else []), Finish(cause=cause)]


@dataclass
class Leases:
    """Asynchronous training: each task works on a batch of its own, and every batch is applied once on each shard.

    ``shards``: those that a batch writes. States: planned; open; held (what was begun is finished, nothing new begins);
    closing (the same, for good); counting (servers are asked about leases that lost their task); over.
    """

    tasks: list[int]
    shards: Sequence[int]
    numbers: Iterator[int]
    deadline: float = float("inf")
    state: str = "planned"
    cause: Cause | None = None
    out: dict[int, tuple[int, Any]] = field(default_factory=dict)  # task -> lease
    begun: deque[tuple[int, Any]] = field(default_factory=deque)  # leases that lost their task
    offered: deque[tuple[int, Any]] = field(default_factory=deque)
    doubtful: dict[int, Any] = field(default_factory=dict)  # leases that ended, some shard may have applied them
    torn: list[tuple[int, ...]] = field(default_factory=list)
    missed: dict[int, int] = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)  # leases that some shard may have applied in an earlier try
    mending: set[int] = field(default_factory=set)  # leases that some shards lack, computed once more
    ended: bool = False  # there are no more batches

    @property
    def wants(self) -> int:
        """How many batches there are idle tasks for."""
        idle = len(self.tasks) - len(self.out) - len(self.begun) - len(self.offered)
        return max(0, idle) if self.state == "open" else 0

    def on(self, event: Event, now: float) -> list[Instruction]:  # noqa: C901 (one line for each state and event)
        """The instructions that an event leads to."""
        match self.state, event:
            case "planned", Start():
                self.state = "open"
                return self._next() if self.tasks else self._close(TasksLost("no compute task is left"))
            case "open" | "held", Offer(batch):
                self.offered.append((next(self.numbers), batch))
                return self._next()
            case "open" | "held" | "closing", Done(number, task, values):
                return [*self._done(number, task, values), *self._next()]
            case "open" | "held" | "closing", Revoked(number, task):
                lease = self._back(number, task)
                self._doubt(lease if number in self.tried else None)
                return self._next()
            case "open" | "held" | "closing", Missed(number, task, failure):
                return self._missed(number, task, failure)
            case "open" | "held" | "closing", Error(number, task, failure):
                self._doubt(self._back(number, task))
                return self._close(failure)
            case "open" | "held" | "closing", Lost(task) if task in self.tasks:
                return self._lose(task)
            case "planned" | "counting", Lost(task) if task in self.tasks:
                self.tasks.remove(task)
            case "open" | "held" | "closing", Joined(task) if task not in self.tasks:
                self.tasks.append(task)
                return self._next()
            case "open", Hold():
                self.state = "held"
                return self._next()
            case "held", Resume():
                self.state = "open"
                return self._close(None) if self.ended else self._next()
            case "held", End():
                self.ended = True
            case "open", End():
                return self._close(None)
            case "open" | "held" | "closing", Interrupt():
                return [*self._revoke(), *self._close(Interrupted())]
            case "open" | "held" | "closing", Tick() if now >= self.deadline and self.cause is None:
                return [*self._revoke(), *self._close(TimedOut())]
            case "counting", Counted(shards):
                return self._counted(shards)
            case "open" | "held" | "closing" | "counting", ShardLost(shard):
                return self._over(ServerLost(shard))
        return []

    def _next(self) -> list[Instruction]:
        """Leases for idle tasks; or the end of a hold's waiting, or of it all."""
        given: list[Instruction] = []
        for task in self.tasks:
            queue = self.begun or (self.offered if self.state == "open" or self.cause is None else None)
            if task not in self.out and queue and (self.state != "held" or queue is self.begun):
                self.out[task] = queue.popleft()
                given.append(Lease(self.out[task][0], task, self.out[task][1]))
        if self.out or self.begun:
            return given
        if self.state == "held":
            return [*given, Held()]
        if self.state == "closing" and (self.cause is not None or not self.offered):
            return [*given, *self._count()]
        return given

    def _back(self, number: int, task: int) -> tuple[int, Any] | None:
        """The lease that a task gives back; None for a late answer."""
        lease = self.out.get(task)
        return self.out.pop(task) if lease is not None and lease[0] == number else None

    def _doubt(self, lease: tuple[int, Any] | None) -> None:
        if lease is not None:
            self.doubtful[lease[0]] = lease[1]

    def _done(self, number: int, task: int, values: Any) -> list[Instruction]:
        return [] if self._back(number, task) is None else [Report(number, values)]

    def _missed(self, number: int, task: int, failure: Failed) -> list[Instruction]:
        lease = self._back(number, task)
        if lease is None:
            return []
        self.missed[number] = self.missed.get(number, 0) + 1
        self.tried.add(number)
        if self.missed[number] > RETRIES or self._is_stopped or number in self.mending:
            self._doubt(lease)
            return self._close(failure)
        self.begun.append(lease)
        return self._next()

    def _lose(self, task: int) -> list[Instruction]:
        self.tasks.remove(task)
        lease = self.out.pop(task, None)
        if lease is not None:
            self.tried.add(lease[0])
            if self._is_stopped:
                self._doubt(lease)
            else:
                self.begun.append(lease)
        return self._next() if self.tasks else self._close(TasksLost("no compute task is left"))

    @property
    def _is_stopped(self) -> bool:
        """Whether what was begun is not to be finished."""
        return isinstance(self.cause, Interrupted | TimedOut | TasksLost)

    def _revoke(self) -> list[Instruction]:
        return [Revoke(number, task) for task, (number, _) in self.out.items() if number not in self.mending]

    def _close(self, cause: Cause | None) -> list[Instruction]:
        """Begin nothing new; the first cause is the one that counts."""
        if self.cause is None:
            self.cause = cause
        if self._is_stopped or not self.tasks:
            self.doubtful.update(self.begun)
            self.begun.clear()
        if cause is not None:
            self.offered.clear()
        self.state = "closing"
        return self._next()

    def _count(self) -> list[Instruction]:
        """Before the end: which of the doubtful leases were applied."""
        if not self.doubtful:
            return self._over(self.cause)
        self.state = "counting"
        return [Count(tuple(self.doubtful))]

    def _counted(self, shards: Mapping[int, Collection[int]]) -> list[Instruction]:
        """A lease counts if all shards applied it; one that only some applied is completed, or named."""
        reports: list[Instruction] = []
        for number, batch in self.doubtful.items():
            applied = tuple(shard for shard in self.shards if shard in shards.get(number, ()))
            if len(applied) == len(self.shards):
                reports.append(Report(number, None))
            elif applied and self.tasks and number not in self.mending:
                self.mending.add(number)
                self.tried.add(number)
                self.begun.append((number, batch))
            elif applied:
                self.torn.append(applied)
        self.doubtful.clear()
        self.state = "closing"
        return [*reports, *self._next()]

    def _over(self, cause: Cause | None) -> list[Instruction]:
        self.state = "over"
        return [Finish(cause=cause, torn=tuple(self.torn))]
