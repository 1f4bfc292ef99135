"""Snapshots and replacement of the contents of all servers' queues, and of Variables, at one moment.

All shards are frozen first, and report their open rounds; then each copies or changes its own queues, knowing the
effects of these rounds on the other shards. Tensors travel before or after. The caller holds back commits of steps
meanwhile. A change is atomic over shards: everything fallible happens before the first shard changes.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from tfnb.cluster.server.objects import message
from tfnb.cluster.wire.messages import Ask, Ok
from tfnb.errors import TfnbError

Copies = dict[str, tuple[Mapping[str, Any], Sequence[torch.Tensor]]]  # by key: facts and tensors of a queue


@dataclass(frozen=True, slots=True)
class Frozen:
    """A snapshot of one moment. ``counts``: by shard and key, facts and number of tensors of each copy.

    ``seen``: by channel, the mark of the copies, see `tfnb.cluster.queues.journal.ChannelMark`.
    """

    id: str
    counts: Mapping[tuple[int, str], tuple[Mapping[str, Any], int]]
    seen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class ShardContents:
    """New contents of queues and Variables, staged at their shards. ``queues``: keys of queues, by shard.

    is_decided: the contents will be installed, unless a server is lost.
    """

    id: str
    queues: Mapping[int, list[str]]
    is_decided: bool = False


class RemoteContents:
    """Contents of queues on servers. ask: sends requests to shards and returns their answers; raises on failure.

    insist: the same for a change that is decided; a server that fails then is lost.
    """

    def __init__(self, ask: Callable[[Sequence[Ask]], Any], insist: Callable[[Sequence[Ask]], Any]) -> None:
        self._ask, self._insist = ask, insist

    @asynccontextmanager
    async def held(self, queues: Mapping[int, list[str]], *, unheard: bool = False) -> AsyncIterator[Frozen]:
        """Copies of queues, kept by the shards during the block for `fetched`.

        unheard: include dequeued elements whose delivery is not acknowledged.
        """
        async with self._frozen(queues) as (id, rounds):
            moved = [number for number, has_put, _ in rounds if has_put]
            about = {"id": id, "moved": moved, "unheard": unheard}
            answers = await self._ask([Ask(shard, "copy", {**about, "keys": keys}) for shard, keys in queues.items()])
        found = list(zip(queues, answers, strict=True))
        counts = {(shard, key): tuple(one) for shard, answer in found for key, one in answer.meta["found"].items()}
        try:
            yield Frozen(id, counts, {name: one for _, answer in found for name, one in answer.meta["seen"].items()})
        finally:
            await self._thaw(id, queues)

    async def fetched(self, frozen: Frozen) -> Copies:
        """Facts and tensors of the copies, by key."""
        found: Copies = {}
        for (shard, key), (facts, count) in frozen.counts.items():
            tensors: list[torch.Tensor] = []
            while len(tensors) < count:
                about = {"id": frozen.id, "key": key, "start": len(tensors)}
                (answer,) = await self._ask([Ask(shard, "page", about)])
                tensors += answer.tensors
            found[key] = facts, tensors
        return found

    async def bring(
        self, queues: Mapping[int, Copies], values: Mapping[int, Mapping[str, torch.Tensor]] = MappingProxyType({})
    ) -> ShardContents:
        """Stage tensors for `refill` at the shards: contents of queues, values of Variables. Nothing changes yet."""
        shards = sorted({*queues, *values})
        brought = ShardContents(uuid.uuid4().hex, {shard: list(queues.get(shard, ())) for shard in shards})
        try:
            for shard, copies in queues.items():
                for key, (found, tensors) in copies.items():
                    for start, some in _pages(tensors):
                        about = {"id": brought.id, "key": key, "found": found, "start": start}
                        await self._ask([Ask(shard, "bring", about, some)])
            for shard, mine in values.items():
                keys = list(mine)
                for start, some in _pages(list(mine.values())):
                    about = {"id": brought.id, "keys": keys[start : start + len(some)]}
                    await self._ask([Ask(shard, "bring", about, some)])
        except BaseException:
            await self.drop(brought)
            raise
        return brought

    async def refill(self, brought: ShardContents) -> list[int]:
        """Install staged contents in queues and Variables. Returns the open rounds that used the queues: they are void.

        A failure before the decision is raised, with nothing changed.
        """
        async with self._frozen(brought.queues, {"brought": brought.id}) as (id, rounds):
            void = [number for number, _, is_used in rounds if is_used]
            brought.is_decided = True
            about = {"id": id, "brought": brought.id, "void": void}
            answers = await self._insist([Ask(shard, "refill", about) for shard in brought.queues])
        return list({*void, *(number for answer in answers for number in answer.meta["void"])})

    async def drop(self, brought: ShardContents) -> None:
        """Discard staged contents at the shards."""
        await self._thaw(brought.id, brought.queues)

    async def _thaw(self, id: str, shards: Iterable[int]) -> None:
        with suppress(TfnbError):  # of a server that is lost
            await self._ask([Ask(shard, "thaw", {"id": id}) for shard in shards])

    @asynccontextmanager
    async def _frozen(self, queues: Mapping[int, list[str]], more: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Freeze shards; yields the id of the freeze and the open rounds. An error thaws the shards. more: added to
        each request.
        """
        id = uuid.uuid4().hex
        try:
            answers: list[Ok] = await self._ask(
                [Ask(shard, "freeze", {"id": id, "keys": keys, **more}) for shard, keys in queues.items()]
            )
            yield id, [row for answer in answers for row in answer.meta["rounds"]]
        except BaseException:
            await self._thaw(id, queues)
            raise


def _pages(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Tensors in messages, one message at least, each with the number of its first tensor."""
    start = 0
    while start < len(tensors) or not start:
        some = message(tensors, start)
        yield start, some
        start += len(some) or 1
