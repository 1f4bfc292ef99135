"""The position of a session's random streams: a random node draws by its graph's seed, its place and the run's number.

So the position of all streams is one number, and a run draws the same numbers on any executor, partition or cluster.
"""

from __future__ import annotations

from collections.abc import Callable
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
        """Reserve ``count`` run numbers for the caller; returns the first."""
        with self._lock:
            first = self.next
            self.next = first + count
            return first


def runs_of(runs: RunNumbers, total: int, per_pass: int, begin: int = 0) -> Callable[[int], int]:
    """The run number of each of ``total`` steps. The numbers of a pass are reserved at the first request for one of
    them.

    Those of the first one are taken at once. begin: steps that were taken before, whose numbers are given.

    >>> runs = RunNumbers()
    >>> of = runs_of(runs, 5, 3)
    >>> runs.take(), of(1), of(3), of(4), runs.next
    (3, 1, 4, 5, 6)
    >>> of = runs_of(runs, 5, 3, begin=4)
    >>> of(4), runs.next
    (6, 7)
    """
    firsts: dict[int, int] = {}

    def of(step: int) -> int:
        number, at = divmod(step, per_pass)
        if number not in firsts:
            first = number * per_pass
            before = max(0, begin - first)
            firsts[number] = runs.take(min(per_pass, total - first) - before) - before
        return firsts[number] + at

    of(begin)
    return of
