"""Queue: what a graph knows of a queue. Data only; what it holds is the business of `tfnb.state`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

QUEUES: Mapping[str, frozenset[str]] = {
    "fifo": frozenset(), "padding": frozenset(), "shuffle": frozenset({"min_after_dequeue", "seed"}),
    "priority": frozenset(),
}  # fmt: skip
"""The kinds of queues, and the options of each."""


class Queue:
    """A queue of at most ``capacity`` elements, each with a tensor for each of ``components``.

    A component is a dtype and a shape, where None is a size that may differ from element to element. One whose shape is
    None takes any shape. kind: which elements come next, and what a batch of them is, with the ``options`` of that.
    ``machine``: what holds the elements, once somebody uses them.
    """

    def __init__(
        self, name: str, capacity: float, components: Sequence[tuple[Any, tuple[int | None, ...] | None]], *,
        kind: str = "fifo", options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.capacity = name, capacity
        self.components = tuple(components)  # dtype and shape of each
        self.kind, self.options = kind, dict(options or {})
        self.machine: Any = None

    def __repr__(self) -> str:
        state = f"0 of {self.capacity} elements, open" if self.machine is None else self.machine.state
        return f"<{type(self).__name__} {self.name}: {state}>"
