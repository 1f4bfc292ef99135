"""Feeds of a step over microbatches: the whole batch, and the bounds of its microbatches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.placement.row_guards import RowGuards
from tfnb.recording.marks.notes import user_level
from tfnb.session.feeding import MOST_FITTING, Fed, Feeder, Shapes, T


class Division(NamedTuple):
    """Into how many microbatches a step is divided; ``schedule``: of a pipeline (`tfnb.passes.flow`)."""

    microbatches: int = 1
    schedule: str = ""


WHOLE = Division()


class DividedFeeder:
    """The feeder of a step over ``most`` microbatches, fewer where a batch has fewer rows, or where some would have too
    few for the guards of the recording.

    divided: which of the values of ``whole``, the feeder of the batch, have its rows.
    """

    repeats = True  # no step is one call on what is fed

    def __init__(self, whole: Feeder, guards: RowGuards, divided: Sequence[bool], most: int) -> None:
        self.whole, self.guards, self.divided, self.most = whole, guards, divided, most
        self.values, self.names = whole.values, whole.names
        self._sizes: dict[Shapes, list[int]] = {}  # of microbatches, by the shapes of a batch
        self._is_told = False  # that guards make them fewer

    def fed(self, given: Iterable[Any]) -> Fed:
        """The batch as converted by `Feeder.fed`, then the microbatches' shapes for each feed, and their shares."""
        tensors, shapes = self.whole.fed(given)
        more = self.more(tensors)
        return [*tensors, *more], (*shapes, *(tensor.shape for tensor in more))

    def converted(self, given: Iterable[Any]) -> list[torch.Tensor]:
        """See `Feeder.converted`: of the batch alone."""
        return self.whole.converted(given)

    def spread(self, given: Iterable[T]) -> list[T]:
        """See `Feeder.spread`: of the batch alone."""
        return self.whole.spread(given)

    def more(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is fed beside the values of a batch."""
        halves = [tensor for tensor, is_divided in zip(tensors, self.divided, strict=True) if is_divided]
        rows = len(halves[0])
        if any(len(tensor) != rows for tensor in halves):
            lengths = ", ".join(str(len(tensor)) for tensor in halves)
            raise ShapeError(f"microbatches divide the rows of all feeds alike, and these have {lengths} of them")
        if not rows:
            raise InvalidArgument("a batch without rows has no microbatches: leave it out")
        sizes = self._sizes_of(tuple([tensor.shape for tensor in tensors]), rows)
        more = [torch.tensor([[size, *tensor.shape[1:]] for size in sizes]) for tensor in halves]
        more.append(torch.tensor([size / rows for size in sizes], dtype=torch.float64))
        return more

    def _sizes_of(self, shapes: Shapes, rows: int) -> list[int]:
        """The rows of each microbatch: of as many microbatches as the guards of the recording allow."""
        found = self._sizes.get(shapes)
        if found is None:
            ranges, broken = self.guards.divide(shapes, self.divided, rows, self.most)
            found = [stop - start for start, stop in ranges]
            if broken is not None and not self._is_told:
                self._is_told = True
                warnings.warn(
                    f"{broken.source or 'the graph'}: recorded for {broken.expr}, so that a batch of {rows} rows is "
                    f"divided into {len(found)} microbatches, not {self.most}", stacklevel=user_level(None),
                )  # fmt: skip
            if len(self._sizes) == MOST_FITTING:
                self._sizes.clear()
            self._sizes[shapes] = found
        return found
