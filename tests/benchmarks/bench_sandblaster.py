"""Sandblaster L-BFGS beside synchronous SGD on one cluster, in turns: time and passes to an accuracy.

`python -m tests.benchmarks.bench_sandblaster [--seeds 5] [--target 0.93]` trains a small net on the digits of
scikit-learn, 2 tasks and a server, from the same start in both modes for each seed, until that share of the rows that
were held back is right. Printed for each mode: seconds, processor seconds of all processes and passes over the data
until then, and the accuracy at the end; mean over seeds, least and most. A first training of each is not measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.benchmarks.cluster_local import BATCH, HELD_BACK, digits
from tests.benchmarks.cluster_rows import said
from tests.benchmarks.cluster_steps import Usage, workers

PASSES, PORTION = 120, 200  # most passes over the data, and rows of a portion


class Watcher:
    """Stops a training at an accuracy on the rows that were held back, and notes when."""

    def __init__(self, accuracy: Any, feeds: dict[Any, torch.Tensor], target: float) -> None:
        self.accuracy, self.feeds, self.target = accuracy, feeds, target
        self.usage, self.begin, self.found = Usage(), time.perf_counter(), dict[str, float]()

    def on_epoch(self, progress: tfnb.train.Progress) -> None:
        right = float(tfnb.run(self.accuracy, self.feeds))
        seconds, (_, _, cpu) = time.perf_counter() - self.begin, self.usage.since()
        self.found = {"seconds": seconds, "cpu": cpu, "rows": progress.samples, "accuracy": right}
        if right >= self.target:
            progress.stop("reached")


def trained(name: str, is_lbfgs: bool, seed: int, target: float) -> dict[str, float]:
    """The cost of one training."""
    rows, labels = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Sigmoid(), nn.Linear(128, 10))
    with tfnb.record(name):
        x, y = tfnb.placeholder(rows[:BATCH], name="x"), tfnb.placeholder(labels[:BATCH], name="y")
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        accuracy = (logits.argmax(1) == y).float().mean()
        train = tfnb.train.SGD(0.5).minimize(loss)
    data = {x: rows[:-HELD_BACK], y: labels[:-HELD_BACK]}
    watcher = Watcher(accuracy, {x: rows[-HELD_BACK:], y: labels[-HELD_BACK:]}, target)
    if is_lbfgs:
        mode = tfnb.train.Sandblaster(history=10)
        tfnb.fit(loss, data, mode=mode, steps=PASSES, batch_size=PORTION, callbacks=watcher)
    else:
        tfnb.fit(train, data, batch_size=BATCH, epochs=PASSES, seed=seed, watch=(), callbacks=watcher)
    found = watcher.found
    return {"s": found["seconds"], "cpu_s": found["cpu"], "passes": found["rows"] / len(data[x]),
            "accuracy": found["accuracy"]}  # fmt: skip


def main() -> None:
    """Train in both modes, in turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.93)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {"sync SGD": [], "Sandblaster": []}
    with workers(3) as client, tfnb.connect(client, ps=1):
        for seed in (-1, *range(options.seeds)):
            for name, costs in found.items():
                one = trained(f"{name.replace(' ', '_')}_{seed}", name == "Sandblaster", max(0, seed), options.target)
                costs += [one] if seed >= 0 else []
    for name, costs in found.items():
        columns = {key: sorted(cost[key] for cost in costs) for key in costs[0]}
        each = (f"{key} {statistics.mean(v):.3g} ({v[0]:.3g} to {v[-1]:.3g})" for key, v in columns.items())
        print(f"{name:12}  {'  '.join(each)}")
        said(name, {key: statistics.mean(values) for key, values in columns.items()})


if __name__ == "__main__":
    main()
