"""The loop that a task runs by itself while a `fit` trains: one message to each server and step, no notebook.

The notebook lends pieces of training ahead of need, and asks for a report twice a second and when a piece ends; reports
count from the first step of the loop, so that a repeated report means the same. The loop ends by itself at the first
call or kernel that fails; the notebook then decides.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from tfnb.cluster.tasks.computing import Compute, Computing
from tfnb.cluster.tasks.pieces import PieceOrder, Prefetch, Share, TaskShare
from tfnb.cluster.tasks.programs import ComputeProgram, LateProgram, Push
from tfnb.cluster.tasks.rows_there import LookedUp
from tfnb.cluster.wire.messages import Ask, Failure, NotDone, NotSent, Ok, OpId, Outcome, Refusal, failed
from tfnb.cluster.wire.streams import Streams
from tfnb.cluster.wire.transport import outcome_header
from tfnb.errors import Cancelled, Internal

HALF = 0.5  # seconds between two answers to a notebook that watches
QUARTER = 0.25  # seconds until one that wants the loop to stand hears that it does not yet
WHILE = 0.05  # seconds of steps for which the compute thread goes on by itself
SPAN = 64  # steps whose watched values are stacked together
GRACE = 0.25  # seconds that a call on a direct stream may take still when the loop is to end

NO_LOOP = {
    "at": 0, "groups": [], "paused": True, "over": True, "failure": None, "seconds": 0.0, "late": 0, "computed": 0.0,
    "sent": 0, "overtaken": 0,
}  # fmt: skip
_keys = itertools.count(1 << 60)  # of loops among the calls of the compute thread; rounds lie below

Out = list[torch.Tensor | None]


class LoopHost(Protocol):
    """The task as seen by its loops."""

    name: str
    host: str  # where other workers reach it
    computing: Computing
    room: int  # bytes of chunks that it may keep

    async def read(self, key: object, what: str) -> torch.Tensor: ...

    async def stop_reading(self) -> None: ...

    streams: Streams

    async def open_streams(self, shards: Sequence[int]) -> None: ...

    def stream(self, asks: Sequence[Ask]) -> list[Outcome]: ...

    async def ask(self, asks: Sequence[Ask]) -> list[Ok]: ...


class _StepInProgress(NamedTuple):
    """A step to be computed, with its rows of large Variables; None: the rows are yet to be asked for."""

    step: tuple[int, int]  # number of the piece, and index of the step in it
    share: Share
    looked: LookedUp | None = None
    rows: Sequence[torch.Tensor] | None = ()


class _StepResult(NamedTuple):
    """The result of computing one step."""

    share: Share
    out: Out
    pushes: list[Push]
    before: Mapping[str, torch.Tensor] = MappingProxyType({})  # values by key that it was computed from


class _StepInFlight(NamedTuple):
    """A step sent to servers, with their answers by direct streams."""

    done: _StepResult
    asks: list[Ask]
    outcomes: list[Outcome]


@dataclass(slots=True)
class _AppliedPart:
    """An applied part of a step: number of the piece, index of the step, place among its parts, rows and values."""

    number: int
    index: int
    place: int
    parts: int
    rows: int
    out: Out

    def follows(self, other: _AppliedPart) -> bool:
        """Whether their values can be stacked."""
        if (self.number, self.index) != (other.number, other.index + 1):
            return False
        if (self.place, self.parts, self.rows) != (other.place, other.parts, other.rows):
            return False
        pairs = zip(self.out, other.out, strict=True)
        return all(a is b if a is None or b is None else a.shape == b.shape for a, b in pairs)


def both(a: Mapping[int, list[str]], b: Mapping[int, list[str]]) -> dict[int, list[str]]:
    """Keys by shard, of two programs together.

    >>> both({0: ["v", "w"]}, {0: ["w", "x"], 1: ["y"]})
    {0: ['v', 'w', 'x'], 1: ['y']}
    """
    return {shard: list(dict.fromkeys([*a.get(shard, ()), *b.get(shard, ())])) for shard in {**a, **b}}


class TrainingLoop:
    """One training on one task."""

    def __init__(
        self, host: LoopHost, name: str, training: str, program: ComputeProgram, ahead: Prefetch | None,
        shards: list[int], staleness: int | None = None, late: LateProgram | None = None,
    ) -> None:  # fmt: skip
        self._host, self._training, self._program, self._shards = host, training, program, shards
        self._late_program, self._averages = (
            late,
            dict[tuple[int, int], torch.Tensor](),
        )  # of the step that was sent last
        self._name, self._staleness = name, staleness
        self._clock = 0  # steps that are applied, as the servers count them where staleness is bounded
        self._leads: dict[int, int] = {}  # shard -> steps that this loop is ahead there
        self._ahead = ahead
        self._reads = self._reads_with(late)
        self._given: deque[PieceOrder] = deque()
        self._held: dict[str, tuple[int, torch.Tensor]] = {}  # key -> version and value
        self._rounds: dict[int, int] = {}  # shard -> the round whose values it sent
        self._counts = True  # whether the last part that was sent counts, on the first shard
        self._place: int | None = None  # in the next round, assigned by the first shard
        self._late = 0  # steps that came too late to count
        self._log: deque[_AppliedPart] = deque()  # parts that the notebook has not confirmed
        self._told = 0  # steps before the log
        self._changed, self._news = asyncio.Event(), asyncio.Event()
        self._stands = asyncio.Event()
        self._is_wanted, self._is_pause_wanted, self._has_stood = True, False, True
        self._failure: Failure | Refusal | None = None
        self._seconds = self._all_seconds = 0.0  # of computing the last step, and all of them
        self._writes: dict[int, int] = {}  # shard -> its writes, as its last answer had them
        self._sent = self._overtaken = 0  # pushes to a shard, and writes of others between the values and the push
        self._change: float | None = None  # of a gradient by the last round of pushes, as a share of it
        self._key = next(_keys)
        self._begun: _StepInProgress | None = None  # the step whose rows did not come by direct streams
        self._waits: asyncio.Future[None] | None = None  # for loops that are behind
        self._work = asyncio.ensure_future(self._run())

    @property
    def is_over(self) -> bool:
        """Whether the loop has ended."""
        return self._work.done()

    @property
    def is_standing(self) -> bool:
        """Whether the loop stands: paused, or without a piece."""
        return self._stands.is_set()

    async def save(self, number: int) -> Ok:
        """Only ranks hold values of their own."""
        raise NotImplementedError

    # -- requests of the notebook -------------------------------------------------------------------------------

    def lend(self, given: PieceOrder) -> None:
        """Add one more piece; a piece that was lent before is ignored."""
        if not any(held.number == given.number for held in self._given):
            given = replace(given, needs_all=self._late_program is not None and self._late_program.has_rows)
            self._given.append(given)
            if self._ahead is not None:
                self._ahead.begin(given, self._changed.set)
            self._changed.set()

    async def watch(self, seen: int) -> Ok:
        """A report, as soon as there is something to decide, and every half a second."""
        self._confirm(seen)
        if not self._work.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), HALF)
        self._news.clear()
        return self.report(seen)

    async def pause(self, is_wanted: bool, seen: int) -> Ok:
        """Stand between two steps, or go on. A step may take long: the report says whether the loop stands by now."""
        self._is_pause_wanted = is_wanted
        self._changed.set()
        if is_wanted:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stands.wait(), QUARTER)
        return self.report(seen)

    async def stop(self, seen: int, *, is_given_up: bool = False) -> Ok:
        """End the loop: its computation is dropped, begun messages are sent, and no other loop is waited for.

        is_given_up: one of the loop's servers is dead, so that nothing more can be sent.
        """
        self._is_wanted = False
        self._changed.set()
        if self._waits is not None:
            self._waits.cancel()
        left = asyncio.ensure_future(self._host.computing.stopped(lambda key: key == self._key))
        await asyncio.wait({left}, timeout=GRACE)
        if not left.done():  # it waits on a stream: from here on by calls that can be given up
            self._host.streams.end()
        await left
        if is_given_up:
            self.cancel()
        await asyncio.wait({self._work})
        return self.report(seen)

    def cancel(self) -> None:
        """Give up its calls to servers, without a word to them."""
        self._has_stood = True
        self._work.cancel()

    def report(self, seen: int) -> Ok:
        """All applied parts that the notebook has not confirmed, and the state of the loop."""
        self._confirm(seen)
        groups: list[list[_AppliedPart]] = []
        log = list(self._log)  # at once: the compute thread adds to it
        for done in log:
            if groups and len(groups[-1]) < SPAN and done.follows(groups[-1][-1]):
                groups[-1].append(done)
            else:
                groups.append([done])
        tensors = [
            torch.stack([done.out[place] for done in group])  # type: ignore[misc]
            for group in groups
            for place, value in enumerate(group[0].out)
            if value is not None
        ]
        return Ok({
            "at": self._told,
            "groups": [
                [d.number, d.index, len(group), d.place, d.parts, d.rows, [value is not None for value in d.out]]
                for group in groups for d in group[:1]
            ],
            "late": self._late,
            "paused": self._stands.is_set(), "over": self._work.done(),
            "failure": None if self._failure is None else outcome_header(self._failure),
            "seconds": self._seconds, "computed": self._all_seconds,
            "sent": self._sent, "overtaken": self._overtaken, "change": self._change,
        }, tensors)  # fmt: skip

    def _confirm(self, seen: int) -> None:
        while self._log and self._told < seen:
            self._log.popleft()
            self._told += 1

    # -- the loop -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while await self._goes_on():
                given, index = self._given[0], 0
                self._read_for(given)
                while index < given.count:
                    if not await self._goes_on():
                        return
                    if self._has_stood:  # take over values that others wrote meanwhile
                        await self._enter()
                    index = await self._advance(given, index)
                self._given.popleft()
                if self._ahead is not None:
                    self._ahead.end(given)
                self._news.set()
        except Cancelled:
            pass
        except NotDone as ended:
            self._failure = ended.outcome  # type: ignore[assignment]  # a host raises what is failed or refused
        except Exception as error:
            self._failure = failed(error, self._host.name)
        finally:
            if self._ahead is not None:
                self._ahead.close()
            with suppress(NotDone):
                await self._depart()
            self._stands.set()
            self._news.set()

    def _read_for(self, given: PieceOrder) -> None:
        """Choose the values to read for a piece: only the first worker computes late fetches."""
        late = self._late_program if given.part is None or not given.part.worker else None
        reads = self._reads_with(late)
        if reads != self._reads:
            self._reads, self._has_stood = reads, True  # it goes to work with values of now

    def _reads_with(self, late: LateProgram | None) -> dict[int, list[str]]:
        """Keys to read from each shard, by the late program that is to be run."""
        return self._program.reads if late is None else both(self._program.reads, late.reads)

    async def _goes_on(self) -> bool:
        """Wait for a piece with its rows, and for the end of a pause; False when the loop is to end."""
        while self._is_wanted and (self._is_pause_wanted or not self._has_piece):
            self._changed.clear()
            await self._depart()
            self._stands.set()
            self._news.set()
            await self._changed.wait()
        self._stands.clear()
        return self._is_wanted

    @property
    def _has_piece(self) -> bool:
        """Whether the next piece is lent and its rows have arrived; raises the error of a failed read."""
        return bool(self._given) and (self._ahead is None or self._ahead.is_here(self._given[0]))

    async def _advance(self, given: PieceOrder, index: int) -> int:
        """Run steps of a piece from ``index`` on, at least one that is not written yet; returns the index of the next
        step.
        """
        tables = (piece.shard for _, pieces in self._program.lookups for piece in pieces)
        await self._host.open_streams(sorted({*self._asked, *tables}))
        if self._begun is not None and self._begun.rows is None and self._begun.looked is not None:
            looked = self._begun.looked
            answers = await self._host.ask(looked.asks)
            self._begun = self._begun._replace(rows=looked.rows(answers))
        index, sent = await self._host.computing.work(self._key, lambda compute: self._steps(given, index, compute))
        if sent is not None:
            await self._ask(sent.asks, sent.outcomes)
            done = sent.done
            if self._late_program is not None:
                try:
                    done = await self._host.computing.work(
                        self._key, lambda compute: self._with_late(given, index, sent.done, compute)
                    )
                except Cancelled:
                    done = self._without_late(sent.done)
            self._applied(given, index, done)
            index += self._is_over(given, index)
        await self._level(given)
        await self._keep_bound()
        return index

    def _steps(self, given: PieceOrder, index: int, compute: Compute) -> tuple[int, _StepInFlight | None]:
        """In the compute thread: one step after the other, for a while and as long as the event loop is not needed.

        Returns the index of the next step, and the step in flight if a stream failed. At least one step runs even if
        a pause is requested, so that repeated pauses cannot starve training.
        """
        first, until = index, time.monotonic() + WHILE
        while index < given.count and self._may_follow and (index == first or self._is_free(until)):
            if not self._is_written(given, index):
                begun = self._begin(given, index, compute)
                if begun.rows is None:
                    self._begun = begun
                    return index, None
                sent = self._streamed(given, index, compute(partial(self._computed, begun)), compute)
                answers = [outcome for outcome in sent.outcomes if isinstance(outcome, Ok)]
                if len(answers) < len(sent.outcomes):
                    return index, sent
                for ask, answer in zip(sent.asks, answers, strict=True):
                    self._take(ask, answer)
                self._applied(given, index, self._with_late(given, index, sent.done, compute))
                behind = self._numbered(self._behind(given))
                for ask, outcome in zip(behind, self._host.stream(behind) if behind else (), strict=True):
                    if isinstance(outcome, Ok):
                        self._take(ask, outcome)
                if not self._is_over(given, index):
                    continue
            index += 1
        return index, None

    def _is_written(self, given: PieceOrder, index: int) -> bool:
        """Whether a step is written, with or without a part of this worker."""
        return given.first + index <= max(self._rounds.values(), default=-1)

    def _is_over(self, given: PieceOrder, index: int) -> bool:
        """Whether a step with a part of this worker is over; else the part was a copy, and another part is missing."""
        return given.part is None or self._is_written(given, index)

    def _is_free(self, until: float) -> bool:
        """Whether the compute thread is to go on."""
        return not self._is_pause_wanted and time.monotonic() <= until

    @property
    def _may_follow(self) -> bool:
        """Whether the next step can be taken, with values of one round and within the bound."""
        return self._is_wanted and len({*self._rounds.values()}) <= 1 and not self._too_far

    def _applied(self, given: PieceOrder, index: int, done: _StepResult) -> None:
        """Log a sent and answered part for the notebook if it counts; else count it as late: another task's copy was
        first. Reports carry the number of late parts, and the card of the cluster shows it.
        """
        share = done.share
        if self._counts:
            self._log.append(_AppliedPart(given.number, index, share.place, share.parts, share.rows, done.out))
        elif share.rows:
            self._late += 1

    def _streamed(self, given: PieceOrder, index: int, done: _StepResult, compute: Compute) -> _StepInFlight:
        """In the compute thread: the requests of a step to servers, and the answers that came by direct streams."""
        asks = self._numbered(self._requests(given, index, done, compute))
        return _StepInFlight(done, asks, self._host.stream(asks) if asks else [])

    def _requests(self, given: PieceOrder, index: int, done: _StepResult, compute: Compute) -> list[Ask]:
        """In the compute thread: the requests of a step to servers."""
        about: dict[str, Any] = {"training": self._training, "rows": done.share.rows, "run_index": done.share.run}
        op: OpId | None = OpId(given.stream, self._operation(given, index))
        method = "push"
        if given.part is None:
            about["loop"] = self._name  # servers take nothing of one that was given up
        else:
            method, op = "contribute", None
            about |= self._of_round(given.part, given.first + index)
            about |= {"place": done.share.place, "places": given.part.places, "parts": done.share.parts}
            self._averages.clear()
        if self._staleness is not None:
            self._clock += 1
            about["clock"] = self._clock
        return self._asks(method, about, {push.shard: push for push in done.pushes}, op)

    def _operation(self, given: PieceOrder, index: int) -> int:
        """The number of the push of a step."""
        return given.first + index

    def _numbered(self, asks: Sequence[Ask]) -> list[Ask]:
        """Requests with identities, so that they can be repeated on another connection."""
        return [ask if ask.op is not None else ask._replace(op=self._host.streams.op()) for ask in asks]

    def _of_round(self, part: TaskShare, number: int) -> dict[str, Any]:
        """The facts of a round and of this worker, for servers."""
        about = {"training": self._training, "round": number, "worker": part.worker, "shards": self._shards}
        return about | {"spare": True} if part.has_spare else about

    def _behind(self, given: PieceOrder) -> list[Ask]:
        """Requests to servers whose latest values are of an earlier round than another server's."""
        latest = max(self._rounds.values(), default=0)
        shards = [shard for shard, number in self._rounds.items() if number < latest]
        if not shards or given.part is None:
            return []
        about = {**self._of_round(given.part, latest), "absent": True}
        return [Ask(shard, "contribute", about | self._known(shard, "reads")) for shard in shards]

    def _begin(self, given: PieceOrder, index: int, compute: Compute) -> _StepInProgress:
        """In the compute thread: the step's share, with rows of large Variables as far as direct streams give them."""
        if self._begun is not None and self._begun.step == (given.number, index):
            begun, self._begun = self._begun, None
            return begun
        place = 0 if given.part is None else given.part.place if self._place is None else self._place
        share = compute(partial(given.share, index, self._ahead.data if self._ahead is not None else None, place))
        if not (share.rows and self._program.lookups):
            return _StepInProgress((given.number, index), share)
        looked = compute(partial(self._program.looked_up, share.feeds, share.run))
        answers = self._host.stream(looked.asks)
        found = [answer for answer in answers if isinstance(answer, Ok)]
        rows = looked.rows(found) if len(found) == len(answers) else None
        return _StepInProgress((given.number, index), share, looked, rows)

    @property
    def _weights(self) -> dict[str, torch.Tensor]:
        """Values by key, as the next step takes them."""
        return {key: value for key, (_, value) in self._held.items()}

    def _computed_for(self, seconds: float) -> None:
        """Note what a step's computing took."""
        self._seconds = seconds
        self._all_seconds += seconds

    def _computed(self, begun: _StepInProgress) -> _StepResult:
        """In the compute thread: the fetches, and the pushes to servers, all of them finite."""
        begin, share = time.monotonic(), begun.share
        values = self._weights
        if not share.rows:
            return _StepResult(share, [], [])
        out, pushes = self._program.run(share.feeds, values, share.run, self._host.name, begun.rows or ())
        self._computed_for(time.monotonic() - begin)
        return _StepResult(share, out, pushes, values if self._late_program is not None else {})

    def _with_late(self, given: PieceOrder, index: int, done: _StepResult, compute: Compute) -> _StepResult:
        """In the compute thread: the result of a written step, completed by its late fetches.

        In a round, the replica at the first place computes them, from all rows; other replicas have no values of them.
        """
        late, share = self._late_program, done.share
        if late is None or not share.rows or share.place:
            return self._without_late(done)
        after = {key: value for key, (_, value) in self._held.items()}
        averages, number = self._averages, given.first + index
        if given.part is None:  # the averages are this worker's own gradients
            averages = {(push.shard, at): t for push in done.pushes for at, t in enumerate(push.tensors)}
        try:
            if given.part is not None and any(latest != number for latest in self._rounds.values()):
                raise Internal(f"late fetches of round {number} cannot be computed of values of {self._rounds}")
            found = self._of_late(late, given, index, share, done.before, after, averages, compute)
        except Cancelled:  # the step is written, and counts without them
            return self._without_late(done)
        except Exception:
            self._applied(given, index, self._without_late(done))
            raise
        return done._replace(out=[*done.out, *found])

    def _without_late(self, done: _StepResult) -> _StepResult:
        """The result of a written step whose late fetches have no values here."""
        late = self._late_program
        return done if late is None or not done.share.rows else done._replace(out=[*done.out, *[None] * late.count])

    def _of_late(
        self, late: LateProgram, given: PieceOrder, index: int, share: Share, before: Mapping[str, torch.Tensor],
        after: Mapping[str, torch.Tensor], averages: Mapping[tuple[int, int], torch.Tensor], compute: Compute,
    ) -> Out:  # fmt: skip
        """In the compute thread: late fetches of a step. before, after: values by key."""
        feeds = share.feeds
        if late.has_rows and share.parts > 1:
            data = None if self._ahead is None else self._ahead.data
            feeds = compute(partial(given.all_rows, index, data)).feeds
        return compute(partial(late.run, feeds, before, after, averages, share.run))

    def asks(self, shards: Collection[int]) -> bool:
        """Whether steps ask one of these shards."""
        tables = (piece.shard for _, pieces in self._program.lookups for piece in pieces)
        return not {*self._asked, *tables}.isdisjoint(shards)

    @property
    def _asked(self) -> list[int]:
        """The shards that each step asks."""
        return sorted({*self._reads, *self._shards})

    def _asks(self, method: str, about: dict[str, Any], pushes: Mapping[int, Push], op: OpId | None) -> list[Ask]:
        """One request to each shard."""
        asks = []
        for shard in self._asked:
            if method == "pull" or shard not in self._shards:
                asks += [self._pull(shard)] if self._reads.get(shard) else []
                continue
            push = pushes.get(shard)
            meta = {**about, **self._known(shard, "reads")}
            meta |= {"absent": True} if push is None else {
                "plan": push.plan, "finite": True,  # the program has looked at them
            }  # fmt: skip
            if self._late_program is not None and not about.get("place", 1):
                meta["shown"] = self._late_program.shown.get(shard, [])
            asks.append(Ask(shard, method, meta, push.sent if push else (), op))
        return asks

    def _pull(self, shard: int, **about: object) -> Ask:
        return Ask(shard, "pull", {**about, **self._known(shard, "keys")})

    # -- bounded staleness ------------------------------------------------------------------------------------------

    async def _enter(self) -> None:
        """Go to work with current values: the first shard sets the clock, and the other shards adopt the same."""
        self._has_stood = False
        if self._staleness is None:
            await self._ask(self._asks("pull", {}, {}, None))
        else:
            first, *others = self._shards
            (answer,) = await self._tell([first], "enter", clock=self._clock)
            self._clock = int(answer.meta["clock"])
            await self._tell(others, "enter", clock=self._clock)
            self._leads = dict.fromkeys({*self._reads, *self._shards}, self._staleness + 1)  # all are to be asked
            await self._keep_bound()

    async def _depart(self) -> None:
        """Stand still, so that no other loop waits for this one."""
        if not self._has_stood and self._staleness is not None:
            await self._tell(self._shards, "depart")
        self._has_stood = True

    @property
    def _too_far(self) -> list[int]:
        """Shards where this loop is too far ahead of the others."""
        return [s for s, lead in self._leads.items() if self._staleness is not None and lead > self._staleness]

    async def _keep_bound(self) -> None:
        """Wait for the others where this loop is too far ahead of them, and take their values."""
        ahead = self._too_far
        if not ahead:
            return
        if not self._is_wanted:
            raise Cancelled("stopped before it waited for others")
        about = {"training": self._training, "loop": self._name, "staleness": self._staleness}
        self._leads |= dict.fromkeys(ahead, 0)
        asks = [self._pull(shard, **(about if shard in self._shards else {})) for shard in ahead]
        self._waits = asyncio.ensure_future(self._ask(asks))
        try:
            await self._waits
        except asyncio.CancelledError:
            if self._is_wanted:
                raise
            raise Cancelled("stopped while it waited for others") from None
        finally:
            self._waits.cancel()
            self._waits = None

    # -- servers ----------------------------------------------------------------------------------------------------

    def _known(self, shard: int, names: str) -> dict[str, list[Any]]:
        """The keys to read from a server, and the versions held here."""
        keys = self._reads.get(shard, [])
        return {names: keys, "since": [self._held.get(key, (-1, None))[0] for key in keys]}

    async def _tell(self, shards: Sequence[int], method: str, **more: object) -> list[Ok]:
        """Tell shards of this loop."""
        about = {"training": self._training, "loop": self._name, **more}
        return await self._host.ask([Ask(shard, method, about) for shard in shards])

    async def _level(self, given: PieceOrder) -> None:
        """Values of one round from all servers: without this worker they may be at different ones."""
        while behind := self._behind(given):  # the others may have gone on meanwhile
            await self._ask(behind)

    async def _ask(self, asks: Sequence[Ask], outcomes: Sequence[Outcome] = ()) -> None:
        """Process the answers of shards; requests without an Ok are sent again by Dask's connections."""
        left = []
        for ask, outcome in zip(asks, outcomes or [NotSent()] * len(asks), strict=True):
            if isinstance(outcome, Ok):
                self._take(ask, outcome)
            else:
                left.append(ask)
        for ask, answer in zip(left, await self._host.ask(left), strict=True):
            self._take(ask, answer)

    def _count_writes(self, ask: Ask, answer: Ok) -> None:
        """Count the writes of others on a shard since its last answer, whose values the push was computed from."""
        writes = answer.meta.get("version")
        if writes is None:
            return
        before = self._writes.get(ask.shard)
        self._writes[ask.shard] = int(writes)
        if ask.method == "push" and before is not None:
            self._sent += 1
            self._overtaken += max(0, int(writes) - before - 1)

    def _take(self, ask: Ask, answer: Ok) -> None:
        """Keep the values in a server's answer, and its progress: round, place, lead, averages."""
        if "latest" in answer.meta:
            self._rounds[ask.shard] = int(answer.meta["latest"])
            if ask.shard == self._shards[0]:
                self._counts, self._place = bool(answer.meta["counts"]), answer.meta.get("place")
        self._count_writes(ask, answer)
        if "lead" in answer.meta:
            self._leads[ask.shard] = int(answer.meta["lead"])
        fresh = iter(answer.tensors)
        keys = ask.meta["keys" if ask.method == "pull" else "reads"]
        for key, old, version in zip(keys, ask.meta["since"], answer.meta["versions"], strict=True):
            if old != version:
                self._held[key] = (version, next(fresh))
        if "shown" in answer.meta:
            self._averages |= {(ask.shard, at): average for at, average in zip(ask.meta["shown"], fresh, strict=True)}
