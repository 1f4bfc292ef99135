"""The collector of cycles waits, and is afterwards as it was.

It is one for the whole process, so each check has a process where no thread of another test uses it.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest

from tfnb.graph.collector import frozen, lasting, uncollected


def the_collector_is_afterwards_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), uncollected():
        assert not gc.isenabled()
        _ = 1 / 0
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected(), uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def what_lasts_is_not_looked_at_when_the_collector_goes_on() -> None:
    gc.collect()
    with lasting():
        made = [[i] for i in range(10_000)]
    assert gc.isenabled() and not gc.get_freeze_count()
    young = {id(o) for generation in (0, 1) for o in gc.get_objects(generation)}
    assert not young.intersection(map(id, made))


def what_was_there_is_not_looked_at_while_frozen() -> None:
    assert not gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), frozen(), frozen():
        assert gc.get_freeze_count()
        _ = 1 / 0
    assert not gc.get_freeze_count()


def what_stays_is_looked_at_once_while_frozen_and_what_does_not_is_freed() -> None:
    before = list(gc.callbacks)
    with frozen():
        gc.collect()
        count = gc.get_freeze_count()
        stays = [[i] for i in range(10_000)]
        cycle: list[object] = []
        cycle.append(cycle)
        gone = weakref.ref(_Held(cycle))
        del cycle
        gc.collect()
        found = gc.get_freeze_count() - count  # less what dies meanwhile of all that was frozen before
        assert found > len(stays) // 2 and gone() is None
    assert gc.callbacks == before and not gc.get_freeze_count()


class _Held:
    """In a cycle with a list."""

    def __init__(self, cycle: list[object]) -> None:
        cycle.append(self)
        self.cycle = cycle


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        the_collector_is_afterwards_as_it_was,
        what_stays_is_looked_at_once_while_frozen_and_what_does_not_is_freed,
        what_lasts_is_not_looked_at_when_the_collector_goes_on,
        what_was_there_is_not_looked_at_while_frozen,
    ],
    ids=lambda check: check.__name__,
)
def test_alone(check: Callable[[], None]) -> None:
    code = f"from {__name__} import {check.__name__} as check; check()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
