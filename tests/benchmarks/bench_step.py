"""One SGD step of the 784-128-10 network at batch 32: tfnb's run and callable against PyTorch eager with torch.optim.

Both train their own copy from the same start; results are compared first. The variants take turns, so that a slow phase
of the machine meets all of them. Prints medians in microseconds and ratios to eager; the last line is JSON.

    python tests/benchmarks/bench_step.py [--rounds 40] [--steps 50] [--threads 1] [--device cpu]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import tfnb

LR = 0.1
BATCH = 32


def network(device: str) -> nn.Module:
    """784-128-10 with ReLU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


def eager(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A step with autograd and torch.optim.SGD; gives the loss."""
    optimizer = torch.optim.SGD(model.parameters(), LR)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def recorded(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """The same step as a graph, through `Session.run` and through a callable."""
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(images), tfnb.placeholder(labels)
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.SGD(LR).minimize(loss)
    session = tfnb.Session(graph)
    call = session.make_callable([train, loss], [x, y])
    feeds = {x: images, y: labels}
    return {
        "tfnb run": lambda: session.run([train, loss], feeds)[1],
        "tfnb callable": lambda: call(images, labels)[1],
    }


def check_equal(images: torch.Tensor, labels: torch.Tensor, device: str) -> None:
    """Twenty steps of each give the same losses and weights, within float32's rounding."""
    model = network(device)
    for name, step in recorded(model, images, labels).items():
        start = copy.deepcopy(model)
        oracle = eager(start, images, labels)
        losses = [(step(), oracle()) for _ in range(20)]
        for got, expected in losses:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, msg=name)
        for got, expected in zip(model.parameters(), start.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, msg=name)


def median_microseconds(variants: dict[str, Callable[[], torch.Tensor]], rounds: int, steps: int) -> dict[str, float]:
    """Median over rounds of the mean time of a step; in each round every variant runs ``steps`` steps."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name in [*variants] * 2:  # warm
        for _ in range(steps):
            variants[name]()
    for _ in range(rounds):
        for name, step in variants.items():
            start = time.perf_counter()
            for _ in range(steps):
                result = step()
            result.item()
            times[name].append((time.perf_counter() - start) / steps * 1e6)
    return {name: statistics.median(samples) for name, samples in times.items()}


def main(arguments: list[str]) -> None:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 784, generator=generator).to(options.device)
    labels = torch.randint(0, 10, (BATCH,), generator=generator).to(options.device)
    check_equal(images, labels, options.device)
    variants = {"eager": eager(network(options.device), images, labels)}
    variants |= recorded(network(options.device), images, labels)
    medians = median_microseconds(variants, options.rounds, options.steps)
    for name, value in medians.items():
        print(f"{name:16s} {value:8.1f} us   {value / medians['eager']:.2f}")
    ratios = {name: round(value / medians["eager"], 3) for name, value in medians.items()}
    rounded = {name: round(value, 1) for name, value in medians.items()}
    print(json.dumps({"bench": "step", "torch": torch.__version__, "threads": options.threads,
                      "microseconds": rounded, "ratio": ratios}))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
