"""How long pictures take: processor time of this process, so that others do not count."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.graph.build import Builder
from tfnb.graph import Dim, Graph, Ref, SourceLine, Spec
from tfnb.view import Drawing, graph_bundle


def layered(count: int) -> Graph:
    """A net of so many nodes: 20 a module, each of which takes the one before and one of another module."""
    import torch

    b = Builder()
    row = Spec(torch.float32, (Dim("B"), 8))
    values = [b.placeholder("x", ("B", 8))]
    for place in range(count - 1):
        block = place // 20
        where = {
            "source": SourceLine("In[1]", 1, "y = net(x)"),
            "scope": ("net", f"stage{block // 25}", f"block{block}", "f"),
        }
        far = values[(place * 7) % len(values)] if place % 20 == 0 else values[-1]
        fields = {"inputs": (values[-1], far), "attrs": {"self": Ref(0), "other": Ref(1)}}
        op = f"aten.{('add', 'mul', 'sub')[place * block % 3]}.Tensor"
        values.append(b.node(f"n{place}", op, (row,), **fields, **where))
    return Graph("net", b.contents())


def seconds(call: Callable[[], Any]) -> float:
    """Of the processor, the better of two."""

    def once() -> float:
        before = time.process_time()
        call()
        return time.process_time() - before

    return min(once(), once())


def test_pictures_are_quick() -> None:
    Drawing(layered(3)).svg  # noqa: B018 - the engine starts once
    assert seconds(lambda: Drawing(layered(500)).svg) < 1.0


@pytest.mark.slow
def test_five_thousand_nodes_fold_and_unfold_at_once() -> None:
    graph = layered(5000)
    whole = seconds(lambda: Drawing(graph).svg)
    assert sum(len(form.encode()) for form in graph_bundle(graph).values()) < 150_000
    drawing = Drawing(graph)
    keys = [box.name for box in drawing.root.walk() if box.children and box.key]
    drawing.svg  # noqa: B018 - what is unfolded stands in a drawing that is there
    slowest = max(seconds(lambda key=key: drawing.face(key, unfolded=True)) for key in keys[:30])  # type: ignore[misc]
    assert whole < 1.5 and slowest < 0.3  # of 1 and 0.2 on a machine that does nothing else
