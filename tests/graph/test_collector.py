"""The collector of cycles waits, and is afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from tfnb.graph.collector import uncollected


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
