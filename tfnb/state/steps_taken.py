"""Which steps of a training count, and where its data stands behind the last one. Imports graph.

Data is drawn ahead: by one batch to see that a pass is over, by many for the tasks of a cluster. A `Source` is saved,
and left by `fit`, behind the batch of the last step that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from tfnb.graph import Variable
from tfnb.state.input_sources import Position, Source
from tfnb.state.run_numbers import RunNumbers


class Taken(NamedTuple):
    """So many steps count, and the source stands there behind them (None: the data has no position)."""

    steps: int
    position: Position | None


class StepsTaken(Protocol):
    """The steps of one training. ``source``: that it reads, if it has a position."""

    source: Source | None

    @property
    def applied(self) -> Taken:
        """The steps that the Variables have seen."""
        ...

    @property
    def next_run(self) -> int:
        """The random numbers of the next step; where others took numbers meanwhile, the session's own next ones."""
        ...


class StepsHere:
    """Of a loop in this process. A step counts as soon as its Variables are written, also if it never returned."""

    def __init__(self, begin: int, source: Source | None, runs: RunNumbers) -> None:
        self.source, self._runs = source, runs
        self._told = self._begun = Taken(begin, None if source is None else source.position)
        self._written: Variable | None = None
        self._version, self._run = 0, runs.next

    def begins(self, position: Position | None, written: Variable | None) -> None:
        """A step over the batch before ``position`` begins, and writes ``written`` among others."""
        self._run, self._written = self._runs.next, written
        self._version = 0 if written is None else written.version
        self._begun = Taken(self._told.steps + 1, position)

    def ends(self) -> None:
        """It has returned."""
        self._told = self._begun

    @property
    def is_inside(self) -> bool:
        """Whether a step has begun and not returned."""
        return self._begun is not self._told

    @property
    def applied(self) -> Taken:
        """The steps that the Variables have seen."""
        has_written = self._written is not None and self._written.version != self._version
        return self._begun if has_written else self._told

    @property
    def next_run(self) -> int:
        """The random numbers of the next step: those of one that was broken off are drawn again."""
        if self.is_inside and self._runs.next in (self._run, self._run + 1):  # nobody else took any
            return self._run + (self.applied is self._begun)
        return self._runs.next


class StepsThere:
    """Of the tasks of a cluster, which apply some steps in any order.

    count: how many are applied. in_order: whether they are the first ones; else a source stands behind those that are
    known to be applied without a gap, so that no batch is lost, and some may be taken twice.
    """

    is_inside = False

    def __init__(self, source: Source | None, runs: RunNumbers, count: Callable[[], int], *, in_order: bool) -> None:
        self.source, self._runs, self._count, self._in_order = source, runs, count, in_order
        self._first_run, self._drawn, self._whole = runs.next, 0, 0
        self._start = None if source is None else source.position
        self._positions: dict[int, Position | None] = {}  # behind each batch, by number
        self._known: set[int] = set()  # applied, after a gap

    def drawn(self, position: Position | None) -> int:
        """The number of a batch that was drawn."""
        number, self._drawn = self._drawn, self._drawn + 1
        self._positions[number] = position
        return number

    def ends(self) -> None:
        """Nothing follows from it: tasks are ahead."""

    def told(self, number: int | None) -> None:
        """A step is applied; None where nobody knows which one."""
        if number is not None:
            self._known.add(number)
        while self._whole in self._known:
            self._known.remove(self._whole)
            self._whole += 1
        for old in [old for old in self._positions if old < self._whole - 1]:
            self._start = self._positions.pop(old)

    @property
    def applied(self) -> Taken:
        """The steps that the servers have applied."""
        steps = self._count()
        last = (max(steps, self._whole) if self._in_order else self._whole) - 1
        return Taken(steps, self._positions.get(last, self._start))

    @property
    def next_run(self) -> int:
        """The random numbers of the step behind those that are applied."""
        is_ours = self._drawn > 0 and self._runs.next == self._first_run + self._drawn
        return self._first_run + self._count() if is_ours and self._in_order else self._runs.next
