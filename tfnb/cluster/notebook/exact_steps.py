"""Steps of a training with ``exact=True``: of each batch the tasks that divide its rows, and the plans of that step.

The step over so many tasks is `tfnb.passes.flow.exact_rows`; it is placed, taken and committed as one that a user
placed by hand. A batch of few rows takes fewer tasks, and so does one after the loss of a task that does not come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tfnb.cluster.engine.members import StepFeeds
from tfnb.cluster.tasks.programs import PlacedStep
from tfnb.passes import StepGraph
from tfnb.passes.flow.exact_rows import StepOverRows, over_rows
from tfnb.placement.row_guards import RowGuards


@dataclass
class ExactSteps:
    """The steps of one training. ``tasks``: gives the numbers of live tasks. ``place``: makes the plans of a step."""

    step: StepGraph
    tasks: Callable[[], Sequence[int]]
    place: Callable[[StepGraph], PlacedStep]

    def __post_init__(self) -> None:
        self._guards = RowGuards.of(self.step)

    def of(self, batch: StepFeeds) -> tuple[StepGraph, PlacedStep, StepFeeds]:
        """The step for a batch, its plans, and its feeds: over as many tasks as there are rows, at most."""
        tasks = tuple(self.tasks())
        over = self._over(tasks)
        if over is None:
            return self._whole(batch)
        rows = over.rows(batch.tensors)
        shapes, divided = [tensor.shape for tensor in batch.tensors], over.divided
        ranges, _ = self._guards.divide(shapes, divided, rows, len(tasks))
        if len(ranges) < len(tasks):
            over = self._over(tasks[: len(ranges)])
        if over is None or not rows:
            return self._whole(batch)
        fed = replace(batch, tensors=over.fed(batch.tensors, ranges), rows=None, split=())
        return over.step, self.place(over.step), fed

    def _over(self, tasks: tuple[int, ...]) -> StepOverRows | None:
        """The step over these tasks, made once."""
        known: dict[tuple[object, ...], StepOverRows | None] = self.step.graph.attached.setdefault("over_rows", {})
        key = tasks, self.step.fetches, self.step.feeds
        if key not in known:
            known[key] = over_rows(self.step, tasks)
        return known[key]

    def _whole(self, batch: StepFeeds) -> tuple[StepGraph, PlacedStep, StepFeeds]:
        return self.step, self.place(self.step), replace(batch, rows=None)
