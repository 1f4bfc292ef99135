"""Seconds to draw a graph: the first picture of a process, then medians at 50, 500 and 2000 nodes.

``python -m tests.benchmarks.bench_drawing``. Targets: first picture under 1 s, 500 nodes under 0.3 s. A picture is
what is seen; a page also holds every other face, so that it unfolds without a kernel.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.graph.build import Builder
from tfnb.graph import Dim, Graph, Ref, Source, Spec, Variable
from tfnb.view import graph_html, graph_svg
from tfnb.view.layout import layout

ROUNDS = 7
ROW = Spec(torch.float32, (Dim("B"), 8))
KINDS = ("relu", "tanh", "sigmoid", "sin")


def residual(nodes: int) -> Graph:
    """A net of that many nodes: residual modules of six nodes, each with a weight, four kinds in turn."""
    b = Builder()
    x = b.placeholder("x", ("B", 8))
    source = Source("In[1]", 2, "y = net(x)")
    while len(b.nodes) + 6 <= nodes:
        number = len(b.nodes) // 6
        w = b.read(Variable(torch.zeros(8, 8), name=f"net.{number}.weight"))
        kind = KINDS[number % len(KINDS)]
        y = x
        for op in ("mm", kind, "neg", kind):
            inputs, attrs = ((y, w), {"self": Ref(0), "mat2": Ref(1)}) if op == "mm" else ((y,), {"self": Ref(0)})
            scope = ("net", str(number), op)
            y = b.node(op, f"aten.{op}.default", (ROW,), inputs=inputs, attrs=attrs, scope=scope, source=source)
        attrs = {"self": Ref(0), "other": Ref(1)}
        scope = ("net", str(number), "add")
        x = b.node("add", "aten.add.Tensor", (ROW,), inputs=(x, y), attrs=attrs, scope=scope, source=source)
    while len(b.nodes) < nodes:
        x = b.node("neg", "aten.neg.default", (ROW,), inputs=(x,), attrs={"self": Ref(0)}, source=source)
    return Graph(f"net{nodes}", b.contents())


def median(draw: Callable[[Graph], str], graph: Graph, *, cold: bool) -> float:
    """Median seconds; ``cold`` forgets layouts between rounds."""
    seconds = []
    for _ in range(ROUNDS):
        if cold:
            layout.cache_clear()
        start = time.perf_counter()
        draw(graph)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


FIRST = """
import time
from tests.benchmarks.bench_drawing import residual
from tfnb.view import graph_svg
graph = residual(50)
start = time.perf_counter()
graph_svg(graph)
print(time.perf_counter() - start)
"""


def first(cache: str | None = None) -> float:
    """Seconds of the first picture of a fresh process; with an empty ``cache`` folder also of a fresh machine."""
    env = os.environ | ({"XDG_CACHE_HOME": cache} if cache else {})
    ran = subprocess.run([sys.executable, "-c", FIRST], env=env, capture_output=True, text=True, check=True)
    return float(ran.stdout)


def main() -> None:
    """Print a table, then one JSON line."""
    with tempfile.TemporaryDirectory() as empty:
        results: dict[str, Any] = {"first_picture_ever": first(empty), "first_picture": first()}
    print(f"first picture on a machine {results['first_picture_ever']:.3f} s")
    print(f"first picture of a process {results['first_picture']:.3f} s")
    for nodes in (50, 500, 2000):
        graph = residual(nodes)
        for name, draw in (("picture", graph_svg), ("page", graph_html)):
            seconds = median(draw, graph, cold=True), median(draw, graph, cold=False)
            results[f"{name}_{nodes}"] = seconds
            size = len(draw(graph)) / 1024
            print(f"{nodes:5} nodes  {name:8} {seconds[0]:.4f} s   again {seconds[1]:.4f} s   {size:6.0f} KB")
    print(json.dumps({key: value for key, value in results.items()}))


if __name__ == "__main__":
    main()
