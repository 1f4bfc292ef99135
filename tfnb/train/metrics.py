"""Watched values of a run: gathered step by step as tensors, read in bulk, averaged by epoch and along the way.

Reading many at once waits for a device once. Imports torch only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Any, NamedTuple

import torch

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
    >>> m.add(1, 30, [torch.tensor(1.0)])
    >>> m.add(2, 10, [torch.tensor(5.0)])
    >>> m.end_epoch(1, 2)
    >>> m.history, m.curve()
    ([{'epoch': 1, 'step': 2, 'loss': 2.0}], [{'step': 1, 'loss': 1.0}, {'step': 2, 'loss': 5.0}])
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.history: list[dict[str, Any]] = []
        self.bad: list[Bad] = []
        self._fresh: list[tuple[int, int, Sequence[torch.Tensor]]] = []  # step, rows, values
        self._sums = [0.0] * len(self.names)
        self._rows = 0
        self._windows: list[tuple[int, int, list[float]]] = []  # last step, steps, sums
        self._width = 1

    def add(self, step: int, rows: int, values: Sequence[torch.Tensor]) -> None:
        """The values of one step over so many rows, one scalar for each name."""
        if values:
            self._fresh.append((step, rows, values))
            if len(self._fresh) >= AT_ONCE:
                self.read()

    def read(self) -> None:
        """Turn what was added into numbers."""
        if not self._fresh:
            return
        steps, rows, values = zip(*self._fresh, strict=True)
        self._fresh.clear()
        numbers = _numbers([value for each in values for value in each])
        columns = [[float(x) for x in numbers[place :: len(self.names)]] for place in range(len(self.names))]
        self._rows += sum(rows)
        self._sums = [s + sum(map(mul, c, rows)) for s, c in zip(self._sums, columns, strict=True)]
        self._note_bad(steps, columns)
        self._extend_windows(steps, columns)

    def means(self) -> dict[str, float]:
        """The means over the epoch so far, or over the last one where the next has not begun."""
        if not self._rows and self.history:
            return {name: self.history[-1][name] for name in self.names}
        return dict(zip(self.names, self._over_rows(), strict=True))

    def _over_rows(self) -> list[float]:
        return [total / self._rows if self._rows else math.nan for total in self._sums]

    def end_epoch(self, epoch: int, step: int) -> None:
        """Add the means over the epoch that ends with ``step`` to the history."""
        self.read()
        self.history.append({"epoch": epoch, "step": step, **dict(zip(self.names, self._over_rows(), strict=True))})
        self._sums, self._rows = [0.0] * len(self.names), 0

    def curve(self) -> list[dict[str, Any]]:
        """Means over windows of equal width."""
        means = [(step, [total / steps for total in sums]) for step, steps, sums in self._windows]
        return [{"step": step, **dict(zip(self.names, values, strict=True))} for step, values in means]

    def _note_bad(self, steps: Sequence[int], columns: list[list[float]]) -> None:
        known = {bad.name for bad in self.bad}
        for name, column in zip(self.names, columns, strict=True):
            if name not in known and not math.isfinite(sum(column)):
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


def _numbers(scalars: list[torch.Tensor]) -> list[float]:
    if len({scalar.device for scalar in scalars}) > 1:
        return [scalar.item() for scalar in scalars]
    return torch.stack([scalar.detach().reshape(()) for scalar in scalars]).tolist()


def _joined(first: tuple[int, int, list[float]], *rest: tuple[int, int, list[float]]) -> tuple[int, int, list[float]]:
    for step, steps, sums in rest:
        first = (step, first[1] + steps, [a + b for a, b in zip(first[2], sums, strict=True)])
    return first
