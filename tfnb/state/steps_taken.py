"""The applied steps of a training, and the data position behind the last one. Imports graph.

Data is drawn ahead for the tasks of a cluster, by many batches. A `Source` is saved, and left by `fit`, behind the
batch of the last step that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tfnb.graph import Variable
from tfnb.state.input_sources import Position, Source
from tfnb.state.run_numbers import RunNumbers


@dataclass
class AppliedSteps:
    """The steps of one training that the Variables have seen: all below ``whole``, and each one in ``beyond``.

    Asynchronous tasks apply steps in any order, so that there may be gaps.

    >>> applied = AppliedSteps()
    >>> applied.add([0, 3, 1])
    >>> applied, 3 in applied, len(applied), applied.missing(range(6))
    (AppliedSteps(whole=2, beyond={3}), True, 3, [range(2, 3), range(4, 6)])
    """

    whole: int = 0
    beyond: set[int] = field(default_factory=set)

    def add(self, numbers: Iterable[int]) -> None:
        """Register steps as applied."""
        self.beyond.update(number for number in numbers if number >= self.whole)
        while self.whole in self.beyond:
            self.beyond.remove(self.whole)
            self.whole += 1

    def copy(self) -> AppliedSteps:
        """The same, to be kept."""
        return AppliedSteps(self.whole, set(self.beyond))

    def missing(self, span: range) -> list[range]:
        """The steps of ``span`` that are not applied, in runs."""
        found, start = list[range](), max(span.start, self.whole)
        for stop in (*sorted(number for number in self.beyond if start <= number < span.stop), span.stop):
            found += [range(start, stop)] if start < stop else []
            start = stop + 1
        return found

    def __contains__(self, number: int) -> bool:
        return number < self.whole or number in self.beyond

    def __len__(self) -> int:
        return self.whole + len(self.beyond)


@dataclass
class SeenSteps:
    """The steps of a training that the local copies of the values have seen: ``now()``, at any instant.

    None while the copies lack what was done before the training, so that nobody can go on from them.
    """

    now: Callable[[], AppliedSteps] | None = None


class TakenSteps(NamedTuple):
    """The number of applied steps, with the position of the source and the run number of the next step.

    position: None where the data has none. run: the session's own next one where others took numbers meanwhile.
    is_whole: whether they are the first ones, as of a training without asynchronous tasks.
    """

    steps: int
    position: Position | None
    run: int = 0
    is_whole: bool = True


class StepsTaken(Protocol):
    """The steps of one training. ``source``: the data source, if the training's data has a position."""

    source: Source | None

    @property
    def applied(self) -> TakenSteps:
        """The steps that the Variables have seen."""
        ...


class _LatestStep(NamedTuple):
    """The latest step. told: steps that have returned; step: with the latest, valid once ``written`` has another
    ``version``.

    run: the next number of a run when it began.
    """

    told: TakenSteps
    step: TakenSteps
    written: Variable | None = None
    version: int = 0
    run: int = 0


class StepsHere:
    """The steps of a loop in this process. A step counts once its Variables are written, even without a return."""

    def __init__(self, begin: int, source: Source | None, runs: RunNumbers) -> None:
        self.source, self._runs = source, runs
        first = TakenSteps(begin, None if source is None else source.position)
        self._begun = _LatestStep(first, first, run=runs.next)  # changed at once: other threads ask what is applied

    def begins(self, position: Position | None, written: Variable | None) -> None:
        """A step over the batch before ``position`` begins, and writes ``written`` among others."""
        told, version = self._begun.told, 0 if written is None else written.version
        self._begun = _LatestStep(told, TakenSteps(told.steps + 1, position), written, version, self._runs.next)

    def ends(self) -> None:
        """The latest step has returned."""
        self._begun = self._begun._replace(told=self._begun.step)

    @property
    def is_inside(self) -> bool:
        """Whether a step has begun and not returned."""
        return self._begun.step is not self._begun.told

    @property
    def applied(self) -> TakenSteps:
        """The steps that the Variables have seen. Random numbers of one that was broken off are drawn again."""
        told, step, written, version, begun = self._begun
        has_written = written is not None and written.version != version
        run = self._runs.next
        if step is not told and run in (begun, begun + 1):  # nobody else took any
            run = begun + has_written
        return (step if has_written else told)._replace(run=run)


class StepsThere:
    """The steps of a training on a cluster, where tasks may apply some steps in any order.

    begin: steps that were taken before. step: the cluster's own count of steps. in_order: whether the first ones are
    applied; else a source stands behind those that are known to be applied without a gap, so that no batch is lost, and
    some may be taken twice.
    """

    is_inside = False

    def __init__(
        self, begin: int, source: Source | None, runs: RunNumbers, step: Callable[[], int], *, in_order: bool
    ) -> None:  # fmt: skip
        self._begin = begin
        self.source, self._runs, self._step, self._in_order = source, runs, step, in_order
        self._before, self._first_run, self._drawn = step(), runs.next, 0
        self._start = None if source is None else source.position
        self._positions: dict[int, Position | None] = {}  # behind each batch, by number
        self._known, self._first, self._is_lost = AppliedSteps(), 0, False

    def numbered_from(self, first: int) -> None:
        """The first step that is taken has this number."""
        self._known, self._first = AppliedSteps(first), first

    def begins(self, total: int = 0) -> None:
        """Tasks begin with the steps not taken yet, of which ``total`` more are drawn."""
        self._first_run = self._runs.next - self._drawn
        self._drawn += total

    def drawn(self, position: Position | None) -> int:
        """The number of a batch that was drawn."""
        number, self._drawn = self._drawn, self._drawn + 1
        self._positions[number] = position
        return number

    def ends(self) -> None:
        """Does nothing: the end of an iteration says nothing about applied steps, since tasks run ahead."""

    def told(self, numbers: Iterable[int | None]) -> None:
        """Register steps as applied; None stands for a step of unknown number."""
        self._known.add(number for number in numbers if number is not None)

    def is_told(self, number: int) -> bool:
        """Whether a step is known to be applied."""
        return number in self._known

    def kept(self, applied: AppliedSteps) -> None:
        """These steps stay applied whatever is lost: data positions before them are forgotten."""
        for old in [old for old in self._positions if old < min(applied.whole, self._known.whole) - 1]:
            self._start = self._positions.pop(old)

    def back_to(self, applied: AppliedSteps) -> None:
        """Only these steps are applied: later ones were lost, and are taken again."""
        self._known, self._is_lost = applied.copy(), False

    def lose(self) -> None:
        """From now on the steps seen by the values are unknown, until `back_to` sets them."""
        self._is_lost = True

    @property
    def applied(self) -> TakenSteps:
        """The steps that the servers have applied, as far as is known here."""
        return self.at(self._step())

    def at(self, step: int) -> TakenSteps:
        """The applied steps at step ``step`` of the cluster."""
        steps = step - self._before
        last = (max(steps, self._known.whole) if self._in_order else self._known.whole) - 1
        is_ours = self._drawn > 0 and self._runs.next == self._first_run + self._drawn
        run = self._first_run + steps if is_ours and self._in_order else self._runs.next
        is_whole = not self._is_lost and (self._in_order or self._known.whole - self._first == steps)
        return TakenSteps(self._begin + steps, self._positions.get(last, self._start), run, is_whole)
