"""Watched values of a run: gathered step by step as tensors, read in bulk, averaged by epoch and along the way.

Reading many at once waits for a device once. Imports step_groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import reduce
from operator import add, mul
from typing import Any, NamedTuple

import torch

from tfnb.state.step_groups import StepReport

POINTS = 400  # of a curve
AT_ONCE = 512  # steps kept as tensors


class Bad(NamedTuple):
    """A watched value that was not finite, the first time."""

    name: str
    value: float
    step: int


class Metrics:
    """Means of watched values.

    >>> m = Metrics(["loss"])
    >>> m.add(2, StepReport((1, 1), (30, 10), [torch.tensor([1.0, 5.0])]))
    >>> m.read()
    >>> m.history, m.curve()
    ([{'epoch': 1, 'step': 2, 'loss': 2.0}], [{'step': 1, 'loss': 1.0}, {'step': 2, 'loss': 5.0}])
    """

    def __init__(self, names: Sequence[str], whole: Collection[str] = ()) -> None:
        """whole: names of whole numbers. NaN stands for a value that parts of a batch do not tell."""
        self.names, self._whole = tuple(names), frozenset(whole)
        self.bad: list[Bad] = []
        self._fresh: list[tuple[int, StepReport]] = []  # that have values, each with its first step
        self._unread = 0  # steps of them
        self._ends: dict[int, int] = {}  # of each epoch its last step so far
        self._unknown: Counter[int] = Counter()  # of each epoch the steps whose values nobody knows
        self._totals: dict[int, list[float]] = {}  # of each epoch the rows, and for each name the sum over them
        self._windows: list[tuple[int, int, list[float]]] = []  # last step, steps, sums
        self._width = 1

    def add(self, step: int, told: StepReport) -> None:
        """Add steps up to ``step``. Steps of several epochs may come in any order, as from asynchronous tasks."""
        first = step - len(told.epochs) + 1
        for at, epoch in enumerate(told.epochs, first):
            self._ends[epoch] = at
        if told.values:
            self._fresh.append((first, told))
            self._unread += len(told.epochs)
            if self._unread >= AT_ONCE:
                self.read()
        elif self.names:
            self._unknown.update(told.epochs)

    def over(self, epoch: int, step: int) -> None:
        """An epoch is over: it is in the history, though all its steps be of an earlier call."""
        self._ends.setdefault(epoch, step)

    def read(self) -> None:
        """Convert the added values to numbers."""
        if not self._fresh:
            return
        steps = [step for first, told in self._fresh for step in range(first, first + len(told.epochs))]
        rows = [number for _, told in self._fresh for number in told.rows]
        epochs = [epoch for _, told in self._fresh for epoch in told.epochs]
        numbers = _numbers([told.values[place] for place in range(len(self.names)) for _, told in self._fresh])
        columns = [[*map(float, numbers[at : at + len(steps)])] for at in range(0, len(numbers), len(steps))]
        self._fresh.clear()
        self._unread = 0
        places: dict[int, list[int]] = {}
        for place, epoch in enumerate(epochs):
            places.setdefault(epoch, []).append(place)
        for epoch, mine in places.items():
            weights = [rows[place] for place in mine]
            added = [weights, *(map(mul, map(column.__getitem__, mine), weights) for column in columns)]
            old = self._totals.get(epoch, [0.0] * len(added))
            # one after the other: the bits do not depend on how many steps are read at a time
            self._totals[epoch] = [reduce(add, more, total) for total, more in zip(old, added, strict=True)]
        self._note_bad(steps, columns)
        self._extend_windows(steps, columns)

    def means(self) -> dict[str, float]:
        """The means over the latest epoch with values read."""
        return self.means_of(max(self._totals, default=0))

    def means_of(self, epoch: int) -> dict[str, float]:
        """The means over the values read of an epoch."""
        rows, *sums = self._totals.get(epoch, [0.0] * (1 + len(self.names)))
        return {name: total / rows if rows else math.nan for name, total in zip(self.names, sums, strict=True)}

    @property
    def history(self) -> list[dict[str, Any]]:
        """For each epoch its last step, the means over its values read, and how many steps have none, if any has."""
        unknown = {epoch: {"unknown": self._unknown[epoch]} if self._unknown else {} for epoch in self._ends}
        return [
            {"epoch": epoch, "step": step, **self.means_of(epoch), **unknown[epoch]}
            for epoch, step in sorted(self._ends.items())
        ]

    def curve(self) -> list[dict[str, Any]]:
        """Means over windows of equal width."""
        means = [(step, [total / steps for total in sums]) for step, steps, sums in self._windows]
        return [{"step": step, **dict(zip(self.names, values, strict=True))} for step, values in means]

    def _note_bad(self, steps: Sequence[int], columns: list[list[float]]) -> None:
        known = {bad.name for bad in self.bad}
        for name, column in zip(self.names, columns, strict=True):
            if name not in known | self._whole and not math.isfinite(sum(column)):
                found = next(((s, v) for s, v in zip(steps, column, strict=True) if not math.isfinite(v)), None)
                if found is not None:  # else only the sum overflowed
                    self.bad.append(Bad(name, found[1], found[0]))

    def _extend_windows(self, steps: Sequence[int], columns: list[list[float]]) -> None:
        start = 0
        while start < len(steps):
            if not self._windows or self._windows[-1][1] >= self._width:
                self._windows.append((steps[start], 0, [0.0] * len(columns)))
            stop = min(start + self._width - self._windows[-1][1], len(steps))
            part = (steps[stop - 1], stop - start, [sum(column[start:stop]) for column in columns])
            self._windows[-1] = _joined(self._windows[-1], part)
            start = stop
            if len(self._windows) > POINTS:
                self._halve()

    def _halve(self) -> None:
        """Every two windows become one, twice as wide."""
        windows = self._windows
        self._windows = [_joined(*windows[i : i + 2]) for i in range(0, len(windows), 2)]
        self._width *= 2


def _numbers(values: list[torch.Tensor]) -> list[float]:
    if len({value.device for value in values}) > 1:
        values = [value.cpu() for value in values]
    return torch.cat([value.detach().reshape(-1) for value in values]).tolist()


def _joined(first: tuple[int, int, list[float]], *rest: tuple[int, int, list[float]]) -> tuple[int, int, list[float]]:
    for step, steps, sums in rest:
        first = (step, first[1] + steps, [a + b for a, b in zip(first[2], sums, strict=True)])
    return first
