"""Copies of shards that a task holds, so that the values outlive their server: its part of a recovery.

The notebook pins the values of one step on all servers, as for a checkpoint, and names the pins; the holder pulls them
by a direct stream, in a thread of its own, and keeps the answers as they came. A set of copies serves a recovery when
all shards are copied: until the notebook has said so the older set stays.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import psutil

from tfnb.cluster.tasks.computing import in_thread
from tfnb.cluster.wire import asking, envelope
from tfnb.cluster.wire.messages import Ask, Failure, Ok, Outcome, Peer, Refusal, Request, failed
from tfnb.cluster.wire.streams import Streams
from tfnb.cluster.wire.transport import Link
from tfnb.errors import NotFound, ResourceExhausted

Answer = Ok | Failure | Refusal


class CopyTask(Protocol):
    """The task that holds the copies. ``most``: bytes of memory that its process may have."""

    name: str
    epoch: int
    shards: list[Peer]
    link: Link
    budget: int
    most: int

    async def used(self) -> int:
        """Bytes of the values of its own shards."""
        ...


class HeldCopies:
    """The sets of copies of one task, by the number of the set and the shard. told: gets the bytes of all of them."""

    METHODS = frozenset({"copy_shards", "shard_copy", "forget_copies"})

    def __init__(self, task: CopyTask, streams: Streams, told: Callable[[int], object]) -> None:
        self._task, self._streams, self._told = task, streams, told
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfnb-copies")
        self._sets: dict[int, dict[int, Ok]] = {}
        self._methods: dict[str, Callable[[Request], Awaitable[Answer]]] = {
            "copy_shards": self._copy, "shard_copy": self._give, "forget_copies": self._forget,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(envelope.size(one.tensors) for copies in self._sets.values() for one in copies.values())

    async def on(self, request: Request) -> Answer:
        """Answer a request of the notebook."""
        try:
            return await self._methods[request.method](request)
        except Exception as error:  # of a server or of memory: it becomes data at this edge
            return failed(error, self._task.name)

    async def _copy(self, request: Request) -> Answer:
        """Pull values that the notebook ``pinned`` on ``shards``, of ``nbytes``, and hold them as set ``copy``."""
        meta = request.meta
        await self._afford(int(meta["nbytes"]))
        number, pins = int(meta["copy"]), {"pinned": int(meta["pinned"]), "of": request.op.client}
        for shard in map(int, meta["shards"]):
            answer = await self._pulled(Ask(shard, "pull", pins))
            if not isinstance(answer, Ok):
                return answer if isinstance(answer, Failure) else Refusal("again", f"shard {shard}: {answer}")
            self._sets.setdefault(number, {})[shard] = answer
            self._told(self.nbytes)
        return Ok({"nbytes": self.nbytes})

    async def _pulled(self, ask: Ask) -> Outcome:
        """The answer of a shard's server, by a direct stream or, if that fails, by Dask's connections."""
        task, peer = self._task, self._task.shards[ask.shard]
        await self._streams.open(peer, epoch=task.epoch)
        ((answer,),) = await in_thread(self._thread, lambda: self._streams.call({peer: [ask]}, epoch=task.epoch))
        if not isinstance(answer, Ok):
            (answer,) = await asking.persisted(task.link, peer, [ask], epoch=task.epoch)
        return answer

    async def _afford(self, asked: int) -> None:
        """Raise ResourceExhausted where the copies exceed the memory budget, or what Dask lets the process have."""
        task = self._task
        taken, held = psutil.Process().memory_info().rss, await task.used() + self.nbytes
        for what, used, limit in (("of copies and values", held, task.budget), ("of its process", taken, task.most)):
            if used + asked > limit:
                raise ResourceExhausted(f"bytes {what} of {task.name}: asked {asked}, used {used}, limit {limit}")

    async def _give(self, request: Request) -> Answer:
        """The copy of a shard, as its server answered."""
        number, shard = int(request.meta["copy"]), int(request.meta["shard"])
        if shard not in self._sets.get(number, {}):
            raise NotFound(f"{self._task.name} holds no copy of shard {shard} in set {number}")
        return replace(self._sets[number][shard], dup=False)

    async def _forget(self, request: Request) -> Answer:
        """Drop all sets but those that the notebook wants to ``keep``."""
        keep: Sequence[int] = request.meta["keep"]
        self._sets = {number: copies for number, copies in self._sets.items() if number in keep}
        self._told(self.nbytes)
        return Ok({"nbytes": self.nbytes})

    def end(self) -> None:
        """Drop all copies, and begin no more."""
        self._streams.end()
        self._sets.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
