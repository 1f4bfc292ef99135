"""Elements of a queue as the data of a training: those that no step counts of go back to where they were.

A training draws ahead, by many elements for the tasks of a cluster. `back_to` puts back what was drawn behind a
position, and a file has it in the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tfnb.errors import OutOfRange
from tfnb.state.input_sources import Position, Source
from tfnb.state.queue_operations import machine_of
from tfnb.state.queues import TensorQueue

Drawn = tuple[tuple[int, int], Sequence[torch.Tensor]]  # the position behind an element, and its tensors


class QueueElements(Source):
    """A source that takes the elements of a queue, until that is closed and empty."""

    def __init__(self, queue: TensorQueue) -> None:
        self.name, self.queue, self._parts, self._root = queue.name, queue, (), self
        self._drawn = deque[Drawn]()
        self._start({"epoch": 0, "count": 0})

    def _rest(self) -> Iterator[Any]:
        while True:
            try:
                parts = self.queue._act("dequeue", {})
            except OutOfRange as end:
                if end.__cause__ is not None:  # who fills it failed
                    raise end.__cause__ from None
                return
            self._drawn.append(((self._position["epoch"], self._position["count"] + 1), parts))
            yield self.queue._one(parts)

    def after(self, position: Position) -> list[Sequence[torch.Tensor]]:
        """The elements that were drawn behind a position, in their order."""
        return [parts for at, parts in self._drawn if at > (position["epoch"], position["count"])]

    def counted(self, position: Position) -> None:
        """Steps count up to this position: what is before it does not come back."""
        while self._drawn and self._drawn[0][0] <= (position["epoch"], position["count"]):
            self._drawn.popleft()

    def back_to(self, position: Position) -> None:
        """What was drawn behind a position is in the queue again, in front."""
        back = self.after(position)
        self._drawn.clear()
        self._start(dict(position))
        if back:
            machine_of(self.queue).put_front(back)
