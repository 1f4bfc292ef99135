"""Drawings of graphs over several tasks: stripes, a legend, and dashed edges between places."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import tfnb
from tests import over_tasks
from tests.over_tasks import on
from tfnb import view
from tfnb.graph import Contents, Graph
from tfnb.view import colours
from tfnb.view.colours import STRIPES


def two(tasks: tuple[int, int] = (0, 1)) -> tfnb.Graph:
    """A value of one task that another one uses."""
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(2, 3), shape=(2, 3), name="x")
        with on(tasks[0]):
            h = x.exp()
        with on(tasks[1]):
            y = h.sin()
        y.sum()
    return g


def crossing(svg: str) -> list[str]:
    """The tooltips of edges between places."""
    return re.findall(r'<path class="wire[^"]* cross"[^>]*stroke-dasharray="8 4"[^>]*><title>([^<]*)</title>', svg)


def test_stripes_and_legend_by_place() -> None:
    g = two()
    html = g._repr_html_()
    assert f'background:{STRIPES[0]}"></span>task:0' in html and f'background:{STRIPES[1]}"></span>task:1' in html
    stripes = re.findall(r'<rect class="site"[^>]*fill="([^"]*)"', view.graph_svg(g))
    assert set(stripes) == {*STRIPES[:2]}
    assert "at task:1" in html


def test_edges_between_places_say_what_crosses() -> None:
    (tooltip,) = crossing(view.graph_svg(two()))
    assert tooltip.splitlines()[-1] == "task:0 -&gt; task:1, value, 24 bytes"


def test_an_order_between_places_says_that_only_the_word_done_crosses() -> None:
    queue = tfnb.FIFOQueue(4, [torch.float32], [(2,)])
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(2), shape=(2,), name="x")
        with on(1):
            total = x.sum()
        with tfnb.control_dependencies([total]), on(0):
            put = queue.enqueue(x)
    drawn = re.findall(r'<path class="wire order cross[^"]*"[^>]*><title>([^<]*)</title>', view.graph_svg(g))
    assert [tooltip.splitlines()[-1] for tooltip in drawn] == ["task:1 -&gt; task:0, done"]
    parts = tfnb.place([total, put])
    assert [str(crossing) for crossing in parts.parts[1].sends] == ["total: task:1 -> task:0 (done)"]
    assert "send total -&gt; task:0" in parts._repr_html_() and "recv total &lt;- task:1" in parts._repr_html_()


@pytest.mark.parametrize("model", [over_tasks.loop, over_tasks.branch], ids=lambda model: model.__name__)
def test_nodes_inside_of_loops_and_branches_have_stripes(model: Any) -> None:
    with tfnb.record() as g:
        model(tfnb.placeholder(torch.ones(3, 8), shape=("B", 8), name="x"))
    drawing = view.Drawing(g)
    assert drawing.sites is not None
    inside = [node for node in drawing.contents.nodes if len(drawing.path(node.id)) > 1]
    assert len({drawing.sites.at[node.id] for node in inside if node.id in drawing.sites.at}) > 1
    whole = drawing.picture([box.key for box in drawing.root.walk() if box.children])
    assert {*STRIPES[:2]} <= set(re.findall(r'<rect class="site"[^>]*fill="([^"]*)"', whole))
    assert crossing(whole)


@pytest.mark.parametrize("tasks", [(0, 0), (1, 1)])
def test_a_drawing_of_one_place_has_neither(tasks: tuple[int, int]) -> None:
    html = two(tasks)._repr_html_()
    assert 'class="site"' not in html and ">task:" not in html and crossing(html) == []


def test_a_graph_that_cannot_be_cut_shows_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: Graph) -> Any:
        raise RuntimeError("no run takes it")

    monkeypatch.setattr(colours, "parts_of_graph", fails)
    svg = view.graph_svg(two())
    assert 'class="site"' in svg and [words.splitlines()[-1] for words in crossing(svg)] == ["task:0 -&gt; task:1"]


def test_a_bad_device_of_a_file_does_not_fail() -> None:
    nodes = tuple(replace(node, device="<b>") for node in two().nodes)
    assert 'class="site"' not in Graph("g", Contents(nodes))._repr_html_()
