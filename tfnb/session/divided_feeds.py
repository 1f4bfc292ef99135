"""Feeds of a step over microbatches: the whole batch, and the bounds of its microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.passes.microbatches import divide
from tfnb.session.feeding import Fed, Feeder, T


class Division(NamedTuple):
    """Into how many microbatches a step is divided; ``schedule``: of a pipeline (`tfnb.passes.flow`)."""

    microbatches: int = 1
    schedule: str = ""


WHOLE = Division()


class DividedFeeder:
    """The feeder of a step over ``most`` microbatches, fewer where a batch has fewer rows.

    divided: which of the values of ``whole``, the feeder of the batch, have its rows.
    """

    repeats = True  # no step is one call on what is fed

    def __init__(self, whole: Feeder, divided: Sequence[bool], most: int) -> None:
        self.whole, self.divided, self.most = whole, divided, most
        self.values, self.names = whole.values, whole.names

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
        sizes = [stop - start for start, stop in divide(rows, self.most)]
        more = [torch.tensor([[size, *tensor.shape[1:]] for size in sizes]) for tensor in halves]
        more.append(torch.tensor([size / rows for size in sizes], dtype=torch.float64))
        return more
