"""Rows that loops keep, within a number of bytes: what is beyond goes to a second tier and comes back ahead of use.

A `Room` is for one run, in the thread that runs; a thread of its own copies. The second tier of the CPU is a file that
is mapped into memory and has no name, so nothing is left of it however the run ends; that of an accelerator is pinned
memory, copied on a stream of its own. Loops go backwards through what they kept: the oldest rows leave first.
Knows no graph.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

BLOCK = 4 << 20  # bytes that are copied at a time, about
_ALIGN = 64

Refuse = Callable[[int, str], Exception]  # of a turn, and why


@dataclass(slots=True)
class Swapped:
    """Bytes of the rows that loops of one run kept: in all, moved out and back, and the most held at once."""

    saved: int = 0
    out: int = 0
    back: int = 0
    most: int = 0


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


class Room:
    """So many bytes for the rows of all loops of one run; leaving the block ends the copying."""

    def __init__(self, bytes: int, tier: Tier) -> None:
        self.bytes, self.held, self.tier = bytes, 0, tier
        self.counts = Swapped()
        self._stacks: list[Stack] = []  # those that may move, the oldest first
        self._leaving: list[tuple[Future[None], _Block]] = []
        self._thread: ThreadPoolExecutor | None = None

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        for block in (block for stack in self._stacks for block in stack.blocks):
            if block.memory is not None:
                self.tier.give(block.memory, block.device)

    @property
    def free(self) -> int:
        """Bytes that nothing holds."""
        return self.bytes - self.held

    def add(self, stack: Stack) -> None:
        """Blocks of this stack may move out."""
        self._stacks.append(stack)

    def take(self, bytes: int) -> bool:
        """Hold more; wait for copies and move blocks out where there is no room. False if that does not help."""
        self._settle()
        while self.held + bytes > self.bytes:
            if self._leaving:
                self._settle(wait=True)
            elif not self.make_room():
                return False
        self.held += bytes
        self.counts.most = max(self.counts.most, self.held)
        return True

    def give(self, bytes: int) -> None:
        """Hold less."""
        self.held -= bytes

    def make_room(self) -> bool:
        """Begin to move the oldest block out; False where there is none."""
        return any(stack.leave() for stack in self._stacks)

    @property
    def leaving(self) -> int:
        """Bytes that are on their way out."""
        return sum(block.bytes for _, block in self._leaving)

    def out(self, block: _Block) -> None:
        """Move a block out, in the other thread; it is held until that is done."""
        self.counts.out += block.bytes
        block.where = _AWAY
        self._leaving.append((self.submit(block.move, self.tier), block))

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call it in the thread that copies."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfnb-swap")
        return self._thread.submit(call, *args)

    def _settle(self, wait: bool = False) -> None:
        """Blocks that are gone are held no more; wait: for one of them."""
        while self._leaving and (wait or self._leaving[0][0].done()):
            future, block = self._leaving[0]
            future.result()
            del self._leaving[0]
            self.give(block.bytes)
            wait = False


_HERE, _AWAY, _COMING = "here", "away", "coming"


class _Block:
    """The rows of some turns: of each column a list. alike: they have one shape."""

    __slots__ = ("alike", "bytes", "coming", "device", "each", "memory", "packs", "pinned", "rows", "where")

    def __init__(self, rows: list[list[torch.Tensor]], each: list[int], alike: bool) -> None:
        self.rows, self.each, self.bytes, self.alike = rows, each, sum(each), alike
        self.where, self.pinned = _HERE, False  # pinned: a loop takes its rows now
        self.device = rows[0][0].device
        self.packs: list[tuple[list[int], _Pack]] = []
        self.memory: torch.Tensor | None = None
        self.coming: Future[list[list[torch.Tensor]]] | None = None

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

    def brought(self, into: torch.Tensor) -> list[list[torch.Tensor]]:
        """What was moved, in memory of enough bytes; in the thread that copies."""
        found: list[list[torch.Tensor]] = [[] for _ in self.each]
        with torch.no_grad(), _stream(self.device):
            assert self.memory is not None
            into = into[: self.memory.numel()]
            into.copy_(self.memory, non_blocking=True)
            first = self.memory.data_ptr()
            for columns, pack in self.packs:
                at = pack.memory.data_ptr() - first
                rows = pack.rows(into[at : at + pack.bytes])
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
        self.bytes, self.memory = memory.numel(), memory.view(first.dtype)
        if first.device.type == "cpu" and alike:
            torch.stack(list(laid), out=self.memory.view(len(rows), *laid[0].shape))
        else:
            self.memory.copy_(torch.cat([row.reshape(-1) for row in laid]), non_blocking=True)

    def rows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The rows, where they were copied to."""
        flat = flat.view(self.memory.dtype)
        order = self.order
        shapes = self.shapes if order is None else [[shape[axis] for axis in order] for shape in self.shapes]
        if self.alike:
            found = flat.view(len(shapes), *shapes[0]).unbind(0)
        else:
            parts = flat.split([prod(shape) for shape in shapes])
            found = tuple([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
        if order is None:
            return list(found)
        back = [order.index(axis) for axis in range(len(order))]
        return [row.permute(back) for row in found]


@dataclass
class Stack:
    """The rows of one loop that the same loops take: a column each, kept within the room.

    bytes: of one turn, of each column; None where that differs. turns: how many there will be, if that is known.
    swap: whether blocks may move out. consumers: how many loops take the rows. refuse: the error if there is no room.
    """

    room: Room
    bytes: Sequence[int | None]
    turns: int | None
    swap: bool
    consumers: int
    refuse: Refuse
    blocks: list[_Block] = field(default_factory=list)
    count: int = 0  # of turns, in blocks
    reverse: bool = False
    shapes: list[torch.Size] = field(default_factory=list)  # of the first rows
    _reading: _Reading | None = None
    _over: bool = False  # there is no room for one more turn

    def __post_init__(self) -> None:
        each = [size for size in self.bytes if size is not None]
        self.each = each if len(each) == len(self.bytes) else None
        self.turn = sum(each)
        self.fresh: list[list[torch.Tensor]] = [[] for _ in self.bytes]
        self.columns: list[Any] = [_Column(self, i) for i in range(len(self.bytes))]
        self.span = 1
        if self.each is not None and self.turn:
            self.span = max(1, min(BLOCK // self.turn, self.room.bytes // (6 * self.turn)))
        self.beyond = 0  # turns that move out as soon as they are there
        if self.swap:
            self.room.add(self)
            if self.each is not None and self.turns is not None:
                self.beyond = -(-max(0, self.turns * self.turn - self.room.free) // max(self.turn, 1))
        self.due = self._granted()

    # -- forward --------------------------------------------------------------------------------------------------

    def _granted(self) -> int:
        """For how many more turns there is room, which they hold from now on."""
        if self.each is None:
            return 1
        left = self.span if self.turns is None else min(self.span, self.turns - self.count)
        if self.count < self.beyond:
            left = min(left, self.beyond - self.count)
        if not self.swap and self.turn:
            left = min(left, self.room.free // self.turn)
        self._over = left <= 0 or not self._taken(left * self.turn)
        return 1 if self._over else left

    def _taken(self, bytes: int) -> bool:
        try:
            return self.room.take(bytes)
        except OSError as error:
            raise self.refuse(self.count + 1, str(error)) from error

    def full(self) -> None:
        """The turns that were granted are over: they are a block."""
        if self._over:
            raise self.refuse(self.count + 1, "")
        rows = [column[:] for column in self.fresh]
        for column in self.fresh:
            column.clear()
        self._seal(rows)
        self.due = self._granted()

    def _seal(self, rows: list[list[torch.Tensor]]) -> None:
        turns = len(rows[0])
        self.shapes = self.shapes or [column[0].shape for column in rows]
        if self.each is None:
            each = [sum(row.numel() * row.element_size() for row in column) for column in rows]
            if not self._taken(sum(each)):
                raise self.refuse(self.count + 1, "")
        else:
            each = [size * turns for size in self.each]
        block = _Block(rows, each, self.each is not None)
        self.blocks.append(block)
        self.count += turns
        self.room.counts.saved += block.bytes
        if self.count <= self.beyond:
            self.room.out(block)
        elif self.swap and self.turns is None and self.room.free + self.room.leaving < self.span * self.turn:
            self.room.make_room()  # the next block will need it

    def leave(self) -> bool:
        """Begin to move the oldest block that is here out; False where there is none."""
        here = (b for b in self.blocks if b.where is _HERE and b.bytes and not b.pinned and all(b.rows))
        block = next(here, None)
        if block is not None and block.packs:
            self.drop(block)
        elif block is not None:
            self.room.out(block)
        return block is not None

    def drop(self, block: _Block) -> None:
        """A block whose rows are in the second tier too is held no more."""
        block.rows, block.where = [], _AWAY
        self.room.give(block.bytes)

    def end(self, reverse: bool) -> None:
        """The loop is over."""
        self.reverse = reverse
        if self.fresh[0]:
            self._seal(self.fresh)
            self.due -= len(self.fresh[0])
            self.fresh = []
        if self.each is not None and not self._over:
            self.room.give(self.due * self.turn)

    # -- backward -------------------------------------------------------------------------------------------------

    def taken(self, column: int, reverse: bool) -> Iterator[torch.Tensor]:
        """The rows of a column in the order in which a loop takes them, which takes those of all columns."""
        if self._reading is None:
            self.consumers -= 1
            self._reading = _Reading(self, back=reverse != self.reverse, last=not self.consumers)
        reading = self._reading
        reading.columns += 1
        if reading.columns == len(self.columns):
            self._reading = None
        return reading.rows(column)

    def open(self, block: _Block) -> None:
        """The block's rows are here from now on."""
        block.pinned = True
        if block.where is _AWAY:
            self.come(block)
        if block.coming is not None:
            block.rows, block.coming, block.where = block.coming.result(), None, _HERE
            for row in (row for rows in block.rows for row in rows if row.device.type != "cpu"):
                row.record_stream(torch.accelerator.current_stream(row.device))  # type: ignore[arg-type]

    def come(self, block: _Block) -> None:
        """Begin to bring a block back."""
        if not self._taken(block.bytes):
            self.room.give(-block.bytes)  # a loop needs it now: it comes all the same
        self.room.counts.back += block.bytes
        into = torch.empty(block.bytes + _ALIGN * len(block.each), dtype=torch.uint8, device=block.device)
        block.where, block.coming = _COMING, self.room.submit(block.brought, into)


class _Reading:
    """A loop that takes the rows of a stack. back: from the last turn to the first; last: no other loop will."""

    def __init__(self, stack: Stack, *, back: bool, last: bool) -> None:
        self.stack, self.back, self.last = stack, back, last
        self.blocks = stack.blocks[::-1] if back else stack.blocks[:]
        self.columns, self._opened, self._closed = 0, -1, 0

    def rows(self, column: int) -> Iterator[torch.Tensor]:
        """Those of one column; all columns are taken turn by turn."""
        for place, block in enumerate(self.blocks):
            if place > self._opened:
                self._open(place)
            rows = block.rows[column]
            if self.last:
                rows, block.rows[column] = (rows if self.back else rows[::-1]), []
                while rows:
                    yield rows.pop()
                self.stack.room.give(block.each[column])
            else:
                yield from reversed(rows) if self.back else iter(rows)
            self._close(block)

    def _open(self, place: int) -> None:
        self._opened = place
        self.stack.open(self.blocks[place])
        for block in self.blocks[place + 1 :] if self.last else self.blocks[place + 1 : place + 2]:
            if block.where is _AWAY:
                if self.stack.room.free < block.bytes:
                    return
                self.stack.come(block)

    def _close(self, block: _Block) -> None:
        self._closed += 1
        if self._closed % len(self.stack.columns) == 0:
            block.pinned = False
            if not self.last and block.packs:
                self.stack.drop(block)


class _Column:
    """One of a stack's rows, as a column and as a sequence; the last one notices that a block is full."""

    def __init__(self, stack: Stack, place: int) -> None:
        self.stack, self.place = stack, place
        self.rows = stack.fresh[place]
        self.put = self._last if place == len(stack.bytes) - 1 else self.rows.append
        self.results: tuple[Any, ...] = (self,)

    def _last(self, value: torch.Tensor) -> None:
        self.rows.append(value)
        if len(self.rows) == self.stack.due:
            self.stack.full()

    def end(self, reverse: bool) -> tuple[Any, ...]:
        if self.place == 0:
            self.stack.end(reverse)
        return self.results

    def __len__(self) -> int:
        return self.stack.count

    def size(self, axis: int) -> int:
        """As of the stacked rows: the number of turns."""
        return self.stack.count if axis == 0 else self.stack.shapes[self.place][axis - 1]

    def taken(self, reverse: bool) -> Iterator[torch.Tensor]:
        """The rows in the order in which a loop takes them."""
        return self.stack.taken(self.place, reverse)


_current = threading.local()


def room() -> Room | None:
    """The room of the run that this thread is in."""
    return getattr(_current, "room", None)


@contextmanager
def within(bytes: int, tier: Tier) -> Iterator[Room]:
    """So much room for the rows of the loops that run inside."""
    before = room()
    with Room(bytes, tier) as found:
        _current.room = found
        try:
            yield found
        finally:
            _current.room = before
