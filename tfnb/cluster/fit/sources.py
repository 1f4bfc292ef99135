"""Where the pieces of a training come from: steps that tasks derive from data they hold, or batches drawn here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tfnb.cluster import wire
from tfnb.cluster.members import Ahead, Batch

DRAW = 0.05  # seconds of drawing after which tasks get what there is
MOST = 32 << 20  # bytes of batches likewise


class Counted:
    """Steps by their numbers.

    >>> from tfnb.state.batch_order import Order
    >>> pieces = Counted(Ahead((), Order(8, 2), total=5, run_index=0))
    >>> pieces.take(3), pieces.take(3), pieces.is_spent
    (range(0, 3), range(3, 5), True)
    """

    held_back = False

    def __init__(self, data: Ahead) -> None:
        self._next, self._total = 0, data.total

    @property
    def left(self) -> int | None:
        """Steps that are not taken yet."""
        return self._total - self._next

    @property
    def is_spent(self) -> bool:
        """Whether there are no more."""
        return self._next >= self._total

    def take(self, size: int, has_written: Callable[[], bool] = lambda: False) -> Sequence[Any]:
        """The next steps, so many at most."""
        start, self._next = self._next, min(self._total, self._next + size)
        return range(start, self._next)


class Drawn:
    """Batches of an iterator.

    >>> pieces = Drawn(Batch((), n) for n in range(3))
    >>> [batch.run_index for batch in pieces.take(2)], pieces.is_spent, len(pieces.take(2)), pieces.is_spent
    ([0, 1], False, 1, True)
    """

    left: int | None = None

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self._back: list[Batch] = []
        self.is_spent = False

    @property
    def held_back(self) -> bool:
        """Whether a batch was drawn that may only be trained on after what was written meanwhile."""
        return bool(self._back)

    def take(self, size: int, has_written: Callable[[], bool] = lambda: False) -> Sequence[Any]:
        """The next batches, so many at most; less where drawing takes long, or where the iterator wrote Variables."""
        found, self._back = self._back, []
        until, nbytes = time.monotonic() + DRAW, sum(wire.size(batch.tensors) for batch in found)
        while len(found) < size and (not found or (time.monotonic() < until and nbytes < MOST)):
            batch = next(self._batches, None)
            if batch is None:
                self.is_spent = True
                break
            if has_written():
                self._back = [batch]
                break
            found.append(batch)
            nbytes += wire.size(batch.tensors)
        return found
