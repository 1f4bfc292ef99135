"""Synchronous training as a pure machine: all tasks contribute to each step.

`Rounds` lends every task the same pieces, two ahead of need; each task computes its share of the rows, and the servers
commit a round when all shares are there. The notebook acts only where something happens: it lets the servers end every
round that is not decided (a cut), ends the loops, and begins anew with the tasks that are there, from the step after
the last one that was written. For a task that joins it waits with that until the piece in progress is done, when a cut
drops least. With spare tasks the first part of each place makes a round, and copies are dropped (see
`server.courses`): no step waits for the slowest tasks, nor does the report of a step, for which the notebook asks the
first server. No clock, socket, thread or Dask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfnb.cluster.modes import events as e
from tfnb.cluster.modes.leases import (
    AHEAD,
    Give,
    LoopFailure,
    Offer,
    PieceProgress,
    PieceSizes,
    Report,
    Standstill,
    StreamPiece,
)
from tfnb.cluster.modes.plan import RETRIES, poison
from tfnb.cluster.wire.messages import GIVEN_UP, Failure

UNTOLD = 1.5  # seconds that a step waits for the word of the other tasks after the first one: they tell twice a second


class Cut(NamedTuple):
    """Let the servers end every round up to this one that is not decided, and all loops end; say where they stand."""

    upto: int


class RoundQuery(NamedTuple):
    """Ask the first server for the latest written round: with backup tasks, a report may be missing for long."""


class LatestRound(NamedTuple):
    """The last round that was written on the first server; training goes on."""

    latest: int


class CutAt(NamedTuple):
    """The last round that was written, on all servers; nothing is in progress."""

    latest: int


Event = e.Event | Offer | PieceProgress | LoopFailure | LatestRound | CutAt
Instruction = Give | RoundQuery | Cut | Standstill | Report | e.Finish


@dataclass
class Rounds:
    """Synchronous training. ``shards``: shards written by a step. ``spare``: backup tasks; no step waits for so many.

    ``wanted``: of how many parts a step is made; a spare task takes the place of a lost one. ``fixed``: this number
    where the mode says it; 0: one for each task but the spare ones. ``least``: tasks without which there is no step.
    ``patience``: seconds that training with fewer tasks waits for one; it waits for a silent one, too. ``members``: the
    tasks of this generation, in worker order. ``base``: steps that were written before it, the first of whose rounds is
    ``first``. States: planned; open; cutting; waiting (for a task); over.
    """

    tasks: list[int]
    shards: Sequence[int]
    numbers: Iterator[int]
    deadline: float = float("inf")
    spare: int = 0
    patience: float = 0.0
    fixed: int = 0
    least: int = 1
    wanted: int = 0
    until: float = 0.0  # it waits
    state: str = "planned"
    cause: e.Cause | None = None
    sizes: PieceSizes = field(default_factory=PieceSizes)
    members: tuple[int, ...] = ()
    workers: dict[int, int] = field(default_factory=dict)  # member -> its number
    base: int = 0
    first: int = 1
    next: int = 1  # the next round that is given
    out: deque[StreamPiece] = field(default_factory=deque)
    again: deque[Sequence[Any]] = field(default_factory=deque)  # steps that were given and not written
    offered: deque[Sequence[Any]] = field(default_factory=deque)
    told: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)  # piece and step -> who told, and when
    known: set[tuple[int, int]] = field(default_factory=set)  # steps that were told of by all tasks of which they are
    asked: float = 0.0
    began: float = 0.0
    missed: int = 0  # failures since the last step that was written
    lost: list[int] = field(default_factory=list)  # dead tasks likewise, one of each attempt; as in `places`
    places: dict[int, int] = field(default_factory=dict)  # task -> the first of those that it follows
    is_ended: bool = False
    is_join_due: bool = False  # a task has joined, and takes part as soon as the piece in progress is done

    @property
    def wants(self) -> int:
        """The number of pieces that there is room for."""
        if self.state not in ("open", "cutting") or self.is_ended or self.cause is not None:
            return 0
        return max(0, AHEAD - len(self.out) - len(self.again) - len(self.offered))

    @property
    def takers(self) -> list[int | None]:
        """One entry for each of them: a piece is for all tasks."""
        return [None] * self.wants

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lent or waits to be."""
        return not (self.out or self.again or self.offered)

    def next_size(self, left: int | None) -> int:
        """The number of steps of the next offer, for all tasks; ``left``: the steps left to lend (None: unknown)."""
        return self.sizes.next(left, 1)

    def part(self, task: int) -> tuple[int, int, int]:
        """The number of a task among the workers, how many there are, and of how many parts a step is made."""
        return self.workers[task], len(self.members), min(self.wanted, len(self.members))

    def steps_at(self, latest: int) -> int:
        """The number of written steps once round ``latest`` of this generation is written."""
        return self.base + max(0, latest - self.first + 1)

    def on(self, event: Event, now: float) -> list[Instruction]:  # noqa: C901 (one line for each state and event)
        """The instructions that an event leads to."""
        match self.state, event:
            case "planned", e.Start():
                return self._begin(now)
            case "open" | "cutting" | "waiting", Offer(steps):
                self.offered.append(steps)
                return self._next()
            case "open" | "cutting" | "waiting", e.DataEnd():
                self.is_ended = True
                return self._next()
            case "open" | "cutting", PieceProgress(task) if task in self.workers:
                return [*self._progress(event, now), *self._next()]
            case "open", LoopFailure(task, failure, is_fatal) if task in self.members:
                self.missed += 1
                return self._stop(failure if is_fatal or self.missed > RETRIES else None)
            case "open" | "cutting" | "planned" | "waiting", e.TaskLoss(task, is_silent) if task in self.tasks:
                return self._lose(task, is_silent)
            case "open" | "cutting" | "waiting", e.TaskJoin(task, follows) if task not in self.tasks:
                return self._join(task, follows, now)
            case "waiting", e.Interrupt():
                return self._over(e.UserStop())
            case "waiting", e.Tick() if now >= min(self.until, self.deadline):
                return self._over(self._too_few if self.until <= self.deadline else e.TimedOut())
            case "open" | "cutting" | "waiting", e.Drain():
                return [Standstill()]  # the first server holds; tasks wait there
            case "open" | "cutting", e.Interrupt():
                return self._stop(e.UserStop())
            case "open" | "cutting", e.Fault(failure):
                return self._stop(failure)
            case "open" | "cutting", e.Tick() if now >= self.deadline:
                return self._stop(e.TimedOut())
            case "open", e.Tick() if self.spare and self._is_untold(now):
                self.asked = now
                return [RoundQuery()]
            case "open", LatestRound(latest):
                return [*self._told_by_server(latest, now), *self._next()]
            case "cutting", CutAt(latest):
                return self._cut(latest, now)
            case "open" | "cutting" | "waiting", e.ShardLost(shard):
                return self._over(e.ServerLost(shard))
        return []

    def _begin(self, now: float) -> list[Instruction]:
        """Begin a generation with the present tasks, or wait for tasks."""
        self.first, self.began, self.is_join_due = self.next, now, False
        if len(self.tasks) < self.least and self.patience:
            self.until = self.until if self.state == "waiting" else now + self.patience
            self.state = "waiting"
            return []
        if len(self.tasks) < self.least:
            return self._over(self._too_few)
        self.state, self.members = "open", tuple(self.tasks)
        self.workers = {task: number for number, task in enumerate(self.members)}
        self.wanted = self.fixed or max(1, self.wanted, len(self.tasks) - self.spare)
        self.told.clear()
        self.known.clear()
        return self._next()

    @property
    def _too_few(self) -> e.Cause:
        """Why there is no step with the tasks that there are."""
        if self.least == 1:
            return e.TasksLost()
        return Failure(
            "StepAborted", f"{len(self.tasks)} of {self.least} required workers live, and no other one came; "
            "SyncReplicas(..., elastic=True) goes on with fewer",
        )  # fmt: skip

    def _next(self) -> list[Instruction]:
        given: list[Instruction] = []
        while self.state == "open" and len(self.out) < AHEAD and (queue := self.again or self.offered):
            steps = queue.popleft()
            piece = StreamPiece(next(self.numbers), 0, self.next, steps)
            self.next += piece.count
            self.out.append(piece)
            given += [Give(task, piece) for task in self.members]
        if self.state == "open" and self.is_ended and not self.out:
            return self._stop(None)
        return given

    def _progress(self, progress: PieceProgress, now: float) -> list[Instruction]:
        """Report steps for which every contributing task has reported."""
        reported = next((piece.done for piece in self.out if piece.number == progress.number), progress.done)
        for step in range(max(progress.start, reported), progress.done):
            tasks = self.told.setdefault((progress.number, step), {})
            tasks.setdefault(progress.task, now)
            if len(tasks) >= (progress.parts or len(self.members)):
                self.known.add((progress.number, step))
        return self._reports(now)

    def _is_untold(self, now: float) -> bool:
        """Whether some tasks told of a step long ago, and others do not."""
        since = next((when for tasks in self.told.values() for when in tasks.values()), now)
        return now >= max(since, self.asked) + UNTOLD

    def _told_by_server(self, latest: int, now: float) -> list[Instruction]:
        """Report steps that the server says are written, even if tasks have not reported them."""
        for piece in self.out:
            written = min(piece.count, latest - piece.first + 1)
            self.known |= {(piece.number, step) for step in range(piece.done, written)}
        return self._reports(now)

    def _reports(self, now: float) -> list[Instruction]:
        """The reports of steps that are known, in order."""
        told: list[Instruction] = []
        while self.out:
            piece = self.out[0]
            done = piece.done
            while (piece.number, done) in self.known:
                self.known.discard((piece.number, done))
                self.told.pop((piece.number, done), None)
                done += 1
            if done > piece.done:
                told.append(Report(piece.number, piece.done, done, self.members))
                piece.done, self.missed = done, 0
                self.lost.clear()
            if done < piece.count:
                break
            self.out.popleft()
            if self.state == "open":
                self.sizes.took(now - self.began, piece.count)
            self.began = now
            if self.is_join_due:  # the tasks have just begun the next step: a cut drops least of their work
                told += self._stop(None)
        return told

    def _join(self, task: int, follows: int | None, now: float) -> list[Instruction]:
        self.tasks.append(task)
        if follows is not None:
            self.places[task] = self.places.get(follows, follows)
        if self.state == "waiting":
            return self._begin(now)
        self.is_join_due = True
        return [] if self.out else self._stop(None)

    def _lose(self, task: int, is_silent: bool) -> list[Instruction]:
        self.tasks.remove(task)
        if is_silent:
            self.patience = max(self.patience, GIVEN_UP)
        if self.state in ("planned", "waiting") or task not in self.members:
            return []
        if self.state == "open" and self.out and not is_silent:  # tasks lost together are one attempt
            self.lost.append(self.places.get(task, task))
        if (cause := poison(self.lost)) is not None:
            return self._stop(cause)
        return self._stop(None if len(self.tasks) >= self.least or self.patience else self._too_few)

    def _stop(self, cause: e.Cause | None) -> list[Instruction]:
        """Begin a cut; the first cause counts, and without a cause training goes on after the cut."""
        if self.cause is None:
            self.cause = cause
        if self.state == "cutting":
            return []
        self.state = "cutting"
        return [Cut(self.next - 1)]

    def _cut(self, latest: int, now: float) -> list[Instruction]:
        """Every step up to round ``latest`` is written, reported or not; later steps are begun again."""
        told: list[Instruction] = []
        written = self.steps_at(latest)
        rest = []
        for piece in self.out:
            done = min(piece.count, max(piece.done, latest - piece.first + 1))
            if done > piece.done:
                told.append(Report(piece.number, piece.done, done, self.members))
            if done < piece.count:
                rest.append(piece.steps[done:])
        self.out.clear()
        self.again.extendleft(reversed(rest))
        self.base = written
        if self.cause is not None or (self.is_ended and not self.again and not self.offered):
            return [*told, *self._over(self.cause)]
        return [*told, *self._begin(now)]

    def _over(self, cause: e.Cause | None) -> list[Instruction]:
        self.state = "over"
        return [e.Finish(cause=cause)]
