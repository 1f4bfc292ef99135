"""The budget of restarts of stuck processes. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MOST = 5
WITHIN = 600.0  # seconds


@dataclass
class Restarts:
    """A budget of ``most`` restarts within ``within`` seconds.

    >>> restarts = Restarts(most=2, within=60.0)
    >>> [restarts.spend(now) for now in (0.0, 1.0, 2.0, 61.5)]
    [True, True, False, True]
    """

    most: int = MOST
    within: float = WITHIN
    _spent: deque[float] = field(default_factory=deque)

    def spend(self, now: float) -> bool:
        """Take one restart; False if none is left."""
        is_left = self.left(now) > 0
        if is_left:
            self._spent.append(now)
        return is_left

    def left(self, now: float) -> int:
        """The number of restarts left."""
        while self._spent and now - self._spent[0] >= self.within:
            self._spent.popleft()
        return self.most - len(self._spent)

    def __str__(self) -> str:
        return f"{self.most} restarts in {self.within / 60:g} minutes are spent"
