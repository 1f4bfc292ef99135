"""What queues on the servers hold, copied or changed at one moment.

All shards are frozen first, and so say which rounds are under way; then each copies or changes its own, knowing what
those did on the others. Tensors travel before or after. Whoever asks holds back the commits of steps meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tfnb.cluster.messages import Ask, Ok
from tfnb.cluster.objects import BYTES, ENTRIES
from tfnb.cluster.wire import size

Copies = dict[str, tuple[Mapping[str, Any], Sequence[torch.Tensor]]]  # by key: facts and tensors of a queue


@dataclass(frozen=True, slots=True)
class Frozen:
    """A moment. ``counts``: of each shard and key the facts of a copy, and how many tensors it has."""

    id: str
    counts: Mapping[tuple[int, str], tuple[Mapping[str, Any], int]]


@dataclass(frozen=True, slots=True)
class Brought:
    """What queues are to hold lies at their shards."""

    id: str
    queues: Mapping[int, list[str]]


class Contents:
    """What queues hold. ask: answers of shards to requests; raises what goes wrong."""

    def __init__(self, ask: Callable[[Sequence[Ask]], Any]) -> None:
        self._ask = ask

    @asynccontextmanager
    async def held(self, queues: Mapping[int, list[str]]) -> AsyncIterator[Frozen]:
        """Copies, which the shards keep during the block, to be `fetched`."""
        async with self._frozen(queues) as (id, rounds):
            moved = [number for number, has_put, _ in rounds if has_put]
            asks = [Ask(shard, "copy", {"id": id, "keys": keys, "moved": moved}) for shard, keys in queues.items()]
            answers = await self._ask(asks)
        found = zip(queues, answers, strict=True)
        counts = {(shard, key): tuple(one) for shard, answer in found for key, one in answer.meta["found"].items()}
        try:
            yield Frozen(id, counts)
        finally:
            await self._ask([Ask(shard, "thaw", {"id": id}) for shard in queues])

    async def fetched(self, frozen: Frozen) -> Copies:
        """The tensors of copies."""
        found: Copies = {}
        for (shard, key), (facts, count) in frozen.counts.items():
            tensors: list[torch.Tensor] = []
            while len(tensors) < count:
                about = {"id": frozen.id, "key": key, "start": len(tensors)}
                (answer,) = await self._ask([Ask(shard, "page", about)])
                tensors += answer.tensors
            found[key] = facts, tensors
        return found

    async def bring(self, queues: Mapping[int, Copies]) -> Brought:
        """Tensors for `refill`."""
        id = uuid.uuid4().hex
        for shard, copies in queues.items():
            for key, (found, tensors) in copies.items():
                start = 0
                while start < len(tensors) or not start:
                    some = _some(tensors[start:])
                    about = {"id": id, "key": key, "found": found, "start": start}
                    await self._ask([Ask(shard, "bring", about, some)])
                    start += len(some) or 1
        return Brought(id, {shard: list(copies) for shard, copies in queues.items()})

    async def refill(self, brought: Brought) -> list[int]:
        """Queues hold what was brought. The rounds under way that used them are void."""
        try:
            async with self._frozen(brought.queues) as (id, rounds):
                void = [number for number, _, is_used in rounds if is_used]
                about = {"id": id, "brought": brought.id, "void": void}
                await self._ask([Ask(shard, "refill", about) for shard in brought.queues])
        finally:
            await self._ask([Ask(shard, "thaw", {"id": brought.id}) for shard in brought.queues])
        return void

    @asynccontextmanager
    async def _frozen(self, queues: Mapping[int, list[str]]) -> Any:
        """A block in which shards are frozen: its name, and the rounds under way."""
        id = uuid.uuid4().hex
        try:
            answers: list[Ok] = await self._ask(
                [Ask(shard, "freeze", {"id": id, "keys": keys}) for shard, keys in queues.items()]
            )
            yield id, [row for answer in answers for row in answer.meta["rounds"]]
        except BaseException:
            await self._ask([Ask(shard, "thaw", {"id": id}) for shard in queues])
            raise


def _some(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if found and (len(found) >= ENTRIES or size([*found, tensor]) > BYTES):
            break
        found.append(tensor)
    return found
