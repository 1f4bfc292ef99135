"""Steps of `run`: each has a machine of its own, `tfnb.cluster.modes.plan`, whose instructions are carried out here.

One step at a time, but for those that use queues: they wait for each other, and take their turn when they commit.
Whoever looks at what a step computed, a breakpoint, does so before that. In the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tfnb.cluster.engine.members import StepFeeds
from tfnb.cluster.engine.peers import LOOK, Settled
from tfnb.cluster.engine.step_record import PINGS, StepRecord
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes import plan as p
from tfnb.cluster.queues.deadlocks import QueueUse
from tfnb.cluster.tasks.programs import PlacedStep
from tfnb.cluster.wire.messages import Ask, Failure, NotDone, NotSent, Ok, Outcome, Refusal, failed
from tfnb.cluster.wire.transport import read_outcome
from tfnb.errors import TfnbError, Unavailable
from tfnb.kernels.random import REPLICA
from tfnb.passes.flow.cut import Kind

if TYPE_CHECKING:
    from tfnb.cluster.engine.engine import Engine

See = Callable[[list[Any]], None]  # values of each worker

GRACE = 1.0  # seconds for telling everybody that a round is over
FOREVER = 86400.0  # seconds


class _EndedWait(NamedTuple):
    """The pending waits of an aborted round, and the numbers of elements enqueued by the round, in words."""

    waits: Sequence[str]
    put: str


def _told(end: e.Finish, rounds: Sequence[_EndedWait]) -> tuple[e.Finish, list[str]]:
    """The end of a step, with the elements that its rounds had enqueued if a task was lost, and their pending waits."""
    waits = [wait for found in rounds for wait in found.waits]
    if not isinstance(end.cause, e.TasksLost):
        return end, waits
    put = ", ".join(found.put for found in rounds if found.put)
    return end._replace(cause=end.cause._replace(put=put)), waits


@dataclass(slots=True)
class Turn:
    """A turn for another thread's work, abandoned if the thread gives up while waiting."""

    is_wanted: bool = True
    is_taken: bool = False


class SingleSteps:
    """Carries out steps one by one, and knows their rounds.

    ``turn``: whoever writes Variables, or needs them all of one step, holds it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self._peers, self.turn = engine, engine.peers, asyncio.Lock()
        self._numbers = itertools.count(1)
        self._rounds: set[int] = set()  # in progress
        self._void: set[int] = set()  # of those: queues that they used hold something else by now
        self._busy: Counter[str] = Counter()  # steps that use queues, by the name of their task
        self.used: Counter[str] = Counter()  # steps that used each queue, by its name, that no copy of it has seen
        self._written: Counter[str] = Counter()  # steps that wrote each Variable, by its key

    def wrote(self, keys: Iterable[str]) -> None:
        """Register a write of Variables: a waiting step that has read one of them raises Aborted."""
        self._written.update(keys)

    @property
    def rounds(self) -> frozenset[int]:
        """The rounds in progress."""
        return frozenset(self._rounds)

    def number(self) -> int:
        """Reserve the number of a round that another driver runs, until the round has `ended`."""
        number = next(self._numbers)
        self._rounds.add(number)
        return number

    def ended(self, number: int) -> None:
        """Register the end of a round of another driver."""
        self._rounds.discard(number)

    def void(self, rounds: Iterable[int]) -> None:
        """Contents of queues were replaced: steps of the rounds that used them raise Aborted."""
        self._void.update(rounds)
        self._void &= self._rounds

    async def take(self, turn: Turn) -> None:
        """Wait for a turn that lasts until `leave`; an abandoned turn is passed on at once."""
        await self.turn.acquire()
        if turn.is_wanted:
            turn.is_taken = True
        else:
            self.turn.release()

    def leave(self, turn: Turn) -> None:
        """A turn is over, or not wanted any more. In the event loop."""
        turn.is_wanted = False
        if turn.is_taken:
            self.turn.release()

    async def run(
        self, placed: PlacedStep, batch: StepFeeds, seconds: float | None, queues: Sequence[tuple[int, str]] = (),
        see: See | None = None, counted: Callable[[int], object] = int, record: StepRecord | None = None,
    ) -> tuple[list[list[Any]], list[int]]:  # fmt: skip
        """One step. Values of each worker, and their rows.

        One at a time, but for steps that use ``queues`` (shard and key of each): they wait for others, and take their
        turn when they commit. counted: gets the cluster's count of steps with this one. see: gets the values of each
        worker before that, and may raise; nothing is written then. record: of a traced step.
        """
        since = self.engine.interrupts
        if self.engine.is_closing:
            raise self.engine.error(e.UserStop(), seconds)
        async with AsyncExitStack() as turn:
            if not queues:
                await turn.enter_async_context(self.turn)
            deadline = time.monotonic() + seconds if seconds is not None else float("inf")
            await self._let_ranks_stand(placed, turn, deadline, seconds)
            whole, lost = not placed.divides, list[int]()
            use = turn.enter_context(self.engine.deadlocks.use(queues, len(placed.parts) or 1))
            while True:
                tasks = await self.engine.idle(deadline, placed.tasks, since)
                if queues and not placed.tasks:  # else they are in the order of the parts
                    tasks.sort(key=lambda task: self._busy[self._peers.tasks[task].name])
                machine = p.StepMachine(tasks, placed.writes, self._numbers, batch.rows, whole, placed.puts, deadline)
                machine.lost, machine.places = lost, {task: self.engine.first(task) for task in tasks}
                machine.senders = placed.senders
                machine.into_parts = partial(_into_parts, placed, batch)
                if record is not None:
                    await self._prepare_trace(placed, tasks[: len(placed.parts) or 1])
                    record.start()
                end, waits = await self._drive(machine, placed, batch, since, use, turn, see, record)
                if not isinstance(end.cause, e.TasksLost):
                    break
                is_undone = machine.once and end.cause.tasks and not end.cause.put  # what it took is back
                if is_undone and p.poison(lost) is None:
                    continue  # on another task
                if not (end.cause.is_none_left and self.engine.comes):
                    break
                if time.monotonic() >= deadline:  # else this would ask again and again, and nothing else would go on
                    end, waits = e.Finish(cause=e.TimedOut()), [self._awaited(placed.tasks)]
                    break
            if end.cause is not None:
                cause = end.cause
                if placed.parts and isinstance(cause, e.TasksLost) and cause.is_none_left:
                    cause = e.TasksLost(self._left_alone(placed.tasks))
                raise self.engine.error(cause, seconds, waits)
            if record is not None:
                record.end()
                await self._ping(record)
            if placed.writes:
                self.engine.step += 1
                counted(self.engine.step)
                self.wrote(placed.written)
            return _results(placed, end.values), list(end.rows)[: 1 if placed.parts else None]

    async def _let_ranks_stand(
        self, placed: PlacedStep, turn: AsyncExitStack, deadline: float, seconds: float | None
    ) -> None:
        """Hold trainings of ranks until the turn is over, so that servers are current. Raises DeadlineExceeded."""
        left = None if seconds is None else max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(left):
                for training in self.engine.with_ranks(placed):
                    await turn.enter_async_context(training.held())
        except TimeoutError as error:
            waits = ("the ranks of a training in mode='allreduce' to save what they hold",)
            raise self.engine.error(e.TimedOut(), seconds, waits) from error

    async def _prepare_trace(self, placed: PlacedStep, tasks: Sequence[int]) -> None:
        """Let tasks prepare the tracing of a step. Raises Unavailable."""
        for member in (self._peers.tasks[task] for task in tasks):
            answer: Outcome = NotSent()
            for attempt in range(2):  # a task forgets plans that were not used for long
                try:
                    await self.engine.register(placed, member, again=attempt > 0)
                    meta = {"plan": placed.plan(member.number).id}
                    call = self._peers.link.call(member.peer, "trace", meta, epoch=self._peers.epoch)
                    answer = await self._peers.unless_dead(member, call)
                except NotDone as failure:
                    answer = failure.outcome
                if isinstance(answer, Ok):
                    break
            else:
                text = f"{type(answer).__name__} {getattr(answer, 'message', '')}".strip()
                raise Unavailable(f"{member.name} cannot trace this step: {text}. Nothing was run", task=member.name)

    async def _ping(self, record: StepRecord) -> None:
        """Compare clocks with the places of a finished step once more."""
        places = {member.name: member for member in self._peers.tasks if member.name in record.tasks}
        places |= {f"ps:{shard}": self._peers.shards[shard] for shard in record.shards}
        for name, member in places.items():
            for _ in range(PINGS):
                sent = time.monotonic_ns()
                ping = self._peers.link.call(member.peer, "ping", epoch=self._peers.epoch)
                answer = await self._peers.unless_dead(member, ping)
                if isinstance(answer, Ok) and not record.pinged(name, sent, answer):
                    break

    def _absent(self, tasks: Sequence[int]) -> str:
        """The names of tasks requested by a graph that are not there."""
        names = {f"task:{number}" for number in tasks}
        there = {member.name for member in self.engine.tasks if member.is_there}
        return ", ".join(sorted(names - there))

    def _awaited(self, tasks: Sequence[int]) -> str:
        """The tasks that a step whose time is over waited for, in words: requested ones, or any."""
        return f"{self._absent(tasks) or 'a compute task'} to come back"

    def _left_alone(self, tasks: Sequence[int]) -> str:
        """The message that tasks requested by a graph are gone."""
        names = {f"task:{number}" for number in tasks}
        gone = self._absent(tasks) or "a task"
        return f"the step has parts on {', '.join(sorted(names))}, and {gone} is gone; nothing of it was written"

    async def _drive(
        self, machine: p.StepMachine, placed: PlacedStep, batch: StepFeeds, since: int, use: QueueUse | None = None,
        turn: AsyncExitStack | None = None, see: See | None = None, record: StepRecord | None = None,
    ) -> tuple[e.Finish, list[str]]:  # fmt: skip
        async with self.engine.heard(since) as queue:
            return await self._driven(queue, machine, placed, batch, since, use or QueueUse(), turn, see, record)

    async def _driven(
        self, queue: asyncio.Queue[p.Event], machine: p.StepMachine, placed: PlacedStep, batch: StepFeeds, since: int,
        use: QueueUse,
        turn: AsyncExitStack | None, see: See | None, record: StepRecord | None,
    ) -> tuple[e.Finish, list[str]]:  # fmt: skip
        """Run a step machine to its end: returns the end, and the pending waits of a stopped step.

        use: of queues. It enters its ``turn`` when it commits, and then has to find what it read. see: as of `run`.
        """
        carried: set[asyncio.Task[None]] = set()
        seen, aborted = {key: self._written[key] for key in placed.read}, list[Coroutine[Any, Any, _EndedWait]]()
        queues, is_in_turn, mine = use.queues, not use.queues, set[int]()
        use.tell = lambda failure: queue.put_nowait(p.Error(machine.number, -1, failure))
        try:
            instructions = machine.on(e.Start(), time.monotonic())
            while True:
                see, cut = await self._shown(see, machine, placed, queues, since)
                if cut is not None:
                    return e.Finish(cause=cut), ["the condition of a breakpoint"]
                there: list[p.Prepare | p.Commit] = []  # for all shards at once
                begun: list[Coroutine[Any, Any, None]] = []
                for instruction in instructions:
                    match instruction:
                        case e.Finish(cause=cause):
                            end, waits = _told(instruction, await asyncio.gather(*aborted))
                            if queues and cause is None:
                                if not is_in_turn:  # else what it took may be counted twice, here and where it went
                                    assert turn is not None
                                    await turn.enter_async_context(self.turn)
                                await self._keep_round(machine.number, queues)
                                self.used.update(queue.name for queue in placed.queues)
                            return end, waits
                        case p.AbortStep(number) if queues:
                            aborted.append(self._ended_round(number, list(machine.ranges)))
                        case p.AbortStep(number):  # at once: what is begun here ends with the machine
                            self._forget_round(number)
                        case p.Run(number, task):
                            mine.add(number)
                            self._rounds.add(number)
                            use.round = number
                            self._busy[self._peers.tasks[task].name] += bool(queues)
                            parts = self._parts(placed, machine.ranges) if placed.parts else None
                            looks = see is not None
                            begun.append(
                                self._run_part(instruction, placed, batch, queue, queues, looks, parts, record)
                            )
                        case p.Prepare() | p.Commit():
                            there.append(instruction)
                if there and not is_in_turn:
                    assert turn is not None
                    await turn.enter_async_context(self.turn)
                    is_in_turn = True
                    there = self._unless_written(seen, there, queue, mine)
                for coroutine in [*begun, *([self._write(there, queue, record)] if there else [])]:
                    work = asyncio.create_task(coroutine)
                    carried.add(work)
                    work.add_done_callback(carried.discard)
                event = await queue.get()
                instructions = machine.on(event, time.monotonic())
        finally:
            self._rounds -= mine
            for work in carried:
                work.cancel()

    async def _shown(
        self, see: See | None, machine: p.StepMachine, placed: PlacedStep, queues: Sequence[tuple[int, str]], since: int
    ) -> tuple[See | None, e.UserStop | e.TimedOut | None]:
        """Let the user's callback inspect a computed step, once: returns the pending callback, and why the step was
        cut.

        Everybody forgets its round then, and where it raises.
        """
        if see is None or not machine.is_computed:
            return see, None
        answers, is_passed = [machine.values[task] for task in machine.ranges], False
        task = asyncio.create_task(asyncio.to_thread(see, _results(placed, answers)))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK)
                if self.engine.interrupts != since:
                    return see, e.UserStop()
                if time.monotonic() >= machine.deadline:
                    return see, e.TimedOut()
            task.result()
            for answer in answers:
                failure = read_outcome(answer.meta["failure"], ()) if "failure" in answer.meta else None
                if isinstance(failure, Failure):  # what it computed cannot be written
                    raise self.engine.error(failure, None)
            is_passed = True
            return None, None
        finally:
            task.cancel()  # its thread ends when it does
            if not is_passed and queues:
                await self._ended_round(machine.number, list(machine.ranges))
            elif not is_passed:
                self._forget_round(machine.number)

    async def _run_part(
        self, run: p.Run, placed: PlacedStep, batch: StepFeeds, queue: asyncio.Queue[p.Event],
        queues: Sequence[tuple[int, str]], looks: bool, parts: dict[str, Any] | None, record: StepRecord | None,
    ) -> None:  # fmt: skip
        """Let a task run its part, and report the resulting event. parts: peers of a graph over several tasks."""
        about: dict[str, Any] = {"worker": run.worker, "rows": run.stop - run.start or 1, "looks": looks}
        feeds, index = batch.part(run.start, run.stop), batch.run_index + run.worker * REPLICA
        if parts is not None:
            wanted = placed.parts[run.worker].feeds
            sized = [feed for feed, kind in zip(feeds, wanted, strict=True) if kind == Kind.SIZE]
            about |= {"parts": parts, "sizes": [list(feed.shape) for feed in sized]}
            feeds = [feed for feed, kind in zip(feeds, wanted, strict=True) if kind == Kind.VALUE]
            index = batch.run_index
        if queues:
            about["queues"] = list(map(list, queues))
        try:
            event = await self._run_on(run.number, run.task, placed, about, feeds, index, record)
        finally:
            self._busy[self._peers.tasks[run.task].name] -= bool(queues)
        queue.put_nowait(event)

    async def _write(
        self, there: Sequence[p.Prepare | p.Commit], queue: asyncio.Queue[p.Event], record: StepRecord | None
    ) -> None:
        """Let shards prepare or commit a round, and report the resulting events."""
        asks, traced = [], {} if record is None else {"trace": True}
        for one in there:
            method = "prepare" if isinstance(one, p.Prepare) else "commit"
            asks.append(Ask(one.shard, method, {**self.over(one.number), "workers": list(one.workers), **traced}))
        sent = time.monotonic_ns()
        for one, ask, answer in zip(there, asks, await self._peers.settled_on(asks), strict=True):
            if record is not None and isinstance(answer, Ok):
                record.wrote(ask, sent, answer)
            done = p.ShardReady if isinstance(one, p.Prepare) else p.ShardCommit
            queue.put_nowait(_shard_event(done(one.number, one.shard), answer))

    def _parts(self, placed: PlacedStep, ranges: Mapping[int, Any]) -> dict[str, Any]:
        """The peer that runs each part of a step."""
        peers = [self._peers.tasks[task].peer for task in ranges]
        return {str(part.task): [*peer] for part, peer in zip(placed.parts, peers, strict=True)}

    def _forget_round(self, number: int) -> None:
        """Abort a round on all shards and tasks, without waiting for the answers."""
        over = self.over(number)
        asks = [Ask(shard, "abort", over) for shard in range(len(self._peers.shards))]
        self.engine.later(self._peers.tell(asks, time.monotonic() + GRACE))
        for member in self._peers.tasks:
            if member.alive:
                self.engine.stop(member, "cancel", lambda: over)

    async def _ended_round(self, number: int, tasks: Sequence[int]) -> _EndedWait:
        """Abort a round that used queues, and wait until all members have.

        All servers halt the round first; if it enqueued nothing, its dequeued elements return to the queues.
        """
        over = self.over(number)
        members = [self._peers.tasks[task] for task in tasks]
        stopping = [self.engine.stop(member, "cancel", lambda: over) for member in members if member.alive]
        if stopping:  # servers end the waits, too: tasks that hear of that first do not say what they waited for
            await asyncio.wait(stopping, timeout=GRACE)
        shards = range(len(self._peers.shards))
        halted = await self._peers.settled_on([Ask(shard, "halt", over) for shard in shards])
        moved = any(answer.meta["moved"] for answer in halted if isinstance(answer, Ok))
        await self._peers.settled_on([Ask(shard, "abort", {**over, "moved": moved}) for shard in shards])
        answers = await asyncio.gather(*stopping)
        waits = [str(wait) for answer in answers if answer is not None for wait in answer.meta.get("waits", ())]
        put = [(name, n) for answer in halted if isinstance(answer, Ok) for name, n in answer.meta["put"].items()]
        return _EndedWait(waits, ", ".join(f"{n} into queue {name}" for name, n in put))

    def _unless_written(
        self, seen: Mapping[str, int], there: list[p.Prepare | p.Commit], queue: asyncio.Queue[p.Event], mine: set[int]
    ) -> list[p.Prepare | p.Commit]:
        """The shards' instructions; none, but errors for the step, if another step wrote its Variables or queues."""
        if all(self._written[key] == before for key, before in seen.items()) and self._void.isdisjoint(mine):
            return there
        failure = Failure("Aborted", "another step wrote what this one had read, while it waited: run it again")
        for one in there:
            queue.put_nowait(p.ShardError(one.number, one.shard, failure))
        return []

    async def _keep_round(self, number: int, queues: Sequence[tuple[int, str]]) -> None:
        """Commit a round on the queues: dequeued elements are never returned."""
        over = self.over(number)
        await self._peers.settled_on(
            [Ask(shard, "keep", over) for shard in dict.fromkeys(shard for shard, _ in queues)]
        )

    def over(self, number: int) -> dict[str, Any]:
        """The message that a round is over, with the number up to which all rounds are."""
        others = self._rounds - {number}
        return {"round": number, "floor": min(min(others, default=number + 1) - 1, number)}

    async def _run_on(
        self, number: int, task: int, placed: PlacedStep, about: dict[str, Any], feeds: list[torch.Tensor],
        run_index: int,
        record: StepRecord | None,
    ) -> p.Event:  # fmt: skip
        """Run a compute plan on a task, registering missing plans; returns the resulting event."""
        member, link = self._peers.tasks[task], self._peers.link
        meta = {"plan": placed.plan(member.number).id, "round": number, "run_index": run_index, **about}
        meta |= {} if record is None else {"trace": True}
        answer: Outcome = NotSent()
        for attempt in range(3):
            try:
                await self.engine.register(placed, member, again=attempt > 0)
                deadline = link.deadline("run", sum(t.numel() * t.element_size() for t in feeds))
                if "queues" in about:  # it waits for others, as long as those take
                    deadline = time.monotonic() + FOREVER
                sent = time.monotonic_ns()
                answer = await self._peers.link.call(
                    member.peer, "run", meta, feeds, epoch=self._peers.epoch, deadline=deadline
                )
                if record is not None and isinstance(answer, Ok):
                    record.ran(member.name, number, sent, feeds, answer)
            except NotDone as failure:
                answer = failure.outcome
            except TfnbError as error:  # what cannot be encoded
                return p.Error(number, task, failed(error))
            if not (isinstance(answer, Refusal) and answer.reason == "unknown-plan"):
                break
        return await self.engine.event_of(answer, number, task)


def _shard_event(done: p.ShardReady | p.ShardCommit, answer: Settled) -> p.Event:
    match answer:
        case Ok():
            return done
        case Failure():
            return p.ShardError(done.number, done.shard, answer)
    return answer


def _results(placed: PlacedStep, answers: Sequence[Ok]) -> list[list[Any]]:
    """The fetches of each worker; for a graph over several tasks, the merged fetches of all parts."""
    found = list(map(_unpacked, answers))
    if not placed.parts:
        return found
    return [[next((value for value in values if value is not None), None) for values in zip(*found, strict=True)]]


def _unpacked(answer: Ok) -> list[Any]:
    """The fetches of a task's answer, None where a fetch has no value."""
    tensors = iter(answer.tensors)
    return [next(tensors) if some else None for some in answer.meta["some"]]


def _into_parts(placed: PlacedStep, batch: StepFeeds, rows: int, most: int) -> list[tuple[int, int]]:
    return placed.guards.divide([tensor.shape for tensor in batch.tensors], batch.split, rows, most)[0]
