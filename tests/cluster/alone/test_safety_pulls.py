"""Pulls during a training: how much of the time they take, by a clock that the test turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from tfnb.cluster.engine.engine import Pins
from tfnb.cluster.notebook.variables_there import BUSY, RARER, REFRESH, STILL, VariablesThere


class Clock:
    """Seconds that pass, and of them those that this process computes."""

    passed = computed = 0.0

    def spend(self, still: float, busy: float) -> None:
        self.passed += still
        self.computed += busy


class There(VariablesThere):
    """Variables of which a pull takes ``still`` seconds, and ``busy`` of a processor. is_held: by others, too."""

    def __init__(self, clock: Clock, still: float, busy: float, is_held: bool) -> None:
        link = SimpleNamespace(start_aside=lambda *_: None)  # nothing is asked
        super().__init__(SimpleNamespace(lost=None, link=link, shown=lambda _: None), self._done)  # type: ignore[arg-type]
        self.safety.is_current = is_held
        self.clock, self.still, self.busy, self.pulls = clock, still, busy, 0

    def _done(self, what: str, timeout: float | None, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        return asyncio.run(work(*args))

    async def copies(self, *_: Any, **__: Any) -> tuple[dict[str, Any], dict[str, Any], Pins]:
        self.pulls += 1
        self.clock.spend(self.still, self.busy)
        return {}, {}, Pins(self.pulls, {}, self.pulls, {}, {})


@pytest.mark.parametrize("is_held", [False, True], ids=["held here", "held by others"])
@pytest.mark.parametrize(("still", "busy"), [(0.001, 0.001), (0.4, 0.01), (0.1, 0.3), (3.0, 0.5)])
def test_pulls_for_safety_take_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, still: float, busy: float, is_held: bool
) -> None:
    clock, times = Clock(), RARER if is_held else 1.0
    is_still, is_busy = STILL / times, BUSY / times
    monkeypatch.setattr(time, "monotonic", lambda: clock.passed)
    monkeypatch.setattr(time, "process_time", lambda: clock.computed)
    there = There(clock, still, busy, is_held)
    while clock.passed < 2000:
        there.refresh()
        clock.spend(0.05, 0.0)
    assert there.pulls * still <= 1.1 * is_still * clock.passed and clock.computed <= 1.1 * is_busy * clock.passed
    assert there.pulls >= clock.passed / (max(REFRESH, still / is_still, busy / is_busy) + still + 0.2)
