"""Loop outputs consumed without being stacked, and batched matrix products over iterations. Knows no graph.

A column takes one value an iteration with ``put``; ``end`` gives what comes of them. A sequence has a length and gives
its rows in order. Sums of products over all iterations are taken `ITERATIONS` iterations at a time, in the order of the
iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from math import prod
from typing import Any, Protocol

import torch

ITERATIONS = 32  # whose rows are multiplied at a time
FEWEST = 4  # products that are worth a copy of their rows


class Column(Protocol):
    """An output of a loop, growing by one row each iteration."""

    @property
    def put(self) -> Callable[[torch.Tensor], None]:
        """Takes an iteration's row."""

    def end(self, reverse: bool) -> tuple[Any, ...]:
        """The final value after the last iteration; reverse: the last iteration's row comes first."""


def rows_of(x: Any, *, reverse: bool) -> tuple[int, Iterator[torch.Tensor]]:
    """The number of rows of a sequence, and its rows in the order of a consuming loop.

    x: a tensor, the elements and the shapes of rows, `RowProducts`, or kept rows (in both places of a pair).
    """
    x = x[0] if isinstance(x, tuple) and not isinstance(x[0], torch.Tensor) else x
    if isinstance(x, tuple):
        return len(x[1]), _packed(*x, reverse=reverse)
    return len(x), (_stacked(x, reverse) if isinstance(x, torch.Tensor) else x.taken(reverse))


def rows_from(x: Any, iteration: int, *, reverse: bool) -> Iterator[torch.Tensor]:
    """The rows from this iteration on, with the same bits; of a tensor or `RowProducts`."""
    first = iteration - iteration % ITERATIONS
    rows = _stacked(x, reverse, first) if isinstance(x, torch.Tensor) else x.taken(reverse, first)
    return islice(rows, iteration - first, None)


def _stacked(x: torch.Tensor, reverse: bool, first: int = 0) -> Iterator[torch.Tensor]:
    for some in _iterations(len(x), reverse, first):
        rows = x[some].unbind(0)
        yield from rows[::-1] if reverse else rows


def _iterations(count: int, reverse: bool, first: int = 0) -> Iterator[slice]:
    """`ITERATIONS` places at a time."""
    for at in range(first, count, ITERATIONS):
        yield slice(max(0, count - at - ITERATIONS), count - at) if reverse else slice(at, at + ITERATIONS)


def _packed(flat: torch.Tensor, shapes: torch.Tensor, *, reverse: bool) -> Iterator[torch.Tensor]:
    """Rows of varying shapes, stored consecutively."""
    count, row = len(shapes), row_at((flat, shapes))
    yield from map(row, reversed(range(count)) if reverse else range(count))


def row_at(x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """A function of the row number ``at`` for a tensor, or for packed rows and their shapes; -1 is the last."""
    if isinstance(x, torch.Tensor):
        return partial(x.select, 0)
    flat, sizes = x[0], x[1].tolist()
    ends = list(accumulate(map(prod, sizes)))
    return lambda at: flat[ends[at] - prod(sizes[at]) : ends[at]].view(sizes[at])


class RowProducts:
    """The sequence of ``x @ weight``, or ``bias + x @ weight``, for each row x of a tensor; `ITERATIONS` rows each."""

    def __init__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.rows, self.weight, self.bias = rows, weight, bias

    def __len__(self) -> int:
        return len(self.rows)

    def taken(self, reverse: bool, first: int = 0) -> Iterator[torch.Tensor]:
        """The rows in the order of a consuming loop; first: a starting iteration, multiple of `ITERATIONS`."""
        for some in _iterations(len(self.rows), reverse, first):
            rows = self._products(self.rows[some]).unbind(0)
            yield from rows[::-1] if reverse else rows

    def stacked(self) -> torch.Tensor:
        """All of them at once, in the order of the rows."""
        return self._products(self.rows)

    def _products(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        made = flat @ self.weight if self.bias is None else torch.addmm(self.bias, flat, self.weight)
        return made.view(*x.shape[:2], made.shape[1])


class Sums:
    """Sums over all iterations of ``a.t() @ b``, or of ``b.sum(0)``, each added to a total; a and b are among the
    columns.

    terms: the places of a (None: a plain sum) and b among ``count`` columns. totals: what is there before the loop.
    zero: of each total, whether it is known to be zero. The sums are in memory of their own.
    """

    def __init__(
        self, terms: Sequence[tuple[int | None, int]], totals: Sequence[torch.Tensor], zero: Sequence[bool], count: int
    ) -> None:
        self.terms, self.totals, self.zero = terms, totals, zero
        self._rows: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self._sums: list[torch.Tensor] = []

    def columns(self) -> list[Column]:
        """The columns; the last one's end gives the sums."""
        *others, last = self._rows
        return [*(_Silent(rows.append) for rows in others), _Last(self, last)]

    def add(self) -> None:
        """Take along the rows that are there."""
        stacked = [rows[0] if len(rows) == 1 else torch.cat(rows) for rows in self._rows]
        if not self._sums:
            self._sums = [self._first(place, stacked) for place in range(len(self.terms))]
        else:
            for found, (a, b) in zip(self._sums, self.terms, strict=True):
                if a is None:
                    found += stacked[b].sum(0)
                else:
                    found.addmm_(stacked[a].t(), stacked[b])
        for rows in self._rows:
            rows.clear()

    def _first(self, place: int, stacked: Sequence[torch.Tensor]) -> torch.Tensor:
        a, b = self.terms[place]
        found = stacked[b].sum(0) if a is None else stacked[a].t() @ stacked[b]
        return found if self.zero[place] else found.add_(self.totals[place])

    def end(self) -> tuple[torch.Tensor, ...]:
        """The sums after the last iteration."""
        if 0 < len(self._rows[0]) < FEWEST and not self._sums:
            each = list(zip(*self._rows, strict=True))
            for rows in each:
                self._rows = [[row] for row in rows]
                self.add()
        elif self._rows[0]:
            self.add()
        return tuple(self._sums or [total.clone() for total in self.totals])


class _Silent:
    """A column that another one takes along."""

    def __init__(self, put: Callable[[torch.Tensor], None]) -> None:
        self.put = put

    def end(self, reverse: bool) -> tuple[Any, ...]:
        return ()


class _Last:
    """The last column of sums, which triggers the sums once enough rows are there."""

    def __init__(self, sums: Sums, rows: list[torch.Tensor]) -> None:
        self.sums, self.rows = sums, rows

    def put(self, value: torch.Tensor) -> None:
        self.rows.append(value)
        if len(self.rows) == ITERATIONS:
            self.sums.add()

    def end(self, reverse: bool) -> tuple[Any, ...]:
        return self.sums.end()


class KeptRows:
    """Rows consumed by other loops only: one tensor an iteration, not stacked. Both a column and a sequence.

    pair: they stand for elements and for shapes. once: one loop takes them, so what it took is gone.
    """

    def __init__(self, *, pair: bool = False, once: bool = False) -> None:
        self.rows: list[torch.Tensor] = []  # in the order of the iterations
        self.put = self.rows.append
        self.once, self.reverse = once, False
        self._count = 2 if pair else 1

    def end(self, reverse: bool) -> tuple[Any, ...]:
        self.reverse = reverse
        return (self,) * self._count

    def __len__(self) -> int:
        return len(self.rows)

    def size(self, axis: int) -> int:
        """The size of the stacked rows, asked before a loop consumes them."""
        return len(self.rows) if axis == 0 else self.rows[0].size(axis - 1)

    def taken(self, reverse: bool) -> Iterator[torch.Tensor]:
        """The rows in the order of a consuming loop."""
        back = reverse != self.reverse
        if not self.once:
            return reversed(self.rows) if back else iter(self.rows)
        if not back:
            self.rows.reverse()
        return _popped(self.rows)


def _popped(rows: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    while rows:
        yield rows.pop()
