"""The position of a session's random streams: a random node draws by its graph's seed, its place and the run's number.

So the position of all streams is one number, and a run draws the same numbers on any executor, partition or cluster.
"""

from __future__ import annotations

from threading import Lock


class RunNumbers:
    """Numbers of runs, each given once, also to several threads. ``next`` is the one to come, and may be set.

    >>> runs = RunNumbers()
    >>> runs.take(), runs.take(3), runs.take(), runs.next
    (0, 1, 4, 5)
    """

    __slots__ = ("_lock", "next")

    def __init__(self) -> None:
        self.next = 0
        self._lock = Lock()

    def take(self, count: int = 1) -> int:
        """The first of so many numbers, which nobody else gets."""
        with self._lock:
            first = self.next
            self.next = first + count
            return first
