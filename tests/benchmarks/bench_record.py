"""Record, differentiate, first run: a 784-128-10 network, a 20-layer convolution net, a 12-layer GPT.

`python tests/benchmarks/bench_record.py [REPEATS]` prints seconds (median) of each phase, the node counts, and
`torch.export` of the GPT with a dynamic batch in the same run, after its result was checked against the model.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import GPT, conv20, mlp

import tfnb


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def phases(make: Callable[[], torch.nn.Module], data: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Seconds to record the loss, to differentiate it, to run the gradients the first time; node counts."""
    model = make()

    def record() -> Any:
        with tfnb.record() as graph:
            x, y = tfnb.placeholder(data), tfnb.placeholder(labels)
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        return graph, x, y, loss

    seconds, (graph, x, y, loss) = timed(record)
    forward = len(graph.nodes)
    parameters = list(model.parameters())
    differentiate, grads = timed(lambda: tfnb.gradients(loss, parameters))
    first, got = timed(lambda: tfnb.run(grads, {x: data, y: labels}))
    want = torch.autograd.grad(F.cross_entropy(model(data).flatten(0, -2), labels.flatten()), parameters)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    return {
        "record": seconds,
        "differentiate": differentiate,
        "first run": first,
        "nodes": forward,
        "all nodes": len(graph.nodes),
    }


def export(ids: torch.Tensor) -> float:
    """Seconds of torch.export of the GPT with a dynamic batch."""
    batch = torch.export.Dim("batch", min=2, max=4096)
    return timed(lambda: torch.export.export(GPT(), (ids,), dynamic_shapes=({0: batch},)))[0]


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    ids = torch.randint(256, (4, 32))
    cases = {
        "mlp": (mlp, torch.randn(32, 784), torch.randint(10, (32,))),
        "conv20": (conv20, torch.randn(8, 3, 32, 32), torch.randint(10, (8,))),
        "gpt12": (GPT, ids, ids.clone()),
    }
    table: dict[str, Any] = {}
    for name, case in cases.items():
        runs = [phases(*case) for _ in range(repeats + 1)]
        table[name] = {key: round(statistics.median(r[key] for r in runs[1:]), 3) for key in runs[0]}
        table[name]["record, first in the process"] = round(runs[0]["record"], 3)
    exports = [export(ids) for _ in range(repeats + 1)]
    table["torch.export of gpt12"] = round(statistics.median(exports[1:]), 3)
    table["gpt12 record / export"] = round(table["gpt12"]["record"] / table["torch.export of gpt12"], 2)
    for name, row in table.items():
        print(f"{name:24} {row}")
    print(json.dumps({"bench": "record", "torch": torch.__version__, **table}))


if __name__ == "__main__":
    main()
