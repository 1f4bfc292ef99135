"""The most bytes that a step holds: tfnb's predicted and measured peak beside that of PyTorch eager.

Measured by torch's profiler from every allocation on the CPU, scratch of kernels included; parameters and data were
there before and do not count. Eager is as users write it: a module, autograd, torch.optim.SGD. The last line is JSON.

    python -m tests.benchmarks.bench_memory [--rows resnet-18 gpt-6 ...] [--nodes 12]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import tfnb
from tests.benchmarks.peers import torch_eager
from tests.benchmarks.peers.serve import arrays
from tests.benchmarks.peers.torch_ops import network
from tests.benchmarks.rows import ROWS, Row, write
from tfnb.execution import lower
from tfnb.passes import peak

NAMES = ("mlp-32", "lstm-100", "gpt-6", "resnet-18", "alexnet-step", "googlenet-step")
WARM = 2  # steps before the one that is measured


def held(step: Callable[[], Any]) -> int:
    """The most bytes that one step holds above what was there before."""
    for _ in range(WARM):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def recorded(row: Row, weights: list[Any], data: list[Any]) -> tuple[Callable[[], Any], int]:
    """A step of tfnb's generated code, and its predicted peak."""
    task = {"program": row.program, "sizes": row.sizes, "device": "cpu"}
    net, batch = network(task, weights), [torch.from_numpy(array) for array in data]
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(sample, shape=tuple(sample.shape)) for sample in batch]
        loss = net(*fed)
        fetches = [loss, tfnb.train.SGD(row.rate).minimize(loss)]
    values, feeds = [item.value for item in fetches], [item.value for item in fed]
    call = tfnb.Session(graph, compile="off").make_callable(fetches, fed)
    return lambda: call(*batch), peak(lower(graph, values, feeds).graph, values, feeds)


def measured(row: Row) -> dict[str, float]:
    """Bytes of both, and the ratios."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.npz"
        write(row, file)
        weights, data = arrays(str(file))
    task = {"program": row.program, "sizes": row.sizes, "device": "cpu", "mode": "step", "rate": row.rate}
    task["threads"] = torch.get_num_threads()
    weights_again = [array.copy() for array in weights]
    eager = held(torch_eager.build(task, weights_again, data).run)
    step, predicted = recorded(row, weights, data)
    ours = held(step)
    return {"eager": eager, "tfnb": ours, "predicted": predicted, "ratio": ours / eager, "error": predicted / ours}


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=NAMES, metavar="NAME")
    options = parser.parse_args(arguments)
    table = {}
    print(f"{'':16s}{'eager MB':>10s}{'tfnb MB':>10s}{'of eager':>10s}{'predicted':>10s}")
    for name in options.rows:
        table[name] = found = measured(ROWS[name])
        sizes = "".join(f"{found[key] / 1e6:10.2f}" for key in ("eager", "tfnb"))
        print(f"{name:16s}{sizes}{found['ratio']:10.2f}{found['error']:10.2f}", flush=True)
    print(json.dumps({"bench": "memory", "torch": torch.__version__, "rows": table}))


if __name__ == "__main__":
    main(sys.argv[1:])
