"""A cluster on the virtual clock: `python -m tests.benchmarks.virtual_cluster [ROW ...] [--quick]`.

Real are the machines of the notebook and of a server, the token queue and the accumulator; the durations of kernels and
of messages are modelled, so no time below is one of a cluster, but for processor time.

machines: processor time of the notebook's and of a server's machines for a step of 10, 100 and 1,000 tasks, by mode.
replicas: figure 8 of the TensorFlow paper (OSDI 2016): asynchronous and synchronous steps of 25 to 200 workers, and 0
to 8 backup workers. Beside them what the paper has, read off the figure, within 1 or 2 %.

Each row prints a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import psutil
import torch

from tests.cluster.alone.virtual import made
from tests.cluster.alone.virtual_replicas import MODEL, PERCENTILES, REPLICAS, SERVERS, Injected, Job, Percentiles

MODES = ("sync", "backup", "async", "bounded")
READ_OFF = {0: 2.265, 1: 2.105, 2: 2.07, 3: 1.95, 4: 1.93, 5: 1.965}  # seconds of the paper's step by backup workers
ROWS_OF_A_GRADIENT = 32  # our assumption; the paper does not say


def said(name: str, found: dict[str, Any]) -> None:
    """The line for programs."""
    about = {"bench": f"virtual {name}", "torch": torch.__version__, "cores": psutil.cpu_count()}
    print(json.dumps({**about, "load": psutil.getloadavg()[0], **found}), flush=True)


def jittered(task: int, step: int) -> float:
    """Seconds of a step on a task; the first task takes three times as long."""
    return (0.1 + 1e-5 * ((7919 * task + 104729 * step) % 1000)) * (1 if task else 3)


def machines(is_quick: bool) -> None:
    """Processor milliseconds of a step, which every task takes part in."""
    counts, steps = (10, 100, 1000), 2 if is_quick else 8
    found: dict[str, dict[int, list[float]]] = {mode: {} for mode in MODES}
    for mode in MODES:
        for tasks in counts:
            runs = []
            for _ in range(1 if is_quick else 3):
                training = made(mode, tasks, steps, jittered)
                training.run()
                runs.append([1e3 * training.meter.seconds[who] / steps for who in ("notebook", "server")])
            found[mode][tasks] = [statistics.median(each) for each in zip(*runs, strict=True)]
    print(f"processor ms of a step, machines of the notebook and of a server (median of {1 if is_quick else 3} runs)")
    print("mode     " + "".join(f"{tasks:>10} tasks    " for tasks in counts) + "  100 to 1,000")
    for mode, each in found.items():
        cells = "".join(f"{notebook:>9.2f} {server:>8.2f} " for notebook, server in each.values())
        grows = [after / before for before, after in zip(each[counts[-2]], each[counts[-1]], strict=True)]
        print(f"{mode:9}{cells}  x {grows[0]:.1f} and {grows[1]:.1f}")
    said("machines", {"steps": steps, "ms": found})


def replicas(is_quick: bool) -> None:
    """Virtual seconds of steps: 10th, 50th and 90th percentiles."""
    steps = 20 if is_quick else 200
    job = Job(steps=steps)
    times = [round(number, 4) for number in job.times]
    print(f"virtual: {steps} steps after burn-in; {SERVERS} servers of which one is played, with {MODEL / 1e6:.0f} MB "
          f"(assumed) on links of {job.bandwidth / 1e9:g} GB/s;\na gradient takes {times[0]} + {times[1]} "
          f"exp({times[2]} z) seconds, so that {REPLICAS} take {PERCENTILES[1]} s in the median")  # fmt: skip
    rates: dict[str, dict[int, float]] = {"async": {}, "sync": {}}
    for workers in (25, 50, 100, 200):
        several = Job(steps=max(20, steps // 4))
        for name, run in (("async", several.asynchronous), ("sync", several.sync)):
            seconds: Percentiles = run(workers)
            rates[name][workers] = workers * ROWS_OF_A_GRADIENT / seconds.p50
            print(f"{workers:4} workers {name:5} {rates[name][workers]:6.0f} images/s, a step {told(seconds)}")
    clean, tail = job.sync(), Injected(every=5, seconds=1.0)
    found: dict[int, Percentiles] = {}
    print("backup   a step (p50, p10-p90)   normalised   the paper's p50   with a tail: p90")
    for backup in range(9):
        found[backup] = job.sync(backup=backup)
        normalised = found[0].p50 / found[backup].p50 * REPLICAS / (REPLICAS + backup)
        late = job.sync(backup=backup, tail=tail).p90
        print(
            f"{backup:6}   {told(found[backup]):22}  {normalised:10.3f}   {READ_OFF.get(backup, ''):>15}   {late:16.2f}"
        )
    removed = [1 - (job.sync(backup=1, tail=each).p90 - clean.p90) / (job.sync(tail=each).p90 - clean.p90)
               for each in (tail, tail._replace(seconds=2.0))]  # fmt: skip
    shares = " and ".join(f"{share:.0%}" for share in removed)
    print(f"one backup worker removes {shares} of tails of 1 and 2 s at the 90th percentile")
    unlimited = Job(float("inf"), steps=steps)
    monotone = [unlimited.sync(backup=backup).p50 for backup in range(9)]
    print("without a limit of the links:", ", ".join(f"{each:.3f}" for each in monotone))
    said("replicas", {"steps": steps, "images_per_s": rates, "removed": removed,
                      "step": {backup: list(each) for backup, each in found.items()}})  # fmt: skip


def told(seconds: Percentiles) -> str:
    return f"{seconds.p50:.3f} s ({seconds.p10:.2f}-{seconds.p90:.2f})"


TABLE: dict[str, Callable[[bool], None]] = {"machines": machines, "replicas": replicas}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*TABLE, []], default=[])
    parser.add_argument("--quick", action="store_true", help="fewer steps: both rows within a minute")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.rows or TABLE:
        TABLE[name](given.quick)


if __name__ == "__main__":
    main()
