"""The servers that hold the notebook's queues: queues move there at `connect`, and return when the connection ends.

A queue in use goes with what it holds and with who waits for it; another one is made there when it is first used. Where
``tfnb.device("ps:1")`` was in force when it was made it lies on that server, else on the one with the fewest.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tfnb.cluster.engine.engine import Engine, Pins
from tfnb.cluster.modes.events import UserStop
from tfnb.cluster.queues.journal import ChannelMark
from tfnb.cluster.queues.queues_there import CONFIRM, Ask, Channels, RemoteQueue
from tfnb.cluster.wire.messages import Failure, Ok, raised
from tfnb.cluster.wire.transport import ClientLink
from tfnb.errors import Aborted, FailedPrecondition, InvalidArgument, TfnbError
from tfnb.graph import resources
from tfnb.graph.device_request import parse
from tfnb.graph.queue import Queue
from tfnb.state.queue_contents import QueueSnapshot
from tfnb.state.queue_machine import QueueMachine
from tfnb.state.queue_operations import HOMES, QueueHandle, machine_of, move


class QueueHomes:
    """The queues that lie on the servers of one cluster, with the shard and key of each."""

    def __init__(self, engine: Engine, link: ClientLink) -> None:
        self._engine, self._link = engine, link
        self._channels = engine.deadlocks.channels = Channels(link.loop, self._asking)
        self._here: weakref.WeakKeyDictionary[Queue, tuple[int, str]] = weakref.WeakKeyDictionary()
        self._count, self._lock = itertools.count(), threading.Lock()
        self._trainings = 0  # in progress, that go on where a server is lost
        self._kept: list[str] = []  # names of queues on a lost server whose contents a journal has
        self.emptied: list[str] = []  # names of queues on a lost server whose contents nobody knows

    def begin(self) -> None:
        """Move all queues in use to servers; queues used later are made there.

        Raises InvalidArgument for a queue that asks for another server than there is, before any of them moves.
        """
        every = resources.all_of(QueueHandle)
        queues = [queue for queue in every if isinstance(queue.machine, QueueMachine) and not queue.gone]
        for queue in queues:
            self._asked(queue)
        HOMES.append(self._home)
        move(queues)

    def used(self, queues: Iterable[Queue]) -> list[tuple[int, str]]:
        """Shard and key of the queues of a step; starts the queue runners that fill them."""
        found = self.places(queues)
        for queue in found:
            if isinstance(queue.machine, RemoteQueue):
                queue.machine.ensure_made()
            for start in tuple(machine_of(queue).starters):
                start()
        return list(found.values())

    def cause(self, queues: Iterable[Queue]) -> BaseException | None:
        """The error of a failed producer of one of the queues."""
        return next((cause for queue in queues if (cause := machine_of(queue).cause) is not None), None)

    def places(self, queues: Iterable[Queue]) -> dict[Queue, tuple[int, str]]:
        """Shard and key of each queue, made on a server first if it is new.

        Raises FailedPrecondition for a queue of another cluster, Aborted while this cluster closes, and
        ParameterServerLost after the loss of a server.
        """
        found = {}
        for queue in queues:
            machine_of(queue)
            if queue not in self._here:
                if self._engine.is_closing or self._engine.lost is not None:  # it went home while the step began
                    raise self._engine.error(UserStop(), None) if self._engine.lost is None else self._engine.lost
                raise FailedPrecondition(f"queue {queue.name} lives on another cluster: close that one first")
            found[queue] = self._here[queue]
        return found

    # -- what they hold, should a server be lost -------------------------------------------------------------------

    @contextmanager
    def journaled(self) -> Iterator[None]:
        """A block of a training: journals let queues survive the loss of a server, from the first copy on."""
        with self._lock:
            self._trainings += 1
        try:
            yield
        finally:
            with self._lock:
                self._trainings -= 1
                if not self._trainings:
                    for home in self._homes().values():
                        home.journal.forget()

    @property
    def lacks_copies(self) -> bool:
        """Whether there is a queue on a server that was not copied for the trainings in progress."""
        return self._trainings > 0 and any(home.journal.held is None for home in self._homes().values())

    @property
    def are_copied(self) -> bool:
        """Whether queues lie on servers whose contents are copied for the trainings in progress."""
        return self._trainings > 0 and bool(self._homes())

    @property
    def nbytes(self) -> int:
        """Bytes of elements that were put and taken here since the last copy."""
        return sum(home.journal.nbytes for home in self._homes().values())

    async def eras(self) -> dict[Queue, int]:
        """The queues to copy, with the current eras of their journals. In the event loop."""
        if not self._trainings:
            return {}
        eras = {queue: home.journal.era for queue, home in self._homes().items()}
        try:
            await self.there()
        except TimeoutError as error:
            raise Aborted("a server did not make its queues in time: pull again") from error
        return eras

    def at(self, queues: Iterable[Queue]) -> dict[Queue, tuple[int, str]]:
        """Shard and key of each queue; all lie on servers already."""
        return {queue: self._here[queue] for queue in queues}

    def copied(self, eras: Mapping[Queue, int], pulled: Pins) -> None:
        """Queues were copied with the Variables."""
        for queue, era in eras.items():
            home = queue.machine
            if isinstance(home, RemoteQueue) and (told := pulled.held.get(home.key)) is not None:
                seen = ChannelMark.of(pulled.seen.get(home.channel.id, {"ended": 0, "heard": 0, "put": []}))
                home.journal.copied(era, QueueSnapshot(*told), seen)
        if eras:
            self._engine.single.used.subtract(pulled.used)

    @property
    def undone(self) -> tuple[tuple[str, int], ...]:
        """Steps of `run` that used queues on lost servers and that no copy had seen, by the queue's name."""
        used = self._engine.single.used
        return tuple((name, used[name]) for name in dict.fromkeys(self._kept) if used[name] > 0)

    def _homes(self) -> dict[Queue, RemoteQueue]:
        """The queues on servers, with their proxies."""
        found = {queue: queue.machine for queue in list(self._here)}
        return {
            queue: home for queue, home in found.items()
            if isinstance(home, RemoteQueue) and home.heir is None and not home.is_dropped
        }  # fmt: skip

    async def there(self) -> None:
        """Wait until the servers have begun every operation that was sent to their queues. In the event loop."""
        for channel in list(self._channels.all.values()):
            if channel.broken is None:
                await channel.done("withdraw", "", {"numbers": []}, CONFIRM)

    def _home(self, queue: Queue, held: QueueMachine | None) -> RemoteQueue:
        """Make a queue on a server, with the contents of its local machine, if there was one."""
        with self._lock:
            shard, key = self._shard(queue), f"{queue.name}/{next(self._count)}"
            self._here[queue] = shard, key
        home = self._channels.queue(queue, shard, key)
        home.make(queue, held)
        weakref.finalize(queue, _forget, home)
        return home

    def _asked(self, queue: Queue) -> int | None:
        """The shard requested for a queue; None without a request."""
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
            if isinstance(answer, Failure):
                raise raised(answer)
            raise self._engine.lost_server(shard)

        return ask

    # -- the end --------------------------------------------------------------------------------------------------

    async def bring_home(self) -> None:
        """Bring all queues back, with contents and waiting operations. In the event loop."""
        if self._home in HOMES:
            HOMES.remove(self._home)
        found = [(queue, queue.machine) for queue in list(self._here) if isinstance(queue.machine, RemoteQueue)]
        await asyncio.gather(*(machine.come_home(queue) for queue, machine in found if not machine.is_dropped))
        self._here.clear()

    def lost(self, error: TfnbError) -> None:
        """After the loss of a server: its queues become local, with journaled contents or empty; other queues come
        home.

        In the event loop.
        """
        if self._home in HOMES:
            HOMES.remove(self._home)
        there = [(queue, home, self._here[queue][0]) for queue, home in self._homes().items()]
        gone = [(queue, home) for queue, home, shard in there if not self._engine.shards[shard].alive]
        for queue, home in gone:
            (self._kept if home.stay(queue) else self.emptied).append(queue.name)
        for queue, home in gone:
            home.channel.close(error)  # of all queues on that server
            home.lose(queue)
        for queue, home, shard in there:
            if self._engine.shards[shard].alive:
                self._engine.later(self._try_home(queue, home))
        self._here.clear()

    async def _try_home(self, queue: Queue, machine: RemoteQueue) -> None:
        try:
            await asyncio.wait_for(machine.come_home(queue), CONFIRM)
        except (TfnbError, TimeoutError) as error:
            machine.lose(queue, error)
            if machine.is_lost:
                self.emptied.append(queue.name)

    def end(self) -> None:
        """The cluster is no more: waiting operations fail, and queues made later are local."""
        if self._home in HOMES:
            HOMES.remove(self._home)
        for queue in list(self._here):
            if isinstance(queue.machine, RemoteQueue):
                queue.machine.lose(queue)
        self._here.clear()
        self._link.post(self._channels.close)


def _forget(home: RemoteQueue) -> None:
    """Abort the queue on its server after the handle here was collected."""
    if home.heir is None and home.channel.broken is None:
        home.abort("nobody can reach it any more")
