"""The arrays of one training on one task: arrays sent whole, and arrays in chunks, read as needed.

Chunks are read ahead of need, when a piece is lent, and kept while there is room. Runs in the event loop of the task;
rows are taken in its compute thread.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from tfnb.errors import ProtocolError, ResourceExhausted, ShapeError
from tfnb.graph.spec import dtype_name, rounded
from tfnb.state.chunks import ChunkedArray, Chunks

ALIGNED = 64  # bytes
Read = Callable[[Any, str], Awaitable[torch.Tensor]]  # of a key, and what the chunk is called in errors
Needs = Collection[tuple[int, int]]  # chunks: array, number


def written(array: torch.Tensor | ChunkedArray) -> torch.Tensor:
    """The message form of an array: itself, or a description of its chunks."""
    if isinstance(array, torch.Tensor):
        return array
    about = {
        "name": array.name, "lengths": array.lengths, "tail": array.tail, "dtype": dtype_name(array.dtype),
        "keys": array.keys, "groups": array.groups,
    }  # fmt: skip
    return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)


def _key(written: object) -> Any:
    """A key of Dask, from its JSON form with lists in place of tuples."""
    return tuple(map(_key, written)) if isinstance(written, list) else written


class Data:
    """The arrays of one training. ``arrays``: for `Rows`. ``room``: bytes of chunks that are kept."""

    def __init__(self, tensors: Sequence[torch.Tensor], chunked: Sequence[int], read: Read, room: int) -> None:
        self.arrays: list[torch.Tensor | Chunks] = list(tensors)
        self._read, self._room = read, room
        self._about: dict[int, Mapping[str, Any]] = {}
        self._kept: OrderedDict[tuple[int, int], int] = OrderedDict()  # chunks that are here: bytes, latest use last
        self._pinned: Counter[tuple[int, int]] = Counter()
        self._coming: dict[tuple[int, int], asyncio.Future[None]] = {}
        for place in chunked:
            about = self._about[place] = json.loads(bytes(tensors[place].tolist()))
            dtype = getattr(torch, str(about["dtype"]), None)
            if not isinstance(dtype, torch.dtype):
                raise ProtocolError(f"no dtype {about['dtype']!r}")
            self.arrays[place] = Chunks(about["lengths"], about["tail"], dtype, about["groups"])

    @property
    def chunked(self) -> dict[int, Chunks]:
        """The arrays in chunks, by place."""
        return {place: array for place, array in enumerate(self.arrays) if isinstance(array, Chunks)}

    def needs(self, rows: Iterable[torch.Tensor | slice]) -> Needs:
        """The chunks that contain these rows."""
        found: set[tuple[int, int]] = set()
        for at in rows:
            for place, array in self.chunked.items():
                found.update((place, number) for number in array.numbers(at))
        return found

    async def hold(self, needs: Needs) -> None:
        """Read these chunks, and keep them until `free`."""
        size = sum(self._nbytes(*one) for one in needs)
        if size > self._room:
            raise ResourceExhausted(
                f"the next steps take rows of {len(needs)} chunks with {size} bytes, and a task keeps {self._room} "
                'bytes of them: use mode="async", which shuffles within chunks, or shuffle=False, or smaller chunks'
            )
        self._pinned.update(needs)
        coming = [self._one(one) for one in sorted(needs)]
        try:
            await asyncio.gather(*(asyncio.shield(one) for one in coming))
        except BaseException:
            self.free(needs)
            raise
        self._make_room()

    def free(self, needs: Needs) -> None:
        """Release chunks of `hold`."""
        self._pinned.subtract(needs)

    def _nbytes(self, place: int, number: int) -> int:
        return self.chunked[place].nbytes(number)

    def _one(self, one: tuple[int, int]) -> asyncio.Future[None]:
        """The pending read of a chunk; already done if the chunk is here."""
        if one in self._kept:
            self._kept.move_to_end(one)
        elif one not in self._coming:
            coming = self._coming[one] = asyncio.ensure_future(self._bring(*one))
            coming.add_done_callback(lambda done: self._came(one, done))
        return self._coming.get(one) or _done()

    def _came(self, one: tuple[int, int], done: asyncio.Future[None]) -> None:
        self._coming.pop(one, None)
        if not done.cancelled():
            done.exception()  # seen, also if nobody waits any more

    async def _bring(self, place: int, number: int) -> None:
        chunks, about = self.chunked[place], self._about[place]
        first, stop = chunks.span(number)
        what = f"chunk {number} of {about['name']} (rows {first} to {stop})"
        found = await self._read(_key(about["keys"][number]), what)
        if tuple(found.shape) != (stop - first, *chunks.tail):
            raise ShapeError(f"{what} has shape {list(found.shape)}, it had {[stop - first, *chunks.tail]}")
        chunks.here[number] = _aligned(rounded(found, chunks.dtype, what).contiguous())
        self._kept[place, number] = chunks.nbytes(number)

    def _make_room(self) -> None:
        """Drop chunks that are not held, the longest unused first, until the rest fits."""
        over = sum(self._kept.values()) - self._room
        for place, number in [one for one in self._kept if not self._pinned[one] > 0]:
            if over <= 0:
                return
            over -= self._kept.pop((place, number))
            del self.chunked[place].here[number]

    def close(self) -> None:
        """Cancel pending reads: the training is over."""
        for coming in list(self._coming.values()):
            coming.cancel()


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory aligned like torch's own: some kernels round by the position of a row in its cache line."""
    return tensor if tensor.data_ptr() % ALIGNED == 0 else tensor.clone()


def _done() -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
