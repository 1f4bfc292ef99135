"""Queue: what a graph knows of a queue. Data only; what it holds is the business of `tfnb.state`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Queue:
    """A queue of at most ``capacity`` elements, each with a tensor for each of ``components``.

    A component is a Spec, whose axes may be symbols: sizes that may differ from element to element. One whose shape is
    None takes any shape. ``fifo``: the elements, once somebody uses them.
    """

    def __init__(
        self, name: str, capacity: float, components: Sequence[tuple[Any, tuple[int | None, ...] | None]]
    ) -> None:
        self.name, self.capacity = name, capacity
        self.components = tuple(components)  # dtype and shape of each
        self.fifo: Any = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
