"""Local SGD beside synchronous training and all-reduce on one cluster, in turns: bytes, time and accuracy.

`python -m tests.benchmarks.cluster_local [--seeds 5] [--epochs 20]` trains a small net on the digits of scikit-learn,
2 tasks and a server, with the same batches in each mode, from the same start for each seed. Printed for each mode:
milliseconds and processor milliseconds of a step, bytes that a task sends to others in a step (of Variables and
gradients, from their sizes), and the accuracy on rows that were held back: mean over seeds, least and most.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import tfnb
from tests.benchmarks.cluster_rows import said
from tests.benchmarks.cluster_steps import Usage, workers

MODES: dict[str, Any] = {
    "sync": "sync", "allreduce": "allreduce",
    **{f"local, every {every}": tfnb.train.LocalSGD(every) for every in (5, 20, 100)},
}  # fmt: skip
BATCH, HELD_BACK = 32, 400


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and their classes, in an order of our own."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(found.data).float()[order] / 16, torch.from_numpy(found.target).long()[order]


def trained(name: str, mode: Any, seed: int, epochs: int) -> dict[str, float]:
    """The cost of a step of a training, and its accuracy."""
    rows, labels = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    with tfnb.record(name):
        x, y = tfnb.placeholder(rows[:BATCH], name="x"), tfnb.placeholder(labels[:BATCH], name="y")
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.Momentum(0.05, 0.9).minimize(loss)
    data = {x: rows[:-HELD_BACK], y: labels[:-HELD_BACK]}
    usage, begin = Usage(), time.perf_counter()
    steps = tfnb.fit(train, data, batch_size=BATCH, epochs=epochs, seed=seed, watch=(), mode=mode).steps
    _, _, cpu = usage.since()
    seconds = time.perf_counter() - begin
    right = model(rows[-HELD_BACK:]).argmax(1) == labels[-HELD_BACK:]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    sent = {"sync": weights, "allreduce": weights}.get(str(mode))  # to the server; by a ring of two: half, twice
    if sent is None:
        sent = 2 * weights / mode.every  # and the momentum
    return {
        "ms": seconds / steps * 1e3, "cpu_ms": cpu / steps * 1e3, "bytes": sent, "accuracy": right.float().mean().item()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
    with workers(3) as client, tfnb.connect(client, ps=1):
        for name, mode in MODES.items():  # what a first training costs
            trained(f"warm_{len(name)}", mode, 0, 1)
        for seed in range(asked.seeds):
            for at, (name, mode) in enumerate(MODES.items()):
                found[name].append(trained(f"net_{seed}_{at}", mode, seed, asked.epochs))
    for name, rows in found.items():
        middle = {key: statistics.median(row[key] for row in rows) for key in ("ms", "cpu_ms", "bytes")}
        right = sorted(row["accuracy"] for row in rows)
        print(
            f"{name:16} {middle['ms']:6.2f} ms  {middle['cpu_ms']:6.2f} cpu ms  {middle['bytes']:9,.0f} bytes a step  "
            f"accuracy {statistics.mean(right):.4f} ({right[0]:.4f} to {right[-1]:.4f})"
        )
        said(f"local {name}", {**middle, "accuracy": statistics.mean(right)})


if __name__ == "__main__":
    main()
