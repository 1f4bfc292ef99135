"""The notebook's side of a cluster: its members, its steps and trainings, and the cause of its end.

Calls to members are `tfnb.cluster.engine.peers`, steps of `run` `tfnb.cluster.engine.single_steps`, and trainings
`tfnb.cluster.engine.training`.
Everything here runs in the client's event loop, so that Ctrl-C in the calling thread cuts nothing in half; the
thread asks for it with `Engine.interrupt`. Decisions are the machines'; this module only reports what happened.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import torch

from tfnb.cluster.engine.lent_windows import StepWindows
from tfnb.cluster.engine.members import Ahead, Member, Mode, SentData
from tfnb.cluster.engine.peers import LATEST, LOOK, ClusterPeers, Looks
from tfnb.cluster.engine.restarts import Restarts
from tfnb.cluster.engine.single_steps import GRACE, SingleSteps
from tfnb.cluster.engine.training import Training
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes import plan as p
from tfnb.cluster.modes.leases import LoopFailure
from tfnb.cluster.queues.contents_there import Copies, RemoteContents, ShardContents
from tfnb.cluster.queues.deadlocks import Deadlocks
from tfnb.cluster.tasks.programs import PlacedStep, Plan
from tfnb.cluster.tasks.resident import NO_LOOP
from tfnb.cluster.tasks.shard_writes import packed
from tfnb.cluster.wire import sparse_values
from tfnb.cluster.wire.envelope import size
from tfnb.cluster.wire.messages import (
    GIVEN_UP,
    SILENCE,
    Ask,
    Failure,
    NotDone,
    NotSent,
    Ok,
    Outcome,
    Refusal,
    Unknown,
    raised,
)
from tfnb.cluster.wire.transport import ClientLink
from tfnb.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    DeadlockError,
    FailedPrecondition,
    NonFinite,
    NonFiniteGradient,
    ParameterServerLost,
    ResourceExhausted,
    SchedulerLost,
    TfnbError,
    WorkerLost,
)  # fmt: skip
from tfnb.graph import lazy_memory
from tfnb.state.manifests import Shard
from tfnb.state.steps_taken import AppliedSteps

T = TypeVar("T")

PULLS = 5  # tries to have values of one step
REPLACED_WITHIN = 60.0  # seconds that a nanny has to start a lost task's process again
STARVED = 0.3  # seconds for a ping to a task that gets too little of its processor
LINES = 100  # of who came and left that are kept


class Pins(NamedTuple):
    """Values that servers pinned at one step of the cluster, contents of queues then, and applied steps of each
    training. ``keys``: keys of the values, ``nbytes``: their bytes, by shard.
    """

    number: int
    keys: Mapping[int, list[str]]
    step: int
    held: Copies
    applied: dict[Training, AppliedSteps]
    seen: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # by the copies of queues, of each channel
    used: Mapping[str, int] = MappingProxyType({})  # steps of `run` that they have seen, by the name of a queue
    nbytes: Mapping[int, int] = MappingProxyType({})


class Engine:
    """The cluster's tasks and servers, driven from the client's event loop.

    ``step``: steps (in asynchronous mode: batches) applied so far. ``lost``: the error that ended the cluster.
    """

    def __init__(self, link: ClientLink, tasks: Sequence[Member], servers: Sequence[Member], epoch: int) -> None:
        self.link, self.epoch = link, epoch
        self.peers = ClusterPeers(link, epoch, tasks, servers, self._report, self.say)
        self.tasks, self.servers, self.shards = self.peers.tasks, self.peers.servers, self.peers.shards
        self.single = SingleSteps(self)
        self.windows = StepWindows(self, self.single)
        self.step = 0
        self.lost: TfnbError | None = None
        self.on_lost: Callable[[TfnbError], None] = lambda error: None
        self.timings: OrderedDict[str, float] = OrderedDict()
        self.is_closed = False
        self._queues: set[asyncio.Queue[Any]] = set()  # of the machines in progress
        self._told: set[asyncio.Task[Any]] = set()
        self._pins = itertools.count()
        self._stopping: dict[Member, asyncio.Task[Ok | None]] = {}  # tasks that were told to stop computing
        self._trainings: dict[Training, asyncio.Task[None]] = {}  # in progress, and who watches for each
        self._unseen: list[Training] = []  # over, and no pull has seen all of their steps
        self.names = itertools.count()  # of trainings and their data
        self.homes = [member.peer.addr for member in tasks]  # of each task, also of those that come later
        self.restarts = Restarts()
        self.lines: deque[str] = deque(maxlen=LINES)  # who came and who left, for the user
        self.said = 0  # lines so far
        self._arrival = asyncio.Event()
        self.interrupts = 0  # so far: what begins is told of those that came before it could listen
        self.notes: list[str] = []  # for the user, in whatever call waits or comes next
        self.deadlocks = Deadlocks(self._who_waits, self.notes.append)
        self.contents = RemoteContents(self.insist_on, partial(self.insist_on, is_decided=True))

    # -- what the notebook asks for -------------------------------------------------------------------------

    async def interrupt(self) -> None:
        """Ctrl-C: machines in progress stop before their commit, or finish the commit."""
        self.interrupts += 1
        self._report(e.Interrupt())

    @property
    def is_closing(self) -> bool:
        """Whether nothing new is begun: the values come home."""
        return self.peers.is_closing

    def begin_closing(self) -> None:
        """Begin nothing new."""
        self.peers.is_closing = True

    async def settle(self, seconds: float) -> None:
        """`interrupt`, and wait until nothing is in progress any more, or all that is waits for a silent server."""
        await self.interrupt()
        mine = asyncio.current_task()
        others = [task for task in self.link.begun if task is not mine]
        others += self._told
        end = time.monotonic() + seconds
        while others and not self.peers.silent and time.monotonic() < end:
            others = list((await asyncio.wait(others, timeout=LOOK))[1])

    async def abandon(self, seconds: float) -> None:
        """A server is lost, and others will take the place of all members: `settle`, then nobody is told anything."""
        await self.settle(seconds)
        for work in (*self._told, *self._stopping.values()):
            work.cancel()
        for member in (*self.tasks, *self.servers):
            member.lose()

    async def create(self, shard: int, values: Mapping[str, torch.Tensor]) -> None:
        """Make variables on a shard."""
        facts, tensors = sparse_values.written(values)
        await self._ensure_room(shard, sparse_values.taking(facts["keys"], facts["tables"], tensors))
        await self._mutate(shard, "create", facts, tensors)

    async def _ensure_room(self, shard: int, asked: int) -> None:
        """Raise ResourceExhausted if ``asked`` bytes would exceed the limit of a server's process: Dask would kill the
        process.

        They are there twice while they arrive. What is smaller the server refuses itself.
        """
        member = self.shards[shard]
        room = member.info.get("room")
        if room is None or asked < lazy_memory.LARGE:
            return
        stats = await self.insist_on([Ask(each, "stat") for each in member.shards])
        used = sum(int(stat.meta[name]) for stat in stats for name in ("bytes", "spare", "staged"))
        if used + 2 * asked > room:
            raise ResourceExhausted(
                f"bytes in the process of {self.name_of(shard)}: asked {asked}, twice while they arrive, used {used}, "
                f"limit {room}: give its worker more memory, or divide the Variable over more servers"
            )

    async def assign(self, values: Mapping[int, Mapping[str, torch.Tensor]], written: Iterable[str]) -> None:
        """Write pieces of variables on some shards, with no step in between. ``written``: keys of those Variables."""
        async with self.single.turn:
            self.single.wrote(written)
            for shard, mine in values.items():
                await self._mutate(shard, "assign", *sparse_values.written(mine))

    async def drop(self, gone: dict[int, list[str]]) -> None:
        """Forget variables, on the servers and on the tasks that have copies."""
        async with self.single.turn:
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
        self, wanted: dict[int, list[str]], queues: Mapping[int, list[str]] | None = None, *, unheard: bool = False
    ) -> tuple[dict[str, torch.Tensor], Pins]:  # fmt: skip
        """Values by key, all of one step; see `pin`. They are fetched while steps go on."""
        pins = await self.pin(wanted, queues, unheard=unheard)
        try:
            return await self.fetched(pins), pins
        finally:
            self.unpin(pins)

    async def fetched(self, pins: Pins, shards: Iterable[int] | None = None) -> dict[str, torch.Tensor]:
        """Pinned values by key, of some shards or of all."""
        values: dict[str, torch.Tensor] = {}
        asks = [Ask(shard, "pull", {"pinned": pins.number}) for shard in (pins.keys if shards is None else shards)]
        for answer in await self.insist_on(asks):
            lazy_memory.ensure_room(size(answer.tensors), "what comes from a server")
            values |= sparse_values.read(answer.meta["keys"], answer.meta["tables"], answer.tensors)
        return values

    async def write_shards(
        self, pins: Pins, labels: Mapping[int, Mapping[str, str]], about: Mapping[str, Any], whole: Iterable[Shard]
    ) -> dict[int, dict[str, tuple[Shard, ...]] | None]:
        """Let all servers write their pinned values to a checkpoint concurrently: see `ShardWrites`.

        labels: by shard and key. Of each shard the files of each key; None where its server does not see the folder.
        """
        of: dict[Member, dict[str, Mapping[str, str]]] = {}
        for shard, some in labels.items():
            of.setdefault(self.shards[shard], {})[str(shard)] = some
        found: dict[int, dict[str, tuple[Shard, ...]] | None] = {}
        known = packed(whole)

        async def write(member: Member, mine: Mapping[str, Mapping[str, str]]) -> None:
            meta = {**about, "pinned": pins.number, "labels": mine}
            ask = partial(self.link.persist, member.peer, "write_shards", meta, known, epoch=self.epoch)
            op, answer = self.link.op(), cast(Outcome | None, None)
            while answer is None or (isinstance(answer, NotSent | Unknown) and await self.peers.verify(member)):
                answer = await self.peers.unless_dead(member, ask(op=op, deadline=float("inf")))
            match answer:
                case Ok({"seen": False}):
                    found.update(dict.fromkeys(map(int, mine)))
                case Ok({"found": layouts}):
                    for shard, layout in layouts.items():
                        found[int(shard)] = {key: tuple(Shard(*one) for one in some) for key, some in layout.items()}
                case Failure() as failure:
                    raise raised(failure)
                case Refusal(reason, message):
                    raise Aborted(f"{member.name} writes no shards: {reason} {message}", step=self.step)
                case _:
                    raise self.lost or self.lost_server(int(next(iter(mine))))

        writes = [asyncio.ensure_future(write(member, mine)) for member, mine in of.items()]
        try:
            while not all(one.done() for one in writes) and self.lost is None:  # of one that failed others go on
                await asyncio.wait(writes, timeout=LOOK)
        finally:
            for one in writes:
                one.cancel()
            ends = await asyncio.gather(*writes, return_exceptions=True)
        for error in ends:
            if error is not None:
                raise self.lost or error
        return found

    def unpin(self, pins: Pins) -> None:
        """The values are not needed any more."""
        if self.lost is None and not self.is_closed:
            asks = [Ask(shard, "unpin", {"pinned": pins.number}) for shard in pins.keys]
            self.later(self.peers.settled_on(asks))

    async def pin(
        self, wanted: dict[int, list[str]], queues: Mapping[int, list[str]] | None = None, *, unheard: bool = False
    ) -> Pins:  # fmt: skip
        """Let servers hold on to values, all of one step, while steps go on and write another generation.

        Of the ``queues`` by shard what they hold then; unheard: see `RemoteContents.held`. Raises Aborted where
        steps went on in each of several tries, because this process stood still in all of them.
        """
        number = next(self._pins)
        pins = [Ask(shard, "pin", {"pinned": number, "keys": keys, "tables": True}) for shard, keys in wanted.items()]
        try:
            async with AsyncExitStack() as copies:
                for _ in range(PULLS):
                    async with self.single.turn, AsyncExitStack() as holds:
                        known = [*self._unseen, *self._trainings]  # one that ends meanwhile has steps in the values
                        stand = [await holds.enter_async_context(training.held()) for training in known]
                        step, applied = self.step, {each: each.applied_steps() for each in known}
                        answers = await self.insist_on(pins)
                        held = await copies.enter_async_context(self.contents.held(queues or {}, unheard=unheard))
                        used = dict(self.single.used)
                        is_one_step = all([await stands() for stands in stand])
                        is_one_step &= {*self._unseen, *self._trainings} <= {*known}  # else one began meanwhile
                    if is_one_step:
                        break
                else:
                    raise Aborted(
                        f"steps went on during each of {PULLS} pulls: a hold ends by itself, and the notebook stood "
                        "still or the values took long; pull again when it has less to do, or after the training",
                        step=self.step,
                    )
                nbytes = {ask.shard: int(answer.meta["nbytes"]) for ask, answer in zip(pins, answers, strict=True)}
                found = await self.contents.fetched(held)
                return Pins(number, wanted, step, found, applied, held.seen, used, nbytes)
        except BaseException:
            self.unpin(Pins(number, wanted, self.step, {}, {}))
            raise

    async def refill(self, brought: ShardContents, written: Iterable[str]) -> None:
        """Restore the contents of queues and Variables; steps that used one of them raise Aborted.

        In a turn that was taken before. written: the keys of these Variables.
        """
        void = await self.contents.refill(brought)
        self.single.wrote(written)
        self.single.void(void)

    async def stats(self, seconds: float) -> dict[int, dict[str, Any]]:
        """The statistics of each shard of a live server, received within ``seconds``."""
        asks = [Ask(shard, "stat") for shard in range(len(self.shards))]
        answers = await self.peers.tell(asks, time.monotonic() + seconds)
        return {shard: dict(answer.meta) for shard, answer in enumerate(answers) if isinstance(answer, Ok)}

    async def task_facts(self, seconds: float) -> dict[str, dict[str, Any]]:
        """Facts of each live task, by its name, received within ``seconds``: the ``code`` that it ran last with the
        reason, its ``traffic``, bytes by the address of a server's worker, and the same as ``posted`` to other tasks.
        """
        live = [member for member in self.tasks if member.is_there]
        end = time.monotonic() + seconds
        calls = (self.link.call(member.peer, "facts", {}, epoch=self.epoch, deadline=end) for member in live)
        answers = zip(live, await asyncio.gather(*calls), strict=True)
        return {member.name: dict(answer.meta) for member, answer in answers if isinstance(answer, Ok)}

    async def _who_waits(self, seconds: float) -> tuple[list[Outcome], list[Outcome]]:
        """The steps that wait for queues, reported by all tasks, and the waiting attempts, reported by all shards."""
        live = [member.peer for member in self.tasks if member.is_there]
        end = time.monotonic() + seconds
        calls = (self.link.call(peer, "waits", {}, epoch=self.epoch, deadline=end) for peer in live)
        steps = await asyncio.gather(*calls)
        asks = [Ask(shard, "waiting") for shard in range(len(self.shards))]
        return steps, await self.peers.tell(asks, time.monotonic() + seconds)

    # -- trainings whose tasks loop by themselves ----------------------------------------------------------------

    async def train(
        self, placed: PlacedStep, mode: Mode, data: Ahead | None, seconds: float | None,
        applied: AppliedSteps | None = None,
    ) -> Training:  # fmt: skip
        """Begin a training. applied: steps of the training that servers had applied before its cluster was lost."""
        if self.is_closing:
            raise self.error(e.UserStop(), seconds)
        deadline = time.monotonic() + seconds if seconds is not None else float("inf")
        since = self.interrupts
        tasks = await self.idle(deadline, placed.tasks, since)
        training = Training(self, placed, mode, data, tasks, deadline, self.patience, applied)
        await training.start()
        if self.interrupts != since:
            training.feed(e.Interrupt())
        return training

    @asynccontextmanager
    async def heard(self, since: int) -> AsyncIterator[asyncio.Queue[p.Event]]:
        """Events for a machine that is in progress; an interrupt that came after the first ``since`` is one at once."""
        queue: asyncio.Queue[p.Event] = asyncio.Queue()
        self._queues.add(queue)
        if self.interrupts != since:
            queue.put_nowait(e.Interrupt())
        watcher = asyncio.create_task(self.peers.watch(queue))
        try:
            yield queue
        finally:
            self._queues.discard(queue)
            watcher.cancel()

    def attend(self, training: Training) -> None:
        """Begin to report losses and ticks of the clock to a training. Raises FailedPrecondition."""
        self.ensure_apart(training)
        self._queues.add(training.queue)
        for task in self.free(training.placed.tasks):  # also those that came since it was planned
            training.queue.put_nowait(e.TaskJoin(task))
        self._trainings[training] = asyncio.create_task(self.peers.watch(training.queue))

    def forget(self, training: Training) -> None:
        """A training is over."""
        self._queues.discard(training.queue)
        watcher = self._trainings.pop(training, None)
        if watcher is not None:
            watcher.cancel()
            self._unseen.append(training)

    def shown(self, pins: Pins) -> None:
        """The copies of the values in this process are the pinned ones, with the steps of trainings then."""
        for training, applied in pins.applied.items():
            training.kept = applied
        self._unseen = [training for training in self._unseen if training not in pins.applied]

    @property
    def has_ranks(self) -> bool:
        """Whether tasks of a training in progress hold the Variables."""
        return any(training.has_ranks for training in self._trainings)

    def with_ranks(self, placed: PlacedStep) -> list[Training]:
        """Trainings whose tasks hold Variables that this step reads or writes."""
        return [each for each in self._trainings if each.has_ranks and each.placed.written_there & placed.used_there]

    def ensure_apart(self, training: Training) -> None:
        """Raise FailedPrecondition if ranks of one training write Variables that another training uses."""
        for other in self._trainings.keys() - {training}:
            for ranks, user in ((training, other), (other, training)):
                if ranks.has_ranks and (both := ranks.placed.written_there & user.placed.used_there):
                    raise FailedPrecondition(
                        f"another training uses {', '.join(sorted(both)[:4])}, and of these tasks hold the values "
                        "while one in mode='allreduce' goes on: let one of them end first, or use mode='sync'"
                    )

    async def unload(self, sent: SentData) -> None:
        """Tasks drop data that they were sent."""
        deadline = time.monotonic() + p.STOPS_WITHIN
        await asyncio.gather(*(
            self.link.call(member.peer, "unload", {"data": sent.name}, epoch=self.epoch, deadline=deadline)
            for member in sent.members
            if member.alive
        ))  # fmt: skip

    def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the background; only `settle` waits for its end."""
        told = asyncio.ensure_future(work)
        self._told.add(told)
        told.add_done_callback(self._told.discard)

    async def training_error(self, training: Training, seconds: float | None) -> TfnbError | None:
        """Why a training ended, if not by the end of its data. In the event loop: queues may come home then."""
        end = training.end
        if end is None or end.cause is None:
            return None
        error = self.error(end.cause, seconds)
        if isinstance(end.cause, e.TimedOut):
            error.message = (
                f"training did not end within {round(seconds or 0.0, 1):g} s; variables are at step {self.step}"
            )
        for shards in end.torn:
            names = ", ".join(map(self.name_of, shards))
            error.add_note(f"one more batch was applied on {names} only: no task was left to complete it")
        return error

    # -- tasks that stop ------------------------------------------------------------------------------------------

    def stop(self, member: Member, method: str, meta: Callable[[], dict[str, Any]]) -> asyncio.Task[Ok | None]:
        """Let a task stop its computation; the task is not idle until then. Returns its answer; None if dead."""
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
        """Wait until a task has stopped; at the deadline restart the task, if its process holds no variables."""
        answer: Outcome | None = None
        latest = time.monotonic() + LATEST
        while member.alive and not isinstance(answer, Ok):
            patience = p.patience(member.seconds)
            deadline = time.monotonic() + patience
            about = {**meta(), "lost": (lost := self.peers.lost_shards)}  # nobody answers for these
            call = self.link.call(member.peer, method, about, epoch=self.epoch, deadline=deadline)
            with Looks() as looks:
                answer = await self._unless_more_are_lost(lost, self.peers.unless_dead(member, call))
            if answer is None:  # the task may wait for that server, and learns of its loss from the next call
                continue
            if isinstance(answer, Refusal) and answer.reason == "stale":
                answer = Ok(NO_LOOP)
            if isinstance(answer, Ok):
                break
            begin = time.monotonic()
            if not await self.peers.verify(member) or member in self.servers:
                continue
            if self.peers.silent:  # it may wait for one of them
                latest = time.monotonic() + LATEST
                continue
            is_starved = time.monotonic() - begin > STARVED
            if not (looks.were_late or is_starved) or time.monotonic() > latest:
                await self._restart(member, patience)
        if before is not None:
            await asyncio.wait({before})
        return answer if isinstance(answer, Ok) else None

    async def _unless_more_are_lost(self, lost: Sequence[int], call: Coroutine[Any, Any, T]) -> T | None:
        """The result of a call, or None as soon as other shards than these are lost."""
        asked = asyncio.ensure_future(call)
        try:
            while not asked.done() and self.peers.lost_shards == lost:
                await asyncio.wait({asked}, timeout=LOOK)
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()

    async def _restart(self, member: Member, patience: float) -> None:
        """End a task's process: its nanny starts another, and a task is made there as on any worker that joins."""
        late = f"{member.name} did not stop computing within {patience:.0f} s"
        if not member.info.get("nanny"):
            self.notes.append(f"{late} and is given up: no nanny would start another process")
        elif not self.charge(member):
            self.notes.append(f"{late} and is given up: {self.restarts}. Connect again to use its worker")
        elif isinstance(answer := await self.quit(member), Refusal):
            self.notes.append(f"{late} and is given up: {answer.message}")
        else:
            self.notes.append(f"{late}; its process was replaced")
        member.lose()
        self._report(self.peers.lost(self.tasks.index(member)))

    def charge(self, member: Member) -> bool:
        """Charge a restart to the budget, once for each member; False if the budget is spent."""
        member.is_charged = member.is_charged or self.restarts.spend(time.monotonic())
        return member.is_charged

    async def reset(self, member: Member) -> Outcome:
        """Let a silent task that answers again abort all of its computations; repeated until the task is given up."""
        self.link.confirm(member.peer.addr)
        deadline = time.monotonic() + max(GIVEN_UP - member.silence, p.patience(member.seconds))
        return await self.link.persist(member.peer, "reset", epoch=self.epoch, deadline=deadline)

    async def stuck(self) -> list[Member]:
        """The servers that are dead, and the members that do not answer, of those whose workers Dask lists.

        After the loss of a server: another task on such a worker would wait for the same process.
        """

        async def is_stuck(member: Member) -> bool:
            self.link.confirm(member.peer.addr)
            until = time.monotonic() + SILENCE
            answer = await self.link.call(member.peer, "ping", epoch=self.epoch, deadline=until)
            if isinstance(answer, Ok) or await self.link.refuses(member.peer.addr):  # Dask hears soon of who is gone
                return member in self.servers and not member.alive
            return True

        listed = [member for member in dict.fromkeys((*self.servers, *self.places.values())) if member.reported]
        found = await asyncio.gather(*map(is_stuck, listed))
        return list(itertools.compress(listed, found))

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
        """Seconds that work waits for a task where there is none: a nanny starts one again, or a silent one answers."""
        return REPLACED_WITHIN if any(m.info.get("nanny") or m.is_silent for m in self.places.values()) else 0.0

    @property
    def comes(self) -> bool:
        """Whether a task may come back: a silent one, or one lost lately that a Dask nanny restarts."""
        since = time.monotonic() - REPLACED_WITHIN
        lost = [member for member in self.places.values() if not member.is_there]
        return any(m.is_silent or (m.lost_at > since and m.info.get("nanny")) for m in lost)

    def join(self, member: Member) -> None:
        """One more task, from the next step on."""
        before = [index for index, other in enumerate(self.tasks) if other.name == member.name]
        self.tasks.append(member)
        self.homes.append(member.peer.addr)
        self._arrival.set()
        self._report(e.TaskJoin(len(self.tasks) - 1, before[-1] if before else None))

    def first(self, task: int) -> int:
        """The first of the tasks that one follows."""
        return next(index for index, member in enumerate(self.tasks) if member.name == self.tasks[task].name)

    def bury(self, member: Member) -> None:
        """Tell servers that a task is lost: its waiting requests end, and answers pinned for the task are dropped."""
        about = {"client": member.info.get("client")}
        asks = [Ask(shard, "gone", about) for shard in range(len(self.shards))]
        self.later(self.peers.settled_on(asks))

    def say(self, line: str) -> None:
        """Tell the user, in one line."""
        self.lines.append(line)
        self.said += 1

    def _report(self, event: p.Event) -> None:
        """Tell every machine in progress."""
        for queue in self._queues:
            queue.put_nowait(event)

    async def idle(self, deadline: float, asked: Sequence[int], since: int) -> list[int]:
        """The live tasks, or the requested ones, after stopped computations have ended; tasks that take long are left
        out.

        Of several that are asked for all or none, in their order.

        Raises Cancelled where there were more than ``since`` interrupts before there is one, and the error of a cluster
        that is lost.
        """
        while any(training.is_left for training in self._trainings) and time.monotonic() < deadline:
            self._ensure_wanted(since)
            await asyncio.sleep(LOOK)
        await self.stops_ended(deadline)
        while not (free := self.free(asked)) and self._stopping:
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(member.name for member in self._stopping)
                raise DeadlineExceeded(f"{names} still computes what was stopped before", step=self.step)
            self._ensure_wanted(since)
            await self._any_stops(min(left, LOOK), asyncio.FIRST_COMPLETED)
        while not (free := self.free(asked)) and self.comes and time.monotonic() < deadline:
            self._ensure_wanted(since)
            self._arrival.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), LOOK)
        return free

    def _ensure_wanted(self, since: int) -> None:
        if self.lost is not None:  # no task comes any more
            raise self.lost
        if self.interrupts != since:
            raise Cancelled(f"interrupted at step {self.step}", step=self.step)

    def free(self, asked: Sequence[int]) -> list[int]:
        """The live tasks with no computation being stopped; of requested tasks all or none, in their order."""
        free = [index for index in self._live() if self.tasks[index] not in self._stopping]
        if not asked:
            return free
        by_number = {self.tasks[index].number: index for index in free}
        found = [by_number.get(number) for number in asked]
        return [index for index in found if index is not None] if None not in found else []

    def is_asked_for(self, task: int, asked: Sequence[int]) -> bool:
        """Whether a task, or its predecessor of the same number, is among the requested tasks."""
        return not asked or self.tasks[task].number in asked

    async def stops_ended(self, deadline: float = float("inf")) -> None:
        """Wait until no task is told to stop a computation, but no longer than GRACE."""
        if self._stopping:
            await self._any_stops(min(GRACE, deadline - time.monotonic()), asyncio.ALL_COMPLETED)

    async def _any_stops(self, seconds: float, when: str) -> None:
        timeout = None if seconds == float("inf") else max(0.0, seconds)
        await asyncio.wait(set(self._stopping.values()), timeout=timeout, return_when=when)

    async def event_of(self, answer: Outcome, number: int, task: int) -> p.Event:
        """The event for a task's answer; without an answer, after checking whether the task is alive."""
        member = self.tasks[task]
        match answer:
            case Ok():
                member.seconds.append(float(answer.meta.get("timings", {}).get("compute", 0.0)))
                return p.TaskAnswer(number, task, answer)
            case Failure(details={"missed": True, "shard": int(shard)}):
                if not await self.peers.verify(self.shards[shard]):
                    return e.ShardLost(shard)
                return p.CallFailure(number, task, answer)
            case Failure(details={"missed": True, "peer": str(name)}):
                return await self._missed_peer(number, task, name, answer)
            case Failure():
                return p.Error(number, task, answer)
            case Refusal("stale", message):
                return p.CallFailure(number, task, Failure("StepAborted", message))
            case Refusal("unknown-task" | "fenced", _):
                member.lose()
                return self.peers.lost(task)
            case Refusal(reason, message):
                return p.Error(number, task, Failure("Internal", f"{member.name} refused: {reason} {message}"))
        if not await self.peers.verify(member):
            return self.peers.lost(task)
        return p.CallFailure(
            number, task, Failure("Unavailable", f"{member.name}: {answer.message}", {"task": member.name})
        )

    async def _missed_peer(self, number: int, task: int, name: str, answer: Failure) -> p.Event:
        """The event for a task that missed a message from a peer of its step."""
        for index, member in enumerate(self.tasks):
            if name in (member.name, member.peer.addr) and member.alive and not await self.peers.verify(member):
                return self.peers.lost(index)
        return p.CallFailure(number, task, answer)

    async def judged(self, answer: Outcome, task: int) -> Any:
        """The event for a training when a task's loop has ended with this answer."""
        if isinstance(answer, Refusal) and answer.reason == "unknown-plan":
            for member in (*self.tasks, *self.servers):
                member.plans.clear()
            return LoopFailure(task, Failure("NotFound", f"plan {answer.message}"), is_fatal=False)
        match await self.event_of(answer, 0, task):
            case p.CallFailure(_, _, failure):
                return LoopFailure(task, failure, is_fatal=False)
            case p.Error(_, _, failure):
                return LoopFailure(task, failure, is_fatal=True)
            case event:
                return event

    # -- plans ---------------------------------------------------------------------------------------------------

    async def register(self, placed: PlacedStep, member: Member, *, again: bool = False) -> None:
        """See that a task and the servers know the plans of a step."""
        plan = placed.plan(member.number)
        plans = [plan] if placed.late is None else [plan, placed.late]
        work: list[tuple[Member, str, Plan, int | None]] = [(member, "register", each, None) for each in plans]
        work += [(self.shards[shard], "register_shard", plan, shard) for shard, plan in placed.servers.items()]
        missing = [item for item in work if again or item[2].id not in item[0].plans]
        if missing:
            await asyncio.gather(*(self._register_one(*item) for item in missing))

    async def register_updates(self, updates: Mapping[int, Plan], member: Member) -> None:
        """Register with a task the update plans that it runs on copies of its own."""
        missing = [plan for plan in updates.values() if plan.id not in member.plans]
        await asyncio.gather(*(self._register_one(member, "register_update", plan, None) for plan in missing))

    async def _register_one(self, member: Member, method: str, plan: Plan, shard: int | None) -> None:
        answer: Outcome | e.ShardLost
        if shard is not None:
            answer = await self.peers.settled(shard, method, plan.meta, plan.tensors)
        else:
            deadline = time.monotonic() + GIVEN_UP
            answer = await self.link.persist(
                member.peer, method, plan.meta, plan.tensors, epoch=self.epoch, deadline=deadline
            )
        if isinstance(answer, Ok):
            member.plans.add(plan.id)
        elif isinstance(answer, e.ShardLost):
            raise NotDone(Failure("Unavailable", f"{member.name} is lost", {"missed": True, "shard": shard}))
        else:
            raise NotDone(answer)

    # -- servers -------------------------------------------------------------------------------------------------

    async def _mutate(self, shard: int, method: str, meta: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        answer = await self.peers.settled(shard, method, meta, tensors)
        if isinstance(answer, e.ShardLost):
            raise self.error(e.ServerLost(shard), None)
        if isinstance(answer, Failure):
            raise raised(answer)

    async def insist_on(self, asks: Sequence[Ask], is_decided: bool = False) -> list[Ok]:
        """`settled_on`, but raises the first error.

        is_decided: others have done it by now. A server that fails to is as good as lost: the cluster ends.
        """
        answers, found = await self.peers.settled_on(asks), []
        for ask, answer in zip(asks, answers, strict=True) if is_decided else ():
            if isinstance(answer, Failure):
                member = self.shards[ask.shard]
                member.info.setdefault("poisoned", f"failed to {ask.method}: {answer.message}")
                member.lose()
        for ask, answer in zip(asks, answers, strict=True):
            if isinstance(answer, e.ShardLost) or (is_decided and isinstance(answer, Failure)):
                raise self.lost_server(ask.shard)
            if isinstance(answer, Failure):
                raise raised(answer)
            found.append(answer)
        return found

    # -- who is alive ----------------------------------------------------------------------------------------------

    def _live(self) -> list[int]:
        return [index for index, member in enumerate(self.tasks) if member.is_there]

    # -- errors ------------------------------------------------------------------------------------------------------

    def error(self, cause: e.Cause, seconds: float | None, waits: Sequence[str] = ()) -> TfnbError:
        """The exception for a cause; a lost server or scheduler ends the cluster. waits: pending waits, in words."""
        if self.is_closed and self.lost is None:
            cause = e.UserStop()
        if self.link.dask.status not in ("running", "newly-created") and not isinstance(cause, Failure | e.UserStop):
            return self.lose_scheduler()
        match cause:
            case e.UserStop() if self.is_closing:
                return Aborted(f"the cluster was closed at step {self.step}, run it again", step=self.step)
            case e.UserStop():
                return Cancelled(f"interrupted at step {self.step}", step=self.step)
            case e.TimedOut():
                names = ", ".join(self.tasks[i].name for i in self._live())
                return DeadlineExceeded(
                    f"step {self.step + 1} did not end within {seconds} s; it waited for "
                    + ("\n  ".join(["", *waits]) if waits else names or "nobody"),
                    step=self.step,
                )
            case e.TasksLost(message, tasks, put):
                message += f" ({put}), what it took is taken, and it put nothing else" if put else ""
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
        if isinstance(error, NonFinite):
            error.step = self.step
            if not isinstance(error, NonFiniteGradient):
                error.add_note(f"variables are at step {self.step} of the cluster")
        if isinstance(error, NonFiniteGradient):
            first, *located = error.message.split("\n")
            first += (
                f". Variables are at step {self.step}: take a smaller learning rate, limit the gradients, or look for "
                "a logarithm, root or division of zero"
            )
            error.message = "\n".join([first, *located])
        return error

    def lost_server(self, shard: int) -> TfnbError:
        """The error for a server that is dead; ends the cluster."""
        return self.error(e.ServerLost(shard), None)

    def lose_scheduler(self) -> TfnbError:
        """End the cluster after the loss of the scheduler, since a scheduler forgets a silent client's actors."""
        is_closed = self.link.dask.status in ("closing", "closed")
        what = "Dask client was closed" if is_closed else "Dask scheduler was lost"
        return self._lose(SchedulerLost(f"the {what} at step {self.step}"))

    def lose_entry(self, error: TfnbError) -> None:
        """End the cluster: its entry in the scheduler's registry is missing or wrong."""
        self._lose(error)

    def _server_error(self, shard: int) -> ParameterServerLost:
        member, count = self.shards[shard], len(self.servers)
        why = member.info.get("poisoned", "was lost")
        where = f"parameter server {self.servers.index(member) + 1} of {count} ({member.peer.addr})"
        if len(self.shards) > count:
            where += f", which held {in_words(member.shards)} of {len(self.shards)},"
        return ParameterServerLost(f"{where} {why} at step {self.step}.", step=self.step, task=member.name)

    def name_of(self, shard: int) -> str:
        """The name of a shard's server, with the shard if the server holds several."""
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
