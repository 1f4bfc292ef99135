"""Carries out what `plan` says: calls tasks and servers, watches who is alive, and moves variables.

Everything here runs in the client's event loop, so that Ctrl-C in the calling thread cuts nothing in half; the
thread asks for it with `Engine.interrupt`. Decisions are the machines'; this module only reports what happened.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from tfnb.cluster import events as e
from tfnb.cluster import plan as p
from tfnb.cluster.asking import identified, messages, sent
from tfnb.cluster.contents_there import Brought, Contents, Copies
from tfnb.cluster.deadlocks import Deadlocks, Use
from tfnb.cluster.fit.leases import Broken
from tfnb.cluster.fit.resident import NO_LOOP, RANK
from tfnb.cluster.fit.training import Training
from tfnb.cluster.joins import Way
from tfnb.cluster.members import Ahead, Batch, Member, Mode, Sent
from tfnb.cluster.messages import Ask, Failed, NotDone, NotSent, Ok, Outcome, Refused, Unknown, failed, raised
from tfnb.cluster.programs import Placed, Plan
from tfnb.cluster.restarts import Restarts
from tfnb.cluster.transport import ClientLink, read_outcome
from tfnb.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    DeadlockError,
    NonFiniteGradient,
    ParameterServerLost,
    SchedulerLost,
    TfnbError,
    WorkerLost,
)  # fmt: skip

T = TypeVar("T")
See = Callable[[list[Any]], None]  # values of each worker
Settled = Ok | Failed | e.ShardLost

LOOK = 0.05  # seconds between looks at who is alive
PATIENCE = 1.0  # seconds a call is out before its peers are pinged
PULLS = 5  # tries to have values of one step
MISSES = 3  # pings without an answer that make a peer dead; two of one that has been silent for longer:
SILENCE = 4.0  # seconds
GRACE = 1.0  # seconds for telling everybody that a round is over
REPLACED_WITHIN = 60.0  # seconds that a nanny has to start a lost task's process again
LINES = 100  # of who came and left that are kept
FOREVER = 86400.0  # seconds


class Engine:
    """The cluster's tasks and servers, driven from the client's event loop.

    ``servers``: processes, of which one may hold several shards. ``shards``: the server of each.
    ``step``: steps (in asynchronous mode: batches) applied so far. ``lost``: the error that ended the cluster.
    """

    def __init__(self, link: ClientLink, tasks: Sequence[Member], servers: Sequence[Member], epoch: int) -> None:
        self.link, self.epoch = link, epoch
        self.tasks, self.servers = list(tasks), list(servers)
        held = {shard: member for member in servers for shard in member.shards}
        self.shards = [held[shard] for shard in sorted(held)]
        self.step = 0
        self.lost: TfnbError | None = None
        self.on_lost: Callable[[TfnbError], None] = lambda error: None
        self.timings: OrderedDict[str, float] = OrderedDict()
        self._numbers = itertools.count(1)
        self._rounds: set[int] = set()  # in progress
        self._void: set[int] = set()  # of those: queues that they used hold something else by now
        self._busy: Counter[str] = Counter()  # steps that use queues, by the name of their task
        self._written: Counter[str] = Counter()  # steps that wrote each Variable, by its key
        self.is_closing = self.is_closed = False
        self._iteration = asyncio.Lock()  # one step at a time
        self._queues: set[asyncio.Queue[Any]] = set()  # of the machines in progress
        self._told: set[asyncio.Task[Any]] = set()
        self._stopping: dict[Member, asyncio.Task[Ok | None]] = {}  # tasks that were told to stop computing
        self._trainings: dict[Training, asyncio.Task[None]] = {}  # in progress, and who watches for each
        self.names = itertools.count()  # of trainings and their data
        self.homes = [member.peer.addr for member in tasks]  # of each task, also of those that come later
        self.restarts = Restarts()
        self.lines: deque[str] = deque(maxlen=LINES)  # who came and who left, for the user
        self.said = 0  # lines so far
        self._arrival = asyncio.Event()
        self._interrupts = 0  # so far: what begins is told of those that came before it could listen
        self.notes: list[str] = []  # for the user, in whatever call waits or comes next
        self.deadlocks = Deadlocks(self._who_waits, self.notes.append)
        self.contents = Contents(self.insist_on)

    # -- what the notebook asks for -------------------------------------------------------------------------

    async def interrupt(self) -> None:
        """Ctrl-C: machines in progress stop before their commit, or finish it."""
        self._interrupts += 1
        self._report(e.Interrupt())

    async def settle(self, seconds: float) -> None:
        """`interrupt`, and wait until nothing is in progress any more."""
        await self.interrupt()
        mine = asyncio.current_task()
        others = [task for task in self.link.begun if task is not mine]
        others += self._told
        if others:
            await asyncio.wait(others, timeout=seconds)

    async def run(
        self, placed: Placed, batch: Batch, seconds: float | None, queues: Sequence[tuple[int, str]] = (),
        see: See | None = None,
    ) -> tuple[list[list[Any]], list[int], list[Any]]:  # fmt: skip
        """One step. Values of each worker, their rows, and the values seen after the commit.

        One at a time, but for steps that use ``queues`` (shard and key of each): they wait for others, and take their
        turn when they commit. see: gets the values of each worker before that, and may raise; nothing is written then.
        """
        since = self._interrupts
        if self.is_closing:
            raise self._error(e.Interrupted(), seconds)
        async with AsyncExitStack() as turn:
            if not queues:
                await turn.enter_async_context(self._iteration)
            deadline = time.monotonic() + seconds if seconds is not None else float("inf")
            whole, lost = placed.why_whole is not None, list[int]()
            use = turn.enter_context(self.deadlocks.use(queues))
            while True:
                tasks = await self._idle(deadline, placed.task, since)
                if queues:
                    tasks.sort(key=lambda task: self._busy[self.tasks[task].name])
                machine = p.Step(tasks, placed.writes, self._numbers, batch.rows, whole, placed.puts, deadline)
                machine.lost, machine.places = lost, {task: self._first(task) for task in tasks}
                end, waits = await self._drive(machine, placed, batch, since, use, turn, see)
                if not (isinstance(end.cause, e.TasksLost) and end.cause.is_none_left and self.comes):
                    break
            if end.cause is not None:
                raise self._error(end.cause, seconds, waits)
            if placed.writes:
                self.step += 1
                self._written.update(placed.written)
            after: list[Any] = []
            if placed.after is not None:
                after = await self._afterwards(placed, placed.after, batch, deadline, seconds)
            return [_unpacked(value) for value in end.values], list(end.rows), after

    async def _afterwards(
        self, placed: Placed, after: Plan, batch: Batch, deadline: float, seconds: float | None
    ) -> list[Any]:
        """Fetches of the state after the commit: a read of its own."""
        reading = Placed(after, {}, placed.after_fetched, replace(placed.placement, transfers=(), writes=()))
        since = self._interrupts
        machine = p.Step(await self._idle(deadline, placed.task, since), (), self._numbers, deadline=deadline)
        end, _ = await self._drive(machine, reading, Batch(batch.tensors, batch.run_index), since)
        if end.cause is not None:
            raise self._error(end.cause, seconds)
        return _unpacked(end.values[0])

    async def create(self, shard: int, values: Mapping[str, torch.Tensor]) -> None:
        """Make variables on a shard."""
        await self._mutate(shard, "create", {"keys": list(values)}, list(values.values()))

    async def assign(self, values: Mapping[int, Mapping[str, torch.Tensor]], written: Iterable[str]) -> None:
        """Write pieces of variables of some shards, with no step in between. ``written``: the keys of those."""
        async with self._iteration:
            self._written.update(written)
            for shard, mine in values.items():
                await self._mutate(shard, "assign", {"keys": list(mine)}, list(mine.values()))

    async def drop(self, gone: dict[int, list[str]]) -> None:
        """Forget variables, on the servers and on the tasks that have copies."""
        async with self._iteration:
            for shard, keys in gone.items():
                await self._mutate(shard, "drop", {"keys": keys}, [])
            deadline, keys = time.monotonic() + GRACE, [key for some in gone.values() for key in some]
            calls = (
                self.link.call(member.peer, "forget", {"keys": keys}, epoch=self.epoch, deadline=deadline)
                for member in self.tasks
                if member.alive
            )
            await asyncio.gather(*calls)

    async def pull(
        self, wanted: dict[int, list[str]], queues: Mapping[int, list[str]] | None = None
    ) -> tuple[dict[str, torch.Tensor], int, Copies]:
        """Values by key, all of one step, and that step. Of the ``queues`` by shard what they hold then.

        Raises Aborted where steps went on in each of several tries, because this process stood still in all of them.
        """
        asks = [Ask(shard, "pull", {"keys": keys}) for shard, keys in wanted.items()]
        async with AsyncExitStack() as copies:
            for _ in range(PULLS):
                async with self._iteration, AsyncExitStack() as holds:
                    stand = [await holds.enter_async_context(training.held()) for training in list(self._trainings)]
                    step = self.step
                    answers = await self.insist_on(asks)
                    held = await copies.enter_async_context(self.contents.held(queues or {}))
                    is_one_step = all([await stands() for stands in stand])
                if is_one_step:
                    break
            else:
                raise Aborted(
                    f"steps went on during each of {PULLS} pulls: a hold ends by itself, and the notebook stood still "
                    "or the values took long; pull again when it has less to do, or after the training",
                    step=self.step,
                )  # fmt: skip
            values = {
                key: tensor
                for keys, answer in zip(wanted.values(), answers, strict=True)
                for key, tensor in zip(keys, answer.tensors, strict=True)
            }
            return values, step, await self.contents.fetched(held)

    async def refill(self, brought: Brought, written: Iterable[str]) -> None:
        """Let queues and Variables hold what was brought; steps that used one of them raise Aborted.

        written: the keys of these Variables.
        """
        async with self._iteration:
            void = await self.contents.refill(brought)
            self._written.update(written)
            self._void = (self._void | {*void}) & self._rounds

    async def stats(self, seconds: float) -> dict[int, dict[str, Any]]:
        """What each shard of a live server says of itself, within ``seconds``."""
        asks = [Ask(shard, "stat") for shard in range(len(self.shards))]
        answers = await self.tell(asks, time.monotonic() + seconds)
        return {shard: dict(answer.meta) for shard, answer in enumerate(answers) if isinstance(answer, Ok)}

    async def _who_waits(self, seconds: float) -> tuple[list[Outcome], list[Outcome]]:
        """Which steps wait for queues, as all tasks say, and then which attempts do, as all shards say."""
        live = [member.peer for member in self.tasks if member.is_there]
        end = time.monotonic() + seconds
        calls = (self.link.call(peer, "waits", {}, epoch=self.epoch, deadline=end) for peer in live)
        steps = await asyncio.gather(*calls)
        asks = [Ask(shard, "waiting") for shard in range(len(self.shards))]
        return steps, await self.tell(asks, time.monotonic() + seconds)

    # -- trainings whose tasks loop by themselves ----------------------------------------------------------------

    async def train(
        self, placed: Placed, mode: Mode, ways: Sequence[Way], data: Ahead | None, seconds: float | None
    ) -> Training:
        """Begin a training."""
        if self.is_closing:
            raise self._error(e.Interrupted(), seconds)
        deadline = time.monotonic() + seconds if seconds is not None else float("inf")
        since = self._interrupts
        tasks = await self._idle(deadline, placed.task, since)
        training = Training(self, placed, mode, ways, data, tasks, deadline, self.patience)
        await training.start()
        if self._interrupts != since:
            training.feed(e.Interrupt())
        return training

    def attend(self, training: Training) -> None:
        """Tell a training who is lost, and the time."""
        self._queues.add(training.queue)
        for task in self.free(training.placed.task):  # also those that came since it was planned
            training.queue.put_nowait(e.Joined(task))
        self._trainings[training] = asyncio.create_task(self._watch(training.queue))

    def forget(self, training: Training) -> None:
        """A training is over."""
        self._queues.discard(training.queue)
        watcher = self._trainings.pop(training, None)
        if watcher is not None:
            watcher.cancel()

    async def unload(self, sent: Sent) -> None:
        """Tasks drop data that they were sent."""
        deadline = time.monotonic() + p.STOPS_WITHIN
        await asyncio.gather(*(
            self.link.call(member.peer, "unload", {"data": sent.name}, epoch=self.epoch, deadline=deadline)
            for member in sent.members
            if member.alive
        ))  # fmt: skip

    def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do it; nobody waits for it but `settle`."""
        told = asyncio.ensure_future(work)
        self._told.add(told)
        told.add_done_callback(self._told.discard)

    async def training_error(self, training: Training, seconds: float | None) -> TfnbError | None:
        """Why a training ended, if not by the end of its data. In the event loop: queues may come home then."""
        end = training.end
        if end is None or end.cause is None:
            return None
        error = self._error(end.cause, seconds)
        if isinstance(end.cause, e.TimedOut):
            error.message = (
                f"training did not end within {round(seconds or 0.0, 1):g} s; variables are at step {self.step}"
            )
        for shards in end.torn:
            names = ", ".join(map(self.name_of, shards))
            error.add_note(f"one more batch was applied on {names} only: no task was left to complete it")
        return error

    # -- one synchronous step ------------------------------------------------------------------------------------

    async def _drive(
        self, machine: p.Step, placed: Placed, batch: Batch, since: int, use: Use | None = None,
        turn: AsyncExitStack | None = None, see: See | None = None,
    ) -> tuple[e.Finish, list[str]]:  # fmt: skip
        """Run a step machine to its end: that, and what the step waited for where it was stopped.

        use: of queues. It enters its ``turn`` when it commits, and then has to find what it read. see: as of `run`.
        """
        queue = self._hears(since)
        carried: set[asyncio.Task[None]] = set()
        seen, aborted = {key: self._written[key] for key in placed.read}, list[Coroutine[Any, Any, list[str]]]()
        use = use or Use()
        queues, is_in_turn, mine = use.queues, not use.queues, set[int]()
        use.tell = lambda failure: queue.put_nowait(p.Error(machine.number, -1, failure))
        watcher = asyncio.create_task(self._watch(queue))
        try:
            instructions = machine.on(e.Start(), time.monotonic())
            while True:
                see, cut = await self._shown(see, machine, queues, since)
                if cut is not None:
                    return e.Finish(cause=cut), ["the condition of a breakpoint"]
                there: list[p.Prepare | p.Commit] = []  # for all shards at once
                begun: list[Coroutine[Any, Any, None]] = []
                for instruction in instructions:
                    match instruction:
                        case e.Finish(cause=cause):
                            waits = [wait for found in await asyncio.gather(*aborted) for wait in found]
                            if queues and cause is None:
                                if not is_in_turn:  # else what it took may be counted twice, here and where it went
                                    assert turn is not None
                                    await turn.enter_async_context(self._iteration)
                                await self._keep_round(machine.number, queues)
                            return instruction, waits
                        case p.Abort(number) if queues:
                            aborted.append(self._ended_round(number, list(machine.ranges)))
                        case p.Abort(number):  # at once: what is begun here ends with the machine
                            self._forget_round(number)
                        case p.Run(number, task):
                            mine.add(number)
                            self._rounds.add(number)
                            use.round = number
                            self._busy[self.tasks[task].name] += bool(queues)
                            begun.append(self._run_part(instruction, placed, batch, queue, queues, see is not None))
                        case p.Prepare() | p.Commit():
                            there.append(instruction)
                if there and not is_in_turn:
                    assert turn is not None
                    await turn.enter_async_context(self._iteration)
                    is_in_turn = True
                    there = self._unless_written(seen, there, queue, mine)
                for coroutine in [*begun, *([self._write(there, queue)] if there else [])]:
                    work = asyncio.create_task(coroutine)
                    carried.add(work)
                    work.add_done_callback(carried.discard)
                event = await queue.get()
                instructions = machine.on(event, time.monotonic())
        finally:
            self._queues.discard(queue)
            self._rounds -= mine
            watcher.cancel()
            for work in carried:
                work.cancel()

    def _hears(self, since: int) -> asyncio.Queue[p.Event]:
        """Events of a machine that begins; of an interrupt that came after the first ``since`` it is told at once."""
        queue: asyncio.Queue[p.Event] = asyncio.Queue()
        self._queues.add(queue)
        if self._interrupts != since:
            queue.put_nowait(e.Interrupt())
        return queue

    async def _shown(
        self, see: See | None, machine: p.Step, queues: Sequence[tuple[int, str]], since: int
    ) -> tuple[See | None, e.Interrupted | e.TimedOut | None]:
        """Let the user look at what a step computed, once: who is to look yet, and why it was cut, if it was.

        Everybody forgets its round then, and where it raises.
        """
        if see is None or not machine.is_computed:
            return see, None
        answers, is_passed = [machine.values[task] for task in machine.ranges], False
        task = asyncio.create_task(asyncio.to_thread(see, list(map(_unpacked, answers))))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK)
                if self._interrupts != since:
                    return see, e.Interrupted()
                if time.monotonic() >= machine.deadline:
                    return see, e.TimedOut()
            task.result()
            for answer in answers:
                failure = read_outcome(answer.meta["failure"], ()) if "failure" in answer.meta else None
                if isinstance(failure, Failed):  # what it computed cannot be written
                    raise self._error(failure, None)
            is_passed = True
            return None, None
        finally:
            task.cancel()  # its thread ends when it does
            if not is_passed and queues:
                await self._ended_round(machine.number, list(machine.ranges))
            elif not is_passed:
                self._forget_round(machine.number)

    async def _run_part(
        self, run: p.Run, placed: Placed, batch: Batch, queue: asyncio.Queue[p.Event],
        queues: Sequence[tuple[int, str]], looks: bool,
    ) -> None:  # fmt: skip
        """Let a task run its part, and report the event it leads to."""
        about: dict[str, Any] = {"worker": run.worker, "rows": run.stop - run.start or 1, "looks": looks}
        feeds, index = batch.part(run.start, run.stop), batch.run_index + run.worker * RANK
        if queues:
            about["queues"] = list(map(list, queues))
        try:
            event = await self._run_on(run.number, run.task, placed, about, feeds, index)
        finally:
            self._busy[self.tasks[run.task].name] -= bool(queues)
        queue.put_nowait(event)

    async def _write(self, there: Sequence[p.Prepare | p.Commit], queue: asyncio.Queue[p.Event]) -> None:
        """Let shards prepare or commit a round, and report the events it leads to."""
        asks = []
        for one in there:
            method = "prepare" if isinstance(one, p.Prepare) else "commit"
            asks.append(Ask(one.shard, method, {**self._over(one.number), "workers": list(one.workers)}))
        for one, answer in zip(there, await self.settled_on(asks), strict=True):
            done = p.Prepared if isinstance(one, p.Prepare) else p.Committed
            queue.put_nowait(_shard_event(done(one.number, one.shard), answer))

    def _forget_round(self, number: int) -> None:
        """Let everybody forget a round; nobody waits for the answers."""
        over = self._over(number)
        asks = [Ask(shard, "abort", over) for shard in range(len(self.shards))]
        self.later(self.tell(asks, time.monotonic() + GRACE))
        for member in self.tasks:
            if member.alive:
                self.stop(member, "cancel", lambda: over)

    async def _ended_round(self, number: int, tasks: Sequence[int]) -> list[str]:
        """Let everybody forget a round that used queues, and wait until they have: what it waited for, in words.

        What it took is in its queues again then, unless it put something: first it is halted on all servers.
        """
        over = self._over(number)
        lost = [shard for shard, member in enumerate(self.shards) if not member.alive]  # nobody answers for these
        members = [self.tasks[task] for task in tasks]
        stopping = [self.stop(member, "cancel", lambda: over | {"lost": lost}) for member in members if member.alive]
        if stopping:  # servers end the waits, too: tasks that hear of that first do not say what they waited for
            await asyncio.wait(stopping, timeout=GRACE)
        shards = range(len(self.shards))
        halted = await self.settled_on([Ask(shard, "halt", over) for shard in shards])
        moved = any(answer.meta["moved"] for answer in halted if isinstance(answer, Ok))
        await self.settled_on([Ask(shard, "abort", {**over, "moved": moved}) for shard in shards])
        answers = await asyncio.gather(*stopping)
        return [str(wait) for answer in answers if answer is not None for wait in answer.meta.get("waits", ())]

    def _unless_written(
        self, seen: Mapping[str, int], there: list[p.Prepare | p.Commit], queue: asyncio.Queue[p.Event], mine: set[int]
    ) -> list[p.Prepare | p.Commit]:
        """What shards are to do, unless somebody wrote what the step had read or taken: then it is told so."""
        if all(self._written[key] == before for key, before in seen.items()) and self._void.isdisjoint(mine):
            return there
        failure = Failed("Aborted", "another step wrote what this one had read, while it waited: run it again")
        for one in there:
            queue.put_nowait(p.ShardError(one.number, one.shard, failure))
        return []

    async def _keep_round(self, number: int, queues: Sequence[tuple[int, str]]) -> None:
        """A round was committed: what it took does not come back."""
        over = self._over(number)
        await self.settled_on([Ask(shard, "keep", over) for shard in dict.fromkeys(shard for shard, _ in queues)])

    def _over(self, number: int) -> dict[str, Any]:
        """A round that is over, and the number up to which all are."""
        others = self._rounds - {number}
        return {"round": number, "floor": min(min(others, default=number + 1) - 1, number)}

    # -- tasks that stop ------------------------------------------------------------------------------------------

    def stop(self, member: Member, method: str, meta: Callable[[], dict[str, Any]]) -> asyncio.Task[Ok | None]:
        """Let a task stop what it computes; until it has, it is not idle. Its answer; None where it is gone."""
        before = self._stopping.get(member)
        stopping = asyncio.create_task(self._stopped(member, method, meta, before))
        self._stopping[member] = stopping

        def over(task: asyncio.Task[Ok | None]) -> None:
            if self._stopping.get(member) is task:
                del self._stopping[member]

        stopping.add_done_callback(over)
        return stopping

    async def _stopped(
        self, member: Member, method: str, meta: Callable[[], dict[str, Any]], before: asyncio.Task[Any] | None
    ) -> Ok | None:
        """Wait until a task has stopped; one that does not in time gets another process, if it holds no variables."""
        answer: Outcome | None = None
        while member.alive and not isinstance(answer, Ok):
            patience = p.patience(member.seconds)
            deadline = time.monotonic() + patience
            call = self.link.call(member.peer, method, meta(), epoch=self.epoch, deadline=deadline)
            answer = await self.unless_dead(member, call)
            if isinstance(answer, Refused) and answer.reason == "stale":
                answer = Ok(NO_LOOP)
            if isinstance(answer, Ok):
                break
            if await self.verify(member) and member not in self.servers:
                await self._restart(member, patience)
        if before is not None:
            await asyncio.wait({before})
        return answer if isinstance(answer, Ok) else None

    async def _restart(self, member: Member, patience: float) -> None:
        """End a task's process: its nanny starts another, and a task is made there as on any worker that joins."""
        late = f"{member.name} did not stop computing within {patience:.0f} s"
        if not member.info.get("nanny"):
            self.notes.append(f"{late} and is given up: no nanny would start another process")
        elif not self.charge(member):
            self.notes.append(f"{late} and is given up: {self.restarts}. Connect again to use its worker")
        elif isinstance(answer := await self.quit(member), Refused):
            self.notes.append(f"{late} and is given up: {answer.message}")
        else:
            self.notes.append(f"{late}; its process was replaced")
        member.lose()
        self._report(e.Lost(self.tasks.index(member)))

    def charge(self, member: Member) -> bool:
        """Take a restart of the budget for a task, once; False where none is left."""
        member.is_charged = member.is_charged or self.restarts.spend(time.monotonic())
        return member.is_charged

    async def quit(self, member: Member) -> Outcome:
        """Tell a task to end its process."""
        self.link.confirm(member.peer.addr)
        return await self.link.call(member.peer, "quit", epoch=self.epoch, deadline=time.monotonic() + GRACE)

    # -- who comes and goes ---------------------------------------------------------------------------------------

    @property
    def places(self) -> dict[str, Member]:
        """The latest task of each name, alive or not, by number."""
        latest = {member.name: member for member in self.tasks}
        return {name: latest[name] for name in sorted(latest, key=lambda name: int(name.removeprefix("task:")))}

    @property
    def patience(self) -> float:
        """Seconds that work waits for a task where there is none: a nanny starts one again."""
        return REPLACED_WITHIN if any(member.info.get("nanny") for member in self.tasks) else 0.0

    @property
    def comes(self) -> bool:
        """Whether a task was lost lately that a nanny starts again."""
        since = time.monotonic() - REPLACED_WITHIN
        return any(m.lost_at > since and m.info.get("nanny") for m in self.places.values() if not m.is_there)

    def join(self, member: Member) -> None:
        """One more task, from the next step on."""
        before = [index for index, other in enumerate(self.tasks) if other.name == member.name]
        self.tasks.append(member)
        self.homes.append(member.peer.addr)
        self._arrival.set()
        self._report(e.Joined(len(self.tasks) - 1, before[-1] if before else None))

    def _first(self, task: int) -> int:
        """The first of the tasks that one follows."""
        return next(index for index, member in enumerate(self.tasks) if member.name == self.tasks[task].name)

    def bury(self, member: Member) -> None:
        """Let servers wait no longer with what a lost task had asked, and take back what was on its way to it."""
        about = {"client": member.info.get("client")}
        asks = [Ask(shard, "gone", about) for shard in range(len(self.shards))]
        self.later(self.tell_until(asks, time.monotonic() + GRACE))

    def say(self, line: str) -> None:
        """Tell the user, in one line."""
        self.lines.append(line)
        self.said += 1

    def _report(self, event: p.Event) -> None:
        """Tell every machine in progress."""
        for queue in self._queues:
            queue.put_nowait(event)

    async def _idle(self, deadline: float, only: int | None, since: int) -> list[int]:
        """The live tasks, or the one asked for, once what was to stop has stopped; one that takes long is left out.

        Raises Cancelled where there were more than ``since`` interrupts before there is one.
        """
        if self._stopping:
            await self._any_stops(min(GRACE, deadline - time.monotonic()), asyncio.ALL_COMPLETED)
        while not (free := self.free(only)) and self._stopping:
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(member.name for member in self._stopping)
                raise DeadlineExceeded(f"{names} still computes what was stopped before", step=self.step)
            self._ensure_wanted(since)
            await self._any_stops(min(left, LOOK), asyncio.FIRST_COMPLETED)
        while not (free := self.free(only)) and self.comes and time.monotonic() < deadline:
            self._ensure_wanted(since)
            self._arrival.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), LOOK)
        return free

    def _ensure_wanted(self, since: int) -> None:
        if self._interrupts != since:
            raise Cancelled(f"interrupted at step {self.step}", step=self.step)

    def free(self, only: int | None) -> list[int]:
        """The live tasks, or the one asked for, that compute nothing which was stopped."""
        free = [index for index in self._live() if self.tasks[index] not in self._stopping]
        return [index for index in free if self.is_asked_for(index, only)]

    def is_asked_for(self, task: int, only: int | None) -> bool:
        """Whether a task may compute what only one of them may, or its successor."""
        return only is None or self.tasks[task].name == self.tasks[only].name

    async def _any_stops(self, seconds: float, when: str) -> None:
        timeout = None if seconds == float("inf") else max(0.0, seconds)
        await asyncio.wait(set(self._stopping.values()), timeout=timeout, return_when=when)

    async def _run_on(
        self, number: int, task: int, placed: Placed, about: dict[str, Any], feeds: list[torch.Tensor], run_index: int
    ) -> p.Event:
        """Run a compute plan on a task, registering what it lacks; the event that came of it."""
        member = self.tasks[task]
        meta = {"plan": placed.compute.id, "round": number, "run_index": run_index, **about}
        answer: Outcome = NotSent()
        for attempt in range(3):
            try:
                await self.register(placed, member, again=attempt > 0)
                deadline = self.link.deadline("run", sum(t.numel() * t.element_size() for t in feeds))
                if "queues" in about:  # it waits for others, as long as those take
                    deadline = time.monotonic() + FOREVER
                answer = await self.link.call(member.peer, "run", meta, feeds, epoch=self.epoch, deadline=deadline)
            except NotDone as failure:
                answer = failure.outcome
            except TfnbError as error:  # what cannot be encoded
                return p.Error(number, task, failed(error))
            if not (isinstance(answer, Refused) and answer.reason == "unknown-plan"):
                break
        return await self._judged(answer, number, task)

    async def _judged(self, answer: Outcome, number: int, task: int) -> p.Event:
        """What a task's answer means, after asking who is alive where it was none."""
        member = self.tasks[task]
        match answer:
            case Ok():
                member.seconds.append(float(answer.meta.get("timings", {}).get("compute", 0.0)))
                return p.Done(number, task, answer)
            case Failed(details={"missed": True, "shard": int(shard)}):
                if not await self.verify(self.shards[shard]):
                    return e.ShardLost(shard)
                return p.Missed(number, task, answer)
            case Failed():
                return p.Error(number, task, answer)
            case Refused("stale", message):
                return p.Missed(number, task, Failed("StepAborted", message))
            case Refused("unknown-task" | "fenced", _):
                member.lose()
                return e.Lost(task)
            case Refused(reason, message):
                return p.Error(number, task, Failed("Internal", f"{member.name} refused: {reason} {message}"))
        if not await self.verify(member):
            return e.Lost(task)
        return p.Missed(number, task, Failed("Unavailable", f"{member.name}: {answer.message}", {"task": member.name}))

    async def judged(self, answer: Outcome, task: int) -> Any:
        """What it means for a training that a loop of a task ended so."""
        if isinstance(answer, Refused) and answer.reason == "unknown-plan":
            for member in (*self.tasks, *self.servers):
                member.plans.clear()
            return Broken(task, Failed("NotFound", f"plan {answer.message}"), is_fatal=False)
        match await self._judged(answer, 0, task):
            case p.Missed(_, _, failure):
                return Broken(task, failure, is_fatal=False)
            case p.Error(_, _, failure):
                return Broken(task, failure, is_fatal=True)
            case event:
                return event

    # -- plans ---------------------------------------------------------------------------------------------------

    async def register(self, placed: Placed, member: Member, *, again: bool = False) -> None:
        """See that a task and the servers know the plans of a step."""
        work: list[tuple[Member, str, Plan, int | None]] = [(member, "register", placed.compute, None)]
        work += [(self.shards[shard], "register_shard", plan, shard) for shard, plan in placed.servers.items()]
        missing = [item for item in work if again or item[2].id not in item[0].plans]
        if missing:
            await asyncio.gather(*(self._register_one(*item) for item in missing))

    async def _register_one(self, member: Member, method: str, plan: Plan, shard: int | None) -> None:
        meta = plan.meta if shard is None else {**plan.meta, "shard": shard}
        answer = await self.link.persist(
            member.peer, method, meta, plan.tensors, epoch=self.epoch, deadline=time.monotonic() + 60.0
        )
        if isinstance(answer, Ok):
            member.plans.add(plan.id)
            return
        if shard is not None and isinstance(answer, NotSent | Unknown | Refused):
            answer = Failed("Unavailable", answer.message, {"missed": True, "shard": shard})
        raise NotDone(answer)

    # -- servers -------------------------------------------------------------------------------------------------

    async def _mutate(self, shard: int, method: str, meta: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        answer = await self.settled(shard, method, meta, tensors)
        if isinstance(answer, e.ShardLost):
            raise self._error(e.ServerLost(shard), None)
        if isinstance(answer, Failed):
            raise raised(answer)

    async def insist_on(self, asks: Sequence[Ask]) -> list[Ok]:
        """`settled_on`; raises what went wrong first."""
        found = []
        for ask, answer in zip(asks, await self.settled_on(asks), strict=True):
            if isinstance(answer, e.ShardLost):
                raise self._error(e.ServerLost(ask.shard), None)
            if isinstance(answer, Failed):
                raise raised(answer)
            found.append(answer)
        return found

    async def settled(
        self, shard: int, method: str, meta: dict[str, Any], tensors: Sequence[torch.Tensor] = ()
    ) -> Settled:
        """A call to a shard, repeated under one identity until it is answered or its server is dead."""
        (answer,) = await self.settled_on([Ask(shard, method, meta, tensors)])
        return answer

    async def settled_on(self, asks: Sequence[Ask]) -> list[Settled]:
        """`settled` for calls to several shards, with one message for each process."""
        return await self._by_process(asks, self._settled)

    async def tell_until(self, asks: Sequence[Ask], deadline: float) -> list[Outcome]:
        """`tell`, again under the same identities while a server that lives does not answer."""
        asks = identified(asks, self.link)
        while True:
            outcomes = await self.tell(asks, deadline)
            silent = [
                self.shards[ask.shard]
                for ask, outcome in zip(asks, outcomes, strict=True)
                if isinstance(outcome, NotSent | Unknown) and self.shards[ask.shard].is_there
            ]
            if not silent or time.monotonic() >= deadline:
                return outcomes
            await asyncio.sleep(LOOK)
            for member in silent:
                self.link.confirm(member.peer.addr)

    async def tell(self, asks: Sequence[Ask], deadline: float) -> list[Outcome]:
        """Calls to shards, tried once, where their servers live."""

        async def told(member: Member, asks: Sequence[Ask]) -> list[Outcome]:
            if not member.alive:
                return [NotSent(f"{member.name} is gone")] * len(asks)
            send = partial(self.link.call, member.peer, epoch=self.epoch, deadline=deadline)
            return await sent(send, identified(asks, self.link))

        return await self._by_process(asks, told)

    async def _by_process(
        self, asks: Sequence[Ask], call: Callable[[Member, list[Ask]], Awaitable[Sequence[T]]]
    ) -> list[T]:
        """What ``call`` gives for the calls to each process, in the order of all calls."""
        of: dict[Member, list[int]] = {}
        for place, ask in enumerate(asks):
            of.setdefault(self.shards[ask.shard], []).append(place)
        ends = await asyncio.gather(*(call(member, [asks[i] for i in places]) for member, places in of.items()))
        found: dict[int, T] = {}
        for places, mine in zip(of.values(), ends, strict=True):
            found.update(zip(places, mine, strict=True))
        return [found[place] for place in range(len(asks))]

    async def _settled(self, member: Member, asks: Sequence[Ask]) -> list[Settled]:
        """Calls to the shards of one process."""
        found: dict[int, Ok | Failed] = {}
        left = dict(enumerate(identified(asks, self.link)))
        while left and member.alive:
            some = messages(list(left.values()), self.link.budget)[0]
            call = sent(partial(self.link.call, member.peer, epoch=self.epoch), some)
            died: list[Outcome] = [Unknown(f"{member.name} died", lost=True)] * len(some)
            outcomes = await self._unless_dead(member, call, died)
            for place, outcome in zip(list(left), outcomes, strict=False):
                match outcome:
                    case Ok() | Failed():
                        found[place] = outcome
                    case Refused("stale" | "too-old" | "unknown-plan" | "protocol", message):
                        found[place] = Failed("StepAborted", message)
                    case Refused("poisoned", message):
                        member.info["poisoned"] = message
                        member.lose()
                    case Refused("fenced" | "unknown-task", message):
                        member.lose()
            left = {place: ask for place, ask in left.items() if place not in found}
            if any(isinstance(outcome, NotSent | Unknown) for outcome in outcomes) and not await self.verify(member):
                break
        if left:
            member.lose()
        return [found.get(place, e.ShardLost(ask.shard)) for place, ask in enumerate(asks)]

    async def unless_dead(self, member: Member, call: Awaitable[Outcome]) -> Outcome:
        """The call's outcome, or Unknown as soon as the peer is found dead."""
        return await self._unless_dead(member, call, Unknown(f"{member.name} died", lost=True))

    async def _unless_dead(self, member: Member, call: Awaitable[T], otherwise: T, *, is_ping: bool = False) -> T:
        """What the call gives, or ``otherwise`` as soon as the scheduler, or pings, say that the peer is dead."""
        asked, died = asyncio.ensure_future(call), asyncio.ensure_future(self._death(member, is_ping))
        try:
            await asyncio.wait({asked, died}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else otherwise
        finally:
            asked.cancel()
            died.cancel()

    # -- who is alive ----------------------------------------------------------------------------------------------

    def _live(self) -> list[int]:
        return [index for index, member in enumerate(self.tasks) if member.is_there]

    async def _death(self, member: Member, is_ping: bool) -> None:
        """Wait for it; who waits long for another answer than that of a ping, pings."""
        since = time.monotonic()
        while member.alive and member.reported:
            await asyncio.sleep(LOOK / 2)
            if not is_ping and time.monotonic() - since > PATIENCE:
                await self.verify(member)
                since = time.monotonic()

    async def verify(self, member: Member) -> bool:
        """Whether a peer that a call failed to is alive: by the scheduler's word, then by pings."""
        begin, since = time.monotonic(), self.link.heard.get(member.peer.addr, 0.0)
        if begin - since > 2 * PATIENCE:  # nobody asked it lately
            since = begin
        for missed in range(MISSES):
            if not member.alive or not member.reported:
                break
            if missed == MISSES - 1 and time.monotonic() - since >= SILENCE:
                break
            if missed == 1 and member in self.tasks:
                self._report(e.Suspect(self.tasks.index(member)))
            self.link.confirm(member.peer.addr)  # the registry's entry is good: it may be dialled once more
            ping = self.link.call(member.peer, "ping", epoch=self.epoch)
            answer: Outcome = await self._unless_dead(member, ping, Unknown(), is_ping=True)
            if isinstance(answer, Ok) and answer.meta.get("incarnation") == member.peer.incarnation:
                return True
        member.lose()
        self.link.suspect.add(member.peer.addr)
        return False

    async def _watch(self, queue: asyncio.Queue[p.Event]) -> None:
        """Report deaths and the time; ping everybody once the work takes long."""
        begin = pinged = time.monotonic()
        pings: dict[Member, asyncio.Task[bool]] = {}
        seen = {member for member in (*self.tasks, *self.servers) if not member.alive}
        try:
            while True:
                await asyncio.sleep(LOOK)
                now = time.monotonic()
                for index, member in enumerate(self.tasks):
                    if member not in seen and not (member.alive and member.reported):
                        seen.add(member)
                        member.lose()
                        queue.put_nowait(e.Lost(index))
                for member in self.servers:
                    if member not in seen and not (member.alive and member.reported):
                        seen.add(member)
                        member.lose()
                        for shard in member.shards:
                            queue.put_nowait(e.ShardLost(shard))
                queue.put_nowait(e.Tick())
                if now - begin > PATIENCE and now - pinged > PATIENCE:
                    pinged = now
                    for member in {*self.tasks, *self.servers} - seen:
                        if member not in pings or pings[member].done():
                            pings[member] = asyncio.create_task(self.verify(member))
        finally:
            for ping in pings.values():
                ping.cancel()

    # -- errors ------------------------------------------------------------------------------------------------------

    def _error(self, cause: e.Cause, seconds: float | None, waits: Sequence[str] = ()) -> TfnbError:
        """The exception of a cause; a lost server or scheduler ends the cluster. waits: for what it did, in words."""
        if self.is_closed and self.lost is None:
            cause = e.Interrupted()
        if self.link.dask.status not in ("running", "newly-created") and not isinstance(cause, Failed | e.Interrupted):
            return self.lose_scheduler()
        match cause:
            case e.Interrupted() if self.is_closing:
                return Aborted(f"the cluster was closed at step {self.step}, run it again", step=self.step)
            case e.Interrupted():
                return Cancelled(f"interrupted at step {self.step}", step=self.step)
            case e.TimedOut():
                names = ", ".join(self.tasks[i].name for i in self._live())
                return DeadlineExceeded(
                    f"step {self.step + 1} did not end within {seconds} s; it waited for "
                    + ("\n  ".join(["", *waits]) if waits else names or "nobody"),
                    step=self.step,
                )
            case e.TasksLost(message, tasks):
                names = ", ".join(f"{self.tasks[i].name} ({self.tasks[i].peer.addr})" for i in tasks)
                text = f"{message}{f': {names}' if names else ''} (step {self.step}); variables are as of that step"
                return WorkerLost(text, step=self.step)
            case e.ServerLost(shard):
                lost = self._lose(self._server_error(shard))
                if not waits:
                    return lost
                text = "\n  ".join(["the step waited for", *waits, lost.message])
                return type(lost)(text, step=lost.step, task=lost.task, details=lost.details)
        error = raised(cause)
        if isinstance(error, DeadlockError):
            error.details = cause.details["graph"]
        if isinstance(error, NonFiniteGradient):
            error.step = self.step
            first, *located = error.message.split("\n")
            first += (
                f". Variables are at step {self.step}: take a smaller learning rate, limit the gradients, or look for "
                "a logarithm, root or division of zero"
            )
            error.message = "\n".join([first, *located])
        return error

    def lost_server(self, shard: int) -> TfnbError:
        """The error of a server that does not answer any more; the cluster ends with it."""
        return self._error(e.ServerLost(shard), None)

    def lose_scheduler(self) -> TfnbError:
        """The client has no scheduler any more, which forgets the actors of a client that it does not hear."""
        is_closed = self.link.dask.status in ("closing", "closed")
        what = "Dask client was closed" if is_closed else "Dask scheduler was lost"
        return self._lose(SchedulerLost(f"the {what} at step {self.step}"))

    def _server_error(self, shard: int) -> ParameterServerLost:
        member, count = self.shards[shard], len(self.servers)
        why = member.info.get("poisoned", "was lost")
        where = f"parameter server {self.servers.index(member) + 1} of {count} ({member.peer.addr})"
        if len(self.shards) > count:
            where += f", which held {in_words(member.shards)} of {len(self.shards)},"
        return ParameterServerLost(f"{where} {why} at step {self.step}.", step=self.step, task=member.name)

    def name_of(self, shard: int) -> str:
        """The server of a shard, and the shard where it holds several."""
        member = self.shards[shard]
        return member.name if len(member.shards) == 1 else f"{member.name} (shard {shard})"

    def _lose(self, error: TfnbError) -> TfnbError:
        if self.lost is None:
            self.lost = error
            self.on_lost(error)
        return self.lost


def in_words(shards: Sequence[int]) -> str:
    """Numbers of shards.

    >>> in_words([1]), in_words([0, 2, 4])
    ('shard 1', 'shards 0, 2 and 4')
    """
    *first, last = map(str, shards)
    return f"shards {', '.join(first)} and {last}" if first else f"shard {last}"


def _shard_event(done: p.Prepared | p.Committed, answer: Settled) -> p.Event:
    match answer:
        case Ok():
            return done
        case Failed():
            return p.ShardError(done.number, done.shard, answer)
    return answer


def _unpacked(answer: Ok) -> list[Any]:
    """The fetches of a task's answer, None where a fetch has no value."""
    tensors = iter(answer.tensors)
    return [next(tensors) if some else None for some in answer.meta["some"]]
