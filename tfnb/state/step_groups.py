"""Consecutive steps that a training has applied, several at a time on a cluster. Imports torch only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch

from tfnb.state.steps_taken import AppliedSteps


class StepGroup(NamedTuple):
    """``steps`` in a row: how many. ``values``: one tensor for each fetch, stacked over the steps, in a sequence.

    A value is None where the fetch has none, or where a lost task told nobody. ``numbers``: of these steps in their
    training, from 0; None where nobody knows them. A group of no steps tells that all tasks stand still; or, with
    ``kept``, which steps the copies of the values here have seen; with ``lost`` as well, that a server was lost:
    ``lost`` is a `Recovery` if training goes on from the steps in ``kept``, else the error with which it ends.

    >>> group = StepGroup(2, [torch.tensor([3.0, 1.0]), None])
    >>> list(group.each())
    [[tensor(3.), None], [tensor(1.), None]]
    """

    steps: int
    values: Any  # from a session in the structure of the fetches
    numbers: Sequence[int] | None = None
    kept: AppliedSteps | None = None
    lost: object = None

    def each(self) -> Iterator[list[torch.Tensor | None]]:
        """The values of each step."""
        columns = [repeat(None, self.steps) if column is None else column.unbind() for column in self.values]
        return map(list, zip(*columns, strict=True)) if columns else ([] for _ in range(self.steps))


def of_one(values: Sequence[torch.Tensor | None], number: int | None) -> StepGroup:
    """One step as a group."""
    stacked = [None if value is None else value.unsqueeze(0) for value in values]
    return StepGroup(1, stacked, None if number is None else (number,))


class StepReport(NamedTuple):
    """Consecutive applied steps: the epoch and the number of rows of each step, and the watched values.

    values: for each name one tensor, which has one number for each step; none where nobody knows them. numbers: of the
    steps in their training on a cluster.
    """

    epochs: Sequence[int]
    rows: Sequence[int]
    values: Sequence[torch.Tensor] = ()
    numbers: Sequence[int] = ()

    def part(self, start: int, stop: int) -> StepReport:
        """Some of the steps."""
        values = tuple(value.reshape(-1)[start:stop] for value in self.values)
        return StepReport(self.epochs[start:stop], self.rows[start:stop], values, self.numbers[start:stop])

    def named(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The values of one step by name, 0-d; NaN where nobody knows them."""
        values = self.values or (torch.full((), torch.nan),) * len(names)
        return dict(zip(names, (value.reshape(()) for value in values), strict=False))

    def one_by_one(self) -> Iterator[StepReport]:
        """Each step by itself."""
        return (self.part(at, at + 1) for at in range(len(self.epochs)))

    def by_epoch(self) -> Iterator[StepReport]:
        """Split the report into parts, each of which begins with its latest epoch.

        >>> [part.epochs for part in StepReport((2, 1, 2, 3, 3), (8,) * 5).by_epoch()]
        [(2, 1, 2), (3, 3)]
        """
        start, latest = 0, self.epochs[0] if self.epochs else 0
        for at, epoch in enumerate(self.epochs):
            if epoch > latest:
                yield self.part(start, at)
                start, latest = at, epoch
        yield self.part(start, len(self.epochs)) if start else self
