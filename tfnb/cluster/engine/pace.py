"""The pace of a task in a training, from the reports of its loop: steps, rate, waiting, staleness.

A pure machine: the time is an argument. May import nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

SPAN = 5.0  # seconds of reports from which rates are made
SHORTEST = 0.2  # seconds of reports that make a rate
FRESH = 3.0  # seconds after which the last report says nothing about now


class PaceReport(NamedTuple):
    """Totals of one loop at a time: steps that count, seconds of computing, gradients sent by themselves, and the
    updates by others that lie between the reading of a value and its gradient, over all of these.
    """

    at: float
    steps: int
    computed: float
    sent: int
    overtaken: int


class PaceFacts(NamedTuple):
    """The pace of a task now; None where nothing says it. waits: share of the time; age: updates by others between the
    reading of a value and its gradient, on average.
    """

    steps: int
    rate: float | None = None  # steps a second
    waits: float | None = None
    age: float | None = None

    def words(self) -> tuple[str, ...]:
        """The facts that are known, each in words; nothing before the first step."""
        found = [f"{self.steps:,} step{'s' if self.steps != 1 else ''}"] if self.steps else []
        found += [f"{self.rate:.1f} a second"] if self.rate is not None else []
        found += [f"waits {100 * self.waits:.0f} % of the time"] if self.waits is not None else []
        found += [f"gradients {self.age:.1f} updates old"] if self.age is not None else []
        return tuple(found)


class Pace:
    """The reports of a task's loops in the last seconds. ``steps``: of all of its loops.

    >>> pace = Pace()
    >>> pace.hear("a", 0, {"computed": 0.0}, now=10.0)
    >>> pace.hear("a", 20, {"computed": 0.5, "sent": 20, "overtaken": 30}, now=12.0)
    >>> pace.facts(now=12.1)
    PaceFacts(steps=20, rate=10.0, waits=0.75, age=1.5)
    >>> pace.facts(now=12.1).words()
    ('20 steps', '10.0 a second', 'waits 75 % of the time', 'gradients 1.5 updates old')
    >>> pace.hear("b", 4, {"computed": 0.1}, now=20.0)
    >>> pace.facts(now=20.0).words(), pace.facts(now=30.0).words()
    (('24 steps',), ('24 steps',))
    """

    def __init__(self) -> None:
        self._loop, self._before = "", 0
        self._reports: deque[PaceReport] = deque()

    @property
    def steps(self) -> int:
        """Steps that count, and that the task computed or computed a part of."""
        return self._before + (self._reports[-1].steps if self._reports else 0)

    @property
    def totals(self) -> PaceReport | None:
        """The last report of the last loop."""
        return self._reports[-1] if self._reports else None

    def hear(self, loop: str, steps: int, told: Mapping[str, Any], now: float) -> None:
        """Take the totals of a loop's report; a loop that follows another one begins at 0."""
        if loop != self._loop:
            self._loop, self._before = loop, self.steps
            self._reports.clear()
        totals = float(told.get("computed", 0.0)), int(told.get("sent", 0)), int(told.get("overtaken", 0))
        self._reports.append(PaceReport(now, steps, *totals))
        while len(self._reports) > 2 and now - self._reports[1].at >= SPAN:
            self._reports.popleft()

    def facts(self, now: float) -> PaceFacts:
        """The pace now; without a rate where the last report is old, or before the first step."""
        if not self.steps:
            return PaceFacts(0)
        first, last = self._reports[0], self._reports[-1]
        seconds = last.at - first.at
        if now - last.at > FRESH or seconds < SHORTEST:
            return PaceFacts(self.steps)
        waits = min(1.0, max(0.0, 1 - (last.computed - first.computed) / seconds))
        sent = last.sent - first.sent
        age = (last.overtaken - first.overtaken) / sent if sent else None
        return PaceFacts(self.steps, (last.steps - first.steps) / seconds, waits, age)
