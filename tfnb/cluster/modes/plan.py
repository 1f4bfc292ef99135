"""Steps on a cluster as pure machines: ``machine.on(event, now) -> [instruction]``.

`StepMachine` is one synchronous step driven by the notebook: divide the rows over the live tasks, run, prepare, commit;
if a task dies or falls silent while it computes, divide again and repeat. Trainings, whose tasks loop by themselves,
have the machines of `tfnb.cluster.modes.leases` and `tfnb.cluster.modes.rounds`; the events shared by all machines are
in `tfnb.cluster.modes.events`. No clock, socket, thread or Dask: time is an argument, and `tfnb.cluster.engine` carries
out the instructions.

Every attempt has a round number of its own, so that late messages of an earlier attempt mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from tfnb.cluster.modes import events as e
from tfnb.cluster.wire.messages import Failure
from tfnb.passes.microbatches import divide

RETRIES = 3  # of a step whose tasks live but whose calls failed
POISON = 3  # attempts of one step that each lost a task
STOPS_WITHIN = 5.0  # seconds that a task has, at least, to stop computing


def patience(seconds: Sequence[float]) -> float:
    """Seconds within which a task must stop its computation, by the durations of its recent ones.

    >>> patience([]), patience([1.0, 4.0, 90.0])
    (5.0, 12.0)
    """
    return max(STOPS_WITHIN, 3 * median(seconds)) if seconds else STOPS_WITHIN


def poison(lost: Sequence[int]) -> e.TasksLost | None:
    """The reason to give up a step that seems to kill tasks, by the task lost in each attempt; a successor counts as
    the same.

    A silent task is not among them: it may be busy.

    >>> poison([0, 1]), poison([1, 1]).message
    (None, '2 attempts of this step each lost a task: it seems to kill them')
    """
    if len(lost) < POISON and len(set(lost)) == len(lost):
        return None
    text = f"{len(lost)} attempts of this step each lost a task: it seems to kill them"
    return e.TasksLost(text, tuple(dict.fromkeys(lost)))


# -- events ---------------------------------------------------------------------------------------------------


class TaskAnswer(NamedTuple):
    """A task answered; ``values`` are its fetches."""

    number: int
    task: int
    values: object


class Error(NamedTuple):
    """A task's program raised, or a server refused the task's message."""

    number: int
    task: int
    failure: Failure


class CallFailure(NamedTuple):
    """A call to a task, or from a task to a server, failed, and both are alive."""

    number: int
    task: int
    failure: Failure


class ShardReady(NamedTuple):
    """A shard has computed its new values."""

    number: int
    shard: int


class ShardCommit(NamedTuple):
    """A shard has written."""

    number: int
    shard: int


class ShardError(NamedTuple):
    """A shard could not prepare or commit."""

    number: int
    shard: int
    failure: Failure


Event = e.Event | TaskAnswer | Error | CallFailure | ShardReady | ShardCommit | ShardError


# -- instructions ---------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Let a task compute rows ``start`` to ``stop`` as worker number ``worker`` of this round."""

    number: int
    task: int
    worker: int
    start: int
    stop: int


class Prepare(NamedTuple):
    """Let a shard compute the update from the contributions of ``workers``."""

    number: int
    shard: int
    workers: tuple[int, ...]


class Commit(NamedTuple):
    """Let a shard write its new values."""

    number: int
    shard: int
    workers: tuple[int, ...]


class AbortStep(NamedTuple):
    """Abort the round on all members."""

    number: int


Instruction = Run | Prepare | Commit | AbortStep | e.Finish


@dataclass
class StepMachine:
    """One step with everything or nothing written.

    ``rows``: rows of the batch, None where it has none. ``whole``: one task computes all of them. ``shards``: those
    that the step writes. ``once``: it puts elements into queues, so it is not tried again. ``numbers``: fresh round
    numbers. ``senders``: of a graph over several tasks, each of which does its part of the whole batch, the workers
    that send to each shard.
    ``into_parts``: the ranges of rows, in at most so many parts. States: planned, running, preparing, committing, over.
    """

    tasks: list[int]
    shards: Sequence[int]
    numbers: Iterator[int]
    rows: int | None = None
    whole: bool = False
    once: bool = False
    deadline: float = float("inf")
    state: str = "planned"
    number: int = -1
    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)  # task -> rows, in worker order
    values: dict[int, Any] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)  # shards
    missed: int = 0
    lost: list[int] = field(default_factory=list)  # dead tasks, one of each attempt; each stands for its successors
    places: Mapping[int, int] = field(default_factory=dict)  # task -> the first of those that it follows
    senders: Mapping[int, tuple[int, ...]] | None = None
    into_parts: Callable[[int, int], list[tuple[int, int]]] = divide

    def on(self, event: Event, now: float) -> list[Instruction]:
        """The next instructions."""
        match self.state, event:
            case "planned" | "running", e.TaskLoss(task, is_silent) if task in self.tasks:
                return self._lose(task, is_silent)
            case "planned", e.Start():
                return self._run()
            case "running", TaskAnswer(number, task, values) if number == self.number:
                return self._done(task, values)
            case "running", Error(number, _, failure) if number == self.number:
                return self._stop(failure)
            case "running", CallFailure(number, _, failure) if number == self.number:
                return self._again(failure)
            case "preparing", ShardReady(number, shard) if number == self.number:
                return self._prepared(shard)
            case "committing", ShardCommit(number, shard) if number == self.number:
                return self._committed(shard)
            case "preparing" | "committing", ShardError(number, _, failure) if number == self.number:
                return self._stop(failure)
            case "running" | "preparing" | "committing", e.ShardLost(shard):
                return self._stop(e.ServerLost(shard))
            case "planned" | "running" | "preparing", e.Interrupt():  # a commit is never cut
                return self._stop(e.UserStop())
            case "planned" | "running" | "preparing", e.Tick() if now >= self.deadline:
                return self._stop(e.TimedOut())
        return []  # a late message of another round, or of a step that is over

    def workers(self, shard: int) -> tuple[int, ...]:
        """Workers of this round that send to a shard."""
        return tuple(range(len(self.ranges))) if self.senders is None else self.senders[shard]

    @property
    def is_computed(self) -> bool:
        """Whether all values of this round are there."""
        return bool(self.ranges) and len(self.values) == len(self.ranges)

    def _run(self) -> list[Instruction]:
        if not self.tasks:
            return self._stop(e.TasksLost())
        self.state, self.number = "running", next(self.numbers)
        parts = 1 if self.whole else len(self.tasks)
        ranges = [(0, 0)] if self.rows is None else self.into_parts(self.rows, parts)
        if self.senders is not None:
            ranges = [(0, self.rows or 0)] * len(self.tasks)
        self.ranges = dict(zip(self.tasks, ranges, strict=False))
        self.values = {}
        return [Run(self.number, t, w, *r) for w, (t, r) in enumerate(self.ranges.items())]

    def _done(self, task: int, values: object) -> list[Instruction]:
        self.values[task] = values
        if len(self.values) < len(self.ranges):
            return []
        if len(self.shards) > 1:
            self.state = "preparing"
            return [Prepare(self.number, shard, self.workers(shard)) for shard in self.shards]
        return self._commit()

    def _prepared(self, shard: int) -> list[Instruction]:
        self.answered.add(shard)
        return self._commit() if len(self.answered) == len(self.shards) else []

    def _commit(self) -> list[Instruction]:
        if not self.shards:
            return self._finish()
        self.state, self.answered = "committing", set()
        return [Commit(self.number, shard, self.workers(shard)) for shard in self.shards]

    def _committed(self, shard: int) -> list[Instruction]:
        self.answered.add(shard)
        return self._finish() if len(self.answered) == len(self.shards) else []

    def _finish(self) -> list[Instruction]:
        self.state = "over"
        rows = tuple(stop - start for start, stop in self.ranges.values())
        return [e.Finish(tuple(self.values[task] for task in self.ranges), rows)]

    def _lose(self, task: int, is_silent: bool) -> list[Instruction]:
        self.tasks.remove(task)
        if self.state == "planned" or task not in self.ranges:
            return []
        if not is_silent:
            self.lost.append(self.places.get(task, task))
        if self.once:
            text = "a task was lost in a step that puts elements into queues: those that it put are there"
            return self._stop(e.TasksLost(text, (task,)))
        if (cause := poison(self.lost)) is not None:
            return self._stop(cause)
        if not self.tasks or self.senders is not None:  # nobody else does that part
            return self._stop(e.TasksLost())
        return [AbortStep(self.number), *self._run()]

    def _again(self, failure: Failure) -> list[Instruction]:
        self.missed += 1
        return self._stop(failure) if self.once or self.missed > RETRIES else [AbortStep(self.number), *self._run()]

    def _stop(self, cause: e.Cause) -> list[Instruction]:
        begun, self.state = self.state != "planned", "over"
        return [*([AbortStep(self.number)] if begun else []), e.Finish(cause=cause)]
