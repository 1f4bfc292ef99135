"""A traced run as HTML: heat in the drawing, bars, the bytes alive, tables; everything a user named is text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.view import models
from tests.view.browser import Page as Browsed
from tests.view.browser import browser
from tests.view.test_escape import NASTY, Page, graph
from tfnb.errors import InvalidArgument
from tfnb.execution import Trace
from tfnb.execution.tracing.trace import Event, Transmission
from tfnb.graph import Graph
from tfnb.view import Drawing, graph_html, trace_html
from tfnb.view.page import live


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A step of the small convolution net."""
    graph = models.digits()
    session = tfnb.Session(graph)
    feeds = {"x": torch.rand(16, 1, 8, 8), "y": torch.randint(0, 10, (16,))}
    session.run(["step", "loss"], feeds, trace=True)
    assert session.trace is not None
    return session.trace


def made_up(graph: Graph, seconds: tuple[float, ...], *, thread: str = "MainThread") -> Trace:
    """A trace in which the nodes that compute took these seconds, and gave 1,000 bytes each."""
    at, events = 0.0, []
    for node, took in zip([n for n in graph.nodes if n.op.startswith("aten")], seconds, strict=True):
        events.append(Event(node, at, at + took, 1000, "cpu", thread))
        at += took
    return Trace(graph, (graph.nodes[-1].value(),), tuple(events), ((0.0, 0), (0.5, 2000), (1.0, 1000)), at, 0)


@pytest.mark.parametrize("text", NASTY)
def test_a_name_adds_no_element_and_no_attribute(text: str) -> None:
    pages = [Page(trace_html(made_up(graph(name), (0.7, 0.3), thread=name))) for name in ("plain", text)]
    assert set(pages[1].tags) <= set(pages[0].tags)
    assert pages[1].tags.count("script") == 3
    assert pages[1].attributes <= pages[0].attributes


def test_boxes_are_coloured_by_their_share_of_the_step() -> None:
    names = made_up(graph("plain"), (0.7, 0.1))
    drawing = Drawing(names.graph, trace=names)
    boxes = {box.node.id: box for box in drawing.root.walk() if not box.children}
    first, second = (boxes[event.node.id] for event in names.events)
    assert [drawing.painter.tone(box) for box in (first, second, drawing.root)] == ["heat4", "heat3", "heat4"]
    assert drawing.painter.tone(boxes[names.graph.placeholders[0].id]) == "plain"
    assert [words for words, _ in live(drawing)["legend"]] == ["over 33 % of the time", "11 % of the time"]
    assert "700.00 ms · 88 %" in drawing.card(first).svg
    assert "1000 bytes · 50 %" in Drawing(names.graph, trace=names, by="bytes").card(first).svg
    with pytest.raises(InvalidArgument, match="not by 'flops'"):
        Drawing(names.graph, trace=names, by="flops")


def test_a_plain_drawing_knows_no_heat(digits: Graph) -> None:
    assert "--heat" not in graph_html(digits) and 'class="tfnb-timeline"' not in graph_html(digits)


def test_every_event_is_a_bar_that_names_its_box(trace: Trace) -> None:
    html = trace_html(trace)
    drawing = Drawing(trace.graph, trace=trace)
    bars = re.findall(r'<rect class="card" data-box="([\d.]+)" data-node="([^"]+)"', html)
    assert sorted(name for _, name in bars) == sorted(event.name for event in trace.events if event.node)
    for key, name in bars:
        assert drawing.root.at(tuple(map(int, key.split(".")))).node.name == name


def test_a_bar_says_op_time_bytes_and_line() -> None:
    html = trace_html(made_up(graph("plain"), (0.7, 0.3)))
    words = ("plain_1", "aten.div.Tensor_mode", "700.00 ms from 0 us", "1000 bytes on cpu", "plain line 1:  plain")
    assert "\n".join(words) in html


def test_bars_and_curve_have_the_lengths_of_the_trace() -> None:
    html = trace_html(made_up(graph("plain"), (0.7, 0.3)))
    wide = [float(w) for w in re.findall(r'data-node="[^"]*" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', html)]
    assert wide == pytest.approx([0.7 * 944, 0.3 * 944], abs=0.1)
    assert "live bytes, at most 2,000</title>" in html
    (path,) = re.findall(r'<path class="card" d="M8,132([^"]*)Z"', html)
    assert path == "H8V132H480V62H952V97H952V132"  # nothing, all of it from the middle on, half at the end


def test_only_the_longest_bars_of_a_long_run_are_drawn() -> None:
    short = made_up(graph("plain"), (0.7, 0.3))
    events = tuple(event for event in short.events for _ in range(3000))
    html = trace_html(Trace(short.graph, short.fetches, events, short.live, short.seconds, 0))
    assert html.count("data-box=") == 3000
    assert "the 3,000 shortest of 6,000 bars are left out" in html


def test_tables_show_as_many_rows_as_asked(trace: Trace) -> None:
    html = trace_html(trace)
    assert [html.count(f"<summary>{word}</summary>") for word in ("nodes", "operations", "lines", "scopes")] == [1] * 4
    assert html.count("<tr>") <= 4 * (trace.rows + 1)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as driver:
        yield driver


@pytest.mark.browser
def test_a_bar_lights_its_box_and_a_box_its_bars(driver: Any, trace: Trace, tmp_path: Path) -> None:
    page = Browsed(driver, tmp_path, trace_html(trace))
    widest = (
        "[...document.querySelectorAll('.tfnb-timeline rect[data-box]')]"
        ".sort((a, b) => b.getBoundingClientRect().width - a.getBoundingClientRect().width)[0]"
    )
    bar = page.js(f"return {widest}")
    page.js("arguments[0].scrollIntoView({block: 'center'})", bar)
    page.hands().move_to_element(bar).perform()
    key = bar.get_attribute("data-box")
    pointed = page.wait("document.querySelector('.box.pointed')?.dataset.key")
    assert key == pointed or key.startswith(f"{pointed}.")
    box = page.box(pointed)
    page.js("arguments[0].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))", box)
    lit = page.wait("[...document.querySelectorAll('.tfnb-timeline .lit')].map(el => el.dataset.box)")
    assert key in lit and all(f"{name}.".startswith(f"{pointed}.") for name in lit)
    bar.click()  # unfolds what holds the node
    assert page.wait(f"document.querySelector('.box[data-key=\"{key}\"]')")
    assert page.errors() == []


@pytest.mark.browser
def test_kernels_have_a_lane_whose_bars_light_boxes_and_heat_is_seen(driver: Any, tmp_path: Path) -> None:
    graph = models.digits()
    session = tfnb.Session(graph)
    feeds = {"x": torch.rand(16, 1, 8, 8), "y": torch.randint(0, 10, (16,))}
    session.run(["step", "loss"], feeds, trace="kernels")
    page = Browsed(driver, tmp_path, trace_html(session.trace))
    assert page.js("return [...document.querySelectorAll('.tfnb-timeline svg text')].map(t => t.textContent)").count(
        "torch, cpu"
    )
    bars = "[...document.querySelectorAll('.tfnb-timeline rect[data-node^=\"aten::convolution\"]')]"
    bar = page.js(f"return {bars}[0]")
    page.js("arguments[0].scrollIntoView({block: 'center'})", bar)
    page.js("arguments[0].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))", bar)
    pointed = page.wait("document.querySelector('.box.pointed')?.dataset.key")
    assert bar.get_attribute("data-box").startswith(pointed)
    ring = "return getComputedStyle(document.querySelector('.box.pointed > .face > rect')).stroke"
    assert page.js(ring) == "rgb(238, 123, 21)"
    hot = {"heat1": "253, 235, 200", "heat2": "251, 212, 154", "heat3": "247, 174, 114", "heat4": "239, 129, 97"}
    seen = page.js("""return [...document.querySelectorAll('.face[class*=t-heat] > .card:first-child')].map(
        card => [card.parentNode.getAttribute('class').match(/heat\\d/)[0], getComputedStyle(card).fill])""")
    assert seen and all(fill == f"rgb({hot[tone]})" for tone, fill in seen if tone in hot)
    assert any(tone in hot for tone, _ in seen) and page.errors() == []


@pytest.mark.browser
def test_a_narrow_page_keeps_the_tables_within_it(trace: Trace, tmp_path: Path) -> None:
    with browser(size="520,900") as narrow:
        page = Browsed(narrow, tmp_path, trace_html(trace))
        page.js("document.querySelectorAll('details').forEach(one => one.open = true)")
        tables = "[...document.querySelectorAll('table')].map(one => one.getBoundingClientRect().width)"
        assert max(page.js(f"return {tables}")) > 520  # it is the tables that would be too wide
        assert page.js("return document.documentElement.scrollWidth") <= 520


def test_a_legend_lists_the_colours_of_boxes_and_not_that_of_the_whole() -> None:
    """Four ops take a quarter each. Of a module one op is added: its frame has the colour of a change, told of none."""
    with tfnb.record() as shares:
        x = tfnb.placeholder(torch.ones(2))
        a = torch.sin(x)
        b = torch.cos(x)
        c = torch.exp(x)
        d = torch.tan(x)
    assert len({a, b, c, d}) == 4
    drawing = Drawing(shares, trace=made_up(shares, (0.25,) * 4))
    assert [words for words, _ in live(drawing)["legend"]] == ["11 % of the time"]
    with tfnb.record() as graph:
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())(tfnb.placeholder(torch.ones(1, 2)))
    added = next(node.id for node in graph.nodes if "relu" in node.op)
    assert [words for words, _ in live(Drawing(graph, marks={added: "added"}))["legend"]] == ["added"]


def over_places(graph: Graph, name: str) -> Trace:
    """A trace of a cluster whose places and messages have this name."""
    node = next(node for node in graph.nodes if node.op.startswith("aten"))
    events = tuple(Event(of, 0.0, 0.2, 10, "cpu", place, call=name) for of, place in ((node, name), (None, "ps:0")))
    sent = Transmission(name, "ps:0", 0.3, 0.5, 2048, None, name), Transmission("ps:0", name, 0.5, 0.6, 0, node)
    clocks = {name: 1e-6, "ps:0": 0.0}
    return Trace(graph, (node.value(),), events, (), 1.0, 0, transmissions=sent, clocks=clocks)


@pytest.mark.parametrize("text", NASTY)
def test_names_of_places_and_messages_are_text(text: str) -> None:
    pages = [Page(trace_html(over_places(graph(name), name))) for name in ("plain", text)]
    assert set(pages[1].tags) <= set(pages[0].tags) and pages[1].attributes <= pages[0].attributes
    assert pages[1].tags.count("script") == 3


def test_a_message_is_a_bar_on_its_link_and_an_arrow_between_places() -> None:
    trace = over_places(graph("plain"), "task:0")
    assert trace.lanes == (("task:0", "cpu"), ("ps:0", "cpu"))
    assert trace.links == (("task:0 → ps:0", "link"), ("ps:0 → task:0", "link"))
    html = trace_html(trace)
    assert "task:0\ntask:0 → ps:0\n200.00 ms from 300.00 ms\n2.0 KB" in html
    # 944 pixels a second from 8 on; the lanes' middles are at 27 and 67, the first link's bars at 94
    assert 'd="M291.20,27L480.00,67m-3,-5l3,5l3,-5"' in html
    assert 'x="291.20" y="94" width="188.80"' in html
    assert "clocks are aligned within 1.0 us (task:0)" in html and "at once" not in html
