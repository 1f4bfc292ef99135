"""Rows of some turns of a loop, as a block that moves to a second tier and back. Knows no graph.

The second tier of the CPU is a file that is mapped into memory and has no name, so nothing is left of it however the
run ends; that of an accelerator is pinned memory, copied on a stream of its own.

The thread that copies makes few calls, each for many rows, and neither makes nor frees rows: whatever it does in Python
holds up the thread that takes turns. That one drops rows once they are gone, and makes them of what came back.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain, groupby, repeat
from math import prod
from typing import Any, TypeVar

import torch

from tfnb.kernels.pieces import Piece, Pieces

PIECE = 64 << 10  # bytes that come back in one piece of memory, about
_ALIGN = 64
T = TypeVar("T")
HERE, AWAY, COMING = "here", "away", "coming"


class Tier:
    """Memory of the second tier, which later runs use again. Of the CPU it is a file without a name.

    pieces: of the first tier, for rows that come back.
    """

    def __init__(self) -> None:
        self.pieces = Pieces()
        self._free: dict[tuple[int, str], list[torch.Tensor]] = {}
        self._end = 0

    def take(self, bytes: int, device: torch.device) -> torch.Tensor:
        """So many bytes, for rows of a device. Raises OSError where there are none."""
        try:
            return self._free[bytes, device.type].pop()
        except (KeyError, IndexError):
            return self._new(bytes, device)

    def give(self, memory: torch.Tensor, device: torch.device) -> None:
        """The memory is free."""
        self._free.setdefault((memory.numel(), device.type), []).append(memory)

    def _new(self, bytes: int, device: torch.device) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(bytes, dtype=torch.uint8, pin_memory=True)
        with tempfile.TemporaryFile(prefix="tfnb-swap-") as file:  # gone from the disk when nothing is mapped any more
            os.posix_fallocate(file.fileno(), 0, bytes)  # a full disk is an error here, and a dead process later
            return torch.frombuffer(mmap.mmap(file.fileno(), bytes), dtype=torch.uint8)


class Block:
    """The rows of some turns: of each column a list. alike: they have one shape.

    first, turns: which turns. state: the carried values before them, to take them again from; None: they move.
    """

    __slots__ = (
        "alike", "bytes", "coming", "device", "each", "first", "gone", "leaving", "memory", "moved", "pieces", "pinned",
        "ready", "rows", "state", "turns", "where",
    )  # fmt: skip

    def __init__(
        self, rows: list[list[torch.Tensor]], each: list[int], alike: bool, first: int,
        state: Sequence[torch.Tensor] | None,
    ) -> None:  # fmt: skip
        self.rows, self.each, self.bytes, self.alike = rows, each, sum(each), alike
        self.first, self.turns, self.state, self.gone = first, len(rows[0]), state, False
        self.where, self.pinned = HERE, False  # pinned: a loop takes its rows now
        self.device = rows[0][0].device
        self.moved: list[tuple[_Layout, torch.Tensor]] = []  # the columns, if they are in the second tier
        self.pieces: list[list[Piece]] = []  # of each column, if it came back
        self.memory: torch.Tensor | None = None
        self.leaving: Future[None] | None = None
        self.coming: Future[None] | None = None
        self.ready: Any = None

    def mark(self) -> None:
        """In the thread that computes: what it started so far comes before the next copy."""
        if self.device.type != "cpu":
            self.ready = torch.accelerator.current_stream(self.device).record_event()

    def move(self, tier: Tier) -> None:
        """Copy to the second tier; in the thread that copies. Raises OSError where there is no memory."""
        kinds: dict[Any, list[int]] = {}  # columns of one kind are copied together
        for column, rows in enumerate(self.rows):
            kind = (rows[0].shape, rows[0].stride(), rows[0].dtype) if self.alike else column
            kinds.setdefault(kind, []).append(column)
        sizes = [sum(self.each[column] for column in columns) for columns in kinds.values()]
        spans = [-(-size // _ALIGN) * _ALIGN for size in sizes]
        self.memory, at = tier.take(max(sum(spans), 1), self.device), 0
        moved: dict[int, tuple[_Layout, torch.Tensor]] = {}
        with torch.no_grad(), _stream(self.device, self.ready):
            for columns, size, span in zip(kinds.values(), sizes, spans, strict=True):
                layout = (_Alike if self.alike else _Layout)(self.rows[columns[0]])
                memory = self.memory[at : at + size].view(layout.dtype)
                layout.put([row for column in columns for row in self.rows[column]], memory)
                parts = memory.view(len(columns), -1).unbind(0) if size else [memory] * len(columns)
                moved |= {column: (layout, part) for column, part in zip(columns, parts, strict=True)}
                at += span
        self.moved = [moved[column] for column in range(len(self.rows))]

    def left(self) -> None:
        """What `move` copied is held here no more."""
        self.leaving, self.rows = None, []

    def memory_here(self, pieces: Pieces) -> None:
        """Take the memory that `bring` fills."""
        self.pieces = [layout.pieces(pieces, self.device) for layout, _ in self.moved]
        self.mark()  # kernels that used this memory for something else may still run

    def bring(self) -> None:
        """Copy from the second tier; in the thread that copies."""
        with torch.no_grad(), _stream(self.device, self.ready):
            parts = [part for layout, memory in self.moved for part in layout.parts(memory)]
            torch._foreach_copy_([piece.memory for piece in chain(*self.pieces)], parts, non_blocking=True)

    def arrived(self) -> None:
        """What `bring` copied is used from here on."""
        self.coming, self.where = None, HERE
        if self.device.type != "cpu":
            for piece in chain(*self.pieces):
                piece.memory.record_stream(torch.accelerator.current_stream(self.device))  # type: ignore[arg-type]

    def taken(self, column: int, *, back: bool, last: bool) -> Iterator[torch.Tensor]:
        """A column's rows; back: the last turn's first. last: nobody takes them again, so they go one by one."""
        if self.pieces:
            way: Callable[..., Iterator[Any]] = reversed if back else iter
            return chain.from_iterable(map(way, [piece.rows for piece in way(self.pieces[column])]))
        rows = emptied(self.rows[column]) if last else self.rows[column][:]
        if not back:
            rows.reverse()
        return _popped(rows)

    def dropped(self) -> list[Piece]:
        """Hold no rows; gives the memory that they had."""
        pieces = [*chain(*self.pieces)]
        self.rows, self.pieces, self.where = [], [], AWAY
        return pieces


def _popped(rows: list[T]) -> Iterator[T]:
    """Those of a list, the last one first, which leave it."""
    return map(list.pop, repeat(rows, len(rows)))


def emptied(rows: list[T]) -> list[T]:
    """What a list held, in order. It touches none of it, which takes longer where that is out of the caches."""
    found = [*_popped(rows)]
    found.reverse()
    return found


@contextmanager
def _stream(device: torch.device, ready: Any) -> Iterator[None]:
    """A stream of one's own behind what is ready then, waited for at the end."""
    if device.type == "cpu":
        yield
        return
    stream = torch.Stream(device)
    stream.wait_event(ready)
    with stream:
        yield
    stream.synchronize()


class _Layout:
    """How rows of a column lie in the second tier: one after the other, with the order of axes that they had."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        first = rows[0]
        strides = first.stride()
        order = sorted(range(first.dim()), key=lambda axis: -strides[axis])
        self.order = None if order == sorted(order) else order
        self.places = tuple(order.index(axis) for axis in range(len(order)))
        self.dtype = first.dtype
        self.shapes = [row.shape for row in self.laid(rows)]

    def laid(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows with the axes as they lie."""
        return [*rows] if self.order is None else [row.permute(self.order) for row in rows]

    def put(self, rows: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Copy rows of this layout, of one or more columns."""
        memory.copy_(torch.cat([row.reshape(-1) for row in self.laid(rows)]), non_blocking=True)

    def pieces(self, pieces: Pieces, device: torch.device) -> list[Piece]:
        """Memory for a column that comes back."""
        counts = [prod(shape) for shape in self.shapes]
        memory = torch.empty(sum(counts), dtype=self.dtype, device=device)
        rows = [part.view(shape) for part, shape in zip(memory.split(counts), self.shapes, strict=True)]
        return [Piece(memory, [row.permute(self.places) for row in rows])]

    def parts(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """What belongs into each piece."""
        return [memory]


class _Alike(_Layout):
    """Rows of one shape. The CPU's allocator gives small pieces of what others gave back, with no page to map."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        super().__init__(rows[:1])
        self.shape, self.turns, some = self.shapes[0], len(rows), len(rows)
        if rows[0].device.type == "cpu":
            some = max(1, PIECE // max(1, rows[0].numel() * rows[0].element_size()))
        whole, rest = divmod(self.turns, some)
        self.counts = [some] * whole + [rest] * bool(rest)  # of rows in each piece

    def put(self, rows: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        if rows[0].device.type == "cpu":
            torch.stack(self.laid(rows), out=memory.view(len(rows), *self.shape))
        else:
            super().put(rows, memory)

    def pieces(self, pieces: Pieces, device: torch.device) -> list[Piece]:
        counts = ((count, list(some)) for count, some in groupby(self.counts))
        kinds = (((self.shape, count, self.dtype, self.places), len(some)) for count, some in counts)
        return [piece for kind, some in kinds for piece in pieces.take(kind, some, device)]

    def parts(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        return memory.view(self.turns, *self.shape).split(self.counts)
