"""Cluster step time against the local one: the 784-128-10 network, batch 32, on a LocalCluster in processes.

`python tests/benchmarks/bench_cluster.py [STEPS]` prints medians in milliseconds of one `run` of the training step,
here and on 2 compute tasks with 1 parameter server, and of a step of `fit`, sync and async. The loss of the same
batch is checked to be equal here and there first.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from models import mlp

import tfnb


def median_ms(step: object, feeds: dict[object, torch.Tensor], steps: int) -> float:
    """Median time of one run of the step, after ten that are not counted."""
    times = []
    for count in range(steps + 10):
        start = time.perf_counter()
        tfnb.run(step, feeds)
        if count >= 10:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    torch.set_num_threads(1)
    model, data, labels = mlp(), torch.randn(3200, 784), torch.randint(10, (3200,))
    with tfnb.record("bench"):
        x, y = tfnb.placeholder(data[:32]), tfnb.placeholder(labels[:32])
        loss = F.cross_entropy(model(x), y)
        step = tfnb.train.SGD(0.01).minimize(loss)
    one, everything = {x: data[:32], y: labels[:32]}, {x: data, y: labels}
    row = {"local run": median_ms(step, one, steps)}
    row["local fit"] = tfnb.fit(step, everything, batch_size=32).seconds * 10
    here = tfnb.run(loss, everything)
    start = time.perf_counter()
    with tfnb.connect(2, ps=1):
        connect = time.perf_counter() - start
        torch.testing.assert_close(tfnb.run(loss, everything), here)
        row["cluster run"] = median_ms(step, one, steps)
        for mode in ("sync", "async"):
            row[f"cluster fit {mode}"] = tfnb.fit(step, everything, batch_size=32, mode=mode).seconds * 10
    for name, ms in row.items():
        print(f"{name:18} {ms:8.2f} ms  {ms / row['local run']:6.1f} x local run")
    print(
        json.dumps(
            {"bench": "cluster", "milliseconds": {k: round(v, 3) for k, v in row.items()}, "connect": round(connect, 1)}
        )
    )


if __name__ == "__main__":
    main()
