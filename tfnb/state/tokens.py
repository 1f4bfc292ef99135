"""Tokens: a worker with a token may take a step. Tokens are leased, so a dead worker delays the others no longer.

The order of a queue, see `tfnb.state.orders`. Pure, but for the clock that it is given. Semantics S-93.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tfnb.errors import FailedPrecondition
from tfnb.state.orders import Element, Whole


class Lease(NamedTuple):
    """A leased token's step, and the end of the lease."""

    step: int
    end: float


class Tokens(Whole):
    """Tokens, each of a step, given in order. An enqueue puts a step; a dequeue takes a token's number and its step.

    >>> now = [0.0]
    >>> tokens = Tokens(lease=10.0, clock=lambda: now[0])
    >>> tokens.put((torch.tensor(7),)), [int(part) for part in tokens.take()], tokens.spare(False)
    (True, [1, 7], 0)
    >>> now[0] = 11.0
    >>> tokens.spare(False), [int(part) for part in tokens.take()]
    (1, [2, 7])
    """

    noun = "tokens"

    def __init__(self, lease: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease, self._clock = lease, clock
        self._free: deque[int] = deque()  # steps
        self._held: dict[int, Lease] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[Element]:
        return ((torch.tensor(self._count + 1 + at), torch.tensor(step)) for at, step in enumerate(self._free))

    def spare(self, closed: bool, required: int = 1) -> int:
        """The number of free tokens; tokens with expired leases return to the front first."""
        now = self._clock()
        over = [number for number, lease in self._held.items() if lease.end <= now]
        self._free.extendleft(self._held.pop(number).step for number in reversed(over))
        return len(self._free)

    def put(self, element: Element) -> bool:
        """One more, of this step."""
        self._free.append(int(element[0]))
        return True

    def take(self) -> Element:
        """The first one, for as long as its lease."""
        self._count += 1
        step = self._free.popleft()
        self._held[self._count] = Lease(step, self._clock() + self.lease)
        return torch.tensor(self._count), torch.tensor(step)

    def put_back(self, element: Element, place: int) -> None:
        """Return an unused token to the front."""
        if self._held.pop(int(element[0]), None) is not None:
            self._free.insert(place, int(element[1]))

    def coming(self) -> int:
        """The number of leased tokens: their leases may expire and free them."""
        return len(self._held)

    def renew(self, number: int) -> int:
        """Renew the lease of a token; raises FailedPrecondition if the lease was over."""
        self._held[number] = Lease(self._of(number).step, self._clock() + self.lease)
        return number

    def end(self, number: int) -> int:
        """Use up a token."""
        self._of(number)
        del self._held[number]
        return number

    def _of(self, number: int) -> Lease:
        self.spare(False)
        if number not in self._held:
            raise FailedPrecondition(
                f"token {number} is not held any more: it is finished, or its lease of {self.lease:g} s is over"
            )
        return self._held[number]

    def contents(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Steps of the free tokens, and the leased tokens with their remaining seconds."""
        now = self._clock()
        held = [[number, lease.step, lease.end - now] for number, lease in self._held.items()]
        return {"free": list(self._free), "held": held, "count": self._count}, []

    def fill(self, facts: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Restore the saved tokens and leases."""
        now = self._clock()
        self._free.extend(map(int, facts["free"]))
        self._held |= {int(number): Lease(int(step), now + left) for number, step, left in facts["held"]}
        self._count = int(facts["count"])
