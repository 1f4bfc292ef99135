"""Rows of some turns of a loop, as a block that moves to a second tier and back. Knows no graph.

The second tier of the CPU is a file that is mapped into memory and has no name, so nothing is left of it however the
run ends; that of an accelerator is pinned memory, copied on a stream of its own.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

PIECE = 64 << 10  # bytes that come back in one piece of memory, about
_ALIGN = 64
HERE, AWAY, COMING = "here", "away", "coming"


class Tier:
    """Memory of the second tier, which later runs use again. Of the CPU it is a file without a name."""

    def __init__(self) -> None:
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
        "alike", "bytes", "coming", "device", "each", "first", "gone", "leaving", "memory", "packs", "pinned", "rows",
        "state", "turns", "where",
    )  # fmt: skip

    def __init__(
        self, rows: list[list[torch.Tensor]], each: list[int], alike: bool, first: int,
        state: Sequence[torch.Tensor] | None,
    ) -> None:  # fmt: skip
        self.rows, self.each, self.bytes, self.alike = rows, each, sum(each), alike
        self.first, self.turns, self.state, self.gone = first, len(rows[0]), state, False
        self.where, self.pinned = HERE, False  # pinned: a loop takes its rows now
        self.device = rows[0][0].device
        self.packs: list[tuple[list[int], _Pack]] = []
        self.memory: torch.Tensor | None = None
        self.leaving: Future[None] | None = None
        self.coming: Future[list[list[torch.Tensor]]] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no loop took some of its rows for good."""
        return self.where is COMING or all(self.rows)

    def move(self, tier: Tier) -> None:
        """Copy to the second tier; in the thread that copies."""
        kinds: dict[Any, list[int]] = {}  # columns of one kind are copied together
        for column, rows in enumerate(self.rows):
            kind = (rows[0].shape, rows[0].stride(), rows[0].dtype) if self.alike else column
            kinds.setdefault(kind, []).append(column)
        sizes = [sum(self.each[column] for column in columns) for columns in kinds.values()]
        spans = [-(-size // _ALIGN) * _ALIGN for size in sizes]
        self.memory, at = tier.take(max(sum(spans), 1), self.device), 0
        with torch.no_grad(), _stream(self.device):
            for columns, size, span in zip(kinds.values(), sizes, spans, strict=True):
                rows = [row for column in columns for row in self.rows[column]]
                self.packs.append((columns, _Pack(rows, self.memory[at : at + size], self.alike)))
                at += span
        self.rows = []

    def memory_here(self) -> list[list[torch.Tensor]]:
        """Memory for what was moved, for `brought`. Raises OSError where that failed."""
        if self.leaving is not None:
            self.leaving.result()
        return [pack.memory_here(self.device) for _, pack in self.packs]

    def brought(self, into: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """What was moved; in the thread that copies."""
        found: list[list[torch.Tensor]] = [[] for _ in self.each]
        with torch.no_grad(), _stream(self.device):
            for (columns, pack), memory in zip(self.packs, into, strict=True):
                rows = pack.rows(memory)
                turns = len(rows) // len(columns)
                for place, column in enumerate(columns):
                    found[column] = rows[place * turns : (place + 1) * turns]
        return found


@contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    """A stream of one's own, waited for at the end."""
    if device.type == "cpu":
        yield
        return
    stream = torch.Stream(device)
    torch.accelerator.synchronize(device)  # the rows are there
    with stream:
        yield
    stream.synchronize()


class _Pack:
    """Rows of one kind in the second tier, with the order of axes that they had in memory."""

    def __init__(self, rows: Sequence[torch.Tensor], memory: torch.Tensor, alike: bool) -> None:
        first = rows[0]
        self.shapes, self.alike = [first.shape] * len(rows) if alike else [row.shape for row in rows], alike
        strides = first.stride()
        order = sorted(range(first.dim()), key=lambda axis: -strides[axis])
        self.order = None if order == sorted(order) else order
        laid = rows if self.order is None else [row.permute(order) for row in rows]
        self.memory = memory.view(first.dtype)
        self.some = len(rows)  # that come back in one piece
        if first.device.type == "cpu" and alike:
            self.some = max(1, PIECE // max(1, first.numel() * first.element_size()))
        if first.device.type == "cpu" and alike:
            torch.stack(list(laid), out=self.memory.view(len(rows), *laid[0].shape))
        else:
            self.memory.copy_(torch.cat([row.reshape(-1) for row in laid]), non_blocking=True)

    def memory_here(self, device: torch.device) -> list[torch.Tensor]:
        """Memory for the rows. The CPU's allocator gives small pieces of what others gave back, with no page to map."""
        pieces = [self.shapes[at : at + self.some] for at in range(0, len(self.shapes), self.some)]
        return [torch.empty(sum(map(prod, shapes)), dtype=self.memory.dtype, device=device) for shapes in pieces]

    def rows(self, into: list[torch.Tensor]) -> list[torch.Tensor]:
        """The rows, in this memory."""
        torch._foreach_copy_(into, self.memory.split([len(piece) for piece in into]), non_blocking=True)
        order = self.order
        shapes = self.shapes if order is None else [[shape[axis] for axis in order] for shape in self.shapes]
        found: list[torch.Tensor] = []
        for at, piece in zip(range(0, len(shapes), self.some), into, strict=True):
            some = shapes[at : at + self.some]
            if self.alike:
                found += piece.view(len(some), *some[0]).unbind(0)
            else:
                parts = piece.split([prod(shape) for shape in some])
                found += [part.view(shape) for part, shape in zip(parts, some, strict=True)]
        if order is None:
            return found
        back = [order.index(axis) for axis in range(len(order))]
        return [row.permute(back) for row in found]
