"""Gradients in 16 bits on their way to the servers beside gradients as they are: bytes, loss and accuracy, in turns.

`python -m tests.benchmarks.cluster_lossy [--seeds 5] [--epochs 20]` trains a small net on the digits of scikit-learn,
2 tasks in `mode="sync"` and a server, with the same batches from the same start for each format. Printed for each one:
bytes that all processes sent and got in a step, counted by the envelopes; processor milliseconds of a step; the loss of
all training rows at the end, as a difference from that of gradients as they are; and the accuracy on rows that were
held back.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from distributed import Client
from torch import nn

import tfnb
from tests.benchmarks.cluster_local import BATCH, HELD_BACK, digits
from tests.benchmarks.cluster_rows import said
from tests.benchmarks.cluster_steps import Usage, workers
from tfnb.cluster.wire.lossy import FORMATS

AS_IT_IS = "as it is"


def moved(client: Client) -> int:
    """Bytes that all workers have sent and got so far."""

    def counted() -> int:
        from tfnb.cluster.wire import envelope

        return sum(envelope.MOVED.values())

    return sum(client.run(counted).values())


def trained(client: Client, format: str, seed: int, epochs: int) -> dict[str, float]:
    """The facts of one training, with connections of its own."""
    rows, labels = digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    with tfnb.record(f"{format}_{seed}_{epochs}".replace(" ", "_")):
        x, y = tfnb.placeholder(rows[:BATCH], name="x"), tfnb.placeholder(labels[:BATCH], name="y")
        train = tfnb.train.Momentum(0.05, 0.9).minimize(F.cross_entropy(model(x), y))
    data = {x: rows[:-HELD_BACK], y: labels[:-HELD_BACK]}
    lossy: dict[str, Any] = {} if format == AS_IT_IS else {"gradients": format}
    with tfnb.connect(client, ps=1, lossy=lossy) as cluster:
        tfnb.fit(train, data, batch_size=BATCH, steps=5, seed=seed, watch=())
        cluster.pull()
        before, usage = moved(client), Usage()
        steps = tfnb.fit(train, data, batch_size=BATCH, epochs=epochs, seed=seed, watch=()).steps
        _, _, cpu = usage.since()
        sent = moved(client) - before
        cluster.pull()
    with torch.no_grad():
        loss = F.cross_entropy(model(rows[:-HELD_BACK]), labels[:-HELD_BACK]).item()
        right = model(rows[-HELD_BACK:]).argmax(1) == labels[-HELD_BACK:]
    return {"bytes": sent / steps, "cpu_ms": cpu / steps * 1e3, "loss": loss, "accuracy": right.float().mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (AS_IT_IS, *FORMATS)}
    with workers(3) as client:
        for seed in range(asked.seeds):
            for format, rows in found.items():
                rows.append(trained(client, format, seed, asked.epochs))
    for format, rows in found.items():
        middle = {key: statistics.median(row[key] for row in rows) for key in ("bytes", "cpu_ms")}
        apart = [row["loss"] - base["loss"] for row, base in zip(rows, found[AS_IT_IS], strict=True)]
        right = sorted(row["accuracy"] for row in rows)
        print(
            f"{format:20} {middle['bytes']:10,.0f} bytes  {middle['cpu_ms']:6.2f} cpu ms a step  loss "
            f"{statistics.mean(row['loss'] for row in rows):.5f} (apart {min(apart):+.1e} to {max(apart):+.1e})  "
            f"accuracy {statistics.mean(right):.4f} ({right[0]:.4f} to {right[-1]:.4f})"
        )
        said(f"lossy {format}", {**middle, "apart": max(map(abs, apart)), "accuracy": statistics.mean(right)})


if __name__ == "__main__":
    main()
