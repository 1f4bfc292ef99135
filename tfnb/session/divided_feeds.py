"""Feeds of a step over microbatches: the whole batch, and the bounds of its microbatches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.execution.pack_step import Rows
from tfnb.graph import Guard
from tfnb.placement.row_guards import RowGuards
from tfnb.recording.marks.notes import user_level
from tfnb.session.feeding import MOST_FITTING, Fed, Feeder, Shapes, T

AUTO: Literal["auto"] = "auto"


class Division(NamedTuple):
    """The microbatches of a step; ``schedule``: of a pipeline (`tfnb.passes.flow`).

    microbatches: so many, or ``"auto"``: one, the whole step, if that keeps the memory budget, else as many as keep it
    in packs and are predicted quickest. replicas: of a pipeline, among which the microbatches are divided.
    """

    microbatches: int | Literal["auto"] = 1
    schedule: str = ""
    replicas: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether steps are never divided."""
        return self.microbatches == 1

    @property
    def is_pipeline(self) -> bool:
        """Whether the microbatches are those of a pipeline, which no memory budget divides in packs."""
        return bool(self.schedule) or self.replicas > 1


WHOLE = Division()


def division(microbatches: object) -> Division:
    """The division into so many microbatches, or ``"auto"``; raises InvalidArgument for other values."""
    if isinstance(microbatches, Division):
        return microbatches
    if isinstance(microbatches, str) and microbatches == AUTO:
        return Division(AUTO)
    if type(microbatches) is not int or microbatches < 1:
        raise InvalidArgument(
            "microbatches is how many a step has, an int of at least 1, or 'auto' with memory_budget in this process, "
            f"not {microbatches!r}"
        )
    return Division(microbatches)


class DividedFeeder:
    """The feeder of a step over ``most`` microbatches, fewer where a batch has fewer rows, or where some would have too
    few for the guards of the recording.

    divided: which of the values of ``whole``, the feeder of the batch, have its rows. choose: for ``most="auto"``, the
    number of microbatches, of a function that says the rows of each of at most so many. replicas: of a pipeline, see
    `tfnb.passes.flow.pipeline_replicas`.
    """

    repeats = True  # no step is one call on what is fed

    def __init__(
        self, whole: Feeder, guards: RowGuards, divided: Sequence[bool], most: int | Literal["auto"],
        choose: Callable[[Callable[[int], Rows]], int] | None = None, replicas: int = 1,
    ) -> None:  # fmt: skip
        self.whole, self.guards, self.divided, self.most, self.choose = whole, guards, divided, most, choose
        self.replicas = replicas
        self.values, self.names = whole.values, whole.names
        self._sizes: dict[Shapes, list[int]] = {}  # of microbatches, by the shapes of a batch
        self._is_told = False  # that guards make them fewer

    def fed(self, given: Iterable[Any]) -> Fed:
        """The batch as converted by `Feeder.fed`, then the microbatches' shapes for each feed, and their shares.

        Of several replicas for each the rows of its microbatches, and their shapes and shares.
        """
        return self.with_more(self.whole.fed(given))

    def with_more(self, batch: Fed) -> Fed:
        """The feeds of a converted batch, with the shapes of its microbatches."""
        tensors, shapes = batch
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
        if self.replicas == 1:
            return [*_about(halves, sizes, rows)]
        more: list[torch.Tensor] = []
        for first in range(self.replicas):
            mine = slice(first, None, self.replicas)
            more += [torch.cat([tensor[:0], *tensor.split(sizes)[mine]]) for tensor in halves]
            more += _about(halves, sizes[mine], rows)
        return more

    def _sizes_of(self, shapes: Shapes, rows: int) -> list[int]:
        """The rows of each microbatch: of as many microbatches as the guards of the recording allow."""
        found = self._sizes.get(shapes)
        if found is None:
            found, broken = self._lengths(shapes, rows, self._most(shapes, rows))
            if broken is not None and self.choose is None and not self._is_told:
                self._is_told = True
                warnings.warn(
                    f"{broken.source or 'the graph'}: recorded for {broken.expr}, so that a batch of {rows} rows is "
                    f"divided into {len(found)} microbatches, not {self.most}", stacklevel=user_level(None),
                )  # fmt: skip
            if len(self._sizes) == MOST_FITTING:
                self._sizes.clear()
            self._sizes[shapes] = found
        return found

    def _most(self, shapes: Shapes, rows: int) -> int:
        if self.choose is not None:
            return self.choose(lambda most: tuple(self._lengths(shapes, rows, most)[0]))
        assert self.most != AUTO
        return self.most

    def _lengths(self, shapes: Shapes, rows: int, most: int) -> tuple[list[int], Guard | None]:
        """The rows of each of at most so many microbatches, and a guard that makes them fewer."""
        ranges, broken = self.guards.divide(shapes, self.divided, rows, most)
        return [stop - start for start, stop in ranges], broken


def _about(tensors: Sequence[torch.Tensor], sizes: Sequence[int], rows: int) -> Iterator[torch.Tensor]:
    """The shapes of microbatches of these sizes for each tensor, and the shares of the rows of a batch."""
    for tensor in tensors:
        shapes = [[size, *tensor.shape[1:]] for size in sizes]
        yield torch.tensor(shapes, dtype=torch.int64).reshape(len(sizes), tensor.dim())
    yield torch.tensor([size / rows for size in sizes], dtype=torch.float64)
