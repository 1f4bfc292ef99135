"""Elements that left a queue and are not acknowledged yet: a lost answer or taker loses none. Pure.

Who took an element says so when it has it (`HandOuts.end`) and uses it only then. Until that the element is lent: if
the taker is gone, or the lease is over, it stands in front of its queue again, in the order of the queue. The taker
then gets an error for its `end`, and takes another element.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tfnb.cluster.messages import OpId
from tfnb.errors import FailedPrecondition
from tfnb.state.queue_machine import QueueMachine

LEASE = 30.0  # seconds that a taker has to acknowledge an element; it may ask again within them

Element = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class HandOut:
    """An element on its way. ``number``: its place in the order of the queue; ``end``: of the lease."""

    queue: QueueMachine
    number: int
    element: Element
    end: float


class HandOuts:
    """Those of all queues of a server.

    >>> queue, outs = QueueMachine("q", 3), HandOuts()
    >>> queue.elements.extend("ab")
    >>> for seq in (1, 2):
    ...     outs.add(OpId("t", seq), queue, queue.elements.popleft(), now=0.0)
    >>> outs.end(OpId("t", 1))
    >>> outs.expire(now=LEASE), list(queue.elements)
    ([OpId(client='t', seq=2)], ['b'])
    """

    def __init__(self) -> None:
        self.out: dict[OpId, HandOut] = {}
        self._count = 0
        self._front: defaultdict[QueueMachine, list[int]] = defaultdict(list)  # numbers of elements that are back

    @property
    def nbytes(self) -> int:
        """Bytes of elements on their way."""
        return sum(t.numel() * t.element_size() for given in self.out.values() for t in given.element)

    def of(self, queue: QueueMachine) -> bool:
        """Whether elements of a queue are on their way, and may come back."""
        return any(given.queue is queue for given in self.out.values())

    def add(self, op: OpId, queue: QueueMachine, element: Element, now: float) -> None:
        """The first element of a queue was given as the answer to ``op``."""
        if self._front[queue]:
            number = self._front[queue].pop(0)
        else:
            self._count += 1
            number = self._count
        self.out[op] = HandOut(queue, number, element, now + LEASE)

    def end(self, op: OpId) -> None:
        """The taker has it; raises FailedPrecondition where it went back meanwhile."""
        if self.out.pop(op, None) is None:
            raise FailedPrecondition(
                f"the element that {op.client} took as number {op.seq} went back to its queue: take another one"
            )

    def gone(self, client: str) -> list[OpId]:
        """A taker is no more: its elements go back; what they had been given as."""
        return self._back(lambda op, given: op.client == client)

    def expire(self, now: float) -> list[OpId]:
        """Elements whose leases are over go back; what they had been given as."""
        return self._back(lambda op, given: given.end <= now)

    def _back(self, is_over: Callable[[OpId, HandOut], bool]) -> list[OpId]:
        ops = [op for op, given in self.out.items() if is_over(op, given)]
        for op in ops:
            given = self.out.pop(op)
            front = self._front[given.queue]
            insort(front, given.number)
            given.queue.put_back(given.element, front.index(given.number))
        return ops
