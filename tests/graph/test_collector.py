"""The collector of cycles waits, and is afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from tfnb.graph.collector import frozen, uncollected


def test_the_collector_is_afterwards_as_it_was() -> None:
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


def test_what_was_there_is_not_looked_at_while_frozen() -> None:
    assert not gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), frozen(), frozen():
        assert gc.get_freeze_count()
        _ = 1 / 0
    assert not gc.get_freeze_count()
