"""Tokens: a worker that has one may take a step. Each is held under a lease, so that who dies with one delays no more.

Pure: time arrives as an argument. Nobody waits in here: `Tokens.take` gives None where there is none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tfnb.errors import FailedPrecondition, InvalidArgument


@dataclass(frozen=True, slots=True)
class Lease:
    """A token that somebody holds until ``end``."""

    step: int
    holder: str
    end: float


class Tokens:
    """Tokens, each of a step, given in order.

    >>> tokens = Tokens(lease=10.0)
    >>> tokens.give(step=7, count=1)
    >>> tokens.take("a", now=0.0), tokens.take("b", now=0.0)
    ((1, 7), None)
    >>> tokens.expire(now=11.0), tokens.take("b", now=11.0)
    (1, (2, 7))
    """

    def __init__(self, lease: float) -> None:
        if lease <= 0:
            raise InvalidArgument(f"a lease is of more than 0 seconds, not {lease}")
        self.lease = lease
        self.free: deque[int] = deque()  # steps
        self.held: dict[int, Lease] = {}
        self._count = 0

    def give(self, step: int, count: int) -> None:
        """So many tokens more."""
        self.free.extend([step] * count)

    def take(self, holder: str, now: float) -> tuple[int, int] | None:
        """A token's number, and its step; None where there is none."""
        if not self.free:
            return None
        self._count += 1
        self.held[self._count] = Lease(self.free.popleft(), holder, now + self.lease)
        return self._count, self.held[self._count].step

    def renew(self, number: int, now: float) -> None:
        """Hold it for another lease; raises FailedPrecondition where it was given to somebody else."""
        found = self._of(number)
        self.held[number] = Lease(found.step, found.holder, now + self.lease)

    def end(self, number: int) -> None:
        """It is used up."""
        self._of(number)
        del self.held[number]

    def _of(self, number: int) -> Lease:
        if number not in self.held:
            raise FailedPrecondition(f"token {number} is not held any more: its lease of {self.lease:g} s is over")
        return self.held[number]

    def expire(self, now: float) -> int:
        """Tokens whose leases are over stand in front again; how many."""
        over = [number for number, lease in self.held.items() if lease.end <= now]
        self.free.extendleft(self.held.pop(number).step for number in reversed(over))
        return len(over)
