"""What copies for a recovery cost: 50 MB of Variables, held by another process, beside pulls to the notebook.

`python -m tests.benchmarks.cluster_copies [--mb 50] [--turns 10] [--seconds 20]` starts three worker processes, makes
copies and pulls by turns, and prints the processors' milliseconds for one of them, a mean: of the notebook, of the
server, and of the tasks, one of which holds the copy. Then it trains in pairs, with the notebook's pulls only, as it
was before, and with copies, and prints the share of the time that the notebook's processor and the server's took, and
what a step costs all processors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import psutil
import torch

import tfnb
from tests.benchmarks.cluster_bulk import _workers
from tfnb.cluster.notebook.recovery_copies import RecoveryCopies

WHO = ("notebook", "server", "tasks")


class ProcessorTimes:
    """Milliseconds of the processors of the notebook, the server and the tasks of a cluster."""

    def __init__(self, cluster: Any) -> None:
        engine = cluster._engine
        pids = [[os.getpid()], *([m.info["pid"] for m in members] for members in (engine.servers, engine.tasks))]
        self._of = [[psutil.Process(pid) for pid in mine] for mine in pids]

    def now(self) -> list[float]:
        """Of all threads, so far."""
        return [1e3 * sum(sum(process.cpu_times()[:2]) for process in mine) for mine in self._of]

    def of(self, function: Callable[[], object]) -> list[float]:
        """Those of a call, and the milliseconds that it took."""
        before, begin = self.now(), time.perf_counter()
        function()
        return [b - a for a, b in zip(before, self.now(), strict=True)] + [(time.perf_counter() - begin) * 1e3]


class Wide:
    """Variables of so many MB, five of the same size, and a cheap step that writes them all."""

    def __init__(self, megabytes: int) -> None:
        count = megabytes * 50_000
        self.variables = [tfnb.Variable(torch.linspace(-1.0, 1.0, count), name=f"w{i}") for i in range(5)]
        with tfnb.record("wide"):
            self.x = tfnb.placeholder(torch.zeros(2), name="x", shape=("B",))
            factor = self.x.mean()
            self.train = tfnb.train.SGD(0.1).apply_gradients([(w.read() * factor, w) for w in self.variables])


def one_each(cluster: Any, times: ProcessorTimes, turns: int) -> Mapping[str, list[float]]:
    """Means for one copy and one pull, made by turns."""
    there, link = cluster._variables, cluster._engine.link
    there.safety._is_on = True
    ways = {"copy": lambda: link.start_aside(there.safety._copy, 0.0), "pull": lambda: link.start(there.bring_home)}
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for turn in range(turns + 2):
        for name, begin in ways.items():
            taken = times.of(partial(_done, link, begin, name))
            if turn >= 2:  # memory is made in the first ones
                found[name].append(taken)
    there.safety.end()
    return {name: [statistics.mean(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}


def _done(link: Any, begin: Callable[[], Any], name: str) -> None:
    link.wait(begin(), 60.0, name)


def trained(net: Wide, times: ProcessorTimes, seconds: float, is_on: bool) -> tuple[list[float], int]:
    """The shares of a training for so long, and its steps. is_on: with copies, else with the notebook's pulls only."""
    refresh = RecoveryCopies.refresh
    if not is_on:
        RecoveryCopies.refresh = lambda self, every: None  # type: ignore[method-assign]
    end, steps = time.monotonic() + seconds, list[int]()

    def feeds() -> Iterator[Any]:
        while time.monotonic() < end:
            yield {net.x: torch.tensor([0.5, 0.5])}

    try:
        row = times.of(lambda: steps.append(tfnb.fit(net.train, feeds(), mode="async").steps))
    finally:
        RecoveryCopies.refresh = refresh  # type: ignore[method-assign]
    return row, steps[0]


def show(megabytes: int, turns: int, seconds: float, pairs: int = 3) -> None:
    """Print the costs."""
    with _workers(own=True, count=3) as client, tfnb.connect(client, ps=1) as cluster:
        net, times = Wide(megabytes), ProcessorTimes(cluster)
        tfnb.run(net.train, {net.x: torch.zeros(2)})
        for name, (*taken, wall) in one_each(cluster, times, turns).items():
            told = ", ".join(f"{who} {ms:.0f}" for who, ms in zip(WHO, taken, strict=True))
            print(f"one {name} of {megabytes} MB: {told} ms of processors; {wall:.0f} ms of time")
        found: dict[bool, list[list[float]]] = {False: [], True: []}
        for _ in range(pairs if seconds else 0):
            for is_on in (False, True):
                (*taken, wall), steps = trained(net, times, seconds, is_on)
                found[is_on].append([*(ms / wall for ms in taken), sum(taken) / steps])
        for is_on, rows in found.items():
            if rows:
                *shares, step = (statistics.median(column) for column in zip(*rows, strict=True))
                told = ", ".join(f"{who} {share:.1%}" for who, share in zip(WHO, shares, strict=True))
                print(f"copies {'on ' if is_on else 'off'}: {told} of a processor; {step:.1f} ms of processors a step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=50)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    show(asked.mb, asked.turns, asked.seconds)
