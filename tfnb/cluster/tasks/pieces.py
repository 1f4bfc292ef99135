"""Pieces of a training that a task is lent: which rows of each step are its own, and chunks that are read ahead."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tfnb.cluster.modes.plan import divide
from tfnb.cluster.tasks.data import Data, Needs
from tfnb.state.batch_order import Order, Rows

RANK = 1 << 40  # between the random streams of the workers of one step


class Share(NamedTuple):
    """Feeds and rows of one worker of a step, no rows where it has none; of how many workers the step is made."""

    feeds: Sequence[torch.Tensor]
    rows: int
    run: int
    workers: int


class _Mine(NamedTuple):
    """``rows``, from and to, that a worker takes of a ``batch`` of a piece; None where it has none."""

    batch: int
    rows: tuple[int, int] | None
    run: int
    workers: int


@dataclass(frozen=True, slots=True)
class Given:
    """One piece of training. ``steps``: of the data sent ahead; else ``batches`` holds (feeds, rows, run index).

    ``part``: this worker, how many there are, and how many of them make a step, among which the rows of each batch are
    divided; None: whole batches. The spare workers of a step compute the first rows of the next batch; who is spare
    goes round, so that a slow task leaves out no rows more than others. ``joint``: the same workers make a step on all
    servers; else the first ones on each.
    """

    number: int
    stream: str
    first: int
    count: int
    steps: int | None = None
    run: int = 0
    part: tuple[int, int, int] | None = None
    joint: bool = True
    batches: Sequence[tuple[Sequence[torch.Tensor], int, int, Sequence[bool]]] = ()

    @classmethod
    def of(cls, meta: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Given:
        """The piece in a request."""
        source, batches = iter(tensors), []
        for feeds, rows, run, cut in meta.get("batches", ()):
            batches.append((list(itertools.islice(source, feeds)), rows, run, cut))
        part = meta["part"]
        return cls(
            int(meta["number"]), str(meta["stream"]), int(meta["first"]), int(meta["count"]), meta["steps"],
            int(meta["run"]), None if part is None else (part[0], part[1], part[2]), bool(meta["joint"]),
            tuple(batches),
        )  # fmt: skip

    def share(self, index: int, data: Rows | None) -> Share:
        """What this worker computes of a step."""
        mine = self._mine(index, data)
        if mine.rows is None:
            return Share((), 0, mine.run, mine.workers)
        first, last = mine.rows
        if self.steps is not None:
            assert data is not None  # the notebook sends the data first
            feeds: Sequence[torch.Tensor] = data.part(self.steps + mine.batch, first, last)
            return Share(feeds, last - first, mine.run, mine.workers)
        tensors, of, _, cut = self.batches[mine.batch % self.count]
        if (first, last) == (0, of):
            return Share(tensors, of or 1, mine.run, mine.workers)
        feeds = [t[first:last] if c else t for t, c in zip(tensors, cut, strict=True)]
        return Share(feeds, last - first, mine.run, mine.workers)

    def rows(self, order: Rows) -> Iterator[torch.Tensor | slice]:
        """Where the rows are that this worker takes of arrays, step by step."""
        for index in range(self.count):
            mine = self._mine(index, order)
            if mine.rows is not None:
                yield order.at((self.steps or 0) + mine.batch, *mine.rows)

    def _mine(self, index: int, data: Rows | None) -> _Mine:
        """Which rows of which batch."""
        worker, workers, wanted = self.part or (0, 1, 1)
        ranges = divide(self._rows(index, data), wanted)
        run = self.run + index if self.steps is not None else self.batches[index][2]
        if wanted == workers:
            if worker >= len(ranges):
                return _Mine(index, None, run, len(ranges))
            return _Mine(index, ranges[worker], run + worker * RANK, len(ranges))
        ahead, place = divmod((worker + self.first + index) % workers, wanted)
        of_next = divide(self._rows(index + ahead, data), wanted)
        return _Mine(index + ahead, of_next[place % len(of_next)], run + worker * RANK, len(ranges))

    def _rows(self, index: int, data: Rows | None) -> int:
        """Rows of a batch, 0 where it has none; behind the last batch of those drawn in the notebook is the first."""
        if self.steps is None:
            return self.batches[index % self.count][1]
        assert data is not None  # the notebook sends the data first
        _, start, stop = data.order.place(self.steps + index)
        return stop - start


class Prefetch:
    """The rows of the pieces that are lent, on their way to where they are trained on. ``data``: for the steps."""

    def __init__(self, arrays: Data, order: Order) -> None:
        self.data = Rows(arrays.arrays, order)
        self._arrays = arrays
        self._order = Rows(arrays.arrays, order)  # of its own: steps take theirs in another thread
        self._one_by_one = asyncio.Lock()
        self._held: dict[int, asyncio.Task[Needs]] = {}  # by number of the piece

    def begin(self, given: Given, is_here: Callable[[], None]) -> None:
        """A piece is lent."""
        if self._arrays.chunked:
            held = self._held[given.number] = asyncio.ensure_future(self._hold(given))
            held.add_done_callback(lambda _: is_here())

    async def _hold(self, given: Given) -> Needs:
        async with self._one_by_one:
            needs = await asyncio.to_thread(lambda: self._arrays.needs(given.rows(self._order)))
        await self._arrays.hold(needs)
        return needs

    def is_here(self, given: Given) -> bool:
        """Whether its rows are here; raises what kept them away."""
        held = self._held.get(given.number)
        if held is not None and held.done():
            held.result()
        return held is None or held.done()

    def end(self, given: Given) -> None:
        """A piece is done."""
        held = self._held.pop(given.number, None)
        if held is not None:
            self._arrays.free(held.result())

    def close(self) -> None:
        """No more pieces."""
        for held in self._held.values():
            if not held.done():
                held.cancel()
            elif not held.cancelled() and held.exception() is None:
                self._arrays.free(held.result())
        self._held.clear()
