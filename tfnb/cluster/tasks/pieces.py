"""Pieces of a training that a task is lent: the task's rows of each step, and the prefetch of their chunks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tfnb.cluster.tasks.data import Data, Needs
from tfnb.kernels.random import REPLICA
from tfnb.passes.microbatches import divide
from tfnb.state.batch_order import RowOrder, Rows


class Share(NamedTuple):
    """One part of a step: feeds and rows, no rows where there is none; its place, and how many parts the step has."""

    feeds: Sequence[torch.Tensor]
    rows: int
    run: int
    place: int
    parts: int


class TaskShare(NamedTuple):
    """The worker that computes a piece, the number of workers, and of ``places``: parts of each batch's rows.

    A worker begins with the place of its number. Spare ones begin with copies, of the last place first.

    >>> [TaskShare(worker, 4, 2).place for worker in range(4)]
    [0, 1, 1, 0]
    """

    worker: int
    workers: int
    places: int

    @property
    def has_spare(self) -> bool:
        """Whether there are more workers than places."""
        return self.workers > self.places

    @property
    def place(self) -> int:
        """The place that this worker begins with."""
        turn, place = divmod(self.worker, self.places)
        return self.places - 1 - place if turn else place


@dataclass(frozen=True, slots=True)
class PieceOrder:
    """One piece of training. ``steps``: of the data sent ahead; else ``batches`` holds feeds, rows, run index, and of
    each feed whether its rows are divided.

    ``part``: None for whole batches. ``fewer``: by the number of rows of a batch, the most parts that the guards of the
    recording allow; absent where they allow all.

    ``needs_all``: whether the worker at the first place looks at all rows. ``measures``: whether it tells how much of a
    gradient its pushes change.
    """

    number: int
    stream: str
    first: int
    count: int
    steps: int | None = None
    run: int = 0
    part: TaskShare | None = None
    batches: Sequence[tuple[Sequence[torch.Tensor], int, int, Sequence[bool]]] = ()
    needs_all: bool = False
    fewer: Mapping[int, int] = field(default_factory=dict)
    measures: bool = False

    @classmethod
    def of(cls, meta: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> PieceOrder:
        """The piece in a request."""
        source, batches = iter(tensors), []
        for feeds, rows, run, cut in meta.get("batches", ()):
            batches.append((list(itertools.islice(source, feeds)), rows, run, cut))
        part = meta["part"]
        return cls(
            int(meta["number"]), str(meta["stream"]), int(meta["first"]), int(meta["count"]), meta["steps"],
            int(meta["run"]), None if part is None else TaskShare(*part), tuple(batches),
            fewer=dict(meta.get("fewer", ())), measures=bool(meta.get("measures")),
        )  # fmt: skip

    def share(self, index: int, data: Rows | None, place: int) -> Share:
        """The part of a place of a step."""
        parts, run = self._parts(index, data), self.run + index if self.steps is not None else self.batches[index][2]
        if self.part is not None and self.part.has_spare:
            place %= len(parts)  # a short batch has fewer parts than places
        elif place >= len(parts):
            return Share((), 0, run, place, len(parts))
        (first, last), run = parts[place], run + place * REPLICA
        if self.steps is not None:
            assert data is not None  # the notebook sends the data first
            feeds: Sequence[torch.Tensor] = data.part(self.steps + index, first, last)
            return Share(feeds, last - first, run, place, len(parts))
        tensors, of, _, cut = self.batches[index]
        if (first, last) == (0, of):
            return Share(tensors, of or 1, run, place, len(parts))
        feeds = [t[first:last] if c else t for t, c in zip(tensors, cut, strict=True)]
        return Share(feeds, last - first, run, place, len(parts))

    def all_rows(self, index: int, data: Rows | None) -> Share:
        """A whole step, undivided, as for a single worker."""
        return replace(self, part=None).share(index, data, 0)

    def rows(self, order: Rows) -> Iterator[torch.Tensor | slice]:
        """Where the rows are that this worker may take of arrays, step by step: with spare workers all of them."""
        for index in range(self.count):
            parts = self._parts(index, order)
            if self.part is not None and (self.part.has_spare or (self.needs_all and not self.part.worker)):
                parts = [(0, parts[-1][1])]
            place = 0 if self.part is None or self.part.has_spare else self.part.worker
            if place < len(parts):
                yield order.at((self.steps or 0) + index, *parts[place])

    def _parts(self, index: int, data: Rows | None) -> list[tuple[int, int]]:
        """The rows of a batch from and to, for each of its parts."""
        rows, places = self.whole(index, data), 1 if self.part is None else self.part.places
        return divide(rows, min(places, self.fewer.get(rows, places)))

    def whole(self, index: int, data: Rows | None) -> int:
        """Number of rows of a batch; 0 for a batch without rows."""
        if self.steps is None:
            return self.batches[index][1]
        assert data is not None  # the notebook sends the data first
        _, start, stop = data.order.place(self.steps + index)
        return stop - start


class Prefetch:
    """Prefetch of the chunks of lent pieces. ``data``: the rows for steps."""

    def __init__(self, arrays: Data, order: RowOrder) -> None:
        self.data = Rows(arrays.arrays, order)
        self._arrays = arrays
        self._order = Rows(arrays.arrays, order)  # of its own: steps take theirs in another thread
        self._one_by_one = asyncio.Lock()
        self._held: dict[int, asyncio.Task[Needs]] = {}  # by number of the piece

    def begin(self, given: PieceOrder, is_here: Callable[[], None]) -> None:
        """Start to read the chunks of a lent piece; ``is_here`` is called when they have arrived."""
        if self._arrays.chunked:
            held = self._held[given.number] = asyncio.ensure_future(self._hold(given))
            held.add_done_callback(lambda _: is_here())

    async def _hold(self, given: PieceOrder) -> Needs:
        async with self._one_by_one:
            needs = await asyncio.to_thread(lambda: self._arrays.needs(given.rows(self._order)))
        await self._arrays.hold(needs)
        return needs

    def is_here(self, given: PieceOrder) -> bool:
        """Whether the rows of a piece have arrived; raises the error of a failed read."""
        held = self._held.get(given.number)
        if held is not None and held.done():
            held.result()
        return held is None or held.done()

    def end(self, given: PieceOrder) -> None:
        """Release the chunks of a finished piece."""
        held = self._held.pop(given.number, None)
        if held is not None:
            self._arrays.free(held.result())

    def close(self) -> None:
        """Release all chunks, and cancel pending reads."""
        for held in self._held.values():
            if not held.done():
                held.cancel()
            elif not held.cancelled() and held.exception() is None:
                self._arrays.free(held.result())
        self._held.clear()
