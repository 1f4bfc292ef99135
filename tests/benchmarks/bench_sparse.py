"""A step that touches 100 rows of a [1 000 000, 64] table: tfnb's row-sparse updates, its dense ones, torch's.

Variants take turns, each on a table of its own. Prints medians in microseconds and ratios to torch's sparse step of the
same kind; the last line is JSON.

    python tests/benchmarks/bench_sparse.py [--rows 1000000] [--width 64] [--touched 100] [--rounds 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import tfnb

Step = Callable[[], object]
QUICK, SLOW = 30, 1  # steps in a round


def recorded(rows: int, width: int, words: torch.Tensor, make: Callable[[], tfnb.train.Optimizer], dense: bool) -> Step:
    """The step as a graph; ``dense``: on the gradient made dense."""
    model = nn.Embedding(rows, width)
    optimizer = make()
    with tfnb.record() as graph:
        i = tfnb.placeholder(words)
        pairs = optimizer.compute_gradients(model(i).square().sum())
        step = optimizer.apply_gradients([(g.to_dense() if dense else g, v) for g, v in pairs])
    call = tfnb.Session(graph).make_callable(step, [i])
    return lambda: call(words)


def eager(rows: int, width: int, words: torch.Tensor, make: Callable[..., torch.optim.Optimizer], sparse: bool) -> Step:
    """The step with autograd and torch.optim."""
    model = nn.Embedding(rows, width, sparse=sparse)
    optimizer = make(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(words).square().sum().backward()
        optimizer.step()

    return step


def variants(rows: int, width: int, words: torch.Tensor) -> dict[str, tuple[Step, int]]:
    """Name -> step and steps in a round."""
    sizes = rows, width, words
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    return {
        "sgd torch sparse": (eager(*sizes, lambda p: sgd(p, 0.1), True), QUICK),
        "sgd tfnb rows": (recorded(*sizes, lambda: tfnb.train.SGD(0.1), False), QUICK),
        "sgd tfnb dense": (recorded(*sizes, lambda: tfnb.train.SGD(0.1), True), SLOW),
        "sgd torch dense": (eager(*sizes, lambda p: sgd(p, 0.1, fused=True), False), SLOW),
        "adam torch sparse": (eager(*sizes, lambda p: torch.optim.SparseAdam(list(p)), True), QUICK),
        "adam tfnb lazy": (recorded(*sizes, tfnb.train.LazyAdam, False), QUICK),
        "adam tfnb exact": (recorded(*sizes, tfnb.train.Adam, False), SLOW),
        "adam torch dense": (eager(*sizes, lambda p: adam(p, fused=True), False), SLOW),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("rows", 1_000_000), ("width", 64), ("touched", 100), ("rounds", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # torch's own, about checks of sparse tensors
    steps = variants(options.rows, options.width, torch.randint(0, options.rows, (options.touched,)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, (step, count) in steps.items():
            step()
            start = time.perf_counter()
            for _ in range(count):
                step()
            times[name].append((time.perf_counter() - start) / count * 1e6)
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, microseconds in medians.items():
        reference = medians[f"{name.split()[0]} torch sparse"]
        print(f"{name:20} {microseconds:12.1f} us  {microseconds / reference:8.2f} x torch sparse")
    print(json.dumps({"torch": torch.__version__, **vars(options), "median_us": medians}))


if __name__ == "__main__":
    main(sys.argv[1:])
