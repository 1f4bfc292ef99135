"""The layout engine: threads, failures, deadlines; and what a page shows when a layout fails."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.graph.build import dense
from tfnb.graph import Graph
from tfnb.view import graph_html, layout
from tfnb.view.layout import LayoutFailed


def chain(length: int, name: str = "n") -> str:
    """DOT of a chain."""
    edges = "".join(f"{name}{i} -> {name}{i + 1} [id={i}];" for i in range(length))
    return f"digraph {{edge [arrowhead=none]; node [shape=box]; {edges}}}"


def multigraph(edges: int) -> str:
    """DOT of very many edges between two nodes."""
    return "digraph {edge [arrowhead=none];" + "".join(f"a -> b [id={i}];" for i in range(edges)) + "}"


def test_boxes_stand_below_each_other() -> None:
    plan = layout.layout(chain(2))
    ys = [plan.nodes[f"n{i}"][1] for i in range(3)]
    assert ys == sorted(ys) and 0 < ys[0] < ys[2] < plan.height
    assert len(plan.edges) == 2 and all(len(points) % 3 == 1 for points in plan.edges.values())


def test_sixteen_threads_get_what_one_gets() -> None:
    sources = [chain(5 + i, f"t{i}_") for i in range(16)]
    alone = [layout.layout(source) for source in sources]
    layout.layout.cache_clear()
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(layout.layout, sources)) == alone


def test_a_trap_is_an_error_and_the_next_layout_works() -> None:
    with pytest.raises(LayoutFailed, match="could not be laid out"):
        layout.layout(multigraph(20_000))
    assert len(layout.layout(chain(3, "after")).nodes) == 4


def test_a_trap_is_an_error_after_faulthandler_took_the_signals() -> None:
    """As it does in a pytest that runs in this process; where the engine needs signals itself, the process dies."""
    source = f"""
import faulthandler
from tfnb.view import layout
layout.layout("digraph {{a -> b}}")
faulthandler.enable()
try:
    layout.layout({multigraph(20_000)!r})
except layout.LayoutFailed:
    print("failed")
"""
    run = subprocess.run([sys.executable, "-"], input=source, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip()) == (0, "failed"), run.stderr[-2000:]


def test_bad_dot_is_an_error_and_the_next_layout_works() -> None:
    with pytest.raises(LayoutFailed):
        layout.layout("digraph {")
    assert layout.layout(chain(1, "again")).nodes


def timers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)}


def test_a_layout_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "DEADLINE", 0.2)
    pick = random.Random(0)
    edges = "".join(f"m{pick.randrange(200)} -> m{pick.randrange(200)} [id={k}];" for k in range(2000))
    before = timers()
    with pytest.raises(LayoutFailed, match="interrupt"):
        layout.layout(f"digraph {{edge [arrowhead=none]; {edges}}}")
    assert len(timers() - before) <= 1  # the one that is being stopped


def test_a_page_without_layout_is_a_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: str) -> bytes:
        raise LayoutFailed("this graph could not be laid out: <out of memory>")

    layout.layout.cache_clear()
    monkeypatch.setattr(layout, "_render", broken)
    page = graph_html(Graph("net", dense()))
    assert "&lt;out of memory&gt;" in page and "<svg" not in page
    assert "y = aten.relu.default(fc/addmm)" in page or "relu" in page
