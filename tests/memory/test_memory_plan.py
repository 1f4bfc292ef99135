"""One plan for values of straight code and for rows of loops: what does not stay, its prices, and what that decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tfnb.graph import Graph
from tfnb.memory import MemoryPlan, memory_plan, prices, step_passes, within
from tfnb.passes import ONCE, optimize, peak

ITERATIONS = 50


def both() -> tuple[Graph, list[Any], list[Any]]:
    """Large values of straight code around a loop that keeps rows for its gradient."""
    with tfnb.record() as g:
        xs = tfnb.placeholder(torch.randn(ITERATIONS, 64), shape=(ITERATIONS, 64))
        start = tfnb.placeholder(torch.randn(64), shape=(64,))
        end = h = tfnb.fold(lambda h, x: (h * x).tanh(), start, xs)
        for _ in range(6):
            h = h.repeat(2).sin().exp().tanh()
        slope, direct = (tfnb.gradients(y.square().sum(), [start])[0] for y in (end, h))
    return g, [slope.value, direct.value], [xs.value, start.value]


def planned(budget: int) -> MemoryPlan:
    g, *ask = both()
    graph = optimize(g, *ask, step_passes(ONCE, within(budget, {})))
    return memory_plan(graph, *ask, {}, budget, g)


def test_values_and_loops_are_rows_of_one_table() -> None:
    g, *ask = both()
    free = planned(1 << 40)
    assert free.peak <= peak(optimize(g, *ask, step_passes()), *ask) and not free.values
    (loop,) = free.loops
    assert loop.rows is not None and loop.rows.iterations == ITERATIONS and loop.bytes == loop.rows.bytes
    assert free.decisions == (*free.values, *free.loops) and free.left == (1 << 40) - free.peak
    tight = planned(free.peak - 1)
    assert tight.peak < free.peak and tight.left >= 0
    assert {found.fate for found in tight.values} == {"is computed again"}
    assert "is computed again" in str(tight.values[0]) and f"{tight.values[0].bytes:,} bytes of" in str(tight.values[0])


@pytest.mark.parametrize(("price", "fate"), [(0.0, "moves out"), (1e12, "is computed again")])
def test_the_cheaper_of_two_prices_decides(price: float, fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "MOVED", {"cpu": price})
    (loop,) = planned(1 << 40).loops
    assert loop.fate == fate and loop.moving == price * loop.bytes and fate in str(loop)
