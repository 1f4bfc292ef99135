"""A server's core behind a connection that loses answers and repeats messages, in this process: no Dask, no socket."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tfnb.cluster.queues.queues_there import Ask, Channels, RemoteQueue
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import CoreTick, Reply, RequestArrival
from tfnb.cluster.wire.messages import Ok, OpId, Request
from tfnb.graph.queue import Queue
from tfnb.state.queue_machine import QueueMachine
from tfnb.state.queue_operations import HOMES
from tfnb.state.store import Store


class Distance:
    """Queues on one core. ``loss``: the share of answers that get lost and of messages that come again, at any time."""

    def __init__(self, loss: float = 0.0, seed: int = 0, budget: int | None = None) -> None:
        self.core = Core(Store(budget=budget), lambda meta, tensors: None, epoch=1, incarnation=7)  # type: ignore[arg-type,return-value]
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.loss, self.random = loss, random.Random(seed)
        self.tickets, self.keys, self.ops = itertools.count(), itertools.count(), itertools.count()
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.late: list[Request] = []  # that come once more
        self.channels = Channels(self.loop, self.asking)

    def asking(self, shard: int) -> Ask:
        async def ask(method: str, meta: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Ok:
            op = OpId("me", next(self.ops))
            while True:
                request = Request(method, op, 1, 7, dict(meta), [tensor.clone() for tensor in tensors])
                answer = self.feed(request)
                if self.random.random() < self.loss:
                    self.late.append(request)
                if self.late and self.random.random() < 0.5:
                    self.feed(self.late.pop(self.random.randrange(len(self.late))))
                if self.random.random() < self.loss:
                    continue  # the answer is lost, or comes to nobody
                found = await answer
                if isinstance(found, Ok):
                    return found
                assert getattr(found, "reason", "") == "again", found

        return ask

    def feed(self, request: Request) -> asyncio.Future[Any]:
        ticket, answer = next(self.tickets), self.loop.create_future()
        self.answers[ticket] = answer
        self.carry_out(self.core.on(RequestArrival(ticket, request), time.monotonic()))
        return answer

    def carry_out(self, effects: Any) -> None:
        for effect in effects:
            assert isinstance(effect, Reply)
            self.answers.pop(effect.ticket).set_result(effect.answer)

    def call(self, method: str, **meta: Any) -> Any:
        """A call that nobody disturbs, from another thread."""

        async def work() -> Any:
            return await self.feed(Request(method, OpId("master", next(self.ops)), 1, 7, meta, []))

        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(30)

    def tick(self) -> None:
        self.loop.call_soon_threadsafe(lambda: self.carry_out(self.core.on(CoreTick(), time.monotonic())))

    def home(self, queue: Queue, held: QueueMachine | None) -> RemoteQueue:
        made = self.channels.queue(queue, 0, f"{queue.name}/{next(self.keys)}")
        made.make(queue, held)
        return made

    def machine(self, queue: Queue) -> QueueMachine:
        """What the core has of a queue."""
        return self.core.objects.queues[queue.machine.key].machine

    def found(self, queue: Queue) -> QueueMachine | None:
        """What the core has of a queue, if it has one."""
        held = None if queue.machine is None else self.core.objects.queues.get(queue.machine.key)
        return None if held is None else held.machine

    def settle(self) -> None:
        """Wait until everything that was asked for was seen, and what came of it is known."""
        channel = self.channels.to(0)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            done = asyncio.run_coroutine_threadsafe(self._is_settled(channel), self.loop).result(30)
            if done:
                return
            time.sleep(0.0005)
        raise AssertionError("it does not settle")

    async def _is_settled(self, channel: Any) -> bool:
        there = self.core.objects.channels.get(channel.id)
        heard = there is None or all(serial <= channel._got for serial in there.ends)
        return not channel._outbox and not channel._posting and heard

    def close(self) -> None:

        async def end() -> None:
            self.channels.close()
            await asyncio.sleep(0.01)  # what was cancelled ends

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@contextmanager
def queues_there(**how: Any) -> Iterator[Distance]:
    """Queues that are made or used inside are there."""
    distance = Distance(**how)
    HOMES.append(distance.home)
    try:
        yield distance
    finally:
        HOMES.remove(distance.home)
        distance.close()


@contextmanager
def queues_at(where: str, **how: Any) -> Iterator[Callable[[Queue], QueueMachine | None]]:
    """Queues that are made or used inside are here or there; gives what finds the machine that holds one."""
    if where == "here":
        yield lambda queue: queue.machine
        return
    with queues_there(**how) as distance:
        yield distance.found
