"""Record, differentiate, first run, and torch.export of the same model in the same run.

`python -m tests.benchmarks.bench_record [REPEATS] [CASE ...]` prints medians in seconds of one thread's processor
time, so that a busy machine does not move the ratios, and microseconds for each node. Phases and `torch.export` with a
dynamic batch take turns. Gradients are compared with torch's before anything is timed, in float64: the last digits of a
deep network at its first weights grow to whole percents. Recording computes samples: ``lazy`` is recording without
them, which is what export does; ``train`` is recording with the gradients and an Adam step in the same block.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tfnb
from tests.benchmarks.models import conv20, mlp
from tests.models.sequence import GPT
from tests.models.vision import resnet50


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


class Case:
    """A model with one batch of data and labels."""

    def __init__(self, model: torch.nn.Module, data: torch.Tensor, labels: torch.Tensor) -> None:
        self.model, self.data, self.labels = model, data, labels
        self.parameters = list(model.parameters())

    def record(self, *, lazy: bool = False) -> tuple[tfnb.Graph, Any, Any, Any]:
        with tfnb.record(lazy=lazy) as graph:
            x, y = tfnb.placeholder(self.data), tfnb.placeholder(self.labels)
            loss = F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
        return graph, x, y, loss

    def train(self) -> Any:
        """Recorded up to the step: loss, gradients and update of every parameter."""
        with tfnb.record() as graph:
            x, y = tfnb.placeholder(self.data), tfnb.placeholder(self.labels)
            loss = F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
            step = tfnb.train.Adam(1e-3).minimize(loss)
        return graph, step

    def export(self) -> Any:
        batch = torch.export.Dim("batch", min=2, max=4096)
        return torch.export.export(self.model, (self.data,), dynamic_shapes=({0: batch},))

    def phases(self) -> dict[str, float]:
        """Seconds of each phase, one after the other."""
        record, (graph, x, y, loss) = timed(self.record)
        nodes = len(graph.nodes)
        export, _ = timed(self.export)
        lazy, _ = timed(lambda: self.record(lazy=True))
        train, _ = timed(self.train)
        differentiate, grads = timed(lambda: tfnb.gradients(loss, self.parameters))
        with tfnb.Session(graph, compile="off") as session:  # export fails beside a compiler in the background
            first, _ = timed(lambda: session.run(grads, {x: self.data, y: self.labels}))
        eager, _ = timed(lambda: self.model(self.data))
        added = len(graph.nodes) - nodes
        return {
            "record": record, "lazy": lazy, "export": export, "train": train, "eager forward": eager,
            "differentiate": differentiate, "first run": first, "nodes": nodes, "gradient nodes": added,
            "record us/node": 1e6 * record / nodes, "lazy us/node": 1e6 * lazy / nodes,
            "differentiate us/node": 1e6 * differentiate / added,
        }  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError where the gradients of a run are not torch's."""
        precise = self.data.double() if self.data.is_floating_point() else self.data
        case = Case(copy.deepcopy(self.model).double(), precise, self.labels)
        graph, x, y, loss = case.record()
        with tfnb.Session(graph, compile="off") as session:
            got = session.run(tfnb.gradients(loss, case.parameters), {x: case.data, y: case.labels})
        logits = case.model(case.data)
        want = torch.autograd.grad(F.cross_entropy(logits.flatten(0, -2), case.labels.flatten()), case.parameters)
        for a, b in zip(got, want, strict=True):
            a = a.to_dense() if isinstance(a, tfnb.IndexedSlices) else a
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9 * float(b.abs().max()))


def gpt12(time: int = 32) -> Case:
    ids = torch.randint(256, (4, time))
    return Case(GPT(layers=12, vocabulary=256, width=96, heads=4, time=time), ids, ids.clone())


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(mlp(), torch.randn(32, 784), torch.randint(10, (32,))),
    "conv20": lambda: Case(conv20(), torch.randn(8, 3, 32, 32), torch.randint(10, (8,))),
    "resnet50": lambda: Case(resnet50(), torch.randn(4, 3, 224, 224), torch.randint(1000, (4,))),
    "gpt12": gpt12,
}


def main() -> None:
    torch.set_num_threads(1)
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    table: dict[str, dict[str, float]] = {}
    for name in sys.argv[2:] or CASES:
        case = CASES[name]()
        case.check()
        runs = [case.phases() for _ in range(repeats + 1)]
        row = {key: round(statistics.median(r[key] for r in runs[1:]), 3) for key in runs[0]}
        row["record, first in the process"] = round(runs[0]["record"], 3)
        row["record / export"] = round(statistics.median(r["record"] / r["export"] for r in runs[1:]), 2)
        row["lazy / export"] = round(statistics.median(r["lazy"] / r["export"] for r in runs[1:]), 2)
        row["train / export"] = round(statistics.median(r["train"] / r["export"] for r in runs[1:]), 2)
        table[name] = row
        print(f"{name:10} {row}", flush=True)
    print(json.dumps({"bench": "record", "torch": torch.__version__, **table}))


if __name__ == "__main__":
    main()
