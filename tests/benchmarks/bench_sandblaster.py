"""Sandblaster L-BFGS beside synchronous SGD on one cluster, in turns: time and passes to an accuracy.

`python -m tests.benchmarks.bench_sandblaster [--seeds 5] [--target 0.93]` trains a small net on the digits of
scikit-learn, 2 tasks and a server, from the same start in both modes for each seed, until that share of the rows that
were held back is right. Printed for each mode: seconds, processor seconds of all processes and passes over the data
until then, and the accuracy at the end; mean over seeds, least and most. A first training of each is not measured.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from torch import nn

import tfnb
from tests.benchmarks.cluster_local import HELD_BACK, Method, Point, curve, digits, perceptron
from tests.benchmarks.cluster_rows import said
from tests.benchmarks.cluster_steps import workers
from tfnb.train import SGD, Sandblaster

PASSES = 120  # at most, over the data; iterations of L-BFGS make at least one each
METHODS = {
    "sync SGD": Method("sync", lambda: SGD(0.5)), "Sandblaster": Method(Sandblaster(history=10), lambda: SGD(0.5)),
}  # fmt: skip


def costs(end: Point) -> dict[str, float]:
    """The cost of a training until its last point."""
    rows = len(digits()[0]) - HELD_BACK
    return {"s": end.seconds, "cpu_s": end.cpu, "passes": end.rows / rows, "accuracy": end.accuracy}


def main() -> None:
    """Train in both modes, in turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.93)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    net = partial(perceptron, nn.Sigmoid)
    with workers(3) as client, tfnb.connect(client, ps=1):
        for seed in (-1, *range(options.seeds)):
            for name, method in METHODS.items():
                graph = f"{name.replace(' ', '_')}_{seed}"
                points = curve(graph, method, max(0, seed), PASSES, net=net, target=options.target)
                found[name] += [costs(points[-1])] if seed >= 0 else []
    for name, each in found.items():
        columns = {key: sorted(cost[key] for cost in each) for key in each[0]}
        texts = (f"{key} {statistics.mean(v):.3g} ({v[0]:.3g} to {v[-1]:.3g})" for key, v in columns.items())
        print(f"{name:12}  {'  '.join(texts)}")
        said(name, {key: statistics.mean(values) for key, values in columns.items()})


if __name__ == "__main__":
    main()
