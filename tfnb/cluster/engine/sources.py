"""The pieces of a training: step numbers, whose rows tasks derive from data they hold, or batches drawn here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tfnb.cluster.engine.members import Ahead, StepFeeds
from tfnb.cluster.wire import envelope
from tfnb.state.batch_order import chunk_order
from tfnb.state.chunks import ChunkedArray
from tfnb.state.steps_taken import AppliedSteps

NONE = AppliedSteps()
DRAW = 0.05  # seconds of drawing after which tasks get what there is
MOST = 32 << 20  # bytes of batches likewise


class NumberedSteps:
    """Pieces of consecutive step numbers, without the steps ``applied`` before.

    >>> from tfnb.state.batch_order import RowOrder
    >>> pieces = NumberedSteps(Ahead((), RowOrder(8, 2), total=5, run=int))
    >>> pieces.take(3), pieces.take(3), pieces.is_spent
    (range(0, 3), range(3, 5), True)
    >>> pieces = NumberedSteps(Ahead((), RowOrder(8, 2), total=5, run=int, by_pass=True))
    >>> pieces.take(3), pieces.take(3), pieces.stands, pieces.take(3), pieces.stands
    (range(0, 3), range(3, 4), True, range(4, 5), False)
    >>> pieces = NumberedSteps(Ahead((), RowOrder(8, 2), total=6, run=int), AppliedSteps(1, {3}))
    >>> pieces.take(3), pieces.take(3), pieces.is_spent
    (range(1, 3), range(4, 6), True)
    """

    held_back = False

    def __init__(self, data: Ahead, applied: AppliedSteps = NONE) -> None:
        self._next, self._total, self._data, self._applied = applied.whole, data.total, data, applied.copy()
        self._pass = data.order.per_pass if data.by_pass else data.total
        self.stands = False  # the tasks, before the next piece

    @property
    def left(self) -> int | None:
        """Steps not taken yet: of the current pass if tasks stand still after each pass, else of all."""
        return sum(map(len, self._applied.missing(range(self._next, self._end))))

    @property
    def _end(self) -> int:
        return min(self._total, (self._next // self._pass + 1) * self._pass)

    @property
    def is_spent(self) -> bool:
        """Whether there are no more."""
        return self._next >= self._total

    def take(
        self, size: int, has_written: Callable[[], bool] = lambda: False, task: int | None = None
    ) -> Sequence[Any]:
        """Up to ``size`` next steps."""
        end = self._end
        piece = next(iter(self._applied.missing(range(self._next, end))), range(end, end))[:size]
        following = self._applied.missing(range(piece.stop, end))
        self._next = following[0].start if following else end
        self.stands = self._data.ends_pass(self._next)
        return piece


class Near:
    """Pieces of step numbers from whole chunks: a task preferably gets steps whose rows its worker holds.

    Those that were ``applied`` before are left out. ``homes``: for each task the address of its worker.

    >>> from tfnb.state.batch_order import RowOrder
    >>> array = ChunkedArray("x", (4, 6), (), torch.float32, homes=(("a",), ("b",)))
    >>> pieces = Near(Ahead((array,), RowOrder(10, 2, shuffle=False, within=0), total=7, run=int), ["b", "a"])
    >>> [pieces.take(2, task=task) for task in (0, 1, 0, 1)], pieces.left
    ([range(2, 4), range(0, 2), range(4, 5), range(5, 7)], 0)
    >>> applied = AppliedSteps(1, {2, 5, 6})
    >>> pieces = Near(Ahead((array,), RowOrder(10, 2, shuffle=False, within=0), total=7, run=int), ["b"], applied)
    >>> [pieces.take(9, task=0) for _ in range(3)], pieces.left
    ([range(3, 5), range(1, 2), range(0, 0)], 0)
    """

    held_back = False

    def __init__(self, data: Ahead, homes: Sequence[str], applied: AppliedSteps = NONE) -> None:
        place = data.order.within
        assert place is not None
        chunked = data.arrays[place]
        assert isinstance(chunked, ChunkedArray)
        self._order, self._chunks, self._homes = data.order, chunked, homes
        self._runs: list[tuple[range, Collection[str]]] = []  # of the pass in progress: steps, and where their rows lie
        self._applied, self._total, self._by_pass = applied.copy(), data.total, data.by_pass
        self._passes, self.left = applied.whole // data.order.per_pass, data.total - len(applied)
        self.stands = False  # the tasks, before the next piece

    @property
    def is_spent(self) -> bool:
        """Whether there are no more."""
        return self.left == 0

    def take(
        self, size: int, has_written: Callable[[], bool] = lambda: False, task: int | None = None
    ) -> Sequence[Any]:
        """Up to ``size`` next steps for a task; a pass begins when the one before is used up."""
        if not self.left:
            return range(0)
        while not self._runs:
            self._runs = self._next_pass()
        home = None if task is None else self._homes[task]
        at = min(range(len(self._runs)), key=lambda at: self._away(self._runs[at][1], home))
        steps, where = self._runs[at]
        self.left -= len(steps[:size])
        self._runs[at : at + 1] = [(steps[size:], where)] if len(steps) > size else []
        self.stands = self._by_pass and not self._runs and self.left > 0
        return steps[:size]

    def _away(self, where: Collection[str], home: str | None) -> int:
        """0 here, 1 where no task is, 2 with another task."""
        return 0 if home in where else 2 if any(other in where for other in self._homes) else 1

    def _next_pass(self) -> list[tuple[range, Collection[str]]]:
        """The steps of a pass, by the chunk of their first row."""
        order, chunks = self._order, self._chunks
        first, self._passes = self._passes * order.per_pass, self._passes + 1
        runs: list[tuple[range, Collection[str]]] = []
        rows, step, end = 0, first, self._total
        for chunk in chunk_order(order, chunks.groups, self._passes, torch.Generator()):
            rows += chunks.lengths[chunk]
            stop = min(first - (-rows // order.batch_size), first + order.per_pass, end)
            if stop > step:
                runs += [(run, chunks.homes[chunk]) for run in self._applied.missing(range(step, stop))]
                step = stop
        return runs


class DrawnBatches:
    """Batches of an iterator; a None among them: tasks stand still there.

    >>> pieces = DrawnBatches(StepFeeds((), n) for n in range(3))
    >>> [batch.run_index for batch in pieces.take(2)], pieces.is_spent, len(pieces.take(2)), pieces.is_spent
    ([0, 1], False, 1, True)
    """

    left: int | None = None

    def __init__(self, batches: Iterable[StepFeeds | None]) -> None:
        self._batches = iter(batches)
        self.stands = False  # the tasks, before the next piece
        self._back: list[StepFeeds] = []
        self.is_spent = False

    @property
    def held_back(self) -> bool:
        """Whether a batch is held back until the Variables written while drawing the batch are sent to the servers."""
        return bool(self._back)

    @property
    def rest(self) -> Iterable[StepFeeds | None]:
        """The batches that were not taken."""
        return itertools.chain(self._back, self._batches)

    def take(
        self, size: int, has_written: Callable[[], bool] = lambda: False, task: int | None = None
    ) -> Sequence[Any]:
        """Up to ``size`` next batches; fewer if drawing takes long, or if the iterator wrote Variables."""
        found, self._back, self.stands = self._back, [], False
        until, nbytes = time.monotonic() + DRAW, sum(envelope.size(batch.tensors) for batch in found)
        while len(found) < size and (not found or (time.monotonic() < until and nbytes < MOST)):
            try:
                batch = next(self._batches)
            except StopIteration:
                self.is_spent = True
                break
            if batch is None:
                self.stands = True
                break
            if has_written():
                self._back = [batch]
                break
            found.append(batch)
            nbytes += envelope.size(batch.tensors)
        return found


def drawn_from(
    source: Ahead | Iterable[StepFeeds | None], by_chunk: bool, homes: Sequence[str], applied: AppliedSteps = NONE
) -> tuple[Ahead | None, NumberedSteps | Near | DrawnBatches]:
    """The data to send ahead to tasks, and the pieces; ``by_chunk``: the row order may follow the chunks.

    ``homes``: for each task the address of its worker. ``applied``: steps of arrays that are not taken again.
    """
    if not isinstance(source, Ahead):
        return None, DrawnBatches(source)
    nbytes = {place: array.nbytes for place, array in enumerate(source.arrays) if isinstance(array, ChunkedArray)}
    if not (by_chunk and nbytes):
        return source, NumberedSteps(source, applied)
    largest = max(nbytes, key=lambda place: nbytes[place])
    data = replace(source, order=source.order._replace(within=largest))
    return data, Near(data, homes, applied)
