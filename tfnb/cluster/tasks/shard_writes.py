"""Shards of a checkpoint that a parameter server writes by itself, from values that the notebook pinned.

Pinned values do not change, so the thread that writes them needs no lock, and steps go on beside it. The notebook names
the folder, and a file in it that it wrote: a server that does not see this file is on another disk, or has a
``memory://`` of its own, and says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from tfnb.cluster.tasks.computing import in_thread
from tfnb.cluster.wire import sparse_values
from tfnb.cluster.wire.messages import POLL, Failure, Ok, OpId, Refusal, Request, failed
from tfnb.errors import CheckpointWriteError, InvalidArgument
from tfnb.state import manifests
from tfnb.state.checkpoint_stores import CheckpointStore, store_of
from tfnb.state.manifests import Shard

Answer = Ok | Failure | Refusal
STALLED = 60.0  # seconds without a written shard, of at most 16 MiB, after which a disk or store counts as stalled


class ShardWrites:
    """The writes of one server process. serve: lets its shards answer a request."""

    def __init__(self, serve: Callable[[Request], Awaitable[Answer]]) -> None:
        self._serve = serve
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfnb-shards")
        self._writes: dict[OpId, asyncio.Task[Answer]] = {}
        self._moved = 0.0  # when something was last written, by `time.monotonic`

    async def on(self, request: Request) -> Answer:
        """Write ``labels`` (of each shard: label by key) to ``store``, unless ``probe`` is not seen there.

        The answer has the `Shard`s of each key. While they are written the notebook asks again, so that it notices a
        server that died. The write fails where nothing moves on a disk or store.
        """
        if request.op not in self._writes:
            self._writes = {op: write for op, write in self._writes.items() if not write.done()}
            if not self._writes:
                self._move()
            self._writes[request.op] = asyncio.ensure_future(self._answer(request))
        write = self._writes[request.op]
        await asyncio.wait({write}, timeout=min(POLL, request.seconds_left / 2))
        if write.done():
            return write.result()
        if (seconds := time.monotonic() - self._moved) < STALLED:
            return Refusal("again", "its shards are being written")
        self._writes.pop(request.op, write).cancel()  # it is not begun any more, and its values are given up
        where = request.meta["store"]
        text = f"cannot write shards to {where}: nothing was written for {seconds:.0f} s; its disk or store hangs"
        return failed(CheckpointWriteError(text))

    def _move(self) -> None:
        self._moved = time.monotonic()

    async def _answer(self, request: Request) -> Answer:
        meta, pinned = request.meta, dict[int, Ok]()
        for shard in map(int, meta["labels"]):
            about = {"pinned": meta["pinned"], "shard": shard}
            answer = await self._serve(replace(request, method="pull", meta=about, tensors=()))
            if not isinstance(answer, Ok):
                return answer
            pinned[shard] = answer
        try:
            return await in_thread(self._thread, lambda: _written(meta, request.tensors, pinned, self._move))
        except Exception as error:  # of a disk or a store: it becomes data at this edge
            return failed(error)

    def end(self) -> None:
        """Begin no more writes; running ones end by themselves."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _written(
    meta: Mapping[str, Any], tensors: Iterable[torch.Tensor], pinned: dict[int, Ok], on_shard: Callable[[], object]
) -> Ok:  # fmt: skip
    """Write the shards, in the thread."""
    on_shard()  # its turn came
    try:
        store = store_of(str(meta["store"]))
        is_seen = manifests.is_seen(store, str(meta["probe"]))
    except InvalidArgument:  # a package for this kind of URL is not installed here
        is_seen = False
    if not is_seen:
        return Ok({"seen": False})
    whole = set(unpacked(*tensors))
    found = {
        shard: _of_shard(store, meta["labels"][str(shard)], pinned.pop(shard), whole, on_shard) for shard in [*pinned]
    }  # fmt: skip
    return Ok({"seen": True, "found": found})


def _of_shard(
    store: CheckpointStore, labels: Mapping[str, str], answer: Ok, whole: set[Shard], on_shard: Callable[[], object]
) -> dict[str, tuple[Shard, ...]]:  # fmt: skip
    values = sparse_values.read(answer.meta["keys"], answer.meta["tables"], answer.tensors)
    layout = manifests.write_shards(store, {label: values[key] for key, label in labels.items()}, whole, on_shard)
    return {key: layout[label] for key, label in labels.items()}


def packed(shards: Iterable[Shard]) -> list[torch.Tensor]:
    """Shards as tensors of a message: digests and numbers of bytes.

    >>> shards = [Shard("0a" * 32, 80), Shard("ff" * 32, 1 << 40)]
    >>> unpacked(*packed(shards)) == shards, unpacked(*packed([]))
    (True, [])
    """
    shards = list(shards)
    digests = bytearray(b"".join(bytes.fromhex(shard.sha256) for shard in shards))
    numbers = torch.frombuffer(digests, dtype=torch.uint8) if digests else torch.empty(0, dtype=torch.uint8)
    return [numbers.view(-1, 32), torch.tensor([shard.bytes for shard in shards], dtype=torch.int64)]


def unpacked(digests: torch.Tensor, sizes: torch.Tensor) -> list[Shard]:
    """The shards that `packed` packed."""
    return [
        Shard(row.numpy().tobytes().hex(), size) for row, size in zip(digests, sizes.tolist(), strict=True)
    ]  # fmt: skip
