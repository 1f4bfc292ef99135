"""The rows of each step's batch: a function of the seed, the number of rows, the batch size and the chunks of an array,
so every machine knows the batches by itself.

Imports chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tfnb.state.chunks import ChunkedArray, Chunks


class RowOrder(NamedTuple):
    """``rows`` in batches of ``batch_size``, the last one of a pass may be short; shuffled, each pass in another order.

    ``within``: the place of an array in chunks; whole chunks are shuffled then, and the rows within each of them.

    >>> order = RowOrder(rows=7, batch_size=3)
    >>> [order.place(step) for step in (0, 2, 3)]
    [(1, 0, 3), (1, 6, 7), (2, 0, 3)]
    """

    rows: int
    batch_size: int
    shuffle: bool = True
    seed: int = 0
    within: int | None = None

    @property
    def per_pass(self) -> int:
        """Batches in a pass."""
        return -(-self.rows // self.batch_size)

    def place(self, step: int) -> tuple[int, int, int]:
        """The pass of step ``step`` (from 0; passes from 1), and its batch's start and stop in the pass's order."""
        number, batch = divmod(step, self.per_pass)
        start = batch * self.batch_size
        return 1 + number, start, min(start + self.batch_size, self.rows)


class Arrays(NamedTuple):
    """Arrays of training data, all with the same number of rows or without an axis, and the order of the rows."""

    arrays: tuple[torch.Tensor | ChunkedArray, ...]
    order: RowOrder


@dataclass
class Rows:
    """Arrays whose rows are taken in an order. An array without an axis is taken whole.

    >>> rows = Rows((torch.arange(5), torch.tensor(7)), RowOrder(5, 2, shuffle=False))
    >>> rows.batch(2), rows.part(0, 1, 2)
    ((tensor([4]), tensor(7)), (tensor([1]), tensor(7)))
    """

    arrays: Sequence[torch.Tensor | Chunks]
    order: RowOrder
    _pass: int = field(default=0, init=False)  # the pass of `_permutation`
    _permutation: torch.Tensor = field(default_factory=lambda: torch.empty(0), init=False)
    _generator: torch.Generator = field(default_factory=torch.Generator, init=False)

    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        """The arrays of one step."""
        _, start, stop = self.order.place(step)
        return self.part(step, 0, stop - start)

    def part(self, step: int, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """Rows ``first`` to ``last`` of the batch of one step."""
        at = self.at(step, first, last)
        return tuple(_taken(array, at) if array.dim() else array for array in self.arrays)  # type: ignore[misc]

    def at(self, step: int, first: int, last: int) -> torch.Tensor | slice:
        """The indices, in the arrays, of rows ``first`` to ``last`` of a step's batch."""
        number, start, _ = self.order.place(step)
        start, stop = start + first, start + last
        return self._order_of(number)[start:stop] if self.order.shuffle else slice(start, stop)

    def _order_of(self, number: int) -> torch.Tensor:
        """The row order of pass ``number``; without chunks, each pass's permutation follows from the one before."""
        if self.order.within is not None:
            if number != self._pass:
                self._pass, self._permutation = number, self._within_chunks(number, self.order.within)
            return self._permutation
        if not self._pass or number < self._pass:
            self._pass = 0
            self._generator.manual_seed(self.order.seed)
        while self._pass < number:
            self._permutation = torch.randperm(self.order.rows, generator=self._generator)
            self._pass += 1
        return self._permutation

    def _within_chunks(self, number: int, place: int) -> torch.Tensor:
        chunks, self._generator = self.arrays[place], torch.Generator()
        assert isinstance(chunks, Chunks)
        order = chunk_order(self.order, chunks.groups, number, self._generator)
        parts = ((chunks.span(chunk)[0], chunks.lengths[chunk]) for chunk in order)
        return torch.cat([first + torch.randperm(length, generator=self._generator) for first, length in parts])


def chunk_order(order: RowOrder, groups: Sequence[int], number: int, generator: torch.Generator) -> list[int]:
    """The order in which pass ``number`` takes whole chunks; ``generator`` is left to draw the order of their rows.

    Shuffled chunks of one group stand together: a batch at the end of a chunk goes on with one of the same worker.

    >>> chunk_order(RowOrder(8, 2, shuffle=False), [1, 0, 1], 1, torch.Generator())
    [0, 1, 2]
    >>> chunk_order(RowOrder(8, 2), [1, 0, 1], 1, torch.Generator())[0]
    1
    """
    if not order.shuffle:
        return list(range(len(groups)))
    generator.manual_seed(order.seed * 1_000_003 + number)
    return sorted(torch.randperm(len(groups), generator=generator).tolist(), key=lambda chunk: groups[chunk])


def _taken(array: torch.Tensor | Chunks, at: torch.Tensor | slice) -> torch.Tensor:
    return array[at] if isinstance(at, slice) else array.index_select(0, at.to(array.device))
