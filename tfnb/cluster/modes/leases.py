"""Asynchronous training as a pure machine: pieces of a training are leased to tasks that loop by themselves.

`Leases` lends each task pieces of training ahead of need, two at a time. A piece is a run of steps under one stream of
operation numbers, one for each push; a piece whose task is gone is lent again, from where it was last heard of, under
the same numbers, so that a server applies each push once. Where tasks are idle while another is slow (``lends_twice``),
they get copies of its pieces: of each step the first of both counts. Training ends, and can be held, at a cut: every
step is then applied on all servers or on none. No clock, socket, thread or Dask: time arrives as an argument, and
`training` carries out what is said here. Steps themselves are opaque: a sequence of them, cut by slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tfnb.cluster.modes import events as e
from tfnb.cluster.modes.plan import RETRIES, poison
from tfnb.cluster.wire.messages import GIVEN_UP, Failure

AHEAD = 2  # pieces that a task has at a time
SECONDS = 0.5  # that a piece should take
LARGEST = 256  # steps of a piece: what a task has at a time lies within the window of a ledger
SMALLEST = 1
AGREED = 0.5  # the share of a gradient by which the pushes of the other tasks may change it, for all of them to begin
SLOW, LEAST = 2.0, 0.25  # times what pieces took lately, and seconds, after which a piece counts as late


@dataclass
class StreamPiece:
    """Steps that are pushed as operations ``first`` and following of a stream, ``n_push`` steps at a time.

    The last push of a piece may have fewer. ``done``: the number of steps reported as done to the notebook.
    ``is_again``: another task had it, so that some servers may have applied some of the rest. ``lost``: tasks that
    died over its next step, one of each attempt. ``told``: of a piece with a copy, the number that either has done.
    """

    number: int
    stream: int
    first: int
    steps: Sequence[Any]
    done: int = 0
    is_again: bool = False
    lost: tuple[int, ...] = ()
    told: int = 0
    n_push: int = 1

    @property
    def count(self) -> int:
        """The number of steps."""
        return len(self.steps)

    @property
    def operations(self) -> list[tuple[int, int]]:
        """Stream and operation number of each push."""
        return [(self.stream, self.first + at) for at in range(-(-self.count // self.n_push))]

    def pushed_by(self, at: int) -> range:
        """The steps of a push, by the place of its operation."""
        return range(at * self.n_push, min((at + 1) * self.n_push, self.count))

    def rest(self, number: int) -> StreamPiece:
        """The steps not done, as a piece with another number."""
        done = max(self.done, self.told)
        first, lost = self.first + done // self.n_push, () if done else self.lost
        return replace(
            self, number=number, first=first, steps=self.steps[done:], done=0, told=0, is_again=True, lost=lost
        )


# -- events, beside the shared ones ---------------------------------------------------------------------------


class Offer(NamedTuple):
    """Steps to train on, as many as wanted. ``task``: the preferred task, unless its lease has no room."""

    steps: Sequence[Any]
    task: int | None = None


class PieceProgress(NamedTuple):
    """A task has applied ``done`` steps of a piece; steps from ``start`` on have ``parts`` tasks' contributions."""

    task: int
    number: int
    done: int
    start: int = 0
    parts: int = 0


class GradientChange(NamedTuple):
    """What one round of pushes changes of a gradient, as a share of it: measured by a task that works alone."""

    task: int
    share: float


class LoopFailure(NamedTuple):
    """The loop of a task ended by itself; ``is_fatal``: trying again would not help."""

    task: int
    failure: Failure
    is_fatal: bool


class LoopEnd(NamedTuple):
    """A task ended its loop on request; every step begun was sent completely, unless the loop had failed before."""

    task: int
    has_failed: bool = False


class TaskPause(NamedTuple):
    """A task stands between two steps."""

    task: int


class AppliedCounts(NamedTuple):
    """For each push in doubt, by stream and operation number, the shards that applied it."""

    shards: Mapping[tuple[int, int], Collection[int]]


Event = e.Event | Offer | PieceProgress | GradientChange | LoopFailure | LoopEnd | TaskPause | AppliedCounts


# -- instructions -------------------------------------------------------------------------------------------------


class Give(NamedTuple):
    """Lend a task a piece."""

    task: int
    piece: StreamPiece


class StopLoop(NamedTuple):
    """End the loop of a task, and report its steps."""

    task: int


class Pause(NamedTuple):
    """Let a task stand between two steps."""

    task: int


class Continue(NamedTuple):
    """The end of a pause."""

    task: int


class Count(NamedTuple):
    """Ask every shard which steps of these pieces were applied; no task works on them any more."""

    pieces: tuple[StreamPiece, ...]


class Standstill(NamedTuple):
    """Nothing is in progress."""


class Report(NamedTuple):
    """Steps ``start`` to ``stop`` of a piece are applied; ``tasks`` know the values, none of them if they are lost."""

    number: int
    start: int
    stop: int
    tasks: tuple[int, ...]


Instruction = Give | StopLoop | Pause | Continue | Count | Standstill | Report | e.Finish


# -- sizes --------------------------------------------------------------------------------------------------------


@dataclass
class PieceSizes:
    """The size of the next piece: twice the last until a piece takes `SECONDS`, and less towards a known end.

    >>> sizes = PieceSizes()
    >>> sizes.next(None, 2), sizes.next(None, 2), sizes.next(3, 2)
    (1, 2, 1)
    >>> sizes.took(0.2, 2)
    >>> [sizes.next(None, 2) for _ in range(3)]
    [2, 4, 5]
    >>> PieceSizes(unit=4).next(None, 2)
    4
    """

    unit: int = 1  # of which a piece has a multiple, but at the end of the data
    last: float = 0.5
    seconds: float = 0.0  # of a step

    def took(self, seconds: float, steps: int) -> None:
        """Note the duration of a piece of ``steps`` steps."""
        self.seconds = seconds / steps

    def next(self, left: int | None, tasks: int) -> int:
        """The number of steps of the next piece; ``left``: the steps left to lend (None: unknown)."""
        is_quick = self.seconds * LARGEST <= SECONDS
        most = LARGEST if is_quick else max(SMALLEST, min(LARGEST, round(SECONDS / self.seconds)))
        if left is not None:
            most = max(SMALLEST, min(most, -(-left // (AHEAD * max(1, tasks)))))
        self.last = min(2 * self.last, most)
        return -(-int(self.last) // self.unit) * self.unit


# -- the machine --------------------------------------------------------------------------------------------------


@dataclass
class Leases:
    """Asynchronous training: each task works on pieces of its own.

    ``patience``: seconds that training without any task waits for one; a silent task is waited for. ``n_push``: steps
    that a task pushes together. ``warm_start``: steps that one task takes, and servers apply, before the others begin;
    ``is_warmth_measured``: or fewer, once gradients that are as many pushes old as there are other tasks would do.
    ``lends_twice``: whether idle tasks get copies of late pieces; a task whose piece another one has done first ends
    its loop, and begins anew, so that it stands at the end of a pass.
    States: planned; open; closing (loops end, what is in doubt is found out and completed); counting; over.
    """

    tasks: list[int]
    shards: Sequence[int]
    numbers: Iterator[int]
    deadline: float = float("inf")
    patience: float = 0.0
    until: float = float("inf")  # it waits for a task
    state: str = "planned"
    cause: e.Cause | None = None
    n_push: int = 1
    warm_start: int = 0
    is_warmth_measured: bool = False
    offers: int = 0  # steps that were offered
    applied: int = 0  # steps that tasks have reported as applied
    sizes: PieceSizes = field(default_factory=PieceSizes)
    out: dict[int, deque[StreamPiece]] = field(default_factory=dict)  # task -> pieces, in order
    again: deque[StreamPiece] = field(default_factory=deque)  # pieces that lost their task
    offered: deque[Offer] = field(default_factory=deque)
    doubtful: list[StreamPiece] = field(default_factory=list)
    torn: list[tuple[int, ...]] = field(default_factory=list)
    mended: set[tuple[int, int]] = field(default_factory=set)  # operations that some shards lacked
    missed: int = 0  # failures since the last step that was applied
    places: dict[int, int] = field(default_factory=dict)  # task -> the first of those that it follows
    streams: dict[int, list[int]] = field(default_factory=dict)  # task -> its stream, and the next operation of it
    began: dict[int, float] = field(default_factory=dict)  # task -> when its piece began
    lent: int = 0  # pieces that tasks have
    room: dict[int, None] = field(init=False)  # tasks with fewer than `AHEAD` of them, but those in `stopping`
    is_ended: bool = False  # there are no more steps
    is_hold_wanted: bool = False
    is_held: bool = False
    paused: dict[int, float] = field(default_factory=dict)  # task -> since when it stands
    told: set[int] = field(default_factory=set)  # tasks that were told to pause
    lends_twice: bool = False
    twins: dict[int, int] = field(default_factory=dict)  # a piece's number -> that of its copy, and back
    stopping: set[int] = field(default_factory=set)  # tasks that were told to end their loops, until these end

    def __post_init__(self) -> None:
        self.room = dict.fromkeys(self.tasks)

    @property
    def wants(self) -> int:
        """The number of pieces that there is room for."""
        if self.state != "open" or self.is_ended:
            return 0
        if self._is_warming:
            return len(self.takers)
        room = AHEAD * len(self.tasks) - self.lent - sum(AHEAD - len(self.out.get(t, ())) for t in self.stopping)
        return max(0, room - len(self.again) - len(self.offered))

    @property
    def takers(self) -> list[int | None]:
        """A task for each piece that there is room for; tasks with the fewest pieces come first."""
        if self.state != "open" or self.is_ended:
            return []
        room = [task for had in range(AHEAD) for task in self._with_room if len(self.out.get(task, ())) <= had]
        room = room[len(self.again) + len(self.offered) :]
        if self._is_warming:  # one offer at a time, as its size counts what was offered before
            room = room[: self.offers < self.warm_start]
        return [*room]

    def next_size(self, left: int | None) -> int:
        """The number of steps of the next offer; ``left``: the steps left to lend (None: unknown)."""
        if self._is_warming:
            warm = self.warm_start - self.offers
            left = warm if left is None else min(left, warm)
        return self.sizes.next(left, 1 if self._is_warming else len(self.tasks))

    @property
    def measures(self) -> bool:
        """Whether a task is to measure how much pushes change gradients."""
        return self.is_warmth_measured and self._is_warming

    @property
    def _is_warming(self) -> bool:
        return self.applied < self.warm_start

    @property
    def _with_room(self) -> tuple[int, ...]:
        """The tasks that may get another piece."""
        return tuple(task for task in self.tasks[:1] if task in self.room) if self._is_warming else tuple(self.room)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lent or waits to be."""
        return not (self.lent or self.again or self.offered or self.stopping)

    def on(self, event: Event, now: float) -> list[Instruction]:  # noqa: C901 (one line for each state and event)
        """The instructions that an event leads to."""
        match self.state, event:
            case "planned", e.Start():
                self.state = "open"
                return [] if self.tasks else self._close(e.TasksLost())
            case "open", Offer():
                self.offered.append(event)
                self.offers += len(event.steps)
                return self._next(now)
            case "open", e.DataEnd():
                self.is_ended = True
                return self._next(now)
            case "open" | "closing", PieceProgress(task, number, done):
                return [*self._progress(task, number, done, now), *self._next(now)]
            case "open", GradientChange(_, share) if self.measures and (len(self.tasks) - 1) * share <= AGREED:
                self.warm_start = self.applied
                return self._next(now)
            case "open" | "closing", LoopFailure(task, failure, is_fatal) if self._has_loop(task):
                return self._broken(task, failure, is_fatal, now)
            case "open", LoopEnd(task) if task in self.stopping:
                self.stopping.discard(task)
                self._return(task)
                return self._next(now)
            case "closing", LoopEnd(task, has_failed):
                self._drop(task, has_failed)
                return self._next(now)
            case "open" | "closing", e.TaskLoss(task, is_silent) if task in self.tasks:
                return self._lose(task, is_silent, now)
            case "planned" | "counting", e.TaskLoss(task) if task in self.tasks:
                self.tasks.remove(task)
                self.room.pop(task, None)
            case "open" | "closing", e.TaskJoin(task, follows) if task not in self.tasks:
                self.tasks.append(task)
                self.room[task] = None
                self.until = float("inf")
                if follows is not None:
                    self.places[task] = self.places.get(follows, follows)
                return self._next(now)
            case "open", e.Drain():
                self.is_hold_wanted = True
                return self._next(now)
            case "open", TaskPause(task) if self.is_hold_wanted:
                self.paused.setdefault(task, now)
                return self._next(now)
            case "open", e.Resume():
                return self._resume(now)
            case "open" | "closing", e.Interrupt():
                return self._close(e.UserStop())
            case "open" | "closing", e.Fault(failure):
                return self._close(failure)
            case "open", e.Tick() if now >= self.until and self.until <= self.deadline:
                return self._close(e.TasksLost())
            case "open" | "closing", e.Tick() if now >= self.deadline and self.cause is None:
                return self._close(e.TimedOut())
            case "open", e.Tick() if self.lends_twice:
                return self._next(now)
            case "counting", AppliedCounts(shards):
                return self._counted(shards, now)
            case "open" | "closing" | "counting", e.ShardLost(shard):
                return self._over(e.ServerLost(shard))
        return []

    # -- handing out ------------------------------------------------------------------------------------------------

    def _next(self, now: float) -> list[Instruction]:
        """Pieces for tasks that have room; or the way to a hold; or the end."""
        if self.state == "closing":
            return self._closing()
        if self.is_held:
            return []
        if self.is_hold_wanted and not self._is_unsure and not self.stopping:
            return self._hold()
        given = self._handed_out(now)
        return self._close(None) if self.is_ended and self.is_idle else given

    def _handed_out(self, now: float) -> list[Instruction]:
        """Pieces for tasks that have room, as far as there are some. Every report of every task comes by here."""
        given: list[Instruction] = []
        first = self.offered[0].task if len(self.offered) == 1 and not self.again else None
        tasks = self._with_room if first is None or first not in self.room else (first,)
        for had in range(AHEAD) if self.again or self.offered else ():  # who has least comes first
            for task in tasks:
                if len(self.out.get(task, ())) == had and (piece := self._taken(task)) is not None:
                    given.append(self._give(task, piece, now))
        for task in tuple(self.room) if self.lends_twice else ():
            if (piece := self._copied(task, now)) is not None:
                given.append(self._give(task, piece, now))
        return given

    def _has_loop(self, task: int) -> bool:
        """Whether a task works on pieces, or is to end its loop."""
        return bool(self.out.get(task)) or task in self.stopping

    @property
    def _is_unsure(self) -> bool:
        """Whether some piece lost its task: only at its end do all servers agree."""
        return bool(self.again) or any(piece.is_again for pieces in self.out.values() for piece in pieces)

    def _taken(self, task: int) -> StreamPiece | None:
        if self.again:
            return self.again.popleft()
        if self.is_hold_wanted:
            return None
        fits = [
            at for at, offer in enumerate(self.offered) if offer.task in (task, None) or offer.task not in self.room
        ]
        if not fits:
            return None
        at = min(fits, key=lambda at: self.offered[at].task != task)
        steps, stream = self.offered[at].steps, self.streams.setdefault(task, [next(self.numbers), 0])
        del self.offered[at]
        piece = StreamPiece(next(self.numbers), stream[0], stream[1], steps, n_push=self.n_push)
        stream[1] += len(piece.operations)
        return piece

    def _give(self, task: int, piece: StreamPiece, now: float) -> Give:
        if not self.out.get(task):
            self.began[task] = now
        self.out.setdefault(task, deque()).append(piece)
        self.lent += 1
        if len(self.out[task]) >= AHEAD:
            self.room.pop(task, None)
        return Give(task, piece)

    def _progress(self, task: int, number: int, done: int, now: float) -> list[Instruction]:
        piece = next((piece for piece in self.out.get(task, ()) if piece.number == number), None)
        if piece is None or done <= piece.done:
            return []
        start, self.missed = max(piece.done, piece.told), 0
        piece.done, self.applied = done, self.applied + max(0, done - start)
        told: list[Instruction] = [Report(number, start, done, (task,))] if done > start else []
        twin = self._twin(piece)
        if twin is not None:
            twin[1].told = max(twin[1].told, piece.first + done - twin[1].first)
        if done == piece.count:
            self.out[task].remove(piece)
            self.lent -= 1
            if task not in self.stopping:
                self.room[task] = None
            self.sizes.took(now - self.began.get(task, now), piece.count)
            self.began[task] = now
            return told if twin is None else [*told, *self._overtake(*twin)]
        return told

    # -- copies -------------------------------------------------------------------------------------------------------

    def _copied(self, task: int, now: float) -> StreamPiece | None:
        """A copy of the last piece of the latest task, for one that would be idle; None where no piece is late."""
        if not self.lends_twice or self.out.get(task) or self.again or self.offered:
            return None
        late = [
            (self.began.get(other, now), other) for other, pieces in self.out.items()
            if any(piece.number not in self.twins for piece in pieces) and self._is_late(other, pieces[0], now)
        ]  # fmt: skip
        if not late:
            return None
        piece = next(p for p in reversed(self.out[min(late)[1]]) if p.number not in self.twins)
        copy, piece.is_again = piece.rest(next(self.numbers)), True
        self.twins |= {piece.number: copy.number, copy.number: piece.number}
        return copy

    def _is_late(self, task: int, piece: StreamPiece, now: float) -> bool:
        return now - self.began.get(task, now) > max(LEAST, SLOW * self.sizes.seconds * piece.count)

    def _twin(self, piece: StreamPiece) -> tuple[int, StreamPiece] | None:
        """The other of a piece and its copy, with the task that has it."""
        number = self.twins.get(piece.number)
        if number is None:
            return None
        return next(((task, p) for task, pieces in self.out.items() for p in pieces if p.number == number), None)

    def _part(self, piece: StreamPiece) -> bool:
        """Forget that a piece has a copy; returns whether another task still has the other one."""
        is_there = self._twin(piece) is not None
        self.twins.pop(self.twins.pop(piece.number, 0), None)
        return is_there

    def _overtake(self, task: int, piece: StreamPiece) -> list[Instruction]:
        """Another task was first: this one ends its loop, and what else it has is lent again."""
        self._part(piece)
        self.out[task].remove(piece)
        self.lent -= 1
        if task in self.stopping or self.state != "open":
            return []
        self.stopping.add(task)
        self.room.pop(task, None)
        return [StopLoop(task)]

    # -- holds --------------------------------------------------------------------------------------------------------

    def _hold(self) -> list[Instruction]:
        working = {task for task, pieces in self.out.items() if pieces}
        if working <= self.paused.keys():
            is_new, self.is_held = not self.is_held, True
            return [Standstill()] if is_new else []
        new = sorted(working - self.told)
        self.told |= working
        return [Pause(task) for task in new]

    def _resume(self, now: float) -> list[Instruction]:
        self.is_hold_wanted = self.is_held = False
        return [*self._continue(now), *self._next(now)]

    def _continue(self, now: float) -> list[Instruction]:
        """Let tasks go on; the time for which they stood is none of their pieces'."""
        for task in self.began.keys() & self.paused.keys():
            self.began[task] += now - self.paused[task]
        told = sorted(self.told)
        self.told.clear()
        self.paused.clear()
        return [Continue(task) for task in told if task in self.tasks]

    # -- losses -------------------------------------------------------------------------------------------------------

    def _lose(self, task: int, is_silent: bool, now: float) -> list[Instruction]:
        self.tasks.remove(task)
        self.stopping.discard(task)
        if is_silent:
            self.patience = max(self.patience, GIVEN_UP)
        self.told.discard(task)
        self.paused.pop(task, None)
        first = next(iter(self.out.get(task, ())), None)
        is_own = first is not None and self._twin(first) is None  # of a piece with a copy another task has the steps
        rest = self._return(task)
        del self.room[task]
        if rest and is_own and self.state == "open" and not is_silent:
            rest[0].lost += (self.places.get(task, task),)
            if (cause := poison(rest[0].lost)) is not None:
                return self._close(cause)
        if not self.tasks and not (self.patience and self.state == "open"):
            return self._close(e.TasksLost())
        if not self.tasks:
            self.until = now + self.patience
        waking = self._continue(now) if self.state == "open" and self.again and not self.is_held else []
        return [*waking, *self._next(now)]

    def _broken(self, task: int, failure: Failure, is_fatal: bool, now: float) -> list[Instruction]:
        self.told.discard(task)
        self.paused.pop(task, None)
        self.stopping.discard(task)
        self._return(task)
        self.missed += 1
        if is_fatal or self.missed > RETRIES * max(1, len(self.tasks)):
            return self._close(failure)
        waking = self._continue(now) if self.state == "open" and not self.is_held else []
        return [*waking, *self._next(now)]

    def _return(self, task: int) -> list[StreamPiece]:
        """Take back a task's pieces, to lend them again or, while closing, to count them; streams are not reused."""
        rest = [piece.rest(next(self.numbers)) for piece in self._recalled(task)]
        self.streams.pop(task, None)
        if self.state == "closing":
            self.doubtful += rest
        else:
            self.again.extend(rest)
        return rest

    def _recalled(self, task: int) -> Sequence[StreamPiece]:
        """The pieces of a task, which has none from now on, but those that another task has as well."""
        left = [piece for piece in self.out.get(task, ()) if not self._part(piece)]
        self.lent -= len(self.out.pop(task, ()))
        self.room[task] = None
        return left

    # -- the end ------------------------------------------------------------------------------------------------------

    def _close(self, cause: e.Cause | None) -> list[Instruction]:
        """Begin nothing new; the first cause is the one that counts."""
        if self.cause is None:
            self.cause = cause
        if self.state == "closing":
            return self._closing()
        self.state = "closing"
        self.offered.clear()
        self.doubtful += self.again
        self.again.clear()
        working = [task for task, pieces in self.out.items() if pieces and task not in self.stopping]
        self.stopping.update(working)
        return [*map(StopLoop, working), *self._closing()]

    def _drop(self, task: int, has_failed: bool) -> None:
        """Drop a task's pieces at a stop; doubtful are steps that a failed loop, or an earlier task, may have begun."""
        self.stopping.discard(task)
        pieces = self._recalled(task)
        self.doubtful += [piece.rest(next(self.numbers)) for piece in pieces if has_failed or piece.is_again]

    def _closing(self) -> list[Instruction]:
        """Once every loop has ended, ask the shards for the applied ones among the doubtful pushes, or end."""
        if self.lent or self.stopping:
            return []
        if not self.doubtful:
            return self._over(self.cause)
        self.state = "counting"
        return [Count(tuple(self.doubtful))]

    def _counted(self, shards: Mapping[tuple[int, int], Collection[int]], now: float) -> list[Instruction]:
        """Count doubtful pushes: applied if on all shards; a partly applied push is completed by a task, or torn."""
        told: list[Instruction] = []
        doubtful, self.doubtful, self.state = self.doubtful, [], "closing"
        for piece in doubtful:
            for at, operation in enumerate(piece.operations):
                steps = piece.pushed_by(at)
                applied = tuple(shard for shard in self.shards if shard in shards.get(operation, ()))
                if len(applied) == len(self.shards):
                    told.append(Report(piece.number, steps.start, steps.stop, ()))
                elif applied and self.tasks and operation not in self.mended:
                    self.mended.add(operation)
                    lacking = piece.steps[steps.start : steps.stop]
                    mend = replace(piece, number=next(self.numbers), first=operation[1], steps=lacking, is_again=True)
                    told.append(self._give(self.tasks[0], mend, now))
                elif applied:
                    self.torn.append(applied)
        return [*told, *self._closing()]

    def _over(self, cause: e.Cause | None) -> list[Instruction]:
        self.state = "over"
        return [e.Finish(cause=cause, torn=tuple(self.torn))]
