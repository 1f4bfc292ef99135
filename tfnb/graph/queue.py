"""Queue: the description of a queue in a graph. Data only; `tfnb.state` holds the elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class QueueKind:
    """A kind of queue, with the names of its options. The last ``kept_back`` components of an element are never
    dequeued.

    tells: a put tells whether its element was kept. one_length: the tensors of what is taken have as many rows as one
    another. numbered: what is taken begins with a number.
    """

    options: frozenset[str] = frozenset()
    kept_back: int = 0
    tells: bool = False
    one_length: bool = False
    numbered: bool = False


QUEUES: Mapping[str, QueueKind] = {
    "fifo": QueueKind(),
    "padding": QueueKind(),
    "shuffle": QueueKind(frozenset({"min_after_dequeue", "seed"})),
    "priority": QueueKind(),
    "mean": QueueKind(kept_back=1, tells=True),
    "barrier": QueueKind(frozenset({"parts"}), numbered=True),
    "tokens": QueueKind(frozenset({"lease_ms"}), numbered=True),
    "sparse_mean": QueueKind(frozenset({"rows", "per_row"}), kept_back=1, tells=True, one_length=True),
}
"""The kinds of queues. Accumulators are two of them: what is taken is a mean of all that was put."""


class Queue:
    """A queue of at most ``capacity`` elements, each with a tensor for each of ``components``.

    A component is a dtype and a shape, where None is a size that may differ from element to element. One whose shape is
    None takes any shape. kind: which elements come next, and what a batch of them is, with the ``options`` of that.
    ``machine``: what holds the elements, once somebody uses them; ``device``: the server that should, on a cluster.
    """

    def __init__(
        self, name: str, capacity: float, components: Sequence[tuple[Any, tuple[int | None, ...] | None]], *,
        kind: str = "fifo", options: Mapping[str, Any] | None = None, container: str = "",
        shared_name: str | None = None,
    ) -> None:  # fmt: skip
        self.container, self.shared_name = container, shared_name
        self.name, self.capacity = name, capacity
        self.components = tuple(components)  # dtype and shape of each
        self.kind, self.options = kind, dict(options or {})
        self.machine: Any = None
        self.device: str | None = None  # of a server, asked for where it was made

    @property
    def gives(self) -> tuple[tuple[Any, tuple[int | None, ...] | None], ...]:
        """Dtype and shape of each tensor of an element that is taken."""
        kind = QUEUES[self.kind]
        numbered = self.components[:1] if kind.numbered else ()
        return (*numbered, *self.components[: len(self.components) - kind.kept_back])

    def puts(self, part: int | None) -> tuple[tuple[Any, tuple[int | None, ...] | None], ...]:
        """Dtype and shape of each tensor that is put: of an element, or of the key and one of its parts."""
        return self.components if part is None else (self.components[0], self.components[1 + part])

    def _repr_html_(self) -> str:
        from tfnb.view import queue_html  # listed exception: a repr asks view

        return queue_html(self)

    def __repr__(self) -> str:
        state = "not used yet" if self.machine is None else str(self.machine.level)
        return f"<{type(self).__name__} {self.name}: {state}>"
