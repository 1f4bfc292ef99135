"""Which queues of the notebook live on which servers: they go there at `connect`, and come home when that ends.

A queue in use goes with what it holds and with who waits for it; another one is made there when it is first used. Where
``tfnb.device("ps:1")`` was in force when it was made it lies on that server, else on the one with the fewest.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tfnb.cluster.engine.engine import Engine
from tfnb.cluster.queues.queues_there import CONFIRM, Ask, Channels, RemoteQueue
from tfnb.cluster.wire.messages import Failed, Ok, raised
from tfnb.cluster.wire.transport import ClientLink
from tfnb.errors import FailedPrecondition, InvalidArgument, TfnbError
from tfnb.graph import resources
from tfnb.graph.device_request import parse
from tfnb.graph.queue import Queue
from tfnb.state.queue_machine import QueueMachine
from tfnb.state.queue_operations import HOMES, QueueHandle, machine_of, move


class QueueHomes:
    """The queues of one cluster."""

    def __init__(self, engine: Engine, link: ClientLink) -> None:
        self._engine, self._link = engine, link
        self._channels = engine.deadlocks.channels = Channels(link.loop, self._asking)
        self._here: weakref.WeakKeyDictionary[Queue, tuple[int, str]] = weakref.WeakKeyDictionary()
        self._count, self._lock = itertools.count(), threading.Lock()
        self.emptied: list[str] = []  # names of those that were on a lost server

    def begin(self) -> None:
        """All queues that are in use go to the servers, and those that are used from now on.

        Raises InvalidArgument for a queue that asks for another server than there is, before any of them moves.
        """
        queues = [queue for queue in resources.all_of(QueueHandle) if isinstance(queue.machine, QueueMachine)]
        for queue in queues:
            self._asked(queue)
        HOMES.append(self._home)
        move(queues)

    def used(self, queues: Iterable[Queue]) -> list[tuple[int, str]]:
        """Shard and key of the queues of a step, which runners begin to fill."""
        found = self.places(queues)
        for queue in found:
            for start in tuple(machine_of(queue).starters):
                start()
        return list(found.values())

    def cause(self, queues: Iterable[Queue]) -> BaseException | None:
        """The error that ended who filled one of them."""
        return next((cause for queue in queues if (cause := machine_of(queue).cause) is not None), None)

    def places(self, queues: Iterable[Queue]) -> dict[Queue, tuple[int, str]]:
        """Shard and key of each."""
        found = {}
        for queue in queues:
            machine_of(queue)
            if queue not in self._here:
                raise FailedPrecondition(f"queue {queue.name} lives on another cluster: close that one first")
            found[queue] = self._here[queue]
        return found

    async def there(self) -> None:
        """Wait until all that was asked for has begun on the servers. In the event loop."""
        for channel in list(self._channels.all.values()):
            if channel.broken is None:
                await channel.done("withdraw", "", {"numbers": []}, CONFIRM)

    def _home(self, queue: Queue, held: QueueMachine | None) -> RemoteQueue:
        """A queue lives on a server from now on, with what a machine here held."""
        with self._lock:
            shard, key = self._shard(queue), f"{queue.name}/{next(self._count)}"
            self._here[queue] = shard, key
        home = self._channels.queue(queue, shard, key)
        home.make(queue, held)
        weakref.finalize(queue, _forget, home)
        return home

    def _asked(self, queue: Queue) -> int | None:
        """The shard that a queue asks for, if it asks for one."""
        count = len(self._engine.shards)
        asked = None if queue.device is None else parse(queue.device)
        if asked is None or asked.job != "ps":
            return None
        shard = asked.task or 0
        if shard >= count:
            there = "server ps:0 only" if count == 1 else f"servers ps:0 to ps:{count - 1}"
            raise InvalidArgument(
                f'queue {queue.name} was made under tfnb.device("{queue.device}"), and the cluster has {there}: '
                f"connect with ps={shard + 1}, or make the queue anew without that device"
            )
        return shard

    def _shard(self, queue: Queue) -> int:
        asked, taken = self._asked(queue), [shard for shard, _ in self._here.values()]
        return min(range(len(self._engine.shards)), key=taken.count) if asked is None else asked

    def _asking(self, shard: int) -> Ask:
        async def ask(method: str, meta: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Ok:
            answer = await self._engine.peers.settled(shard, method, dict(meta), tensors)
            if isinstance(answer, Ok):
                return answer
            if isinstance(answer, Failed):
                raise raised(answer)
            raise self._engine.lost_server(shard)

        return ask

    # -- the end --------------------------------------------------------------------------------------------------

    async def bring_home(self) -> None:
        """All queues, with what they hold and who waits for them. In the event loop."""
        if self._home in HOMES:
            HOMES.remove(self._home)
        found = [(queue, queue.machine) for queue in list(self._here) if isinstance(queue.machine, RemoteQueue)]
        await asyncio.gather(*(machine.come_home(queue) for queue, machine in found if not machine.is_dropped))
        self._here.clear()

    def lost(self, error: TfnbError) -> None:
        """A server is gone: its queues are empty, those of others come home. In the event loop."""
        if self._home in HOMES:
            HOMES.remove(self._home)
        for queue, (shard, _) in list(self._here.items()):
            machine = queue.machine
            if not isinstance(machine, RemoteQueue):
                continue
            if self._engine.shards[shard].alive:
                self._engine.later(self._try_home(queue, machine))
            else:
                self.emptied.append(queue.name)
                machine.channel.close(error)  # of all queues on that server
                machine.lose(queue)
        self._here.clear()

    async def _try_home(self, queue: Queue, machine: RemoteQueue) -> None:
        try:
            await asyncio.wait_for(machine.come_home(queue), CONFIRM)
        except (TfnbError, TimeoutError):
            machine.lose(queue)

    def end(self) -> None:
        """Nothing is asked any more."""
        if self._home in HOMES:
            HOMES.remove(self._home)
        for queue in list(self._here):
            if isinstance(queue.machine, RemoteQueue):
                queue.machine.lose(queue)
        self._here.clear()
        self._link.post(self._channels.close)


def _forget(home: RemoteQueue) -> None:
    """Nobody can reach the queue any more."""
    if home.heir is None and home.channel.broken is None:
        home.abort("nobody can reach it any more")
