"""Windows of steps of a pipeline whose tasks are servers: carries out what `tfnb.cluster.modes.windows` says.

In the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tfnb.cluster.engine.members import StepFeeds
from tfnb.cluster.engine.single_steps import FOREVER, GRACE, SingleSteps
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes import plan as p
from tfnb.cluster.modes import windows as w
from tfnb.cluster.tasks.programs import PlacedStep
from tfnb.cluster.tasks.step_windows import CLIENT, commit_of
from tfnb.cluster.wire.messages import Ask, NotDone, Ok, Outcome, Refusal, failed
from tfnb.cluster.wire.transport import read_outcome
from tfnb.errors import TfnbError
from tfnb.passes.flow.cut import Kind

if TYPE_CHECKING:
    from tfnb.cluster.engine.engine import Engine


class WrittenSteps(NamedTuple):
    """The steps of a window that are written: how many, the fetches of those that are known, and why no more are."""

    steps: int
    values: list[list[Any]]
    error: TfnbError | None = None


class StepWindows:
    """Lends windows of steps to the stages of a pipeline."""

    def __init__(self, engine: Engine, single: SingleSteps) -> None:
        self._engine, self._single = engine, single

    def may_take(self, placed: PlacedStep) -> bool:
        """Whether every part of a step reads and writes the shard of its own process only, and uses no queue."""
        by_number = {member.number: member.process for member in self._engine.tasks}
        process_of = [member.process for member in self._engine.shards]
        is_own = all(process_of[shard] == by_number.get(part.task) for part in placed.parts for shard in part.shards)
        return is_own and bool(placed.parts and placed.writes) and not placed.queues

    async def run(
        self, placed: PlacedStep, batches: Sequence[StepFeeds], seconds: float | None,
        counted: Callable[[int, int], object],
    ) -> WrittenSteps:  # fmt: skip
        """Take steps, in a turn of their own; an error comes with the steps that were written before.

        counted: gets the number of each written step in its training, and the cluster's count of steps with this one,
        also where nobody waits any more.
        """
        engine, since, steps, values = self._engine, self._engine.interrupts, 0, list[list[Any]]()
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        async with self._single.turn:
            if engine.is_closing:
                return WrittenSteps(0, [], engine.error(e.UserStop(), seconds))
            for _ in range(1 + p.RETRIES):
                window = _Window(engine, self._single, placed, batches[steps:])
                try:
                    end = await window.taken(deadline, since)
                except TfnbError as error:  # of a wait for tasks that were stopped before
                    return WrittenSteps(steps, values, error)
                values += window.values(end.steps)
                for batch in batches[steps : steps + end.steps]:
                    engine.step += 1
                    counted(batch.number, engine.step)
                    self._single.wrote(placed.written)
                steps += end.steps
                if not end.is_missed or steps == len(batches):
                    break
            is_over = end.cause is None or steps == len(batches)
            return WrittenSteps(
                steps, values, None if is_over or end.cause is None else engine.error(end.cause, seconds)
            )


class _Window:
    """One window, until its end."""

    def __init__(
        self, engine: Engine, single: SingleSteps, placed: PlacedStep, batches: Sequence[StepFeeds]
    ) -> None:  # fmt: skip
        self._engine, self._single, self._placed, self._batches = engine, single, placed, batches
        self._answers: dict[int, Ok] = {}  # by part
        self._calls: set[asyncio.Task[None]] = set()

    async def taken(self, deadline: float, since: int) -> w.WindowEnd:
        """Take the steps, as many as can be."""
        engine, single = self._engine, self._single
        lost = next((shard for shard in self._placed.writes if not engine.shards[shard].is_there), None)
        if lost is not None:
            return w.WindowEnd(0, e.ServerLost(lost))
        tasks = await engine.idle(deadline, self._placed.tasks, since)
        if not tasks:
            return w.WindowEnd(0, e.TasksLost("the step has a part on a task that is gone"))
        self._tasks = tasks
        self._rounds = [single.number() for _ in self._batches]
        others = single.rounds - {*self._rounds}
        self._floor = min(min(others, default=self._rounds[0]), self._rounds[0]) - 1
        machine = w.WindowMachine(frozenset(tasks), len(self._batches), deadline)
        try:
            async with engine.heard(since) as heard:
                self._events = cast("asyncio.Queue[Any]", heard)  # also those of the window
                instructions = machine.on(e.Start(), time.monotonic())
                while True:
                    for instruction in instructions:
                        if isinstance(instruction, w.WindowEnd):
                            await self._drop(instruction.steps, instruction.cause)
                            return instruction
                        self._begin(instruction)
                    instructions = machine.on(await self._events.get(), time.monotonic())
        finally:
            for number in self._rounds:
                single.ended(number)
            for call in self._calls:
                call.cancel()

    def values(self, steps: int) -> list[list[Any]]:
        """The fetches of each written step, as far as all stages told them."""
        each = [_unpacked(answer) for answer in self._answers.values()]
        known = min([steps, *(len(some) for some in each)]) if len(each) == len(self._placed.parts) else 0
        return [
            [next((value for value in values if value is not None), None) for values in zip(*step, strict=True)]
            for step in zip(*(some[:known] for some in each), strict=True)
        ]

    def _begin(self, instruction: w.Instruction) -> None:
        match instruction:
            case w.RunWindow():
                for place, task in enumerate(self._tasks):
                    self._soon(self._run(place, task))
            case w.StopWindow():
                self._soon(self._stop())
            case w.AskApplied():
                self._soon(self._ask_applied())
            case w.CommitLast(step, shards):
                self._soon(self._commit(step, shards))

    def _soon(self, work: Any) -> None:
        self._calls.add(asyncio.ensure_future(work))

    async def _run(self, place: int, task: int) -> None:
        """Let a stage take its part of the window."""
        member, engine, part = self._engine.tasks[task], self._engine, self._placed.parts[place]
        peers = [engine.tasks[other].peer for other in self._tasks]
        about: dict[str, Any] = {
            "plan": part.plan.id, "round": self._rounds[0], "floor": self._floor, "worker": place,
            "parts": {str(p.task): [*peer] for p, peer in zip(self._placed.parts, peers, strict=True)}, "steps": [],
        }  # fmt: skip
        feeds = []
        for batch in self._batches:
            mine = [feed for feed, kind in zip(batch.tensors, part.feeds, strict=True) if kind == Kind.VALUE]
            sized = [feed for feed, kind in zip(batch.tensors, part.feeds, strict=True) if kind == Kind.SIZE]
            sizes = [list(feed.shape) for feed in sized]
            about["steps"].append({"run_index": batch.run_index, "feeds": len(mine), "sizes": sizes})
            feeds += mine
        answer: Outcome = Refusal("unknown-plan")
        for attempt in range(3):
            try:
                await engine.register(self._placed, member, again=attempt > 0)
                deadline = time.monotonic() + FOREVER  # the death of the task is noticed beside
                answer = await engine.link.call(
                    member.peer, "run_window", about, feeds, epoch=engine.epoch, deadline=deadline
                )
            except NotDone as failure:
                answer = failure.outcome
            except TfnbError as error:  # what cannot be encoded
                answer = failed(error)
            if not (isinstance(answer, Refusal) and answer.reason == "unknown-plan"):
                break
        self._events.put_nowait(await self._told(place, task, answer))

    async def _told(self, place: int, task: int, answer: Outcome) -> Any:
        """The event for a stage's answer."""
        if isinstance(answer, Ok):
            self._answers[place] = answer
            if "failure" not in answer.meta:
                self._engine.tasks[task].seconds.append(float(answer.meta["timings"]["compute"]))
                return w.WindowAnswer(task)
            answer = read_outcome(answer.meta["failure"], ())
        match await self._engine.event_of(answer, self._rounds[0], task):
            case p.CallFailure(_, _, failure):
                return w.WindowAnswer(task, failure, is_missed=True)
            case p.Error(_, _, failure):
                return w.WindowAnswer(task, failure)
            case event:
                return event

    @property
    def _about(self) -> dict[str, int]:
        return {"round": self._rounds[0], "floor": self._floor, "window": len(self._rounds)}

    async def _stop(self) -> None:
        """Let all stages leave the window, and take their last answers."""
        running = [call for call in self._calls if call is not asyncio.current_task()]
        await asyncio.gather(
            *(self._engine.stop(self._engine.tasks[task], "cancel", lambda: self._about) for task in self._tasks)
        )
        await asyncio.wait(running, timeout=GRACE)
        self._events.put_nowait(w.WindowExit())

    async def _ask_applied(self) -> None:
        shards, seqs = self._placed.writes, self._rounds
        asks = [Ask(shard, "applied", {"client": CLIENT, "seqs": seqs}) for shard in shards]
        answers = await self._engine.peers.settled_on(asks)
        found: dict[int, int] = {}
        for shard, answer in zip(shards, answers, strict=True):
            if not isinstance(answer, Ok):
                return self._events.put_nowait(e.ShardLost(shard))
            found[shard] = len(answer.meta["applied"])
        self._events.put_nowait(w.WindowCounts(found))

    async def _commit(self, step: int, shards: Sequence[int]) -> None:
        """Let shards write what others have written; one that cannot is as good as lost."""
        number = self._rounds[step]
        asks = [
            Ask(shard, "commit", {"round": number, "floor": self._floor, "workers": self._worker(shard)}, (),
                commit_of(number))
            for shard in shards
        ]  # fmt: skip
        with suppress(TfnbError):
            await self._engine.insist_on(asks, is_decided=True)
            return self._events.put_nowait(w.LastCommit())
        self._events.put_nowait(e.ShardLost(shards[0]))

    def _worker(self, shard: int) -> list[int]:
        assert self._placed.senders is not None
        return list(self._placed.senders[shard])

    async def _drop(self, steps: int, cause: e.Cause | None) -> None:
        """Let shards drop what was staged for steps that are not taken; nobody waits on for a stage that is lost."""
        if isinstance(cause, e.ServerLost):
            for member in (self._engine.tasks[task] for task in self._tasks):
                if member.alive:
                    self._engine.stop(member, "cancel", lambda: self._about)
            return
        if steps == len(self._rounds):
            return
        over = [{"round": number, "floor": self._floor} for number in self._rounds[steps:]]
        await self._engine.peers.settled_on(
            [Ask(shard, "abort", about) for shard in self._placed.writes for about in over]
        )


def _unpacked(answer: Ok) -> list[list[Any]]:
    """The fetches of each step of a stage's answer, None where a fetch has no value there."""
    tensors = iter(answer.tensors)
    return [[next(tensors) if some else None for some in step] for step in answer.meta["some"]]
