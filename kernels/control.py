"""Structured control flow over functions of tensors. Knows no graph."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from tfnb.kernels.define import op
from tfnb.kernels.random import REPLICA, mix
from tfnb.kernels.rows import Column, rows_from, rows_of

Function = Callable[..., Sequence[torch.Tensor]]  # of tensors and, last, the number that random draws depend on


Row = tuple[Sequence[int] | int, torch.dtype, str]  # shape, dtype, device of one; an int: of that rank, and any shape
Sequences = Sequence[Any]  # see `tfnb.kernels.rows.rows_of`


def while_loop(
    cond: Function | None, body: Function, init: Sequence[torch.Tensor], xs: Sequences,
    captures: Sequence[torch.Tensor], *, limit: int | None, rows: Sequence[Row | Column], reverse: bool = False,
    run: int = 0, draws: bool = False, replicas: tuple[int, int] | None = None,
) -> list[Any]:  # fmt: skip
    """The carried values after the last iteration, the number of iterations (int64, on the CPU), and the rows, stacked
    or packed.

    See `tfnb.graph.subgraph` for the meaning. draws: each iteration has a position of its own in random streams.
    replicas: (first, distance): iteration i draws as microbatch ``first + i * distance`` of the step. rows: for each
    output that is stacked the shape, dtype and device of a row, or a column that collects the rows.
    """
    lengths, sequences = zip(*(rows_of(x, reverse=reverse) for x in xs), strict=True) if xs else ((), ())
    limit = min([*lengths[:1], *([] if limit is None else [limit])], default=None)
    if not (xs or rows or draws):
        return _plain_loop(cond, body, init, captures, limit, run)
    state: Sequence[torch.Tensor] = tuple(init)
    iterations, carried = 0, len(init)
    given = zip(*sequences) if xs else repeat(())  # noqa: B905  # as many as iterations are taken
    columns = [_StackedColumn(row) if isinstance(row, tuple) else row for row in rows]
    puts = [column.put for column in columns]
    while limit is None or iterations < limit:
        number = _number(run, iterations, limit, reverse, replicas) if draws else run
        if cond is not None and not cond(*state, *captures, number)[0]:
            break
        out = body(*state, *next(given), *captures, number)
        state = out[:carried]
        for put, value in zip(puts, out[carried:], strict=True):
            put(value)
        del out
        iterations += 1
    return [*state, _count(iterations), *(result for column in columns for result in column.end(reverse))]


def _count(iterations: int) -> torch.Tensor:
    return torch.tensor(iterations, device="cpu")  # wherever factories make their tensors by default


def _number(run: int, iteration: int, limit: int | None, reverse: bool, replicas: tuple[int, int] | None) -> int:
    """The stream position of an iteration; a backward loop repeats the draws of the forward loop."""
    if replicas:
        first, step = replicas
        return run + (first + iteration * step) * REPLICA
    return mix(run, limit - 1 - iteration if reverse and limit is not None else iteration)


@dataclass(frozen=True, slots=True)
class Replay:
    """Takes iterations of a loop a second time, with the same bits. Its body only computes.

    xs: tensors or `RowProducts`. carried: number of carried values. rows: indices of the requested rows among the
    outputs of the body. written: indices of carried values that the body writes in place. replicas: as of `while_loop`.
    """

    body: Function
    xs: Sequences
    captures: Sequence[torch.Tensor]
    carried: int
    rows: Sequence[int]
    written: Sequence[int]
    limit: int | None
    reverse: bool
    run: int
    draws: bool
    replicas: tuple[int, int] | None = None

    def own(self, state: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The carried values; those written by iterations are copies."""
        return [x.clone() if place in self.written else x for place, x in enumerate(state)]

    def iterations(self, state: Sequence[torch.Tensor], first: int, count: int) -> list[list[torch.Tensor]]:
        """The rows of so many iterations, a list for each, from the carried values before the first of them."""
        lengths = [len(x) for x in self.xs[:1]]
        limit = min([*lengths, *([] if self.limit is None else [self.limit])], default=None)
        sequences = [rows_from(x, first, reverse=self.reverse) for x in self.xs]
        given = zip(*sequences) if self.xs else repeat(())  # noqa: B905
        found: list[list[torch.Tensor]] = [[] for _ in self.rows]
        state = self.own(state)
        for iteration in range(first, first + count):
            number = _number(self.run, iteration, limit, self.reverse, self.replicas) if self.draws else self.run
            out = self.body(*state, *next(given), *self.captures, number)
            state = out[: self.carried]
            for rows, place in zip(found, self.rows, strict=True):
                rows.append(out[place])
        return found


def _plain_loop(
    cond: Function | None, body: Function, init: Sequence[torch.Tensor], captures: Sequence[torch.Tensor],
    limit: int | None, run: int,
) -> list[torch.Tensor]:  # fmt: skip
    """A loop without rows or draws, with low overhead for very short iterations."""
    state, iterations, rest = init, 0, (*captures, run)
    end = None if limit is None else max(limit, 0)
    while iterations != end and (cond is None or cond(*state, *rest)[0]):
        state = body(*state, *rest)
        iterations += 1
    return [*state, _count(iterations)]


class _StackedColumn:
    """A column whose rows are stacked or packed."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.made: list[torch.Tensor] = []
        self.put = self.made.append

    def end(self, reverse: bool) -> tuple[torch.Tensor, ...]:
        if reverse:
            self.made.reverse()
        found = gathered(self.made, self.row)
        self.made.clear()
        return found


def gathered(made: list[torch.Tensor], row: Row) -> tuple[torch.Tensor, ...]:
    """Rows of one shape stacked; of any shape as their elements one after the other, and their shapes."""
    shape, dtype, device = row
    if not isinstance(shape, int):
        return (torch.stack(made) if made else torch.empty((0, *shape), dtype=dtype, device=device),)
    shapes = torch.tensor([list(value.shape) for value in made], dtype=torch.int64, device="cpu").reshape(
        len(made), shape
    )
    flat = torch.cat([value.reshape(-1) for value in made]) if made else torch.empty(0, dtype=dtype, device=device)
    return flat, shapes


# -- functions that call themselves -------------------------------------------------------------------------------

_FRAMES = 24  # of Python, for one call of generated or interpreted code with branches and loops around it
_levels = threading.local()
_lock = threading.Lock()
_waiting: list[int] = []  # limits before the calls that are under way


def call(
    name: str, limit: int, body: Callable[..., Sequence[torch.Tensor]], args: Sequence[torch.Tensor],
    explained: Callable[[RecursionError], Exception],
) -> Sequence[torch.Tensor]:  # fmt: skip
    """``body(*args)``, one level deeper; beyond ``limit``, raises the error made by ``explained``."""
    depth = getattr(_levels, "depth", 0)
    if depth >= limit:
        raise explained(RecursionError(f"{name} calls itself more than {limit} times deep"))
    _levels.depth = depth + 1
    try:
        if depth:
            return body(*args)
        with _room(limit):
            return body(*args)
    except RecursionError as error:
        raise explained(RecursionError(f"{name} calls itself more than {depth} times deep: {error}")) from None
    finally:
        _levels.depth = depth


@contextmanager
def _room(limit: int) -> Iterator[None]:
    """Python's own limit, raised as long as some call is under way."""
    with _lock:
        _waiting.append(sys.getrecursionlimit() if not _waiting else _waiting[0])
        sys.setrecursionlimit(max(sys.getrecursionlimit(), _waiting[0] + _FRAMES * limit))
    try:
        yield
    finally:
        with _lock:
            before = _waiting.pop()
            if not _waiting:
                sys.setrecursionlimit(before)


def _fake_share(total: torch.Tensor, value: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(total)


@op("(Tensor total, Tensor value, Tensor share) -> Tensor", _fake_share)
def add_share(total: torch.Tensor, value: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """``total + share * value``, rounded like `Tensor.add_` with ``alpha``; share: a number on the CPU.

    >>> add_share(torch.tensor([-0.0]), torch.tensor([3.0]), torch.tensor(0.5, dtype=torch.float64))
    tensor([1.5000])
    """
    return total.add(value.to(total.dtype), alpha=share.item())


def _fake_weighted(total: torch.Tensor, value: torch.Tensor, weight: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(total)


@op("(Tensor total, Tensor value, Tensor weight, Tensor seen) -> Tensor", _fake_weighted)
def add_weighted(total: torch.Tensor, value: torch.Tensor, weight: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """``total + weight * value``; a value that weighs nothing adds nothing, whatever it is.

    weight, seen: numbers on the CPU; ``seen`` is 0 as long as nothing had a weight: the result is then ``weight *
    value``, or the value itself if it weighs nothing, too: a mean of nothing is what its parts are, perhaps NaN.

    >>> one, none = torch.tensor(1.0), torch.tensor(0.0)
    >>> add_weighted(torch.tensor([3.0]), torch.tensor([torch.nan]), none, one)
    tensor([3.])
    >>> add_weighted(torch.tensor([torch.nan]), torch.tensor([3.0]), torch.tensor(2.0), none)
    tensor([6.])
    """
    alpha, value = weight.item(), value.to(total.dtype)
    if not alpha:
        return total.clone() if seen.item() else value.clone()
    return total.add(value, alpha=alpha) if seen.item() else value * alpha


@op("(Tensor value, Tensor weight) -> Tensor", lambda value, weight: torch.empty_like(value))
def times_weight(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``weight * value``, and zeros for a value that weighs nothing; weight: a number on the CPU.

    >>> times_weight(torch.tensor([torch.nan]), torch.tensor(0.0))
    tensor([0.])
    """
    return value * weight.item() if weight.item() else torch.zeros_like(value)


def _fake_mean(total: torch.Tensor, whole: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(total)


@op("(Tensor total, Tensor whole, Tensor seen) -> Tensor", _fake_mean)
def over_weight(total: torch.Tensor, whole: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """``total / whole`` of a sum of `add_weighted`, or that sum where nothing had a weight; numbers on the CPU.

    >>> over_weight(torch.tensor([6.0]), torch.tensor(2.0), torch.tensor(2.0))
    tensor([3.])
    """
    return total / whole.item() if seen.item() else total.clone()


@op("(Tensor value) -> Tensor", lambda value: torch.empty((), dtype=torch.float64))
def length_of(value: torch.Tensor) -> torch.Tensor:
    """How many numbers a tensor has, as one on the CPU.

    >>> length_of(torch.ones(2, 3))
    tensor(6., dtype=torch.float64)
    """
    return torch.tensor(value.numel(), dtype=torch.float64)
