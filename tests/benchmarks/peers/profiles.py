"""Where the time and memory of our own steps go, in a line each: for rows that miss a target."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parent.parent.parent.parent
MOST = 6  # parts that are named
SECONDS = 0.3  # of steps under the profiler, about


def step(run: Callable[[], Any]) -> str:
    """Shares of a step by torch's ops, and what is outside of them: Python, and kernels that were compiled."""
    count, found, took = _profiled(run)
    ops = sorted(found, key=lambda op: -op.self_cpu_time_total)
    parts = [f"{op.key} {_share(op.self_cpu_time_total, took)} in {round(op.count / count)} calls" for op in ops[:MOST]]
    rest = max(0.0, took - sum(op.self_cpu_time_total for op in found))
    return "a step: " + ", ".join([f"outside of torch's ops {_share(rest, took)}", *parts])


def peak(run: Callable[[], Any]) -> str:
    """The ops that make the most memory in a step, more than they give back."""
    count, found, _ = _profiled(run)
    makers = sorted((op for op in found if op.self_cpu_memory_usage > 0), key=lambda op: -op.self_cpu_memory_usage)
    parts = [f"{op.key} {op.self_cpu_memory_usage / count / 2**20:.1f} MiB" for op in makers[:MOST]]
    return f"made in a step, freed or not: {', '.join(parts)}"


def first(begin: Callable[[], Any]) -> str:
    """Shares of one more first step by folder of tfnb, everything imported."""
    profiler = cProfile.Profile()
    profiler.runcall(begin)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    by_room: Counter[str] = Counter()
    for (file, _, name), (_, _, own, _, _) in stats.items():
        by_room[_room(file, name)] += own
    total = sum(by_room.values())
    return f"a first step: {', '.join(f'{room} {_share(own, total)}' for room, own in by_room.most_common(MOST))}"


def _profiled(run: Callable[[], Any]) -> tuple[int, list[FunctionEventAvg], float]:
    """Steps, what torch saw of them, and the microseconds that as many took which it did not see."""
    seconds = _seconds(run, 1)
    count = max(1, min(100, round(SECONDS / seconds)))
    took = min(_seconds(run, count) for _ in range(3))
    for steps in (1, count):  # the profiler has a first time of its own
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            _seconds(run, steps)
    return count, [op for op in found.key_averages() if op.key != "[memory]"], took * 1e6


def _seconds(run: Callable[[], Any], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        run()
    return time.perf_counter() - start


def _room(file: str, name: str) -> str:
    path = Path(file)
    if path.is_relative_to(ROOT) and "site-packages" not in file:
        return str(path.relative_to(ROOT).parent)
    if "torch" in path.parts or "torch" in name:
        return "torch"
    return "Python"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}"
