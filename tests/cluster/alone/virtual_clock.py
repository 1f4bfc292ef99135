"""Virtual time: what happens when, and links that carry one message after the other."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass


class Clock:
    """Virtual time. Calls happen in the order of their times, and those of one time as they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def due(self) -> float:
        """The time of the next call; infinite where there is none."""
        return self._due[0][0] if self._due else float("inf")

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at this time."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def step(self) -> None:
        """Let time pass until the next call, and make it."""
        self.now, _, call = heapq.heappop(self._due)
        call()

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let time pass until it is over. Fails where nothing is due before that: somebody waits for ever."""
        while not is_over():
            assert self._due, f"nothing happens any more at {self.now}"
            self.step()


@dataclass
class Link:
    """A link that carries one message after the other: bytes a second, and seconds of latency."""

    clock: Clock
    bandwidth: float = float("inf")
    latency: float = 0.0
    free: float = 0.0  # from this time on

    def arrival(self, nbytes: float) -> float:
        """Send a message now; the time at which its last byte arrives."""
        self.free = max(self.clock.now, self.free) + nbytes / self.bandwidth
        return self.free + self.latency
