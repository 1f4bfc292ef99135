"""Steps of a training whose tasks sum in mid-step (``exact=True``, or None and no mean): of each batch the tasks that
divide its rows, and the plans of that step.

The step over so many tasks is `tfnb.passes.flow.exact_rows`; it is placed, taken and committed as one that a user
placed by hand. A batch of few rows takes fewer tasks, and so does one after the loss of a task that does not come back.
Ops that no rule divides are named before the first step: one task does each with the rows of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tfnb.cluster.engine.members import StepFeeds
from tfnb.cluster.tasks.programs import PlacedStep
from tfnb.graph import Node
from tfnb.passes import StepGraph
from tfnb.passes.flow.exact_rows import StepOverRows, over_rows
from tfnb.passes.flow.row_weights import name_of
from tfnb.placement.row_guards import RowGuards

_NAMED = 4  # ops of a note


@dataclass
class ExactSteps:
    """The steps of one training. ``tasks``: gives the numbers of live tasks. ``place``: makes the plans of a step.

    ``is_asked``: by ``exact=True``; else a look at the first batch found a loss that is no mean over rows.
    """

    step: StepGraph
    tasks: Callable[[], Sequence[int]]
    place: Callable[[StepGraph], PlacedStep]
    is_asked: bool = True

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

    @property
    def note(self) -> str:
        """The ops that one task does with the rows of all, and their lines; empty where every op is divided."""
        over = self._over(tuple(self.tasks()))
        gathered = () if over is None else over.gathered
        if not gathered:
            return ""
        forward = {name_of(node): node for node in reversed(gathered) if node.forward is None}
        ops = forward or {name_of(node): node for node in reversed(gathered)}
        named = [_told(name, node) for name, node in list(ops.items())[:_NAMED]]
        others = [f"{len(ops) - _NAMED} more"] if len(ops) > _NAMED else []
        why = "exact=True" if self.is_asked else "tasks sum over all rows in mid-step"
        cure = "" if self.is_asked else "; exact=False averages gradients instead"
        return (
            f"{why}: {', '.join((*named, *others))} cannot be divided by rows: the tasks send all rows to one of "
            f"them, which does that alone. The values are right; the step gains nothing there{cure}"
        )

    def _over(self, tasks: tuple[int, ...]) -> StepOverRows | None:
        """The step over these tasks, made once."""
        known: dict[tuple[object, ...], StepOverRows | None] = self.step.graph.attached.setdefault("over_rows", {})
        key = tasks, self.step.fetches, self.step.feeds
        if key not in known:
            known[key] = over_rows(self.step, tasks)
        return known[key]

    def _whole(self, batch: StepFeeds) -> tuple[StepGraph, PlacedStep, StepFeeds]:
        return self.step, self.place(self.step), replace(batch, rows=None)


def _told(name: str, node: Node) -> str:
    return f"{name} ({node.source})" if node.source else name
