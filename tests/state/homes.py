"""Where the queues of a state machine are: in this process, or on a core behind a bad connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.state.distance import Distance
from tfnb.graph.queue import Queue
from tfnb.state.queue_machine import Attempt, Kind, QueueMachine
from tfnb.state.queue_operations import attempt_on, made


class Here:
    """A queue in this process."""

    described: Queue

    def open(self, queue: Queue, seed: int) -> None:
        """Begin with a queue; an odd seed says that its connection, if it has one, is bad."""
        self.described = queue
        queue.machine = made(queue)

    def ask(self, kind: Kind, attrs: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> Attempt:
        """An operation on the queue, begun."""
        attempt = attempt_on(self.described, kind, lambda _: None, attrs, tensors)
        attempt.machine.submit(attempt)
        self.settle()
        return attempt

    def withdrawn(self, attempt: Attempt) -> None:
        """An operation is taken back."""
        attempt.machine.withdraw([attempt])
        self.settle()

    @property
    def held(self) -> QueueMachine:
        """What holds the elements."""
        return self.described.machine

    def settle(self) -> None:
        """Wait until what was asked for was seen."""

    def taken(self, attempt: Attempt) -> list[Any]:
        """The elements that an operation took so far."""
        return attempt.taken


class There(Here):
    """A queue on a core, over a connection that loses answers and repeats messages."""

    distance: Distance

    def open(self, queue: Queue, seed: int) -> None:
        self.distance = Distance(0.3 * (seed % 2), seed)
        self.described = queue
        queue.machine = self.distance.home(queue, None)
        self.settle()

    @property
    def held(self) -> QueueMachine:
        return self.distance.machine(self.described)

    def settle(self) -> None:
        self.distance.settle()

    def taken(self, attempt: Attempt) -> list[Any]:
        if not attempt.is_over:
            number = self.described.machine.channel.number_of(attempt)
            (channel,) = self.distance.core.objects.channels.values()
            return channel.open[number].attempt.taken if number in channel.open else []
        if attempt.error is not None or not attempt.outputs:
            return []
        return [attempt.outputs] if attempt.call[0].get("count") is None else list(zip(*attempt.outputs, strict=True))

    def teardown(self) -> None:
        if hasattr(self, "distance"):
            self.distance.close()
