"""Carries out instructions of the training machines (`leases`, `rounds`, `ranks`): lends pieces, watches loops, cuts,
counts.

It runs in the client's event loop, beside `engine`, which knows who is alive. What tasks tell counts from the first
step of their loop, so nothing is heard twice; watched values are kept until the machine says that their steps count.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tfnb.cluster.engine.members import Ahead, Member, Mode, SentData, StepFeeds
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes import leases as a
from tfnb.cluster.modes import plan as p
from tfnb.cluster.modes import ranks as r
from tfnb.cluster.modes import rounds as s
from tfnb.cluster.modes.joins import Join, join
from tfnb.cluster.server.courses import HOLD
from tfnb.cluster.tasks.data import written
from tfnb.cluster.tasks.programs import PlacedStep, Plan, updates_of
from tfnb.cluster.wire import envelope
from tfnb.cluster.wire.messages import Ask, Failure, NotDone, Ok, Outcome, Refusal, failed
from tfnb.cluster.wire.transport import read_outcome
from tfnb.errors import FailedPrecondition, StepAborted, TfnbError
from tfnb.state.chunks import ChunkedArray
from tfnb.state.step_groups import StepGroup
from tfnb.state.steps_taken import AppliedSteps

if TYPE_CHECKING:
    from tfnb.cluster.engine.engine import Engine

WATCH = 5.0  # seconds that a task has to answer a notebook that watches
Machine = s.Rounds | a.Leases


async def _always() -> bool:
    return True


class _TaskReport(NamedTuple):
    """A task's report of its part of steps ``start`` and following of a piece, each divided into ``parts``."""

    start: int
    steps: int
    place: int
    parts: int
    rows: int
    values: list[torch.Tensor | None]


@dataclass
class _Listening:
    """One loop of one task, as the notebook sees its state."""

    name: str
    seen: int = 0
    late: int = 0  # steps of it that did not count
    is_watched: bool = False
    is_left: bool = False  # it was told to end: nothing more is lent to it
    latest: int | None = None  # of a rank, the last round that it has told to have applied
    failure: Outcome | None = None  # of a rank that has ended
    wishes: int = 0  # how often it was told to stand or to go on: the last time counts
    lending: asyncio.Lock = field(default_factory=asyncio.Lock)


class Training:
    """One training in progress. ``steps``: applied so far; ``results``: values of steps that nobody took yet.

    ``applied``: steps that were applied before it.
    ``machine``: the policy of its mode. In another mode it goes on with another one, under another name on the servers.
    """

    def __init__(
        self, engine: Engine, placed: PlacedStep, mode: Mode, data: Ahead | None, tasks: list[int],
        deadline: float, patience: float = 0.0, applied: AppliedSteps | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.placed, self.data = engine, placed, data
        self._deadline, self._patience = deadline, patience
        self._pieces = itertools.count(1)
        self.results: list[StepGroup] = []
        self.steps = self._told = 0
        self._applied_steps = AppliedSteps() if applied is None else applied.copy()  # as far as tasks have told
        self.kept = self._applied_steps.copy()  # those that the copies of the values here have seen
        self.end: e.Finish | None = None
        self.is_held = self.is_left = False
        self._interrupts = engine.interrupts
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        late = 0 if placed.late is None else len(placed.late.meta["fetches"])
        found = [(place, how) for how, place in zip(placed.joins, placed.fetched, strict=True) if place is not None]
        self._joins = [how.at(placed.fetched) for _, how in sorted(found, key=lambda each: each[0])]
        self._joins[len(found) - late :] = [Join("first")] * late  # one replica computes them, of all rows
        self._name = self._new_name()
        self._loops: dict[int, _Listening] = {}  # task -> its loop
        self._gone: list[str] = []  # loops of tasks that were lost: some of what they sent may be on its way
        self._numbers = itertools.count()
        self._steps_of: dict[int, Sequence[int]] = {}  # of each piece the numbers of its steps
        self._heard: dict[tuple[int, int], list[_TaskReport]] = {}  # piece and task
        self._sent = SentData(self._name)
        self._streams: set[int] = set()
        self._news = asyncio.Event()
        self._begun: set[asyncio.Task[None]] = set()
        self._wanted: Mode | None = None  # a mode to change to
        self._is_changing = False
        self._missed: list[Any] = []  # events between two machines
        self._ended_ranks: dict[int, _Listening] = {}  # in a cut, until one of them has saved
        self._meetings: dict[str, asyncio.Task[Ok]] = {}  # where ranks meet, by the name of the rendezvous
        self._holds = 0  # who wants ranks, or asynchronous tasks, to stand
        self._take(mode, tasks)

    def _new_name(self) -> str:
        return f"{self.engine.link.client}-{next(self.engine.names)}"

    def _take(self, mode: Mode, tasks: list[int]) -> None:
        """The policy of a mode, from the next step on."""
        self._staleness = mode.staleness if mode.name == "bounded" else None
        self._mode = mode
        about = (tasks, self.placed.writes, self._pieces, self._deadline)
        least = 1 if mode.elastic else mode.required
        self.machine: Machine
        match mode.name:
            case "sync":
                sizes = mode.backup, self._patience, mode.required, least
                self.machine = s.Rounds(*about, *sizes, base=self.steps)
            case "allreduce" | "local":
                sizes_of = a.PieceSizes(unit=max(1, mode.every))
                self.machine = r.Ranks(*about, patience=self._patience, base=self.steps, sizes=sizes_of)
            case _:
                warm, sizes_of = max(0, mode.warm_start - len(self._applied_steps)), a.PieceSizes(unit=mode.n_push)
                pushes: dict[str, Any] = {"n_push": mode.n_push, "warm_start": warm, "sizes": sizes_of}
                pushes["is_warmth_measured"] = mode.is_warmth_measured
                self.machine = a.Leases(*about, self._patience, lends_twice=mode.is_coordinated, **pushes)

    # -- what the engine asks for -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin."""
        await self.engine.insist_on(self._to_all("open_training"))
        try:
            self.engine.attend(self)
        except FailedPrecondition:
            self.engine.later(self._farewell())
            raise
        self._begin(self._attend())
        self.feed(e.Start())

    async def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition is true, or the training is over."""
        while self.end is None and not is_so():
            self._news.clear()
            await self._news.wait()

    async def exchange(
        self, offers: Sequence[a.Offer], last: bool, drain: bool, mode: Mode | None = None
    ) -> list[StepGroup]:
        """Offer pieces; return the steps applied meanwhile, as soon as there is news or room for more.

        drain: wait until everything that was offered is applied. mode: go on in this one when all that is lent is done.
        """
        for offer in offers:
            self.feed(offer)
        if mode is not None and self.end is None:
            self._wanted, is_new, self._is_changing = mode, not self._is_changing, True
            if is_new:
                self.feed(e.DataEnd())
        if last:
            self.feed(e.DataEnd())
        await self.wait(lambda: self.machine.is_idle if drain else bool(self.results or self.machine.wants))
        results, self.results = self.results, []
        return results

    async def finish(self) -> None:
        """Stop computations, let begun updates be applied, and begin no more.

        Where that takes until a silent server answers, and the user does not wait for it, the training is left: it ends
        then, and what is begun meanwhile waits for that.
        """
        self.feed(e.Interrupt())
        await self.wait(self._may_be_left)
        self.is_left = self.end is None

    def _may_be_left(self) -> bool:
        """Whether to wait no longer for an end delayed by a silent server: after an interrupt, or past the deadline."""
        is_unwanted = self.engine.interrupts != self._interrupts or time.monotonic() >= self._deadline
        return is_unwanted and bool(self.engine.peers.silent)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
        """A block in which no server applies a step; yields a function that tells whether the hold has lasted.

        A synchronous training is held for HOLD seconds at a time: one that is renewed too late goes on.
        """
        await self.wait(lambda: not (self._is_changing or self.is_left))
        if self.end is not None:
            yield _always
            return
        if isinstance(self.machine, s.Rounds) and not self.has_ranks:
            latest = await self._hold()
            renewal = asyncio.create_task(self._renewed())
            try:
                yield partial(self._stands_at, latest)
            finally:
                renewal.cancel()
                await self.engine.peers.settled(self.placed.writes[0], "go", {"training": self._name})
            return
        self._holds += 1
        if self._holds == 1:
            self.feed(e.Drain())
        try:
            await self.wait(lambda: self.is_held)
            yield _always
        finally:
            self._holds -= 1
            if not self._holds:
                self.is_held = False
                self.feed(e.Resume())

    def applied_steps(self) -> AppliedSteps:
        """The steps that the servers have applied, while held; tasks in step may have reported fewer."""
        found, untold = self._applied_steps.copy(), self.steps - self._told
        if isinstance(self.machine, s.Rounds):
            for piece in self.machine.out:
                numbers = self._steps_of[piece.number][piece.done :][:untold]
                found.add(numbers)
                untold -= len(numbers)
        return found

    async def _hold(self) -> int | None:
        """Let all servers stand at one round; returns the round, None if the training has ended meanwhile."""
        chief, *others = self.placed.writes
        try:
            (answer,) = await self.engine.insist_on([Ask(chief, "hold", {"training": self._name})])
            latest = int(answer.meta["latest"])
            about = {"training": self._name, "decided": latest}
            await self.engine.insist_on([Ask(shard, "decided", about) for shard in others])
        except StepAborted:
            if self.end is None:
                raise
            return None  # it ended meanwhile, and all servers stand at its last round
        if self.end is None and isinstance(self.machine, s.Rounds):
            self._applied_to(self.machine.steps_at(latest))
        return latest

    async def _stands_at(self, latest: int | None) -> bool:
        """Whether no round was written since that one."""
        if latest is None:
            return True
        answer = await self.engine.peers.settled(self.placed.writes[0], "hold", {"training": self._name})
        return isinstance(answer, Ok) and int(answer.meta["latest"]) == latest

    async def _renewed(self) -> None:
        while True:
            await asyncio.sleep(HOLD / 2)
            await self.engine.peers.settled(self.placed.writes[0], "hold", {"training": self._name})

    # -- events and instructions -----------------------------------------------------------------------------------

    async def _attend(self) -> None:
        while self.end is None:
            event = await self.queue.get()
            if isinstance(event, e.TaskJoin):
                self._begin(self._welcome(event))
            else:
                self.feed(event)

    async def _welcome(self, event: e.TaskJoin) -> None:
        """Send the plan and the data to a joining task before the machine hears of the task, so that no peer waits."""
        engine, member = self.engine, self.engine.tasks[event.task]
        if event.task in self.machine.tasks or not engine.is_asked_for(event.task, self.placed.tasks):
            return
        try:
            await self._register(member)
            await self._load(member)
        except (NotDone, TfnbError) as error:
            why = error.outcome if isinstance(error, NotDone) else error
            if await engine.peers.verify(member):
                engine.say(f"{member.name} takes no part in this training: {getattr(why, 'message', why)}")
        if member.is_there:
            self.feed(event)

    def feed(self, event: Any) -> None:
        """Give an event to the machine, and carry out its instructions."""
        if self._is_changing and self.machine.state == "over":
            self._missed.append(event)
        if isinstance(event, e.TaskLoss | e.MissedPing):
            self._give_up(event.task)
        if isinstance(event, e.TaskLoss) and (loop := self._loops.pop(event.task, None)) is not None:
            self._gone.append(loop.name)
        for instruction in self.machine.on(event, time.monotonic()):
            match instruction:
                case a.Standstill():
                    self.is_held = True
                case a.Report():
                    self._applied(instruction)
                case e.Finish():
                    self._over(instruction)
                case _:
                    self._begin(self._work(instruction))
        self._news.set()

    @property
    def has_ranks(self) -> bool:
        """Whether tasks hold the Variables while they train."""
        return isinstance(self.machine, r.Ranks)

    def _work(self, instruction: object) -> Coroutine[Any, Any, None]:
        """The coroutine that carries out an instruction in the background."""
        match instruction:
            case a.Give(task, piece):
                return self._lend(task, piece)
            case a.StopLoop(task):
                return self._stopped(task, self._loops.get(task))
            case a.Pause(task):
                return self._pause(task, is_wanted=True)
            case a.Continue(task):
                return self._pause(task, is_wanted=False)
            case a.Count(pieces):
                return self._count(pieces)
            case s.RoundQuery():
                return self._ask()
            case s.Cut() if self.has_ranks:
                return self._end_ranks()
            case s.Cut(upto):
                return self._cut(upto)
            case r.Save():
                return self._save(instruction)
        raise AssertionError(instruction)

    async def _change(self) -> None:
        """Change the mode, once all lent pieces are done: end all loops, and begin loops of the new mode."""
        engine = self.engine
        await asyncio.gather(*(self._left(task, loop) for task, loop in self._loops.items()))
        self._loops.clear()
        await engine.insist_on(self._to_all("end_training", clients=self._clients))
        self._name, mode, self._wanted = self._new_name(), self._wanted, None
        self._streams.clear()
        self._gone.clear()
        await engine.insist_on(self._to_all("open_training"))
        assert mode is not None
        await engine.stops_ended()  # a task that is still told to stop would not take part again
        self._take(mode, engine.free(self.placed.tasks))
        engine.ensure_apart(self)
        engine.say(f"mode={mode} from step {engine.step + 1} on")
        self._is_changing, missed, self._missed = False, self._missed, []
        for event in (e.Start(), *missed):
            self.feed(event)
        if self._wanted is not None:  # and already another one
            self._is_changing = True
            self.feed(e.DataEnd())

    def _to_all(self, method: str, **more: object) -> list[Ask]:
        """One call to every server of the training."""
        return [Ask(shard, method, {"training": self._name, **more}) for shard in self.placed.writes]

    @property
    def _clients(self) -> list[str]:
        """The client names of all streams."""
        return [self._stream(stream) for stream in self._streams]

    def _over(self, end: e.Finish) -> None:
        if self._is_changing and end.cause is None:
            self._begin(self._change())
            return
        self.end = end
        self.engine.forget(self)
        for work in self._begun:
            work.cancel()
        self.engine.later(self._farewell())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._begun.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, work: asyncio.Task[None]) -> None:
        """Handle the end of background work. An error ends the training, through the machine unless already ending."""
        self._begun.discard(work)
        error = None if work.cancelled() else work.exception()
        if error is not None and self.end is None:
            fault = e.Fault(failed(error))
            if self.machine.state == "open":
                self.feed(fault)
            else:
                self.engine.later(self._abandoned(e.Finish(cause=self.machine.cause or fault.failure)))

    async def _abandoned(self, end: e.Finish) -> None:
        """Abandon a training that failed while ending: loops finish their step, and their reports are ignored."""
        ends = []
        for task, loop in self._loops.items():
            about = {"loop": loop.name, "seen": loop.seen}
            ends.append(self.engine.stop(self.engine.tasks[task], "leave", partial(dict, about)))
        await asyncio.gather(*ends)
        if self.end is None:
            self._over(end)
            self._news.set()

    # -- values -----------------------------------------------------------------------------------------------------

    def _applied_to(self, steps: int) -> None:
        """Raise the number of applied steps to ``steps``."""
        self.engine.step += max(0, steps - self.steps)
        self.steps = max(self.steps, steps)

    def _applied(self, report: a.Report) -> None:
        """Steps are applied: queue their reported values for the caller."""
        self._told += report.stop - report.start
        self._applied_to(self._told)
        at = report.start
        while at < report.stop:
            found = [self._found(report.number, task, at) for task in report.tasks]
            known = [heard for heard in found if heard is not None and heard.start <= at]
            ends = [
                heard.start + (heard.steps if heard.start <= at else 0) - at for heard in found if heard is not None
            ]
            count = min([report.stop - at, *ends])
            known.sort(key=lambda heard: heard.place)
            is_whole = bool(known) and len(known) >= known[0].parts  # else a task was lost before it told its part
            values = self._joined(known, at, count) if is_whole else []
            numbers = self._steps_of[report.number][at : at + count]
            self._applied_steps.add(numbers)
            self.results.append(StepGroup(count, values, numbers))
            at += count
        if report.stop == len(self._steps_of[report.number]):
            del self._steps_of[report.number]
        for task in report.tasks:
            if self._found(report.number, task, report.stop) is None:
                self._heard.pop((report.number, task), None)

    def _found(self, number: int, task: int, at: int) -> _TaskReport | None:
        """A task's earliest report of step ``at`` or later ones; earlier reports are dropped."""
        told = self._heard.get((number, task), [])
        while told and told[0].start + told[0].steps <= at:
            del told[0]
        return told[0] if told else None

    def _joined(self, known: Sequence[_TaskReport], at: int, count: int) -> list[torch.Tensor | None]:
        """The values of a step for the whole batch, joined from all parts."""
        rows = [heard.rows for heard in known]
        parts = [[v if v is None else v[at - heard.start :][:count] for v in heard.values] for heard in known]
        return [join(how, parts, index, rows, steps=1) for index, how in enumerate(self._joins)]

    # -- loops ------------------------------------------------------------------------------------------------------

    def _loop(self, task: int) -> _Listening:
        """The loop of a task, created with its first piece."""
        if task not in self._loops:
            self._loops[task] = _Listening(f"{self._name}/{next(self._numbers)}")
        return self._loops[task]

    def _lend(self, task: int, piece: a.StreamPiece) -> Coroutine[Any, Any, None]:
        """Lend a task a piece; the message is made now, and sent in order."""
        loop, machine = self._loop(task), self.machine
        part = machine.part(task) if isinstance(machine, s.Rounds) else None
        self._streams.add(piece.stream)
        meta: dict[str, Any] = {
            "training": self._name, "data": self._sent.name, "loop": loop.name, "plan": self.placed.compute.id,
            "late": None if self.placed.late is None else self.placed.late.id,
            "part": part, "shards": list(self.placed.writes),
            "number": piece.number, "stream": self._stream(piece.stream), "first": piece.first, "count": piece.count,
            "measures": isinstance(machine, a.Leases) and machine.measures,
            "staleness": self._staleness, "order": None, "steps": None, "run": 0, "meeting": None,
            "every": self._mode.every, "n_fetch": self._mode.n_fetch, "n_push": self._mode.n_push,
            "updates": [[shard, plan.id] for shard, plan in self._updates.items()], "outer": self._outer_facts,
        }  # fmt: skip
        self._steps_of[piece.number] = self._step_numbers(piece.steps)
        if isinstance(self.data, Ahead):
            start = piece.steps[0]
            meta |= {"order": list(self.data.order), "steps": start, "run": self.data.run(start)}
            meta["fewer"] = self._fewer(part, self._shapes(self.data, piece.steps))
            return self._lent(task, loop, meta, [])
        batches: Sequence[StepFeeds] = piece.steps
        meta["fewer"] = self._fewer(part, [([t.shape for t in b.tensors], b.split, b.rows or 0) for b in batches])
        meta["batches"] = [[len(b.tensors), b.rows or 0, b.run_index, list(b.split)] for b in batches]
        return self._lent(task, loop, meta, [tensor for batch in batches for tensor in batch.tensors])

    def _step_numbers(self, steps: Sequence[Any]) -> Sequence[int]:
        """The numbers of the steps of a piece, in the training."""
        return steps if isinstance(self.data, Ahead) else [batch.number for batch in steps]

    def _shapes(self, data: Ahead, steps: Iterable[int]) -> Iterator[tuple[list[Sequence[int]], list[bool], int]]:
        """The shapes of feeds, which of them have the rows of a batch, and the rows, for each number of rows."""
        shapes = [(len(a), *a.tail) if isinstance(a, ChunkedArray) else a.shape for a in data.arrays]
        for rows in {stop - start for _, start, stop in map(data.order.place, steps)}:
            yield [(rows, *shape[1:]) if shape else shape for shape in shapes], [bool(shape) for shape in shapes], rows

    def _fewer(
        self, part: tuple[int, int, int] | None, batches: Iterable[tuple[Sequence[Sequence[int]], Sequence[bool], int]]
    ) -> list[tuple[int, int]]:
        """By rows, of how many parts a batch is made where guards of the recording make them fewer."""
        fewer: dict[int, int] = {}
        if part is not None and self.placed.guards.guards:
            for shapes, split, rows in batches:
                ranges, why = self.placed.guards.divide(shapes, split, rows, part[2])
                if why is not None:
                    fewer[rows] = min(len(ranges), fewer.get(rows, len(ranges)))
        return [*fewer.items()]

    def _stream(self, stream: int) -> str:
        """The client name under which the steps of a stream are applied."""
        return f"{self._name}-{stream}"

    async def _lent(self, task: int, loop: _Listening, meta: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        member = self.engine.tasks[task]
        async with loop.lending:
            if loop.is_left:
                return
            try:
                await self._register(member)
                await self._load(member)
                if isinstance(self.machine, r.Ranks):
                    meta["meeting"] = await self._meeting(self.machine, meta["part"])
                answer: Outcome = await self._asked(member, "lend", meta, tensors)
            except NotDone as failure:
                answer = failure.outcome
            except TfnbError as error:  # what cannot be encoded
                answer = failed(error)
            if not isinstance(answer, Ok):
                self._begin(self._broken(task, loop, answer))
            elif not loop.is_watched:
                loop.is_watched = True
                self._begin(self._watch(task, loop))

    async def _asked(
        self, member: Member, method: str, meta: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> Outcome:
        link = self.engine.link
        deadline = link.deadline(method, envelope.size(tensors)) + WATCH
        call = link.persist(member.peer, method, meta, tensors, epoch=self.engine.epoch, deadline=deadline)
        return await self.engine.peers.unless_dead(member, call)

    async def _load(self, member: Member) -> None:
        """Send the data ahead, once."""
        if isinstance(self.data, Ahead) and member not in self._sent.members:
            chunked = [place for place, array in enumerate(self.data.arrays) if isinstance(array, ChunkedArray)]
            about = {"data": self._sent.name, "chunked": chunked}
            answer = await self._asked(member, "load", about, [written(array) for array in self.data.arrays])
            if not isinstance(answer, Ok):
                raise NotDone(answer)
            self._sent.members.add(member)

    async def _watch(self, task: int, loop: _Listening) -> None:
        """Poll a task for reports while its loop runs."""
        engine, member = self.engine, self.engine.tasks[task]
        while self.end is None and self._loops.get(task) is loop:
            meta = {"loop": loop.name, "seen": loop.seen}
            until = time.monotonic() + WATCH
            answer = await engine.link.call(member.peer, "watch", meta, epoch=engine.epoch, deadline=until)
            if self._loops.get(task) is not loop:
                return
            if not isinstance(answer, Ok):
                if await engine.peers.verify(member) and not isinstance(answer, Refusal):
                    continue
                return await self._broken(task, loop, answer)
            self._hear(task, loop, answer)
            if answer.meta["failure"] is not None and self._loops.get(task) is loop:
                return await self._broken(task, loop, read_outcome(answer.meta["failure"], ()))

    def _hear(self, task: int, loop: _Listening, answer: Ok) -> None:
        """Take the new steps of a task's report; steps reported before are skipped."""
        at, tensors = int(answer.meta["at"]), iter(answer.tensors)
        for number, start, count, place, parts, rows, some in answer.meta["groups"]:
            values = [next(tensors) if has else None for has in some]
            known = min(count, max(0, loop.seen - at))
            at += count
            if known < count:
                loop.seen = at
                values = [None if value is None else value[known:] for value in values]
                if number in self._steps_of:  # else all of it was reported by the word of a server
                    heard = _TaskReport(start + known, count - known, place, parts, rows, values)
                    self._heard.setdefault((number, task), []).append(heard)
                self.feed(a.PieceProgress(task, number, start + count, start + known, parts))
        if answer.meta.get("change") is not None:
            self.feed(a.GradientChange(task, float(answer.meta["change"])))
        loop.latest = answer.meta.get("latest")
        member, late = self.engine.tasks[task], int(answer.meta["late"])
        member.late, loop.late = member.late + late - loop.late, late
        member.pace.hear(loop.name, loop.seen, answer.meta, time.monotonic())
        if answer.meta["seconds"]:
            member.seconds.append(float(answer.meta["seconds"]))

    async def _broken(self, task: int, loop: _Listening, answer: Outcome) -> None:
        """A loop failed or was unreachable: end the loop, and tell the machine why, unless ended meanwhile."""
        event = await self.engine.judged(answer, task)
        if self._loops.get(task) is not loop:  # it was ended meanwhile
            return
        if self.has_ranks:  # a cut follows, and its values may be the newest
            self.feed(event)
            return
        if not isinstance(event, e.TaskLoss) and await self._left(task, loop) is None:
            event = self.engine.peers.lost(task)
        if self._loops.get(task) is loop:
            if not isinstance(event, e.TaskLoss):
                del self._loops[task]
            self.feed(event)

    async def _left(self, task: int, loop: _Listening) -> Outcome | None:
        """End the loop of a task and take its last word, which is returned; None where the task is gone."""
        async with loop.lending:
            loop.is_left = True
            member, about = self.engine.tasks[task], lambda: {"loop": loop.name, "seen": loop.seen}
            answer = await self.engine.stop(member, "leave", about)
            if isinstance(answer, Ok):
                self._hear(task, loop, answer)
        return answer

    async def _stopped(self, task: int, loop: _Listening | None) -> None:
        """End the loop that a task had at the machine's request."""
        last = Ok({"failure": None}) if loop is None else await self._left(task, loop)
        if self._loops.get(task) is not loop:  # it failed or was lost meanwhile, which was told
            return
        if last is None:
            return self.feed(self.engine.peers.lost(task))
        self._loops.pop(task, None)
        has_failed = isinstance(last, Ok) and last.meta["failure"] is not None  # a step may have come to some servers
        self.feed(a.LoopEnd(task, has_failed))

    def _give_up(self, task: int) -> None:
        """Let servers refuse the loop of a given-up task, so that no other loop waits; a living task begins anew."""
        loop = self._loops.get(task)
        if loop is not None and self._staleness is not None and self.end is None:
            self.engine.later(self.engine.peers.settled_on(self._to_all("depart", loop=loop.name, gone=True)))

    async def _pause(self, task: int, *, is_wanted: bool) -> None:
        """Pause a loop, polling until the loop stands, or let the loop go on."""
        loop, member = self._loops.get(task), self.engine.tasks[task]
        if loop is None:
            return
        wish = loop.wishes = loop.wishes + 1
        is_paused = False
        while not is_paused:
            async with loop.lending:
                if loop.is_left or loop.wishes != wish:
                    return
                meta = {"loop": loop.name, "seen": loop.seen, "wanted": is_wanted}
                answer = await self._asked(member, "pause", meta, ())
            if self._loops.get(task) is not loop:
                return
            if not isinstance(answer, Ok):
                return await self._broken(task, loop, answer)
            self._hear(task, loop, answer)
            if not is_wanted:
                return
            is_paused = bool(answer.meta["paused"])
        if loop.wishes == wish:
            self.feed(a.TaskPause(task))

    # -- servers ------------------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        """Ask the first server for its latest round, whatever tasks report."""
        chief = self.placed.writes[0]
        answer = await self.engine.peers.settled(chief, "standing", {"training": self._name})
        self.feed(s.LatestRound(int(answer.meta["latest"])) if isinstance(answer, Ok) else e.ShardLost(chief))

    async def _cut(self, upto: int) -> None:
        """Let the servers abort undecided rounds, and end every loop; then report the round where the servers stand."""
        chief, *others = self.placed.writes
        about = {"training": self._name, "upto": upto}
        answer = await self.engine.peers.settled(chief, "cut", about)
        if not isinstance(answer, Ok):
            return self.feed(e.ShardLost(chief))
        about["decided"] = latest = int(answer.meta["latest"])
        answers = await self.engine.peers.settled_on([Ask(shard, "cut", about) for shard in others])
        for shard, answer in zip(others, answers, strict=True):
            if not isinstance(answer, Ok):
                return self.feed(e.ShardLost(shard))
        loops = dict(self._loops)
        ends = await asyncio.gather(*(self._left(task, loop) for task, loop in loops.items()))
        self._loops.clear()
        for task, last in zip(loops, ends, strict=True):
            if last is None:
                self.feed(self.engine.peers.lost(task))
        self.feed(s.CutAt(latest))

    # -- ranks --------------------------------------------------------------------------------------------------------

    async def _register(self, member: Member) -> None:
        """Register the plans with a task and the servers."""
        await self.engine.register(self.placed, member)
        await self.engine.register_updates(self._updates, member)
        if self.placed.outer is not None:
            outer = self.placed.outer.placed
            await self.engine.register(outer, member)
            await self.engine.register_updates(updates_of(outer), member)

    @property
    def _updates(self) -> dict[int, Plan]:
        """The servers' plans, for tasks that make updates on copies of their own; none for other tasks."""
        return updates_of(self.placed) if self._mode.has_copies else {}

    @property
    def _outer_facts(self) -> dict[str, Any] | None:
        """The outer step, for ranks."""
        outer = self.placed.outer
        if outer is None or self._mode.outer is None:  # it began with an outer step, and changed to another mode
            return None
        updates = [[shard, plan.id] for shard, plan in updates_of(outer.placed).items()]
        pieces = [[list(piece) for piece in pieces] for pieces in outer.pieces]
        return {"plan": outer.placed.compute.id, "updates": updates, "pieces": pieces}

    async def _meeting(self, machine: r.Ranks, part: tuple[int, int, int]) -> list[Any]:
        """The rendezvous of a rank: address of the first rank, rank and size; one rendezvous for each generation."""
        rank, size, _ = part
        name = f"{self._name}/{machine.first}"  # the mode and the generation
        if name not in self._meetings:
            first = self.engine.tasks[machine.members[0]]
            self._meetings = {name: asyncio.create_task(self._meet(first, name))}
        answer = await asyncio.shield(self._meetings[name])
        return [answer.meta["name"], answer.meta["host"], answer.meta["port"], rank, size]

    async def _meet(self, first: Member, name: str) -> Ok:
        answer = await self._asked(first, "meet", {"name": name, "loop": "", "seen": 0}, ())
        if isinstance(answer, Ok):
            return Ok({**answer.meta, "name": name})
        raise NotDone(
            Failure("Unavailable", f"{first.name} does not let ranks meet", {"missed": True, "peer": first.name})
        )

    def _end_ranks(self) -> Coroutine[Any, Any, None]:
        """A cut: every current loop ends, and reports its latest applied round; one of them saves.

        A loop that begins meanwhile is of the next generation.
        """
        assert isinstance(self.machine, r.Ranks)
        loops, self._loops = self._loops, {}
        self._ended_ranks |= loops
        return self._ranks_ended(loops, self.machine.waits - loops.keys())

    async def _ranks_ended(self, loops: Mapping[int, _Listening], silent: Iterable[int]) -> None:
        ends = await asyncio.gather(*(self._ended_rank(task, loop) for task, loop in loops.items()))
        for task, loop in loops.items():  # one that fails tells the others that it cannot go on: its word counts
            if loop.failure is not None:
                self.feed(await self.engine.judged(loop.failure, task))
        for task, is_there in zip(loops, ends, strict=True):
            event = r.Stood(task, loops[task].latest) if is_there else self.engine.peers.lost(task)
            self.feed(event)
        for task in silent:  # no loop of it began
            self.feed(r.Stood(task, None))
        self._let_go()

    async def _ended_rank(self, task: int, loop: _Listening) -> bool:
        """End the loop of a rank, but for its values; False where the task is gone."""
        async with loop.lending:
            loop.is_left, loop.latest = True, None
            about = {"loop": loop.name, "seen": 0}
            answer = await self.engine.stop(self.engine.tasks[task], "stop", lambda: {**about, "seen": loop.seen})
            if isinstance(answer, Ok):
                self._hear(task, loop, answer)
                failure = answer.meta["failure"]
                loop.failure = None if failure is None else read_outcome(failure, ())
        return answer is not None

    async def _save(self, save: r.Save) -> None:
        """Let a rank write its values on the servers, on all of them or on none."""
        task = save.task
        loop, member = self._loops.get(task) or self._ended_ranks[task], self.engine.tasks[task]
        number, rounds = self.engine.single.number(), self.engine.single
        meta = {"loop": loop.name, "seen": loop.seen, "round": number}
        try:
            answer: Outcome = await self._asked(member, "save", meta, ())
            while isinstance(answer, Refusal) and answer.reason == "protocol" and member.alive:
                await asyncio.sleep(0.02)  # it has told its last step, and does not stand yet
                answer = await self._asked(member, "save", meta, ())
            if isinstance(answer, Ok):
                about = {**rounds.over(number), "workers": [0]}
                asks = [Ask(shard, "prepare", about) for shard in answer.meta["shards"]]
                await self.engine.insist_on(asks)
                await self.engine.insist_on([ask._replace(method="commit") for ask in asks], is_decided=True)
                rounds.wrote(self.placed.written)
        except TfnbError as error:
            answer = failed(error)
        finally:
            rounds.ended(number)
        if isinstance(answer, Ok):
            self.feed(r.SaveResult(save))
        elif isinstance(event := await self.engine.judged(answer, task), a.LoopFailure):
            self.feed(r.SaveResult(save, event.failure))
        else:
            self.feed(event)
        self._let_go()

    def _let_go(self) -> None:
        """After a cut: ended ranks forget their values."""
        if self.machine.state == "cutting":
            return
        ended, self._ended_ranks = self._ended_ranks, {}
        for task, loop in ended.items():
            about = {"loop": loop.name, "seen": loop.seen}
            member = self.engine.tasks[task]
            if member.alive:
                self.engine.later(self._asked(member, "leave", {**about, "lost": []}, ()))

    async def _count(self, pieces: Sequence[a.StreamPiece]) -> None:
        """Ask the servers which steps of pieces they have applied, and let servers refuse more steps of lost tasks."""
        self._steps_of |= {piece.number: self._step_numbers(piece.steps) for piece in pieces}
        operations = [operation for piece in pieces for operation in piece.operations]
        farewells = [ask for name in self._gone for ask in self._to_all("depart", loop=name, gone=True)]
        await self.engine.peers.settled_on(farewells)
        asks, streams = [], sorted({stream for stream, _ in operations})
        for shard in self.placed.writes:
            for stream in streams:
                about = {"client": self._stream(stream), "seqs": [seq for of, seq in operations if of == stream]}
                asks.append(Ask(shard, "applied", about))
        shards: dict[tuple[int, int], list[int]] = {}
        answers = await self.engine.peers.settled_on(asks)
        for ask, stream, answer in zip(asks, itertools.cycle(streams), answers, strict=False):
            if isinstance(answer, e.ShardLost):
                return self.feed(answer)
            for seq in answer.meta["applied"] if isinstance(answer, Ok) else ():
                shards.setdefault((stream, seq), []).append(ask.shard)
        self.feed(a.AppliedCounts(shards))

    async def _farewell(self) -> None:
        """Let tasks and servers forget the training."""
        engine, deadline = self.engine, time.monotonic() + p.STOPS_WITHIN
        calls: list[tuple[Member, str, dict[str, Any]]] = []
        for task, loop in self._loops.items():
            about = {"loop": loop.name, "seen": loop.seen, "lost": engine.peers.lost_shards}
            calls.append((engine.tasks[task], "leave", about))
        asks = self._to_all("end_training", clients=self._clients)
        await asyncio.gather(engine.peers.settled_on(asks), engine.unload(self._sent), *(
            engine.link.call(member.peer, method, meta, epoch=engine.epoch, deadline=deadline)
            for member, method, meta in calls
            if member.alive
        ))  # fmt: skip
