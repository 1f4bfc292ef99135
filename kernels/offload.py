"""Rows kept by loops, within a number of bytes: further rows are recomputed, or moved out and back.

Loops go backwards through what they kept: the oldest rows leave first. Knows no graph.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter
from typing import Any, TypeVar

import torch

from tfnb.kernels.control import Function, Replay
from tfnb.kernels.memory_budget import AT_ONCE, MemoryBudget
from tfnb.kernels.spill_blocks import AWAY, HERE, SpillBlock, emptied

BLOCKS = {True: 4 << 20, False: 64 << 20}  # bytes that the other thread copies at a time, about: of the CPU or not
AHEAD = 2  # blocks that come before they are needed


T = TypeVar("T")
_first = attrgetter("first")
Refuse = Callable[[int, str], Exception]  # of an iteration, and why


@dataclass
class RowStack:
    """The rows of one loop that the same loops take: a column each, kept within the budget.

    bytes: of one iteration, of each column; None where that differs. iterations: how many there will be, if that is
    known.
    leaves: whether blocks may leave. consumers: how many loops take the rows. refuse: the error if there is no room.
    again: runs iterations again; None: blocks move out. state: bytes of the carried values. held: bytes of what is held
    for iterations that are taken again. on_cpu: whether the rows lie there.
    """

    budget: MemoryBudget
    bytes: Sequence[int | None]
    iterations: int | None
    leaves: bool
    consumers: int
    refuse: Refuse
    again: Replay | None = None
    state: int = 0
    held: int = 0
    on_cpu: bool = True
    blocks: list[SpillBlock] = field(default_factory=list)
    count: int = 0  # of iterations, in blocks
    reverse: bool = False
    shapes: list[torch.Size] = field(default_factory=list)  # of the first rows
    _here: list[SpillBlock] = field(default_factory=list)  # those that are not away, the oldest first
    _reading: _Reading | None = None
    _over: bool = False  # there is no room for one more iteration

    def __post_init__(self) -> None:
        each = [size for size in self.bytes if size is not None]
        self.each = each if len(each) == len(self.bytes) else None
        self.iteration = sum(each)
        self.fresh: list[list[torch.Tensor]] = [[] for _ in self.bytes]
        self.columns: list[Any] = [_Column(self, i) for i in range(len(self.bytes))]
        self.span, self.beyond = 1, 0  # iterations of a block; iterations that leave as soon as they are there
        self.few = 1  # iterations of a block of those
        self._start: Sequence[torch.Tensor] = ()
        if self.leaves:
            self.budget.add(self)
        self._plan(0 if self.each is None else self.iteration)
        self.due = self._granted()

    def _plan(self, iteration: int) -> None:
        """Choose how many iterations form a block, how many leave as soon as they are made (``beyond``), and whether
        blocks are recomputed or moved. iteration: bytes of one iteration, 0 if unknown.
        """
        budget, iterations = self.budget, self.iterations
        span = max(1, budget.bytes // (6 * iteration)) if iteration else 1
        fits = not iteration or (iterations is not None and iterations * iteration <= budget.free)
        if fits or self.again is None or self.state * 2 > span * iteration or not self._held():
            self.again, self.state, self.held = None, 0, 0
            span = max(1, min(BLOCKS[self.on_cpu] // iteration, span)) if iteration else 1
        self.span = self.few = span
        if self.again is None and self.on_cpu and 0 < iteration <= AT_ONCE:
            self.few = min(span, AT_ONCE // iteration)
        if self.leaves and iterations is not None and not fits:
            beyond = iterations * iteration + -(-iterations // span) * self.state - budget.free
            self.beyond = min(iterations, -(-beyond // iteration))

    def _held(self) -> bool:
        """Reserve the bytes of the loop's inputs that reruns need; False if there is no room for them."""
        return self.budget.keep(self.held) and self._tried(self.budget.take, self.held)

    # -- forward --------------------------------------------------------------------------------------------------

    def watching(self, body: Function) -> Function:
        """The body of the loop, of whose iterations the carried values are kept where a block begins."""
        again, fresh = self.again, self.fresh[0]
        if again is None:
            return body

        def iteration(*args: Any) -> Sequence[torch.Tensor]:
            if not fresh:
                self._start = again.own(args[: again.carried])
            return body(*args)

        return iteration

    def _granted(self) -> int:
        """The number of further iterations with room, reserved from now on."""
        if self.each is None:
            return 1
        left = self.span if self.iterations is None else min(self.span, self.iterations - self.count)
        if self.count < self.beyond:
            left = min(self.few, self.beyond - self.count)
        if not self.leaves and self.iteration:
            left = min(left, self.budget.free // self.iteration)
        self._over = left <= 0 or not self._tried(self.budget.take, left * self.iteration + self.state)
        return 1 if self._over else left

    def _tried(self, call: Callable[..., T], *args: object) -> T:
        """Run a call that may find that moving out failed."""
        try:
            return call(*args)
        except OSError as error:
            raise self.refuse(self.count + 1, str(error)) from error

    def full(self) -> None:
        """The iterations that were granted are over: they are a block."""
        if self._over:
            raise self.refuse(self.count + 1, "")
        self._seal([emptied(column) for column in self.fresh])
        self.due = self._granted()

    def _seal(self, rows: list[list[torch.Tensor]]) -> None:
        iterations = len(rows[0])
        self.shapes = self.shapes or [column[0].shape for column in rows]
        if self.each is None:
            each = [sum(row.numel() * row.element_size() for row in column) for column in rows]
            if not self._tried(self.budget.take, sum(each)):
                raise self.refuse(self.count + 1, "")
        else:
            each = [size * iterations for size in self.each]
        state = None if self.again is None else self._start
        block = SpillBlock(rows, each, self.each is not None, self.count, state)
        self.blocks.append(block)
        self._here.append(block)
        self.count += iterations
        self.budget.counts.saved += block.bytes
        if self.count <= self.beyond:
            self._tried(self._send, block)
        elif (
            self.leaves
            and self.iterations is None
            and self.budget.free + self.budget.leaving < self.span * self.iteration
        ):
            self._tried(self.budget.make_room)  # the next block will need it

    def leave(self) -> bool:
        """The oldest block that is here leaves, or begins to; False where there is none."""
        block = next((block for block in self._here if not block.pinned), None)
        if block is not None:
            self._landed(block)
            self._send(block)
        return block is not None

    def _send(self, block: SpillBlock) -> None:
        """Move a block out, or drop it if its rows are in the spill file or can be recomputed."""
        budget = self.budget
        self._here.remove(block)
        if not block.moved and not block.gone and block.state is not None:
            block.gone = budget.keep(self.state)
            if not block.gone:
                self._forget(block)
        if block.moved or block.gone:
            budget.drop(block)
        else:
            budget.out(block)

    def _forget(self, block: SpillBlock) -> None:
        """The block is not computed again from here on."""
        if block.state is not None:
            block.state = None
            self.budget.give(self.state)
            self.budget.states -= self.state if block.gone else 0
            block.gone = False

    def end(self, reverse: bool) -> None:
        """The loop is over."""
        self.reverse = reverse
        if self.fresh[0]:
            self._seal(self.fresh)
            self.budget.give(0 if self.each is None else (self.due - len(self.fresh[0])) * self.iteration)
            self.fresh = []
        elif self.each is not None and not self._over:
            self.budget.give(self.due * self.iteration + self.state)
        if not self.blocks:
            self._done()

    # -- backward -------------------------------------------------------------------------------------------------

    def taken(self, column: int, reverse: bool) -> Iterator[torch.Tensor]:
        """The rows of a column in the order of a consuming loop, which consumes all columns together."""
        if self._reading is None:
            self.consumers -= 1
            self._reading = _Reading(self, back=reverse != self.reverse, last=not self.consumers)
        reading = self._reading
        reading.columns += 1
        if reading.columns == len(self.columns):
            self._reading = None
        return reading.rows(column)

    def open(self, block: SpillBlock) -> None:
        """The block's rows are here from now on."""
        block.pinned = True
        if block.where is AWAY and block.gone:
            self._compute(block)
        elif block.where is AWAY and self.budget.at_once(block):
            self.budget.lend(block)
        elif block.where is AWAY:
            self.come(block)
        self._landed(block)

    def _landed(self, block: SpillBlock) -> None:
        """Wait for a block that is coming."""
        if block.coming is not None:
            block.coming.result()
            block.arrived()

    def _compute(self, block: SpillBlock) -> None:
        """Take the block's iterations again."""
        assert self.again is not None
        assert block.state is not None
        self._tried(self.budget.insist, block.bytes)
        self.budget.counts.again += block.bytes
        block.rows, block.where = self.again.iterations(block.state, block.first, block.iterations), HERE
        insort(self._here, block, key=_first)

    def closed(self, block: SpillBlock, *, last: bool, end: bool) -> None:
        """A loop has taken the block's rows, and all with its end; last: no other loop will."""
        block.pinned = False
        if block.where is AWAY:
            block.dropped()
        elif last:
            self._here.remove(block)
            self.budget.drop(block)
            self._forget(block)
        elif block.moved or block.gone:
            self._here.remove(block)
            self.budget.drop(block)
        if last and end:
            self._done()

    def _done(self) -> None:
        """No iteration is taken again."""
        self.budget.give(self.held)
        self.budget.states -= self.held
        self.again, self.held = None, 0

    def come(self, block: SpillBlock) -> None:
        """Begin to bring a block back."""
        self._tried(self.budget.gone, block)
        self._tried(self.budget.back, block)
        insort(self._here, block, key=_first)


class _Reading:
    """One loop's pass over the rows of a stack, such as that of its backward loop. back: from the last iteration to the
    first; last: no other loop reads them, so they are freed.
    """

    def __init__(self, stack: RowStack, *, back: bool, last: bool) -> None:
        self.stack, self.back, self.last = stack, back, last
        self.blocks = stack.blocks[::-1] if back else stack.blocks[:]
        self.columns, self._opened, self._closed = 0, -1, 0

    def rows(self, column: int) -> Iterator[torch.Tensor]:
        """The rows of one column; all columns are consumed iteration by iteration."""
        return chain.from_iterable(self._runs(column))

    def _runs(self, column: int) -> Iterator[Iterator[torch.Tensor]]:
        for place, block in enumerate(self.blocks):
            if place > self._opened:
                self._open(place)
            rows = block.taken(column, back=self.back, last=self.last)
            yield islice(rows, block.iterations - 1)
            self._close(block)  # before the last row: nobody may ask for one more
            yield rows

    def _open(self, place: int) -> None:
        self._opened = place
        self.stack.budget.reclaim(keep=1)  # not the block before, whose last rows are still in somebody's hands
        self.stack.open(self.blocks[place])
        budget, ahead = self.stack.budget, 0
        for next in range(place + 1, len(self.blocks)):
            block = self.blocks[next]
            if block.where is AWAY:
                if block.gone or budget.at_once(block) or budget.free < block.bytes:
                    return
                self.stack.come(block)
            ahead += block.bytes
            if ahead > AHEAD * BLOCKS[self.stack.on_cpu]:
                return

    def _close(self, block: SpillBlock) -> None:
        self._closed += 1
        if self._closed % len(self.stack.columns) == 0:
            self.stack.closed(block, last=self.last, end=block is self.blocks[-1])


class _Column:
    """One of a stack's rows, as a column and as a sequence; the last one notices that a block is full."""

    def __init__(self, stack: RowStack, place: int) -> None:
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
        """As of the stacked rows: the number of iterations."""
        return self.stack.count if axis == 0 else self.stack.shapes[self.place][axis - 1]

    def taken(self, reverse: bool) -> Iterator[torch.Tensor]:
        """The rows in the order of a consuming loop."""
        return self.stack.taken(self.place, reverse)
