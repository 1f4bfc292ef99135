"""The task: one Dask actor on each worker, reached through its one method ``handle``.

A server hosts the cores of its shards (fed from one thread, in order); a compute task runs registered plans: pull the
Variables that the plan reads, compute in a thread of its own, send updates to the servers, answer with the fetches. The
event loop passes messages.
Every error, also SystemExit from a kernel, becomes an answer at the edge; only cancellation by Dask itself passes.
Imports Dask for the worker it lives on; never IPython.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import multiprocessing
import os
import platform
import secrets
import signal
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import torch
from distributed import get_worker
from distributed.system import MEMORY_LIMIT

from tfnb import __version__
from tfnb.cluster.queues import queues_there
from tfnb.cluster.queues.deadlocks import who_waits
from tfnb.cluster.queues.queues_there import Channels, in_round
from tfnb.cluster.server.core import PLANS, Core, fence
from tfnb.cluster.server.core_events import Send
from tfnb.cluster.server.cores import Cores
from tfnb.cluster.server.serving import Serving
from tfnb.cluster.tasks.computing import Computing, in_thread
from tfnb.cluster.tasks.exchange import Exchange
from tfnb.cluster.tasks.held_copies import HeldCopies
from tfnb.cluster.tasks.part_programs import PartProgram
from tfnb.cluster.tasks.programs import ComputeProgram, Push, ShardProgram
from tfnb.cluster.tasks.reading import Reader
from tfnb.cluster.tasks.shard_writes import ShardWrites
from tfnb.cluster.tasks.step_notes import ShardCall, StepNotes, arrivals
from tfnb.cluster.tasks.step_windows import StageWindow, missed
from tfnb.cluster.tasks.task_loops import Loops
from tfnb.cluster.wire import asking, envelope
from tfnb.cluster.wire.messages import (
    Ask,
    Failure,
    NotDone,
    Ok,
    OpId,
    Outcome,
    Peer,
    Refusal,
    Request,
    failed,
)
from tfnb.cluster.wire.streams import Streams, host_of
from tfnb.cluster.wire.transport import outcome_header, read_request, worker_link, write_outcome
from tfnb.errors import InvalidArgument, NonFiniteGradient, ParameterServerLost, StepAborted, Unavailable
from tfnb.execution import heap
from tfnb.execution.dataflow.executor import Meet
from tfnb.execution.tiers.tiered import limit_copies
from tfnb.execution.tracing.clock_offsets import clock_name
from tfnb.state.store import Store
from tfnb.state.waits import WAITS

Answer = Ok | Failure | Refusal

TICK = 0.5  # seconds between looks at requests that wait inside of the core
WAITING = 64  # steps that use queues at a time: each may wait for another one
SHARE = 0.6  # fraction of the worker's memory limit for a server's values
MOST, LEAST = 0.8, 0.1  # fractions of the limit: for the whole process; for a server's values in any case
ENDS = 0.9  # fraction of the limit for all memory: Dask ends a process at 0.95
COPIES = 4  # of a step's inputs and outputs, while its compiled code is compared


def versions() -> dict[str, str]:
    """Versions that must agree between the processes of a cluster."""
    return {
        "tfnb": __version__, "torch": torch.__version__.partition("+")[0],
        "python": ".".join(platform.python_version_tuple()[:2]), "envelope": str(envelope.VERSION),
    }  # fmt: skip


class TaskActor:
    """Dask's handle of a task, in no cycle, so the task ends when Dask drops the handle, even if the notebook is dead.

    ``threads``: torch threads; ``budget``: bytes of values a server may hold.
    """

    def __init__(self, name: str, threads: int | None = None, budget: int | None = None) -> None:
        self.task = ClusterTask(name, threads, budget)
        weakref.finalize(self, self.task.end)

    async def handle(self, *frames: Any) -> list[envelope.Buffer]:
        """Answer one message with one message."""
        return await self.task.handle(*frames)


class ClusterTask:
    """One task of a cluster, as `TaskActor` says."""

    def __init__(self, name: str, threads: int | None, budget: int | None) -> None:
        worker = get_worker()
        limit = worker.memory_manager.memory_limit
        self.name, self.worker = name, worker
        self.host = host_of(worker.address) or "127.0.0.1"  # of ranks in one process, too
        self.budget = budget if budget is not None else _budget(limit or MEMORY_LIMIT)
        self.most = int(ENDS * (limit or MEMORY_LIMIT))  # bytes of all memory of its process
        self._room = self.most - psutil.Process().memory_info().rss
        self.incarnation = secrets.randbits(62)
        self.epoch = 0
        self.cores = Cores()  # of the shards that it holds
        self.serving: Serving | None = None
        self._at_exit: weakref.finalize[..., ClusterTask] | None = None  # waits for the server's thread
        self._sending: set[asyncio.Future[None]] = set()
        self.shards: list[Peer] = []  # the task that holds each of them
        self.link = worker_link(worker, envelope.BUDGET)
        self.link.own = self.incarnation, self._answer_own
        self.plans: OrderedDict[str, ComputeProgram] = OrderedDict()
        self.cache: dict[str, tuple[int, torch.Tensor]] = {}  # key -> version and value, as last pulled
        self.steps: dict[int, asyncio.Task[Answer]] = {}  # by round
        self.floor = 0  # rounds up to here are over
        self._reset_by = OpId("", -1)  # the notebook's last call of `reset`: its earlier calls come too late
        self._resetting: asyncio.Future[None] | None = None
        self.computing, self.waiting = Computing(), Computing(WAITING)
        self.over: set[int] = set()  # rounds above the floor
        self._loop: asyncio.AbstractEventLoop = worker.loop.asyncio_loop  # type: ignore[attr-defined]
        self.queues = Channels(self._loop, self._asking)
        self.reader = Reader(worker)
        self.room = self.budget // 2
        self.loops = Loops(self, self.plans)
        self.writes = ShardWrites(self._serve)
        self.streams = Streams(self.link, worker.security)
        self.copies = HeldCopies(self, Streams(self.link, worker.security), self.cores.hold)
        about = self.link, self._loop, worker.security
        self.exchange = Exchange(name, self.incarnation, *about, self._served, lambda: self.epoch)
        torch.set_num_threads(threads or worker.state.nthreads)  # here, and in threads that begin later
        self._loop.call_soon_threadsafe(torch.set_num_threads, threads or worker.state.nthreads)
        heap.set_limits()
        limit_copies(self._room // COPIES)
        self._methods: dict[str, Callable[[Request], Awaitable[Answer]]] = {
            "configure": self._configure, "register": self._register, "run": self._run, "cancel": self._cancel,
            "forget": self._forget, "reset": self._reset, "quit": self._quit, "stream": self._open_stream,
            "run_window": self._run_window, "waits": self._waits, "facts": self._facts, "trace": self._trace,
            "deliver": self.exchange.deliver, "write_shards": self.writes.on,
            **dict.fromkeys((*Core.METHODS, "batch"), self._serve), **dict.fromkeys(Loops.METHODS, self.loops.on),
            **dict.fromkeys(HeldCopies.METHODS, self.copies.on),
        }  # fmt: skip

    def end(self) -> None:
        """End its threads and give its memory back: a model is too large to wait until Python looks for cycles."""
        self.streams.end()
        self.exchange.close()
        self.writes.end()
        self.copies.end()
        for threads in (self.computing, self.waiting):
            threads.close()
        thread = None
        if self.serving is not None and self._at_exit is not None:
            thread = self.serving.stop()
            self._at_exit.detach()
        for program in list(self.plans.values()):
            program.code.close()
        with suppress(RuntimeError):  # the worker ends, too
            self._loop.call_soon_threadsafe(self.loops.end)
            self._loop.call_soon_threadsafe(_collect, self._loop, thread)

    async def handle(self, *frames: Any) -> list[envelope.Buffer]:
        """Answer one message with one message."""
        try:
            request = read_request(frames, envelope.BUDGET)
            answer = await self._answer(request)
            return write_outcome(answer, envelope.BUDGET)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also SystemExit: it must not end the worker
            return write_outcome(failed(error, self.name), envelope.BUDGET)

    async def _answer_own(self, request: Request) -> Answer:
        """Answer a call of this task to a shard in its own process."""
        try:
            return await self._answer(request)
        except Exception as error:  # as data, as from another process
            return failed(error, self.name)

    async def _answer(self, request: Request) -> Answer:
        match request.method:
            case "hello":
                return self._hello()
            case "ping":
                at = time.monotonic_ns()
                known = {"incarnation": self.incarnation, "epoch": self.epoch}
                return Ok({**known, "at": [at, at], "clock": clock_name()})
            case "configure":
                pass  # it sets the epoch
            case _:
                refused = fence(request, self.epoch, self.incarnation)
                if refused is not None:
                    return refused
                if self._is_too_late(request.op):
                    return Refusal("stale", f"{self.name} was reset after this call")
        method = self._methods.get(request.method)
        if method is None:
            return Refusal("protocol", f"a task has no method {request.method[:40]!r}")
        return await method(request)

    def _hello(self) -> Ok:
        _ignore_interrupts()
        return Ok({
            "incarnation": self.incarnation, "versions": versions(), "pid": os.getpid(), "budget": self.budget,
            "room": self._room,
            "threads": torch.get_num_threads(), "devices": _devices(), "nanny": self.worker.nanny is not None,
            "client": self.link.client, "lifetime": getattr(self.worker, "lifetime", None),
        })  # fmt: skip

    async def _configure(self, request: Request) -> Answer:
        """Join the cluster: the epoch, the task that holds each shard, and the shards of this task."""
        meta = request.meta
        if request.incarnation != self.incarnation:
            return Refusal("fenced", "this address now belongs to another task")
        if int(meta["epoch"]) < self.epoch:
            return Refusal("fenced", f"this task is at epoch {self.epoch}")
        self.epoch = int(meta["epoch"])
        self.shards = [Peer(str(a), str(k), int(i)) for a, k, i in meta["shards"]]
        self.cache.clear()
        self.streams.end()
        if meta["holds"] and not len(self.cores):
            for shard in meta["holds"]:
                store, mine = (
                    Store(budget=self.budget, is_shared=True),
                    {"incarnation": self.incarnation, "shard": int(shard)},
                )
                self.cores.add(Core(store, ShardProgram, epoch=self.epoch, **mine))
            self._served()
        for core in self.cores:
            core.epoch = self.epoch
        return Ok({"epoch": self.epoch})

    def _served(self) -> Serving:
        """The thread of its sockets and cores; made when a server is configured, or posts come or go."""
        if self.serving is None:
            send = weakref.WeakMethod(self._begin_send)
            carry = partial(_tell, self._loop, _call, send)
            self.serving = Serving(self.cores, carry, receive=self.exchange.receive)
            self.exchange.serving = self.serving
            self._at_exit = weakref.finalize(self, self.serving.close)
        return self.serving

    # -- a server -----------------------------------------------------------------------------------------------

    async def _serve(self, request: Request) -> Answer:
        serving = self.serving
        if serving is None or not len(self.cores):
            return Refusal("protocol", f"{self.name} is no parameter server")
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()
        serving.ask(request, lambda answer: _tell(loop, _set, answered, answer))
        return await answered

    async def used(self) -> int:
        """Bytes of the values of its own shards, with their older generations and staged parts."""
        asks = [
            Request("stat", self.link.op(), self.epoch, self.incarnation, {"shard": core.shard}) for core in self.cores
        ]
        answers = [await self._serve(ask) for ask in asks]
        stats = [answer.meta for answer in answers if isinstance(answer, Ok)]
        return sum(int(stat[name]) for stat in stats for name in ("bytes", "spare", "staged"))

    async def _open_stream(self, request: Request) -> Answer:
        """The address where this task listens for direct streams and posts, and a key for one connection."""
        try:
            offer = self._served().offer(self.worker.address, self.worker.security)
        except OSError as error:
            return Refusal("protocol", str(error))
        return Ok({"host": offer.host, "port": offer.port, "name": offer.name.hex(), "key": offer.key.hex()})

    def _begin_send(self, sends: Sequence[Send]) -> None:
        asks = [Ask(send.shard, send.method, send.meta) for send in sends]
        for peer, places in self._by_process(asks).items():
            sending = asyncio.ensure_future(self._send(peer, [asks[place] for place in places]))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    async def _send(self, peer: Peer, asks: Sequence[Ask]) -> None:
        """Tell the shards of another process, repeatedly; the notebook notices the loss of that process."""
        await asking.persisted(self.link, peer, asks, epoch=self.epoch)

    # -- a compute task ---------------------------------------------------------------------------------------------

    async def _register(self, request: Request) -> Answer:
        plan = str(request.meta["plan"])
        if "late" in request.meta:
            return await self.loops.register_late(request)
        if plan not in self.plans:
            kind = PartProgram if "part" in request.meta else ComputeProgram
            self.plans[plan] = await in_thread(self.computing.executor, lambda: kind(request.meta, request.tensors))
            while len(self.plans) > PLANS:
                self.plans.popitem(last=False)
        return Ok({"plan": plan})

    async def _trace(self, request: Request) -> Answer:
        """Prepare a plan's tracer for the next step, so that the preparation is not part of the traced times."""
        program = self.plans.get(str(request.meta["plan"]))
        if program is None:
            return Refusal("unknown-plan", str(request.meta["plan"]))
        await in_thread(self.computing.executor, lambda: program.tracer)
        self.exchange.arrivals = arrivals()
        return Ok()

    async def _run(self, request: Request) -> Answer:
        """Run a plan for a round; ends early when the round is cancelled."""
        number = int(request.meta["round"])
        if number <= self.floor or number in self.over:
            return Refusal("stale", f"round {number} is over")
        step = asyncio.ensure_future(self._step(request, number))
        self.steps[number] = step
        try:
            await asyncio.wait({step})
        finally:
            step.cancel()
            self.steps.pop(number, None)
        return self._cancelled(number) if step.cancelled() else step.result()

    def _cancelled(self, number: int) -> Failure:
        return Failure("Cancelled", f"round {number} was cancelled", {"task": self.name, "cancelled": number})

    async def _cancel(self, request: Request) -> Answer:
        """End a round, and all up to ``floor`` (by default the round itself); answers when the threads have left them.

        The answer has their pending waits. Servers drop staged parts; ``lost`` servers are not asked any more.
        ``window``: how many rounds from this one on.
        """
        ended = int(request.meta["round"])
        rounds = range(ended, ended + int(request.meta.get("window", 1)))
        self.floor = floor = max(self.floor, int(request.meta.get("floor", ended)))
        self.over = {number for number in {*self.over, *rounds} if number > floor}
        for number in rounds:
            self.exchange.abort(number, floor, StepAborted(f"round {number} was cancelled"))
        for number, step in list(self.steps.items()):
            if number <= floor or number == ended:
                step.cancel()
        stopping = [
            asyncio.ensure_future(threads.stopped(lambda number: number <= floor or number == ended))
            for threads in (self.computing, self.waiting)
        ]
        await asyncio.sleep(0)  # threads are stopped before their waits end
        for shard in request.meta.get("lost", ()):
            self.queues.lose(int(shard), ParameterServerLost(f"server {shard} was lost"))
        return Ok({"waits": [wait for waits in await asyncio.gather(*stopping) for wait in waits]})

    async def _run_window(self, request: Request) -> Answer:
        """Take a window of steps of a part; answers when this stage has left it, with the steps that it computed."""
        number, meta = int(request.meta["round"]), request.meta
        if number <= self.floor or number in self.over:
            return Refusal("stale", f"round {number} is over")
        program = self.plans.get(str(meta["plan"]))
        if not isinstance(program, PartProgram):
            return Refusal("unknown-plan", str(meta["plan"]))
        self.plans.move_to_end(str(meta["plan"]))
        self.exchange.arrivals = None
        window = StageWindow(self.exchange, self._ask_here, program, _peers(meta), meta, request.tensors)
        await self.waiting.work(number, window.take)
        return window.answer

    def _ask_here(self, ask: Ask, reply: Callable[[Answer], None]) -> None:
        """Ask a shard in this process, from any thread."""
        meta = {**ask.meta, "shard": ask.shard}
        op = ask.op or self.link.op()
        self._served().ask(Request(ask.method, op, self.epoch, self.incarnation, meta, ask.tensors), reply)

    async def _reset(self, request: Request) -> Answer:
        """End every round and loop, and drop data and copies of values; answers when nothing of them runs.

        The notebook had taken this task for silent, and sends plans and data anew.
        """
        if request.op != self._reset_by:
            self._reset_by = request.op
            self._resetting = asyncio.ensure_future(self._end_all())
        if self._resetting is not None:
            await asyncio.shield(self._resetting)
        return Ok()

    async def _end_all(self) -> None:
        for step in list(self.steps.values()):
            step.cancel()
        threads = [threads.stopped(lambda number: True) for threads in (self.computing, self.waiting)]
        await asyncio.gather(self.loops.reset(), *threads)
        self.cache.clear()

    def _is_too_late(self, op: OpId) -> bool:
        """Whether the notebook made a call before its reset of this task."""
        return op.client == self._reset_by.client and op.seq < self._reset_by.seq

    async def _waits(self, request: Request) -> Answer:
        """The steps that wait for queues, and their later operations."""
        return Ok({"waits": who_waits(list(WAITS.runners), self.queues.all)})

    async def _facts(self, request: Request) -> Answer:
        """The code of the plan that was used last, and why, empty if none ran; bytes exchanged with each server, and
        posted to each task.
        """
        program = next(reversed(self.plans.values()), None)
        return Ok({
            "code": "" if program is None else program.code.tiers.code(), "traffic": dict(self.streams.traffic),
            "posted": dict(self.exchange.traffic),
        })  # fmt: skip

    async def _forget(self, request: Request) -> Answer:
        """Drop cached values of deleted Variables."""
        for key in request.meta["keys"]:
            self.cache.pop(str(key), None)
        return Ok()

    async def _quit(self, request: Request) -> Answer:
        """End this process at once, since its computation cannot be stopped. Its nanny starts another one.

        Refused by a process that holds variables, also those of another notebook.
        """
        for actor in self.worker.state.actors.values():
            if isinstance(actor, TaskActor) and len(actor.task.cores):
                return Refusal(
                    "protocol", f"its process holds variables{' of another notebook' * (actor.task is not self)}"
                )
        os.kill(os.getpid(), signal.SIGKILL)
        return Ok()

    async def _step(self, request: Request, number: int) -> Answer:
        meta = request.meta
        program = self.plans.get(str(meta["plan"]))
        if program is None:
            return Refusal("unknown-plan", str(meta["plan"]))
        self.plans.move_to_end(str(meta["plan"]))
        begin = time.monotonic()
        notes = None
        if meta.get("trace"):
            notes = StepNotes(program.tracer, program.program.whole, program.sent_nodes, lambda: program.usual_code)
        else:
            self.exchange.arrivals = None
        try:
            values = await self._pull(program, notes)
            feeds, run_index = program.fed(request.tensors, meta), int(meta["run_index"])
            rows = await self._look_up(program, feeds, run_index, number, notes)
            pulled = time.monotonic()
            for queue, (shard, key) in zip(program.queues, meta.get("queues", ()), strict=True):
                queue.machine = self.queues.queue(queue, int(shard), str(key))
            threads = self.waiting if program.queues or "parts" in meta else self.computing
            with in_round(number):
                context = contextvars.copy_context()
            meet: Meet | None = None
            if "parts" in meta:
                meet = partial(self.exchange.begin, number, _peers(meta))
            if notes is not None and meet is not None:
                meet = notes.meeting(meet)
            failure: dict[str, Any] = {}
            try:
                out, pushes = await threads.do(
                    number,
                    lambda: context.run(
                        program.run, feeds, values, run_index, self.name, rows, meet, is_traced=notes is not None
                    ),
                )
            except NonFiniteGradient as error:
                if not meta.get("looks"):
                    raise
                out, pushes, failure = error.details, [], {"failure": outcome_header(failed(error, self.name))}
            computed = time.monotonic()
            await self._stage(pushes, request, number, notes)
        except NotDone as ended:
            return ended.outcome  # type: ignore[return-value]  # see `_passed_on`
        except Exception as error:
            return missed(failed(error, self.name), error)
        finally:
            if "parts" in meta:
                self.exchange.end(number, sys.exception())
        kind = "wait" if program.queues else "compute"
        timings = {"pull": pulled - begin, kind: computed - pulled, "push": time.monotonic() - computed}
        facts, tensors = {"some": [value is not None for value in out], "timings": timings, **failure}, _tensors(out)
        if notes is not None:
            facts["trace"], numbers = notes.answer(self.exchange.arrivals or (), number)
            tensors, self.exchange.arrivals = [*tensors, *numbers], None
        return Ok(facts, tensors)

    async def _pull(self, program: ComputeProgram, notes: StepNotes | None = None) -> dict[str, torch.Tensor]:
        """Values of all Variables that the program reads: one call for each process, and bytes only for changed
        values.

        Those in this process are read where they lie, and not kept: a generation that nobody reads is written in place.
        """
        asks, found = [], dict[str, torch.Tensor]()
        for shard, keys in program.reads.items():
            held = [-1 if shard in self.cores else self.cache.get(key, (-1, None))[0] for key in keys]
            asks.append(Ask(shard, "pull", {"keys": keys, "since": held}))
        for ask, answer in zip(asks, await self.ask(asks, notes), strict=True):
            fresh = iter(answer.tensors)
            for key, old, version in zip(ask.meta["keys"], ask.meta["since"], answer.meta["versions"], strict=True):
                found[key] = next(fresh) if old != version else self.cache[key][1]
                if ask.shard not in self.cores:
                    self.cache[key] = (version, found[key])
        return found

    async def _look_up(
        self, program: ComputeProgram, feeds: Sequence[torch.Tensor], run: int, number: int, notes: StepNotes | None
    ) -> list[torch.Tensor]:
        """The rows of large Variables for the step."""
        if not program.lookups:
            return []
        looked = await self.computing.do(number, lambda: program.looked_up(feeds, run))
        return looked.rows(await self.ask(looked.asks, notes))

    async def _stage(self, pushes: Sequence[Push], request: Request, number: int, notes: StepNotes | None) -> None:
        """Stage every shard's part for the round."""
        meta = request.meta
        about = {
            "round": number, "worker": meta["worker"], "rows": meta.get("rows", 1), "run_index": meta["run_index"],
        }  # fmt: skip
        asks = [Ask(push.shard, "stage", {**about, "plan": push.plan}, push.sent) for push in pushes]
        await self.ask(asks, notes)

    def _asking(self, shard: int) -> queues_there.Ask:
        """A function that sends queue requests to a server, and raises Unavailable for any outcome but Ok."""

        async def ask(method: str, meta: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Ok:
            peer, asks = self.shards[shard], asking.identified([Ask(shard, method, meta, tensors)], self.link)
            (answer,) = await asking.persisted(self.link, peer, asks, epoch=self.epoch)
            if isinstance(answer, Ok):
                return answer
            text = f"server {shard} at {peer.addr}: {getattr(answer, 'message', '')}"
            raise Unavailable(text, details={"shard": shard, "missed": True})

        return ask

    async def read(self, key: Any, what: str) -> torch.Tensor:
        """A chunk that Dask holds."""
        return await self.reader.read(key, f"{what} for {self.name}")

    async def stop_reading(self) -> None:
        """Close the reader: no training reads chunks any more."""
        await self.reader.close()

    async def open_streams(self, shards: Sequence[int]) -> None:
        """Open the missing direct streams to servers, as far as possible."""
        for peer in self.streams.lacks(dict.fromkeys(self.shards[shard] for shard in shards)):
            await self.streams.open(peer, epoch=self.epoch)

    def stream(self, asks: Sequence[Ask]) -> list[Outcome]:
        """Calls to shards by direct streams, in the compute thread. Calls without an Ok are to be repeated by `ask`."""
        of = self._by_process(asks)
        ends = self.streams.call(
            {peer: [asks[i] for i in places] for peer, places in of.items()}, epoch=self.epoch,
            is_thread_wanted=self.computing.is_wanted,
        )  # fmt: skip
        found = dict(zip(itertools.chain(*of.values()), itertools.chain(*ends), strict=True))
        return [found[place] for place in range(len(asks))]

    def _by_process(self, asks: Sequence[Ask]) -> dict[Peer, list[int]]:
        """Places of the calls to each process."""
        of: dict[Peer, list[int]] = {}
        for place, ask in enumerate(asks):
            of.setdefault(self.shards[ask.shard], []).append(place)
        return of

    async def ask(self, asks: Sequence[Ask], notes: StepNotes | None = None) -> list[Ok]:
        """Calls to shards, one message to each process. A failure there becomes this task's answer.

        notes: of the traced step that they belong to.
        """
        of = self._by_process(asks)
        calls = [self._ask_one(peer, [asks[place] for place in places], notes) for peer, places in of.items()]
        ends = await asking.gathered(calls, may_leave=not any(ask.method in ("push", "stage") for ask in asks))
        found = dict(zip(itertools.chain(*of.values()), itertools.chain(*ends), strict=True))
        return [found[place] for place in range(len(asks))]

    async def _ask_one(self, peer: Peer, asks: Sequence[Ask], notes: StepNotes | None) -> list[Ok]:
        if notes is not None:
            asks = [ask._replace(meta={**ask.meta, "trace": True}) for ask in asks]
        sent = time.monotonic_ns()
        outcomes = await asking.persisted(self.link, peer, asks, epoch=self.epoch)
        received = time.monotonic_ns()
        for ask, outcome in sorted(zip(asks, outcomes, strict=True), key=lambda end: asking.is_again(end[1])):
            if not isinstance(outcome, Ok):
                raise NotDone(_passed_on(outcome, peer, ask.shard))
            if notes is not None:
                notes.calls.append(ShardCall.of(ask, sent, outcome, received))
        return [outcome for outcome in outcomes if isinstance(outcome, Ok)]


def _budget(limit: int) -> int:
    """Bytes of values that a server may hold, in addition to the present memory of its process."""
    taken = psutil.Process().memory_info().rss
    return int(max(LEAST * limit, min(SHARE * limit, MOST * limit - taken)))


_collecting: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()  # where a collection comes soon


def _collect(loop: asyncio.AbstractEventLoop, thread: threading.Thread | None) -> None:
    """Collect garbage once the thread of a server has ended; one collection for tasks that end together.

    A collection looks at all that was imported, and this process stands still meanwhile.
    """

    def collected() -> None:
        _collecting.discard(loop)
        gc.collect()

    if thread is not None and thread.is_alive():
        loop.call_later(TICK, _collect, loop, thread)
    elif loop not in _collecting:
        _collecting.add(loop)
        loop.call_later(TICK, collected)


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Let the event loop call a function, from another thread; without effect if the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def _call(method: weakref.WeakMethod[Callable[[Sequence[Send]], None]], sends: Sequence[Send]) -> None:
    found = method()
    if found is not None:
        found(sends)


def _set(answered: asyncio.Future[Answer], answer: Answer) -> None:
    if not answered.done():
        answered.set_result(answer)


def _passed_on(answer: Outcome, peer: Peer, shard: int) -> Failure | Refusal:
    """A server's refusal, reworded by the asking task; the notebook decides on the consequences."""
    match answer:
        case Failure():
            return answer
        case Refusal("unknown-plan", message):
            return Refusal("unknown-plan", message)
        case Refusal("stale", message):
            return Failure("StepAborted", message)
    text = f"server {shard} at {peer.addr}: {type(answer).__name__} {getattr(answer, 'message', '')}"
    return Failure("Unavailable", text, {"shard": shard, "missed": True})


def _peers(meta: Mapping[str, Any]) -> dict[int, Peer]:
    """The task of each part of a step."""
    return {int(number): Peer(str(a), str(k), int(i)) for number, (a, k, i) in meta["parts"].items()}


def _tensors(out: Sequence[Any]) -> list[torch.Tensor]:
    found = [value for value in out if value is not None]
    if not all(isinstance(value, torch.Tensor) for value in found):
        raise InvalidArgument("a fetched value is no tensor")
    return found


def _devices() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index}" for index in range(count))]


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C: in a notebook the signal reaches the whole process group, for the notebook alone to handle.

    Only in a process started by a nanny, which ends its process by message; a worker started by hand keeps its Ctrl-C.
    """
    if multiprocessing.parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
