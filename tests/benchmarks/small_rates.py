"""What a node, a run, a recording, a gradient and an iteration cost: `notebooks/evaluation/rates.ipynb`.

Times are of the thread's processor, so that another process moves them less. Values are compared before anything is
timed; a difference is an AssertionError.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

import tfnb
from tests.benchmarks.bench_loops import counting
from tests.benchmarks.bench_record import timed
from tests.benchmarks.peers.tfnb_off import null


def _seconds(call: Callable[[], Any]) -> float:
    return timed(call)[0]


def nodes(shape: str, count: int, samples: int) -> list[float]:
    """Million nodes a second of generated code for ``count`` null nodes: a "chain", or a "fan"."""
    step = null(shape == "chain", count)
    assert step.run() is not None
    return [count / _seconds(step.run) / 1e6 for _ in range(samples)]


def one_node(calls: int) -> dict[str, list[float]]:
    """Microseconds of a run of one node, one sample for each tenth of the calls: by ``run``, and by a callable."""
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(1.0))
        y = x + 1
    fed = torch.tensor(2.0)
    with tfnb.Session(graph, compile="off") as session:
        call = session.make_callable(y, [x])
        ways = {"run": lambda: session.run(y, {x: fed}), "callable": lambda: call(fed)}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            assert float(way()) == 3.0
        each = max(calls // 10, 1)
        for _ in range(10):
            for name, way in ways.items():
                found[name].append(1e6 * _seconds(lambda way=way: [way() for _ in range(each)]) / each)
    return found


def perceptron(depth: int, width: int = 16) -> nn.Module:
    """So many layers, each with a ReLU."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))


def recorded(depth: int, samples: int, exported: int = 300) -> dict[str, list[float]]:
    """Microseconds a layer of recording a perceptron, and of torch's export in turns, of at most so many layers."""
    module, data = perceptron(depth), torch.randn(8, 16)

    def record() -> tuple[Any, Any, Any]:
        with tfnb.record() as graph:
            x = tfnb.placeholder(data)
            return graph, x, module(x)

    def export() -> Any:
        batch = torch.export.Dim("batch", min=2, max=4096)
        return torch.export.export(module, (data,), dynamic_shapes=({0: batch},))

    graph, x, y = record()
    with tfnb.Session(graph, compile="off") as session:
        torch.testing.assert_close(session.run(y, {x: data[:3]}), module(data[:3]), rtol=0, atol=0)
    ways = {"tfnb": record} | ({"torch.export": export} if depth <= exported else {})
    found: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(samples + 1):  # the first is not counted
        for name, way in ways.items():
            found[name] += [1e6 * _seconds(way) / depth][: min(at, 1)]
    return found


def differentiated(depth: int, samples: int) -> list[float]:
    """Milliseconds for each 1,000 nodes that building the gradient of a chain of so many tanh takes."""
    found, data = [], torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    for at in range(samples + 1):
        with tfnb.record() as graph:
            x = tfnb.placeholder(data)
            y = x
            for _ in range(depth):
                y = torch.tanh(y)
            loss = y.sum()
        before = len(graph.nodes)
        seconds, grad = timed(lambda loss=loss, x=x: tfnb.gradients(loss, [x]))
        if at:
            found.append(1e3 * seconds / (len(graph.nodes) - before) * 1e3)
            continue
        z = wanted = data.clone().requires_grad_()
        for _ in range(depth):
            z = torch.tanh(z)
        with tfnb.Session(graph, compile="off") as session:
            (got,) = session.run(grad, {x: data})
        (expected,) = torch.autograd.grad(z.sum(), wanted)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    return found


def counted(iterations: int, samples: int) -> dict[str, list[float]]:
    """Thousand iterations a second of a counter: the loop in the graph, and the same in Python over torch's tensors."""
    ways = {name: call for name, (call, _) in counting(is_compiled=False).items() if name in ("native", "python")}
    n, found = torch.tensor(iterations), {name: [] for name in ways}
    for call in ways.values():
        assert float(call(n)) == iterations
    for _ in range(samples):
        for name, call in ways.items():
            found[name].append(iterations / _seconds(lambda call=call: call(n)) / 1e3)
    return {{"native": "tfnb, in generated code", "python": "PyTorch"}[name]: rates for name, rates in found.items()}


def reused(runs: int) -> tuple[float, float, int]:
    """Median microseconds of a run before an unrelated cell is edited, and of the runs after it; steps built anew."""
    from tfnb.session import session as room

    graph = tfnb.Graph("reused")
    module, data = perceptron(3), torch.randn(8, 16)
    with tfnb.record(graph):
        x = tfnb.placeholder(data)
        y = module(x)
    with tfnb.record(graph):
        beside = x + 1
    with tfnb.Session(graph, compile="off") as session:
        call = lambda: session.run(y, {x: data})  # noqa: E731
        want = call()
        before = statistics.median(_seconds(call) for _ in range(runs))
        built = 0

        def build(*args: Any, **options: Any) -> Any:
            nonlocal built
            built += 1
            return code(*args, **options)

        code = room.StepCode
        with mock.patch.object(room, "StepCode", build):
            times = []
            for at in range(runs):
                if at % 10 == 0:  # the other cell again, with another number
                    with tfnb.record(graph):
                        beside = x + float(at)
                start = time.thread_time()
                got = call()
                times.append(time.thread_time() - start)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert beside is not None
    return 1e6 * before, 1e6 * statistics.median(times), built
