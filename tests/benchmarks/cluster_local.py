"""Synchronous training, all-reduce, local SGD and Downpour SGD on one cluster, in turns: bytes, time and accuracy.

`python -m tests.benchmarks.cluster_local [--seeds 5] [--epochs 8] [--rows downpour sync]` trains a small net on the
digits of scikit-learn, 2 tasks and a server, with the same batches in each mode, from the same start for each seed.
Rows "sgd" to "downpour, adagrad" are DistBelief's methods (Dean et al., 2012, figure 4): one replica, and several of
them; `bench_sandblaster` and `notebooks/evaluation/distbelief.ipynb` add Sandblaster. Printed for each row:
milliseconds and processor milliseconds of a step of 32 rows; bytes that a task sends to others and gets from them in a
step (of Variables and gradients, from their sizes); epochs after which at least `TARGET` of the rows that were held
back are right; and the accuracy on these at the end: mean over seeds, least and most.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from distributed import Client
from sklearn.datasets import load_digits
from torch import nn

import tfnb
from tests.benchmarks.cluster_rows import said
from tests.benchmarks.cluster_steps import RAY, Usage, workers
from tests.benchmarks.peers import digits as digits_peer
from tests.benchmarks.peers.digits import Data, by_dask, by_ddp
from tfnb.train import SGD, Adagrad, Downpour, LocalSGD, Momentum, Nesterov, Optimizer, Progress, Sandblaster

BATCH, PORTION, HELD_BACK, TARGET, TASKS = 32, 200, 400, 0.9, 2
ALONE = Downpour(1, 1, warm_start=1 << 30)  # one task takes all steps


class Method(NamedTuple):
    """A row: the mode, the optimizer, and how often the bytes of the weights are sent and received in a step."""

    mode: Any
    optimizer: Callable[[], Optimizer]  # not used by Sandblaster, which minimizes the loss itself
    sent: float = 1.0
    received: float = 1.0


class Point(NamedTuple):
    """The accuracy on the rows that were held back, after so many seconds, processor seconds of all processes, rows and
    steps of a training.
    """

    seconds: float
    cpu: float
    rows: int
    steps: int
    accuracy: float


class AccuracyClock:
    """A callback that keeps a `Point` of each epoch, and ends the training at an accuracy.

    read: computes the accuracy; None takes it from the validation of `fit`.
    """

    def __init__(self, target: float, read: Callable[[], float] | None) -> None:
        self.target, self.read, self.points, self.usage = target, read, list[Point](), Usage()

    def on_epoch(self, progress: Progress) -> None:
        """`fit` tells of an epoch, or of an iteration of L-BFGS."""
        accuracy = float(progress.values["val_right"] if self.read is None else self.read())
        seconds, _, cpu = self.usage.since()
        self.points.append(Point(seconds, cpu, progress.samples, progress.step, accuracy))
        if accuracy >= self.target:
            progress.stop("reached")


def reached(points: Sequence[Point], target: float = TARGET) -> Point | None:
    """The first point with an accuracy.

    >>> reached([Point(1.0, 2.0, 32, 1, 0.8), Point(2.0, 4.0, 64, 2, 0.9)]).rows
    64
    """
    return next((point for point in points if point.accuracy >= target), None)


def last(points: Sequence[Point], axis: str, end: float) -> float:
    """The accuracy of the last point up to ``end`` on an axis, "rows" or "seconds"; of the first one if there is none.

    >>> last([Point(1.0, 2.0, 32, 1, 0.8), Point(2.0, 4.0, 64, 2, 0.9)], "seconds", 1.5)
    0.8
    """
    return [*points[:1], *(point for point in points if getattr(point, axis) <= end)][-1].accuracy


def momentum() -> Optimizer:
    return Momentum(0.05, 0.9)


def local(every: int, outer: Optimizer | None = None) -> Method:
    """Weights and momentum around a ring of two: half of them to and from the other one, twice."""
    return Method(LocalSGD(every, outer), momentum, 2 / every, 2 / every)


def downpour(n: int, optimizer: Callable[[], Optimizer]) -> Method:
    return Method(Downpour(n, n), optimizer, 1 / n, 1 / n)


METHODS: dict[str, Method] = {
    "sgd": Method(ALONE, lambda: SGD(0.05)),
    "sync": Method("sync", lambda: SGD(0.05)),
    "downpour": downpour(5, lambda: SGD(0.05)),
    "downpour, adagrad": downpour(5, lambda: Adagrad(0.05)),
    **{
        f"downpour, adagrad, warm {warm}": Method(Downpour(5, 5, warm), lambda: Adagrad(0.05), 0.2, 0.2)
        for warm in (100, "auto")
    },
    "sync, momentum": Method("sync", momentum),
    "allreduce, momentum": Method("allreduce", momentum),
    **{f"local, every {every}": local(every) for every in (5, 20, 100)},
    "local, every 20, outer": local(20, Nesterov(0.7, 0.9)),
}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and their classes, in an order of our own."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(found.data).float()[order] / 16, torch.from_numpy(found.target).long()[order]


def perceptron(between: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    """The net of the digits, with an activation between its layers."""
    return nn.Sequential(nn.Linear(64, 128), between(), nn.Linear(128, 10))


def curve(
    name: str, method: Method, seed: int, epochs: int, *, net: Callable[[], nn.Module] = perceptron,
    target: float = math.inf,
) -> list[Point]:  # fmt: skip
    """A training of so many epochs, or iterations of L-BFGS, that ends before where an accuracy is reached."""
    rows, labels = digits()
    torch.manual_seed(seed)
    model = net()
    with tfnb.record(name):
        x, y = tfnb.placeholder(rows[:BATCH], name="x"), tfnb.placeholder(labels[:BATCH], name="y")
        logits = model(x)
        loss, accuracy = F.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()
        train = method.optimizer().minimize(loss)
    data = {x: rows[:-HELD_BACK], y: labels[:-HELD_BACK]}
    held_back = {x: rows[-HELD_BACK:], y: labels[-HELD_BACK:]}
    if isinstance(method.mode, Sandblaster):
        clock = AccuracyClock(target, lambda: float(tfnb.run(accuracy, held_back)))
        tfnb.fit(loss, data, mode=method.mode, steps=epochs, batch_size=PORTION, callbacks=clock)
    else:
        clock = AccuracyClock(target, None)
        tfnb.fit(
            train, data, batch_size=BATCH, epochs=epochs, seed=seed, watch={"right": accuracy}, validation=held_back,
            mode=method.mode, callbacks=clock,
        )  # fmt: skip
    return clock.points


def curve_of_torch(
    optimizer: Callable[[Any], torch.optim.Optimizer], seed: int, epochs: int, *,
    net: Callable[[], nn.Module] = perceptron,
) -> list[Point]:  # fmt: skip
    """The same training by an optimizer of PyTorch in this process. L-BFGS takes all rows at once."""
    rows, labels = digits()
    torch.manual_seed(seed)
    model, generator = net(), torch.Generator().manual_seed(seed)
    taken = optimizer(model.parameters())
    at, count, points, usage = torch.empty(0), 0, list[Point](), Usage()

    def evaluated() -> torch.Tensor:
        nonlocal count
        taken.zero_grad()
        loss = F.cross_entropy(model(rows[at]), labels[at])
        loss.backward()
        count += len(at)
        return loss

    size = len(rows) - HELD_BACK
    for _ in range(epochs):
        batch = size if isinstance(taken, torch.optim.LBFGS) else BATCH
        for at in torch.randperm(size, generator=generator).split(batch):  # noqa: B007  evaluated() reads it
            taken.step(evaluated)
        with torch.no_grad():
            right = (model(rows[-HELD_BACK:]).argmax(1) == labels[-HELD_BACK:]).float().mean().item()
        seconds, _, cpu = usage.since()
        points.append(Point(seconds, cpu, count, len(points) + 1, right))
    return points


def peers(
    client: Client, seeds: int, epochs: int, net: Callable[[], nn.Module]
) -> dict[str, dict[str, list[list[Point]]]]:  # fmt: skip
    """The trainings of `peers.digits`, by peer and method, one for each seed; a first one of each is not measured.

    client: of a Dask cluster whose actors share its workers. Ray takes part where `make bench-ray` has been run.
    """
    given, found = [], dict[str, dict[str, list[list[Point]]]]()
    for seed in range(seeds):
        torch.manual_seed(seed)
        given.append(Data(*digits(), [p.detach() for p in net().parameters()]))
    runs = [(0, 1), *((seed, epochs) for seed in range(seeds))]
    found["DDP on gloo"] = {"synchronous": [by_ddp(given[seed], count, seed) for seed, count in runs]}
    for method in ("synchronous", "Downpour"):
        each = found.setdefault("plain Dask actors", {})
        each[method] = [by_dask(client, given[seed], count, seed, method) for seed, count in runs]
        if RAY.exists():
            found.setdefault("Ray actors", {})[method] = _by_ray(given, epochs, method)
    return {
        name: {method: [[Point(*point) for point in curve] for curve in curves[1:]] for method, curves in each.items()}
        for name, each in found.items()
    }


def _by_ray(given: Sequence[Data], epochs: int, method: str) -> list[Any]:
    """The points of trainings by Ray, with one more in front."""
    with TemporaryDirectory() as folder:
        files = [data.saved(Path(folder) / f"{seed}.npz") for seed, data in enumerate(given)]
        lines = [f"{seed} {file}" for seed, file in enumerate(files)]
        done = subprocess.run(
            [RAY, digits_peer.__file__, method, str(epochs)], input="\n".join([lines[0], *lines]),
            stdout=subprocess.PIPE, text=True, check=True, timeout=900,
        )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def trained(name: str, method: Method, seed: int, epochs: int) -> dict[str, float]:
    """The cost of a step of a training, and its accuracy."""
    points = curve(name, method, seed, epochs)
    end, right = points[-1], reached(points)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in perceptron().parameters())
    return {
        "ms": end.seconds / end.steps * 1e3, "cpu_ms": end.cpu / end.steps * 1e3, "sent": method.sent * weights,
        "received": method.received * weights, "accuracy": end.accuracy,
        "epochs": math.inf if right is None else points.index(right) + 1,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rows", nargs="*", default=[*METHODS], help="names of rows, or their beginnings")
    asked = parser.parse_args()
    methods = {name: each for name, each in METHODS.items() if name.startswith(tuple(asked.rows))}
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    with workers(TASKS + 1) as client, tfnb.connect(client, ps=1):
        for at, method in enumerate(methods.values()):  # what a first training costs
            trained(f"warm_{at}", method, 0, 1)
        for seed in range(asked.seeds):
            for at, (name, method) in enumerate(methods.items()):
                found[name].append(trained(f"net_{seed}_{at}", method, seed, asked.epochs))
    for name, rows in found.items():
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        right = sorted(row["accuracy"] for row in rows)
        print(
            f"{name:22} {middle['ms']:6.2f} ms  {middle['cpu_ms']:6.2f} cpu ms  {middle['sent']:7,.0f} bytes sent  "
            f"{middle['received']:7,.0f} received  {TARGET:.0%} after {middle['epochs']:g} epochs  "
            f"accuracy {statistics.mean(right):.4f} ({right[0]:.4f} to {right[-1]:.4f})"
        )
        middle = {key: value for key, value in middle.items() if math.isfinite(value)}
        said(f"local {name}", {**middle, "accuracy": statistics.mean(right)})


if __name__ == "__main__":
    main()
