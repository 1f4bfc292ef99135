"""Rows of some iterations of a loop, as a block that moves to a spill file and back. Knows no graph.

Where a thread of its own copies, it makes few calls, each for many rows, and neither makes nor frees rows: whatever it
does in Python holds up the thread that runs iterations. That one drops rows once they are gone, and makes them of what
came back. An accelerator copies on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch

from tfnb.kernels.spill_file import SpillFile

T = TypeVar("T")
HERE, AWAY, COMING = "here", "away", "coming"


class SpillBlock:
    """The rows of some iterations: of each column a list. alike: they have one shape.

    first, iterations: which iterations. state: the carried values before them, to take them again from; None: they
    move.
    """

    __slots__ = (
        "alike",
        "back",
        "bytes",
        "coming",
        "device",
        "each",
        "first",
        "gone",
        "iterations",
        "leaving",
        "moved",
        "pinned",
        "ready",
        "rows",
        "state",
        "where",
    )  # fmt: skip

    def __init__(
        self, rows: list[list[torch.Tensor]], each: list[int], alike: bool, first: int,
        state: Sequence[torch.Tensor] | None,
    ) -> None:  # fmt: skip
        self.rows, self.each, self.bytes, self.alike = rows, each, sum(each), alike
        self.first, self.iterations, self.state, self.gone = first, len(rows[0]), state, False
        self.where, self.pinned = HERE, False  # pinned: a loop takes its rows now
        self.device = rows[0][0].device
        self.moved: list[_SpilledColumns] = []  # the columns, if they are in the spill file
        self.back: list[torch.Tensor] = []  # memory for what comes back
        self.leaving: Future[None] | None = None
        self.coming: Future[None] | None = None
        self.ready: object = None

    def mark(self) -> None:
        """In the computing thread: order the next copy after the work started so far."""
        if self.device.type != "cpu":
            self.ready = torch.accelerator.current_stream(self.device).record_event()

    def move(self, spill: SpillFile) -> None:
        """Copy to the spill file; in the thread that copies. Raises OSError where there is no memory.

        In few calls: each is code that the iterations since the last block have driven from the core's caches.
        """
        kinds: dict[Any, list[int]] = {}  # columns of one kind are copied together
        for column, rows in enumerate(self.rows):
            kind = (rows[0].shape, rows[0].stride(), rows[0].dtype) if self.alike else column
            kinds.setdefault(kind, []).append(column)
        moved = []
        with _stream(self.device, self.ready):
            for columns in kinds.values():
                rows = [row for column in columns for row in self.rows[column]]
                layout = (_UniformRows if self.alike else _Layout)(rows)
                memory = spill.take(layout.count, layout.dtype, self.device)
                layout.put(rows, memory)
                moved.append(_SpilledColumns(layout, columns, memory))
        self.moved = moved

    def left(self) -> None:
        """Release the rows copied by `move`."""
        self.leaving, self.rows = None, []

    def memory_here(self) -> None:
        """Take the memory that `bring` fills."""
        self.back = [torch.empty_like(moved.memory, device=self.device) for moved in self.moved]
        self.mark()  # kernels that used this memory for something else may still run

    def bring(self) -> None:
        """Copy from the spill file; in the thread that copies."""
        with torch.no_grad(), _stream(self.device, self.ready):
            torch._foreach_copy_(self.back, [moved.memory for moved in self.moved], non_blocking=True)

    def arrived(self) -> None:
        """Use the rows copied by `bring` from here on."""
        self.coming, self.where = None, HERE
        self._lie(self.back)
        if self.device.type != "cpu":
            for memory in self.back:
                memory.record_stream(torch.accelerator.current_stream(self.device))  # type: ignore[arg-type]
        self.back = []

    def lent(self) -> None:
        """Let the rows be read in place in the spill file, on the CPU."""
        self._lie(moved.memory for moved in self.moved)

    def _lie(self, memories: Iterable[torch.Tensor]) -> None:
        self.rows = [[] for _ in self.each]
        for moved, memory in zip(self.moved, memories, strict=True):
            rows = moved.layout.rows(memory)
            for place, column in enumerate(moved.columns):
                self.rows[column] = [*rows[place * self.iterations : (place + 1) * self.iterations]]

    def taken(self, column: int, *, back: bool, last: bool) -> Iterator[torch.Tensor]:
        """A column's rows; back: the last iteration's first. last: nobody takes them again, so they go one by one."""
        rows = self.rows[column] if last else self.rows[column][:]
        if not back:
            rows.reverse()
        return _popped(rows)

    def dropped(self) -> None:
        """Hold no rows."""
        self.rows, self.where = [], AWAY

    def end(self) -> None:
        """Release everything; references to the block may remain until a garbage collection."""
        self.rows, self.moved, self.back = [], [], []


def _popped(rows: list[T]) -> Iterator[T]:
    """Pop the items of a list, last one first."""
    return map(list.pop, repeat(rows, len(rows)))


def emptied(rows: list[T]) -> list[T]:
    """The items of a list in order, emptying the list, without touching the items (slow when out of the caches)."""
    found = [*_popped(rows)]
    found.reverse()
    return found


def _stream(device: torch.device, ready: object) -> AbstractContextManager[None]:
    """A separate stream ordered after ``ready``, awaited at the end."""
    return nullcontext() if device.type == "cpu" else _behind(device, ready)


@contextmanager
def _behind(device: torch.device, ready: Any) -> Iterator[None]:
    stream = torch.Stream(device)
    stream.wait_event(ready)
    with stream:
        yield
    stream.synchronize()


class _Layout:
    """How rows lie in the spill file: one after the other, with the order of axes that they had."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._order(rows[0])
        self.shapes = [row.shape for row in self.laid(rows)]
        self.count = sum(map(prod, self.shapes))

    def _order(self, first: torch.Tensor) -> None:
        strides = first.stride()
        order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
        self.order = None if order == sorted(order) else order
        self.places = tuple(order.index(axis) for axis in range(len(order)))
        self.dtype = first.dtype

    def laid(self, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The rows with the axes as they lie."""
        return rows if self.order is None else [row.permute(self.order) for row in rows]

    def put(self, rows: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Copy these rows, or others of their layout."""
        memory.copy_(torch.cat([row.reshape(-1) for row in self.laid(rows)]), non_blocking=True)

    def rows(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """The rows, in memory that they came back to."""
        parts = memory.split([prod(shape) for shape in self.shapes])
        return self.placed([part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)])

    def placed(self, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Rows as they lie, with the axes as they were."""
        return rows if self.order is None else [row.permute(self.places) for row in rows]


class _UniformRows(_Layout):
    """Rows of one shape."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        first = rows[0]
        self._order(first)
        shape = first.shape if self.order is None else [first.shape[axis] for axis in self.order]
        self.whole = (len(rows), *shape)
        self.count = prod(self.whole)

    def put(self, rows: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        if rows[0].is_cpu:
            torch.stack([*self.laid(rows)], out=memory.view(self.whole))
        else:
            super().put(rows, memory)

    def rows(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.placed(memory.view(self.whole).unbind(0))


class _SpilledColumns(NamedTuple):
    """Columns of one kind in the spill file, one after the other."""

    layout: _Layout
    columns: Sequence[int]
    memory: torch.Tensor
