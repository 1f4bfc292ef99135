"""An LSTM over longer and longer sequences within a memory budget for 550 turns (EuroSys'18, table 1).

Without swapping the first turn that does not fit is refused; with it the step is compared with one without a budget,
which takes turns with it: same results to the last bit, bytes moved, and the median time of both.

    python tests/benchmarks/bench_swap.py [--lengths 100 200 500 600 700 900 1000] [--rounds 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F

import tfnb
from tfnb.errors import ResourceExhausted

WIDTH, BATCH, FITS = 64, 16, 550
TARGETS = {"swapped / unlimited": 1.02, "moved / beyond the budget": 1.0}


def recorded(swap: bool) -> tuple[Any, list[Any], list[Any]]:
    """A training step of the LSTM: graph, fetches, feeds."""
    torch.manual_seed(0)
    shapes = (4 * WIDTH, WIDTH), (4 * WIDTH, WIDTH), (4 * WIDTH,)
    wx, wh, bias = (torch.nn.Parameter(torch.randn(shape) / WIDTH**0.5) for shape in shapes)

    def cell(state: Any, x: Any) -> Any:
        h, c = state
        i, f, g, o = (F.linear(x, wx, bias) + F.linear(h, wh)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    with tfnb.record() as graph:
        xs = tfnb.placeholder(torch.randn(4, BATCH, WIDTH), shape=("T", BATCH, WIDTH))
        start, target = (tfnb.placeholder(torch.zeros(BATCH, WIDTH), shape=(BATCH, WIDTH)) for _ in range(2))
        (hidden, _) = tfnb.fold(cell, (start, start), xs, swap_memory=swap)
        loss = (hidden - target).square().mean()
        return graph, [loss, tfnb.train.SGD(0.1).minimize(loss)], [xs, start, target]


class Step:
    """A step of its own weights within a budget."""

    def __init__(self, swap: bool, budget: int | None) -> None:
        graph, fetches, feeds = recorded(swap)
        self.session = tfnb.Session(graph, compile="off", memory_budget=budget)
        self.call = self.session.make_callable(fetches, feeds)

    def __call__(self, turns: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(turns)
        xs, target = torch.randn(turns, BATCH, WIDTH, generator=generator), torch.ones(BATCH, WIDTH)
        return self.call(xs, torch.zeros(BATCH, WIDTH), target)[0]

    def timed(self, turns: int) -> float:
        """Milliseconds for each turn."""
        start = time.perf_counter()
        self(turns)
        return 1e3 * (time.perf_counter() - start) / turns


def limits() -> tuple[int, int]:
    """Bytes that the loop keeps of a turn, and a budget for `FITS` turns."""
    step = Step(True, 1 << 40)
    step(8)
    plan = step.session.plans()[0][1]
    assert plan.swapped is not None
    return plan.swapped.saved // 8, plan.peak + FITS * (plan.swapped.saved // 8)


def row(turns: int, each: int, budget: int, rounds: int) -> dict[str, Any]:
    """What happens at one length."""
    found: dict[str, Any] = {"turns": turns}
    try:
        Step(False, budget)(turns)
        found["off"] = "fits"
    except ResourceExhausted as error:
        found["off"] = str(error).partition(" does not fit")[0] + " is refused"
    swapped, unlimited = Step(True, budget), Step(False, None)
    curves = [[step(turns) for _ in range(3)] for step in (swapped, unlimited)]
    assert all(map(torch.equal, *curves)), f"{turns} turns: swapping changes values"
    pairs = [(swapped.timed(turns), unlimited.timed(turns)) for _ in range(rounds)]
    plan = swapped.session.plans()[-1][1]
    assert plan.swapped is not None
    found["moved"], found["beyond"] = plan.swapped.out, max(0, turns - FITS) * each
    found["swapped ms/turn"], found["unlimited ms/turn"] = (
        statistics.median(column) for column in zip(*pairs, strict=True)
    )
    found["ratio"] = statistics.median(on / off for on, off in pairs)
    return found


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 200, 500, 600, 700, 900, 1000])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    each, budget = limits()
    print(f"{each:,} bytes a turn, a budget of {budget:,} bytes: {FITS} turns")
    table = [row(turns, each, budget, options.rounds) for turns in options.lengths]
    for found in table:
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
            )
        )
    print(json.dumps({"bench": "swap", "torch": torch.__version__, "rows": table, "targets": TARGETS}))


if __name__ == "__main__":
    main()
