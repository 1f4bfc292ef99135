"""The memory budget of the shards of one server process, without a count of all held bytes for each request.

Every growth is requested or reported, so half of the bytes that were free at a count can be granted without another
count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tfnb.errors import ResourceExhausted


class Holder(Protocol):
    """A shard."""

    @property
    def used(self) -> int: ...

    def release(self) -> None: ...


class Room:
    """The memory budget shared by some shards."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = holders
        self._left = 0  # bytes that can be given away before it is counted again
        self._beside = 0  # bytes of others in this process

    def take(self, asked: int | Callable[[], int], budget: int) -> None:
        """Raise ResourceExhausted if so many more bytes exceed the budget, even after unused memory was freed.

        >>> from types import SimpleNamespace
        >>> shard = SimpleNamespace(used=20, release=lambda: None)
        >>> room = Room([shard])
        >>> room.take(10, budget=100), room._left
        (None, 35)
        >>> room.take(30, budget=100), room._left
        (None, 5)
        >>> shard.used = 60
        >>> room.take(50, budget=100)
        Traceback (most recent call last):
        tfnb.errors.ResourceExhausted: bytes on this parameter server: asked 50, used 60, limit 100
        """
        if (more := _number(asked)) <= self._left:
            self._left -= max(0, more)
            return
        used = self._used
        if used + more > budget:
            for holder in self._holders:
                holder.release()
            more, used = _number(asked), self._used
        self._left = max(0, budget - used - more) // 2
        if used + more > budget:
            raise ResourceExhausted(f"bytes on this parameter server: asked {more}, used {used}, limit {budget}")

    def beside(self, nbytes: int) -> None:
        """Count so many bytes of others in the budget. From any thread: the next request counts anew."""
        self._beside, self._left = nbytes, 0

    def grew(self, more: int) -> None:
        """Report bytes taken without a request: for another generation of a value with readers."""
        self._left = max(0, self._left - max(0, more))

    @property
    def _used(self) -> int:
        return self._beside + sum(holder.used for holder in self._holders)


def _number(asked: int | Callable[[], int]) -> int:
    return asked if isinstance(asked, int) else asked()
