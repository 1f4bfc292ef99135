"""One library in a process of its own: `python -m tests.benchmarks.peers.serve LIBRARY`, JSON lines over the pipes.

LIBRARY is a file of this folder with ``version()`` and ``build(task, weights, data)``, which gives a `Step`, or a row
of the ``VARIANTS`` of one, which are further arguments. Requests:
{"do": "start", task}: build and run the first step; "advance": run steps; "state": where the weights moved (or the
gradients); "settle": run steps until their code no longer changes; "block": time some steps; "peak": memory;
"profile": where the time goes.
An error is answered as {"error": text}.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Step:
    """``run`` starts one step and gives the loss, ``wait`` makes a number of it, ``state`` gives numpy arrays.

    The state is the weights, in the order and layout they were given, or the gradients in a task that asks for them.
    """

    run: Callable[[], Any]
    wait: Callable[[Any], float]
    state: Callable[[], list[np.ndarray]] = list
    nodes: int = 0
    note: Callable[[], str] = str
    settled: Callable[[], bool] = lambda: True  # whether later steps will run the code that the last one ran


def arrays(file: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Weights and data, written as w0, w1, ... and d0, d1, ..."""
    with np.load(file) as found:
        return [[found[f"{kind}{i}"] for i in range(sum(n[0] == kind for n in found.files))] for kind in "wd"]


def resident(key: str) -> float:
    """A line of the process's memory in MiB; the highest so far is VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def _moved(after: np.ndarray, before: Any) -> list[float]:
    moved = after.astype(np.float64) - before
    return [float(np.linalg.norm(moved)), float(moved.sum()), moved.size]


def _forget() -> None:
    """The highest so far is what there is now."""
    Path("/proc/self/clear_refs").write_text("5")


def processor() -> float:
    """Seconds of processor time of this process, of its threads and of the compilers that it started."""
    return time.process_time() + sum(os.times()[2:4])


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": processor}


FINAL, FINAL_SECONDS = 30, 5.0  # steps, or their seconds, that tell the final rate
WINDOW = 5  # steps, whose median counts: a stumble is no slower code
SHARE = 0.9


def until_final(seconds: Sequence[float]) -> float | None:
    """Seconds until steps run at `SHARE` of their final rate; None for so few steps that no rate is known.

    >>> until_final([3.0] + [1.0] * 10 + [0.5] * 5 + [9.0] + [0.5] * 30)
    13.0
    """
    if len(seconds) < 2 * WINDOW:
        return None
    final = statistics.median(seconds[-FINAL:])
    slow = 0
    for place, took in enumerate(seconds):
        around = statistics.median(seconds[max(0, place + 1 - WINDOW) : place + 1])
        if min(took, around) > final / SHARE:
            slow = place + 1
    return sum(seconds[:slow])


_VARIED = {"tfnb": "tfnb_off", "torch": "torch_eager"}  # the files that have variants


class Worker:
    """The answers."""

    def __init__(self, name: str) -> None:
        file = _VARIED.get(name.partition("_")[0], name)
        self.library = importlib.import_module(f"tests.benchmarks.peers.{file}")
        self.options = getattr(self.library, "VARIANTS", {}).get(name, {})

    def start(self, **task: Any) -> dict[str, Any]:
        self.task = task
        weights, data = arrays(task["file"])
        self.memory, self.highest = resident("VmRSS"), 0.0
        _forget()
        self.clock = CLOCKS[task["clock"]]
        start = self.clock()
        self.step = self.library.build(task, weights, data, **self.options)
        loss = self.step.wait(self.step.run())
        self.seconds = [self.clock() - start]
        return {"loss": loss, "first": self.seconds[0], "version": self.library.version()}

    def advance(self, steps: int) -> dict[str, Any]:
        losses, seconds = [], []
        for _ in range(steps):
            start = self.clock()
            losses.append(self.step.wait(self.step.run()))
            seconds.append(self.clock() - start)
        self.seconds += seconds
        return {"losses": losses, "seconds": seconds}

    def settle(self, seconds: float) -> dict[str, Any]:
        """How long it took, zero where it is so already; no number where so many seconds were not enough.

        reached: from the source on, until steps ran at `SHARE` of their final rate.
        """
        start, limit, took = self.clock(), time.perf_counter() + seconds, 0.0
        while not self.step.settled():
            if time.perf_counter() > limit:
                return {"seconds": None, "reached": None}
            self.advance(1)
            took = self.clock() - start
        end = time.perf_counter() + FINAL_SECONDS
        for _ in range(FINAL):
            self.advance(1)
            if time.perf_counter() > end:
                break
        return {"seconds": took, "reached": until_final(self.seconds)}

    def state(self) -> dict[str, Any]:
        """Length and sum of what each weight moved since the start; what this takes is no part of the peak."""
        self.highest = max(self.highest, resident("VmHWM"))
        moves = self.task["mode"] == "step"
        with np.load(self.task["file"]) as before:
            found = [_moved(a, before[f"w{i}"] if moves else 0.0) for i, a in enumerate(self.step.state())]
        _forget()
        return {"moved": found}

    def block(self, steps: int) -> dict[str, Any]:
        run = self.step.run
        self.settle_device()
        start = self.clock()
        for _ in range(steps):
            loss = run()
        self.step.wait(loss)
        self.settle_device()
        return {"seconds": self.clock() - start}

    def settle_device(self) -> None:
        """Wait until all that was started is done."""
        if self.task["device"] != "cpu":
            import torch  # the only libraries that are asked to use another device have it

            torch.accelerator.synchronize()

    def profile(self, of: list[str]) -> dict[str, Any]:
        """Where time and memory go, of a library on torch."""
        from tests.benchmarks.peers import profiles  # imports torch

        def begin() -> None:
            step = self.library.build(self.task, *arrays(self.task["file"]), **self.options)
            step.wait(step.run())

        ways = {"time": lambda: profiles.step(self.step.run), "peak": lambda: profiles.peak(self.step.run)}
        return {"lines": [ways[what]() if what in ways else profiles.first(begin) for what in of]}

    def peak(self) -> dict[str, Any]:
        peak = max(self.highest, resident("VmHWM")) - self.memory
        if self.task["device"] != "cpu":
            import torch  # the only libraries that are asked to use another device have it

            peak = torch.accelerator.max_memory_allocated() / 2**20
        return {"peak": peak, "nodes": self.step.nodes, "note": self.step.note()}


def main() -> None:
    """Answer until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer
    start = time.perf_counter()
    worker = Worker(sys.argv[1])
    answers.write(json.dumps({"import": time.perf_counter() - start}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
