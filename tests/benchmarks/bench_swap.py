"""An LSTM over longer and longer sequences within a memory budget for 550 iterations (EuroSys'18, table 1).

Without swapping the first iteration that does not fit is refused; with it the step is compared with one without a
budget, which takes turns with it: same results to the last bit, bytes moved, and the median time of both.

--overlap: the part of the copying that holds up no iteration, with copies that take as long as they would at so many
bytes per second (figure 13); --lanes writes what ran when into a file for Perfetto. --choices: for loops of several
kinds, what it costs to move what does not fit, and to compute it again, and which of them the plan takes.

--device cuda: the sizes of the paper (512 wide, 512 sequences, 12 GB), and which part of the copying held up nothing:
it alone would take as long as copies between pinned memory and the device do.

    python -m tests.benchmarks.bench_swap [--device cuda] [--lengths 100 200 500 600 700 900 1000] [--rounds 9]
    python -m tests.benchmarks.bench_swap --overlap [--rate 400e6] [--lanes FILE]
    python -m tests.benchmarks.bench_swap --choices
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F

import tfnb
from tests.benchmarks.report import machine
from tfnb.errors import ResourceExhausted
from tfnb.kernels.memory_budget import MemoryBudget
from tfnb.kernels.offload import RowStack
from tfnb.kernels.spill_blocks import SpillBlock
from tfnb.memory import prices

FITS = 550  # iterations, on the CPU


class Sizes(NamedTuple):
    """The LSTM: its width, how many sequences, the device, and the budget; None: for `FITS` iterations."""

    width: int
    batch: int
    device: str
    budget: int | None


SIZES = {"cpu": Sizes(64, 16, "cpu", None), "cuda": Sizes(512, 512, "cuda", 12 * 10**9)}
TARGETS = {"swapped / unlimited": 1.02, "moved / beyond the budget": 1.0, "overlap": 0.8, "overlap on cuda": 0.95}


def recorded(swap: bool, sizes: Sizes) -> tuple[Any, list[Any], list[Any]]:
    """A training step of the LSTM: graph, fetches, feeds."""
    torch.manual_seed(0)
    width, batch = sizes.width, sizes.batch
    shapes = (4 * width, width), (4 * width, width), (4 * width,)
    wx, wh, bias = (torch.nn.Parameter((torch.randn(shape) / width**0.5).to(sizes.device)) for shape in shapes)

    def cell(state: Any, x: Any) -> Any:
        h, c = state
        i, f, g, o = (F.linear(x, wx, bias) + F.linear(h, wh)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    with tfnb.record(device=sizes.device) as graph:
        xs = tfnb.placeholder(torch.randn(4, batch, width), shape=("T", batch, width))
        start, target = (tfnb.placeholder(torch.zeros(batch, width), shape=(batch, width)) for _ in range(2))
        (hidden, _) = tfnb.fold(cell, (start, start), xs, swap_memory=swap)
        loss = (hidden - target).square().mean()
        return graph, [loss, tfnb.train.SGD(0.1).minimize(loss)], [xs, start, target]


class Step:
    """A step of its own weights within a budget."""

    def __init__(self, swap: bool, budget: int | None, sizes: Sizes) -> None:
        graph, fetches, feeds = recorded(swap, sizes)
        self.sizes = sizes
        self.session = tfnb.Session(graph, compile="off", memory_budget=budget)
        self.call = self.session.make_callable(fetches, feeds)
        self._data: tuple[int, list[torch.Tensor]] = (0, [])

    def __call__(self, iterations: int) -> torch.Tensor:
        if self._data[0] != iterations:
            width, batch, device, _ = self.sizes
            generator = torch.Generator().manual_seed(iterations)
            xs, start = torch.randn(iterations, batch, width, generator=generator), torch.zeros(batch, width)
            self._data = iterations, [x.to(device) for x in (xs, start, torch.ones(batch, width))]
        return self.call(*self._data[1])[0]

    def timed(self, iterations: int) -> float:
        """Milliseconds for each iteration."""
        start = time.perf_counter()
        float(self(iterations))
        return 1e3 * (time.perf_counter() - start) / iterations


def limits(sizes: Sizes) -> tuple[int, int]:
    """Bytes that the loop keeps of an iteration, and the budget."""
    step = Step(True, 1 << 40, sizes)
    step(8)
    plan = step.session.plans()[0][1]
    assert plan.offloaded is not None
    return plan.offloaded.saved // 8, sizes.budget or plan.plan.peak + FITS * (plan.offloaded.saved // 8)


def row(iterations: int, each: int, budget: int, rounds: int, sizes: Sizes) -> dict[str, Any]:
    """What happens at one length."""
    found: dict[str, Any] = {"iterations": iterations}
    try:
        Step(False, budget, sizes)(iterations)
        found["off"] = "fits"
    except ResourceExhausted as error:
        found["off"] = str(error).partition(" does not fit")[0] + " is refused"
    swapped, unlimited = Step(True, budget, sizes), Step(False, None, sizes)
    curves = [[step(iterations).clone() for _ in range(3)] for step in (swapped, unlimited)]
    assert all(map(torch.equal, *curves)), f"{iterations} iterations: swapping changes values"
    pairs = [
        (swapped.timed(iterations), unlimited.timed(iterations)) for _ in range(rounds)
    ]  # each is the other's neighbour
    plan = swapped.session.plans()[-1][1]
    assert plan.offloaded is not None
    found["moved"] = plan.offloaded.out
    if sizes.budget is None:
        found["beyond"] = max(0, iterations - FITS) * each
    found["swapped ms/iteration"], found["unlimited ms/iteration"] = (
        statistics.median(column) for column in zip(*pairs, strict=True)
    )
    low, found["ratio"], high = statistics.quantiles([on / off for on, off in pairs], n=4)
    found["quartiles"] = [low, high]
    if sizes.device != "cpu":
        found |= held(swapped, unlimited, iterations)
        late = statistics.median(on - off for on, off in pairs) * iterations
        copying = 1e3 * (plan.offloaded.out / rate(out=True) + plan.offloaded.back / rate(out=False))
        found["copying ms"] = copying
        found["overlap"] = 1 - max(late, 0.0) / copying if copying else None
    return found


def held(swapped: Step, unlimited: Step, iterations: int) -> dict[str, int]:
    """The most bytes that a step holds on the device beside what it is given."""
    found = {}
    for name, step in (("swapped peak", swapped), ("unlimited peak", unlimited)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        float(step(iterations))
        found[name] = torch.cuda.max_memory_allocated() - before
    return found


def rate(*, out: bool) -> float:
    """Bytes per second between the device and pinned memory, with nothing beside it."""
    here, there = (
        torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True),
        torch.empty(1 << 28, dtype=torch.uint8).cuda(),
    )
    to, of = (here, there) if out else (there, here)
    to.copy_(of)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(4):
        to.copy_(of, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * here.nbytes / (time.perf_counter() - start)


# -- copying beside computing -------------------------------------------------------------------------------------

Lanes = dict[str, list[tuple[float, float]]]  # of each lane what ran, from when to when, in seconds


@contextmanager
def throttled(rate: float) -> Iterator[Lanes]:
    """Copies take as long as at so many bytes per second; gives when they ran, and when an iteration waited for one."""
    lanes: Lanes = {"out": [], "back": [], "waiting": []}
    own = threading.current_thread()  # what this one copies holds up its iterations

    def noted(call: Callable[..., Any], lane: str, slow: bool) -> Callable[..., Any]:
        def made(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = call(self, *args, **kwargs)
            if slow:
                time.sleep(max(0.0, self.bytes / rate - (time.perf_counter() - start)))
            for each in (lane, *(["waiting"] if slow and threading.current_thread() is own else [])):
                lanes[each].append((start, time.perf_counter()))
            return found

        return made

    waits = [(MemoryBudget, "_settle"), (RowStack, "_landed")]
    with (
        patch.object(SpillBlock, "move", noted(SpillBlock.move, "out", True)),
        patch.object(SpillBlock, "bring", noted(SpillBlock.bring, "back", True)),
        patch.object(*waits[0], noted(getattr(*waits[0]), "waiting", False)),
        patch.object(*waits[1], noted(getattr(*waits[1]), "waiting", False)),
    ):
        yield lanes


def seconds(lane: list[tuple[float, float]]) -> float:
    """What ran in a lane, in all."""
    return sum(end - start for start, end in lane)


def overlap(iterations: int, rate: float, rounds: int, file: str | None) -> dict[str, Any]:
    """How much of the copying ran beside iterations, of a step with throttled copies."""
    step = Step(True, limits(SIZES["cpu"])[1], SIZES["cpu"])
    step(iterations)
    ratios, steps = [], []
    for _ in range(rounds):
        with throttled(rate) as lanes:
            start = time.perf_counter()
            step(iterations)
            lanes["step"] = [(start, time.perf_counter())]
        ratios.append(1 - seconds(lanes["waiting"]) / (seconds(lanes["out"]) + seconds(lanes["back"])))
        steps.append(lanes)
    if file:
        middle = sorted(range(rounds), key=ratios.__getitem__)[rounds // 2]
        Path(file).write_text(json.dumps({"traceEvents": [*events(steps[middle])]}))
    copied = statistics.median(seconds(lanes["out"]) + seconds(lanes["back"]) for lanes in steps)
    whole = statistics.median(seconds(lanes["step"]) for lanes in steps)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"bytes/s": rate, "step ms": 1e3 * whole, "copying ms": 1e3 * copied, "overlap": middle,
            "quartiles": [low, high]}  # fmt: skip


def events(lanes: Lanes) -> Iterator[dict[str, Any]]:
    """The lanes as Chrome's trace events."""
    first = lanes["step"][0][0]
    for lane, ran in lanes.items():
        for start, end in ran:
            yield {"name": lane, "ph": "X", "pid": 0, "tid": lane, "ts": 1e6 * (start - first),
                   "dur": 1e6 * (end - start)}  # fmt: skip


# -- moving or computing again ------------------------------------------------------------------------------------


def lstm(state: Any, x: Any, weight: Any) -> Any:
    h, c = state
    i, f, g, o = (x + h @ weight[:, : 4 * h.shape[1]]).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def products(state: Any, x: Any, weight: Any) -> Any:
    h, c = state
    for _ in range(4):
        h = torch.tanh(h @ weight[:, : h.shape[1]] + x[:, : h.shape[1]])
    return h, c


def arithmetic(state: Any, x: Any, weight: Any) -> Any:
    h, c = state
    a = h * x[:, : h.shape[1]]
    b = h * a
    return (a + b + a * b) * 0.1, c


def waves(state: Any, x: Any, weight: Any) -> Any:
    h, c = state
    return (torch.sigmoid(h + x[:, : h.shape[1]]) * h).sin(), c


KINDS: dict[str, tuple[Any, int, int, int]] = {  # the iteration, width, batch, iterations
    "lstm": (lstm, 64, 16, 1000), "wide lstm": (lstm, 256, 32, 200), "products": (products, 256, 32, 200),
    "arithmetic": (arithmetic, 64, 16, 1000), "wide arithmetic": (arithmetic, 512, 64, 150),
    "wide waves": (waves, 512, 64, 150),
}  # fmt: skip
WAYS = {"plan": prices.MOVED["cpu"], "moved": 0.0, "again": 1e12}  # what the plan is told that moving a byte costs


def choice(kind: str, rounds: int) -> dict[str, Any]:
    """What it costs to move, and to compute again, what does not fit of one kind of loop; and what the plan says."""
    iteration, width, batch, iterations = KINDS[kind]
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(width, 4 * width) / width**0.5)
    feeds = torch.randn(iterations, batch, 4 * width) * 0.1, torch.ones(batch, width) * 0.5
    with tfnb.record() as graph:
        xs = tfnb.placeholder(feeds[0][:3], shape=("T", batch, 4 * width))
        start = tfnb.placeholder(feeds[1], shape=(batch, width))
        loss = tfnb.fold(lambda state, x: iteration(state, x, weight), (start, start), xs)[0].square().mean()
        found = [loss, *tfnb.gradients(loss, [start])]

    def step(budget: int | None, costs: float) -> tuple[Any, Callable[[], Any]]:
        with patch.object(prices, "MOVED", {"cpu": costs}):
            session = tfnb.Session(graph, compile="off", memory_budget=budget)
            call = session.make_callable(found, [xs, start])
            call(*feeds)
        return session, lambda: call(*feeds)

    def timed(call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)

    plan = step(1 << 40, WAYS["plan"])[0].plans()[0][1]
    budget = plan.plan.peak + plan.offloaded.saved * 55 // 100
    steps = {way: step(budget, costs) for way, costs in WAYS.items()}
    calls = {"unlimited": step(None, 1.0)[1]} | {way: call for way, (_, call) in steps.items()}
    taken = [{way: timed(call) for way, call in calls.items()} for _ in range(rounds)]
    more = {way: statistics.median(one[way] - one["unlimited"] for one in taken) for way in WAYS}
    said = steps["plan"][0].plans()[0][1].plan.loops[0]
    return {
        "kind": kind, "unlimited ms": statistics.median(one["unlimited"] for one in taken),
        **{f"{way} ms more": extra for way, extra in more.items()},
        "bytes out": steps["moved"][0].plans()[0][1].offloaded.out,
        "iterations again": said.rows.iterations * 45 // 100, "costs": [said.moving, said.computing],
        "plan says": "again" if said.fate == "is computed again" else "moved",
        "faster": min(("moved", "again"), key=more.__getitem__),
    }  # fmt: skip


def main() -> None:
    """Print the table; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 200, 500, 600, 700, 900, 1000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--out", type=Path, help="a file for the last line")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--rate", type=float, default=400e6, help="bytes per second of throttled copies")
    parser.add_argument("--lanes", help="a file for Perfetto")
    parser.add_argument("--choices", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.overlap:
        table = [overlap(max(options.lengths), options.rate, options.rounds, options.lanes)]
    elif options.choices:
        table = [choice(kind, options.rounds) for kind in KINDS]
    else:
        sizes = SIZES[options.device]
        each, budget = limits(sizes)
        print(f"{each:,} bytes an iteration, a budget of {budget:,} bytes: {budget // each} iterations")
        table = []
        for iterations in options.lengths:
            table.append(row(iterations, each, budget, options.rounds, sizes))
            print(table[-1], flush=True)
    for found in table:
        print("  ".join(f"{key} {_shown(value)}" for key, value in found.items()))
    text = json.dumps(machine(options.device) | {"torch": torch.__version__, "rows": table, "targets": TARGETS})
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
