"""What queues on the servers hold, copied or changed at one moment; what is changed, with values of Variables.

All shards are frozen first, and so say which rounds are under way; then each copies or changes its own, knowing what
those did on the others. Tensors travel before or after. Whoever asks holds back the commits of steps meanwhile.
A change is of all shards or of none: whatever may fail fails before the first of them changes.
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
    """A moment. ``counts``: of each shard and key the facts of a copy, and how many tensors it has.

    ``seen``: what the copies have seen of each channel, see `tfnb.cluster.queues.journal.ChannelMark`.
    """

    id: str
    counts: Mapping[tuple[int, str], tuple[Mapping[str, Any], int]]
    seen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class ShardContents:
    """What queues and Variables are to hold lies at their shards. ``queues``: keys of queues, of each shard.

    is_decided: what was brought will be there, unless a server is lost.
    """

    id: str
    queues: Mapping[int, list[str]]
    is_decided: bool = False


class RemoteContents:
    """What queues hold. ask: answers of shards to requests; raises what goes wrong.

    insist: the same for what is decided; a server that fails to do it is lost.
    """

    def __init__(self, ask: Callable[[Sequence[Ask]], Any], insist: Callable[[Sequence[Ask]], Any]) -> None:
        self._ask, self._insist = ask, insist

    @asynccontextmanager
    async def held(self, queues: Mapping[int, list[str]], *, unheard: bool = False) -> AsyncIterator[Frozen]:
        """Copies, which the shards keep during the block, to be `fetched`.

        unheard: with elements that were taken, of which the server does not know that anybody got them.
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

    async def bring(
        self, queues: Mapping[int, Copies], values: Mapping[int, Mapping[str, torch.Tensor]] = MappingProxyType({})
    ) -> ShardContents:
        """Tensors for `refill`: what queues are to hold, and values of Variables, by shard. Nothing changes."""
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
        """Queues and Variables hold what was brought. The rounds under way that used the queues are void.

        Raises what goes wrong before it is decided, with nothing changed.
        """
        async with self._frozen(brought.queues, {"brought": brought.id}) as (id, rounds):
            void = [number for number, _, is_used in rounds if is_used]
            brought.is_decided = True
            about = {"id": id, "brought": brought.id, "void": void}
            answers = await self._insist([Ask(shard, "refill", about) for shard in brought.queues])
        return list({*void, *(number for answer in answers for number in answer.meta["void"])})

    async def drop(self, brought: ShardContents) -> None:
        """Shards forget what was brought and is not needed."""
        await self._thaw(brought.id, brought.queues)

    async def _thaw(self, id: str, shards: Iterable[int]) -> None:
        with suppress(TfnbError):  # of a server that is lost
            await self._ask([Ask(shard, "thaw", {"id": id}) for shard in shards])

    @asynccontextmanager
    async def _frozen(self, queues: Mapping[int, list[str]], more: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """A block in which shards are frozen: its name, and the rounds under way. more: to be told to each shard."""
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
    """Tensors in messages, one at least, and the number of the first of each."""
    start = 0
    while start < len(tensors) or not start:
        some = message(tensors, start)
        yield start, some
        start += len(some) or 1
