"""All loops of a task, ranks included, with their data, updates, and the meeting points of ranks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tfnb.cluster.server.core import PLANS
from tfnb.cluster.tasks.collectives import Rendezvous, store
from tfnb.cluster.tasks.computing import in_thread
from tfnb.cluster.tasks.data import Data
from tfnb.cluster.tasks.downpour import DownpourLoop
from tfnb.cluster.tasks.pieces import PieceOrder, Prefetch
from tfnb.cluster.tasks.programs import ComputeProgram, LateProgram, ShardProgram, piece_of
from tfnb.cluster.tasks.replicas import LocalReplica, OuterProgram, Replica
from tfnb.cluster.tasks.resident import LoopHost, TrainingLoop
from tfnb.cluster.wire.messages import Ok, Refusal, Request
from tfnb.state.batch_order import RowOrder

LEFT = 1024  # ended loops that are remembered


class Loops:
    """All loops of a task, and the data that was sent ahead for them."""

    METHODS = ("load", "unload", "lend", "watch", "pause", "stop", "leave", "meet", "save", "register_update")

    def __init__(self, host: LoopHost, plans: OrderedDict[str, ComputeProgram]) -> None:
        self._host, self._plans = host, plans
        self._loops: dict[str, TrainingLoop] = {}
        self._data: dict[str, Data] = {}  # of trainings, by the name that each began with
        self._left: deque[str] = deque(maxlen=LEFT)  # loops that were ended: what is lent to them comes too late
        self._updates: OrderedDict[str, ShardProgram] = OrderedDict()  # of plans of servers, for tasks with copies
        self._late: OrderedDict[str, LateProgram] = OrderedDict()  # of plans of late fetches
        self._stores: dict[str, Any] = {}  # where the ranks of a generation meet, until their first one has come

        self._others: dict[str, Callable[[Request], Awaitable[Ok | Refusal]]] = {
            "load": self._load, "unload": self._unload, "lend": self._lend, "meet": self._meet,
            "register_update": self._register_update,
        }  # fmt: skip

    async def on(self, request: Request) -> Ok | Refusal:
        """Answer a request of the notebook."""
        meta = request.meta
        if request.method in self._others:
            return await self._others[request.method](request)
        loop, seen = self._loops.get(str(meta["loop"])), int(meta["seen"])
        if request.method == "leave":
            self._left.append(str(meta["loop"]))
        if loop is None:
            return Refusal("stale", "this loop is over")
        match request.method:
            case "save" if loop.is_over or loop.is_standing:
                return await loop.save(int(meta["round"]))
            case "save":
                return Refusal("protocol", "a rank that saves stands")
            case "watch":
                return await loop.watch(seen)
            case "pause":
                return await loop.pause(bool(meta["wanted"]), seen)
        report = await loop.stop(seen, is_given_up=loop.asks(meta["lost"]))
        if request.method == "leave":
            self._loops.pop(str(meta["loop"]), None)
        return report

    async def reset(self) -> None:
        """End all loops regardless of their servers, and drop the data; later pieces for these loops are refused."""
        loops = list(self._loops.values())
        self._left.extend(self._loops)
        self._loops.clear()
        await asyncio.gather(*(loop.stop(0, is_given_up=True) for loop in loops))
        for data in self._data.values():
            data.close()
        self._data.clear()
        self._stores.clear()
        await self._host.stop_reading()

    def end(self) -> None:
        """Cancel all loops: their task ends."""
        for loop in self._loops.values():
            loop.cancel()

    async def _load(self, request: Request) -> Ok:
        meta = request.meta
        self._data[str(meta["data"])] = Data(request.tensors, meta["chunked"], self._host.read, self._host.room)
        return Ok()

    async def _unload(self, request: Request) -> Ok:
        data = self._data.pop(str(request.meta["data"]), None)
        if data is not None:
            data.close()
        if not self._data:
            await self._host.stop_reading()
        return Ok()

    async def _lend(self, request: Request) -> Ok | Refusal:
        """Lend one more piece to a loop; a new loop begins with its first piece."""
        meta, name = request.meta, str(request.meta["loop"])
        if name in self._left:
            return Refusal("stale", "this loop is over")
        if name not in self._loops:
            program, training = self._plans.get(str(meta["plan"])), str(meta["training"])
            if program is None:
                return Refusal("unknown-plan", str(meta["plan"]))
            self._plans.move_to_end(str(meta["plan"]))
            late = None if meta["late"] is None else self._late.get(str(meta["late"]))
            if late is None and meta["late"] is not None:
                return Refusal("unknown-plan", str(meta["late"]))
            ahead = None if meta["order"] is None else Prefetch(self._data[str(meta["data"])], RowOrder(*meta["order"]))
            about = self._host, name, training, program, ahead, list(meta["shards"]), meta["staleness"], late
            outer = meta["outer"] or {"updates": ()}
            missing = [plan for _, plan in (*meta["updates"], *outer["updates"]) if plan not in self._updates]
            missing += [outer["plan"]] if meta["outer"] and outer["plan"] not in self._plans else []
            if missing:
                return Refusal("unknown-plan", ", ".join(missing))
            self._loops[name] = self._loop(about, meta)
        self._loops[name].lend(PieceOrder.of(meta, request.tensors))
        return Ok()

    def _loop(self, about: Sequence[Any], meta: Mapping[str, Any]) -> TrainingLoop:
        """The loop of a mode: of a rank, of a task with a copy that it fetches, or of one that has no copy."""
        updates, every = self._updates_in(meta), int(meta["every"])
        if meta["meeting"] is not None:
            meeting = Rendezvous(*meta["meeting"])
            store = self._stores.pop(meeting.name, None)
            ranks: dict[str, Any] = {"updates": updates, "meeting": meeting, "store": store, "here": self._host.host}
            outer = None if meta["outer"] is None else self._outer(meta["outer"])
            return LocalReplica(*about, every=every, outer=outer, **ranks) if every else Replica(*about, **ranks)
        if updates:
            return DownpourLoop(*about, updates=updates, n_fetch=int(meta["n_fetch"]), n_push=int(meta["n_push"]))
        return TrainingLoop(*about)

    def _updates_in(self, facts: Mapping[str, Any]) -> dict[int, ShardProgram]:
        return {int(shard): self._updates[plan] for shard, plan in facts["updates"]}

    def _outer(self, facts: Mapping[str, Any]) -> OuterProgram:
        """The outer step of a rank."""
        pieces = [tuple(map(piece_of, each)) for each in facts["pieces"]]
        return OuterProgram(self._plans[str(facts["plan"])], self._updates_in(facts), pieces)

    # -- ranks --------------------------------------------------------------------------------------------------------

    async def _meet(self, request: Request) -> Ok:
        """Let the other ranks of a generation meet here; earlier meeting points of the same training are closed."""
        name = str(request.meta["name"])
        training = name.rpartition("/")[0]
        for other in [other for other in self._stores if other.rpartition("/")[0] == training and other != name]:
            del self._stores[other]
        if name not in self._stores:
            self._stores[name] = await asyncio.to_thread(store, self._host.host)
        return Ok({"host": self._host.host, "port": self._stores[name].port})

    async def _register_update(self, request: Request) -> Ok:
        return await self._registered(self._updates, ShardProgram, request)

    async def register_late(self, request: Request) -> Ok:
        """Register a plan of late fetches."""
        return await self._registered(self._late, LateProgram, request)

    async def _registered(self, programs: OrderedDict[str, Any], kind: Callable[..., Any], request: Request) -> Ok:
        """Compile a plan in the compute thread, unless registered already."""
        plan = str(request.meta["plan"])
        if plan not in programs:
            compiled = partial(kind, request.meta, request.tensors)
            programs[plan] = await in_thread(self._host.computing.executor, compiled)
            while len(programs) > PLANS:
                programs.popitem(last=False)
        return Ok({"plan": plan})
