"""The bytes that all loops of one run have for their rows, and how blocks of rows move out and back. Knows no graph.

What leaves is copied in one of two ways. The thread that runs copies small blocks of the CPU itself, as soon as they
are there: their rows are still in the core's cache, where the next iterations find memory to write to, and a loop takes
them where they lie in the spill file. Larger blocks, those of other devices, and all as soon as a file turns out to be
slow are copied by a thread of its own, and come back ahead of use.

To give a thread Python's lock and get it back takes 0.1 milliseconds and more, the more the busier the machine is, and
on one core nothing is copied beside anything. `tests/benchmarks/bench_swap.py` (LSTM, 1,000 iterations of which 550
fit, 13 MB move; torch 2.13, one thread, two cores that others used too): against a run without a budget the step took
1.12 times as long with the other thread, 1.05 times with copies at once; where others used less of the cores, 1.03 to
1.05 and 1.02. What is left: half a microsecond for each row's tensor that is made again, as much for its copy, and 0.2
milliseconds for each block: code that comes once in forty iterations is cold.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from tfnb.kernels.spill_blocks import AWAY, COMING, SpillBlock
from tfnb.kernels.spill_file import SpillFile

AT_ONCE = 1 << 20  # bytes that the thread that runs copies at a time, at most: they stay in a core's cache
RATE, LATE = 5e8, 2e-3  # copies that lag behind so many bytes per second by so many seconds are left to the thread
STATES = 3  # at most one part of so many of the room is for what is held to run iterations again


@dataclass(slots=True)
class OffloadCounts:
    """Bytes of rows that loops of one run kept: in all, moved out and back, the most held at once, computed again."""

    saved: int = 0
    out: int = 0
    back: int = 0
    most: int = 0
    again: int = 0


class Leaving(Protocol):
    """Rows that may move, as `tfnb.kernels.offload.RowStack`."""

    blocks: list[SpillBlock]

    def leave(self) -> bool:
        """The oldest block that is here leaves, or begins to; False where there is none."""


class MemoryBudget:
    """So many bytes for the rows of all loops of one run; leaving the block ends the copying.

    again: of loops that compute rows again, the inputs that are held for that.
    """

    def __init__(self, bytes: int, spill: SpillFile, again: Mapping[int, Collection[int]]) -> None:
        self.bytes, self.held, self.spill, self.again = bytes, 0, spill, again
        self.states = 0  # bytes that are held to run iterations again
        self.counts = OffloadCounts()
        self._stacks: list[Leaving] = []  # those that may move, the oldest first
        self._leaving: list[SpillBlock] = []
        self._spent: deque[int] = deque()  # bytes of blocks whose last rows may still be in somebody's hands
        self._thread: ThreadPoolExecutor | None = None

    def __enter__(self) -> MemoryBudget:
        return self

    def __exit__(self, *exc: object) -> None:
        if not (self.counts.out or self.counts.again):
            self.counts.most = min(self.counts.most, self.counts.saved)  # not all of what was granted was filled
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.reclaim()
        for block in (block for stack in self._stacks for block in stack.blocks):
            block.end()

    @property
    def free(self) -> int:
        """Bytes that nothing holds."""
        return self.bytes - self.held

    def add(self, stack: Leaving) -> None:
        """Blocks of this stack may move out."""
        self._stacks.append(stack)

    def take(self, bytes: int) -> bool:
        """Hold more; wait for copies and move blocks out where there is no room. False if that does not help."""
        self._settle()
        while self.held + bytes > self.bytes:
            if self._spent:
                self.reclaim()
            elif self._leaving:
                self._settle(wait=True)
            elif not self.make_room():
                return False
        self.held += bytes
        self.counts.most = max(self.counts.most, self.held)
        return True

    def keep(self, bytes: int) -> bool:
        """Count ``bytes`` of held memory as kept for reruns; False above the `STATES`-th part of the budget."""
        if (self.states + bytes) * STATES > self.bytes:
            return False
        self.states += bytes
        return True

    def insist(self, bytes: int) -> None:
        """Hold more, regardless of the budget: a loop needs the memory now."""
        if not self.take(bytes):
            self.held += bytes
            self.counts.most = max(self.counts.most, self.held)

    def give(self, bytes: int) -> None:
        """Hold less."""
        self.held -= bytes

    def drop(self, block: SpillBlock) -> None:
        """Release a block's rows; rows brought back, which share its memory, are released at `reclaim`."""
        block.dropped()
        if block.moved:
            self._spent.append(block.bytes)
        else:
            self.give(block.bytes)

    def reclaim(self, keep: int = 0) -> None:
        """Release memory of consumed blocks, except for the last ``keep``."""
        while len(self._spent) > keep:
            self.give(self._spent.popleft())

    def make_room(self) -> bool:
        """Begin to move the oldest block out; False where there is none."""
        return any(stack.leave() for stack in self._stacks)

    @property
    def leaving(self) -> int:
        """Bytes that are on their way out."""
        return sum(block.bytes for block in self._leaving)

    def out(self, block: SpillBlock) -> None:
        """Move a block out; its memory stays held until the copy is complete."""
        self.counts.out += block.bytes
        block.where = AWAY
        if self.at_once(block):
            self._move(block)
            block.left()
            self.give(block.bytes)
        else:
            block.mark()
            block.leaving = self._submit(self._move, block)
            self._leaving.append(block)

    def _move(self, block: SpillBlock) -> None:
        """Copy a block to the spill file, and update the file's lag: quick copies make up for slow ones."""
        start = perf_counter()
        block.move(self.spill)
        lag = self.spill.lag + perf_counter() - start - block.bytes / RATE
        self.spill.lag = min(max(0.0, lag), 2 * LATE)

    def back(self, block: SpillBlock) -> None:
        """Begin to bring a block back."""
        self.insist(block.bytes)
        self.counts.back += block.bytes
        block.memory_here()
        block.where, block.coming = COMING, self._submit(block.bring)

    def lend(self, block: SpillBlock) -> None:
        """Have a block's rows taken from the spill file."""
        self.counts.back += block.bytes
        block.lent()

    def at_once(self, block: SpillBlock) -> bool:
        """Whether the thread that runs copies the block."""
        return block.bytes <= AT_ONCE and block.device.type == "cpu" and self.spill.lag < LATE

    def _submit(self, call: Callable[..., None], *args: object) -> Future[None]:
        """Submit a call to the copying thread."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tfnb-swap")
        return self._thread.submit(call, *args)

    def gone(self, block: SpillBlock) -> None:
        """Wait until a block that leaves is gone."""
        while block.leaving is not None:
            self._settle(wait=True)

    def _settle(self, wait: bool = False) -> None:
        """Blocks that are gone are held no more; wait: for one of them."""
        while self._leaving:
            block = self._leaving[0]
            assert block.leaving is not None
            if not (wait or block.leaving.done()):
                return
            block.leaving.result()
            del self._leaving[0]
            block.left()
            self.give(block.bytes)
            wait = False


_current = threading.local()


def current_budget() -> MemoryBudget | None:
    """The room of the run that this thread is in."""
    return getattr(_current, "room", None)


@contextmanager
def within(bytes: int, spill: SpillFile, again: Mapping[int, Collection[int]]) -> Iterator[MemoryBudget]:
    """So much room for the rows of the loops that run inside; ``again``: see `MemoryBudget`."""
    before = current_budget()
    with MemoryBudget(bytes, spill, again) as found:
        _current.room = found
        try:
            yield found
        finally:
            _current.room = before
