"""Traced runs in the live drawing, in a real browser: sliders, sides, the timeline, and pictures that are replaced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.view.browser import MODEL, browser
from tests.view.loops import END, FED, HOME, RIGHT, Loops, nested, while_with_a_branch
from tfnb.magics.live import LiveDrawing, Lives
from tfnb.widgets import GraphWidget


class Live(Loops):
    """A page with a live drawing, whose messages its Python answers."""

    def __init__(self, driver: Any, folder: Path, graph: tfnb.Graph) -> None:
        self.live = LiveDrawing(graph, None)
        self.widget = self.live.widget
        state = {name: getattr(self.widget, name) for name in ("picture", "twin", "selection", "chosen")}
        data = json.dumps({"esm": GraphWidget._esm, "state": state}).replace("</", "<\\/")
        super().__init__(driver, folder, MODEL % (GraphWidget._css, data))
        super().wait("window.ready")

    def run(self, y: Any, feeds: Any) -> None:
        """A traced run, in whatever session, and the end of its cell."""
        tfnb.Session(self.live.graph, compile="off").run(y, feeds, trace=True)
        self.live.follow()
        self.js("window.model.set('picture', arguments[0])", json.loads(json.dumps(self.widget.picture)))
        self.answer()

    def answer(self) -> None:
        """What Python answers to all that was asked, and to what that makes the page ask."""
        asked = True
        while asked:
            asked = self.js("return window.model.sent.splice(0)")
            for message in asked:
                if message["kind"] == "layout":
                    laid = {"kind": "layout", "opened": message["opened"]} | {
                        "svg": self.live.drawing.picture(message["opened"])
                    }
                    self.js("window.model.emit('msg:custom', arguments[0])", laid)
                    continue
                found = self.live.drawing.face(message["scope"], unfolded=message["kind"] == "unfold")
                face = {"kind": "face", "scope": message["scope"], "svg": found}
                self.js("window.model.emit('msg:custom', arguments[0])", face)
            self.driver.execute_async_script("setTimeout(arguments[0], 20)")

    def wait(self, code: str) -> Any:
        self.answer()
        return super().wait(code)

    def click(self, key: str) -> None:
        super().click(key)
        self.answer()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser(size="1300,1200") as driver:
        yield driver


@pytest.fixture
def program() -> tuple[tfnb.Graph, Any, Any]:
    return while_with_a_branch()


@pytest.fixture
def page(driver: Any, tmp_path: Path, program: tuple[tfnb.Graph, Any, Any]) -> Iterator[Live]:
    page = Live(driver, tmp_path, program[0])
    page.unfold()
    yield page
    assert page.errors() == []


@pytest.mark.browser
def test_a_traced_run_gives_the_live_drawing_its_slider(page: Live, program: Any) -> None:
    _, x, y = program
    assert page.sliders() == []
    page.run(y, {x: FED})
    (slider,) = page.sliders()
    fed = FED.double()
    for iteration in (1, 2, 3):
        assert page.slide(slider, RIGHT) == f"iteration {iteration} of 3"
        rows = page.card("norm")
        assert f"{fed.norm():.3g}" in rows and any(re.fullmatch(r"[\d.]+ [um]s", row) for row in rows), rows
        fed = fed / 2
    assert (page.opacity("then"), page.opacity("else")) == (pytest.approx(0.35), 1)
    page.slide(slider, HOME, RIGHT)
    assert (page.opacity("then"), page.opacity("else")) == (1, pytest.approx(0.35))
    assert page.js("return model.get('chosen')") == [0] and page.js("return model.saved") >= 5


@pytest.mark.browser
def test_what_was_zoomed_stays_so_and_else_the_view_fits(page: Live, program: Any) -> None:
    _, x, y = program
    page.run(y, {x: FED})
    page.js("document.querySelector('button[aria-label=\"Zoom in\"]').click()")
    page.js("document.querySelector('button[aria-label=\"Show the whole graph\"]').click()")
    page.run(y, {x: FED})
    left, top, wide, tall = page.view()  # times on the cards, and so their widths, differ from run to run
    whole, height = (page.js(f"return +document.querySelector('svg.tfnb .level').dataset.{side}") for side in "wh")
    assert abs(2 * left + wide - whole) < 1
    edge = page.js("return document.querySelector('svg.tfnb').getBoundingClientRect().bottom")
    boxes = "[...document.querySelectorAll('.box:not([aria-expanded=\"true\"])')]"
    last = page.js(f"return Math.max(...{boxes}.map(box => box.getBoundingClientRect().bottom))")
    assert last <= edge, "its end, which is the result, is in view"
    assert top == pytest.approx(max(0, height - tall), abs=24), "no further down than its end needs"
    page.js("document.querySelector('button[aria-label=\"Zoom in\"]').click()")
    zoomed = page.view()
    page.run(y, {x: FED})
    assert page.view() == zoomed


@pytest.mark.browser
def test_what_was_unfolded_stays_so_and_folding_works(page: Live, program: Any) -> None:
    _, x, y = program
    opened = "[...document.querySelectorAll('.box[aria-expanded=\"true\"]')].map(b => b.dataset.key)"
    before = page.js(f"return {opened}")
    page.run(y, {x: FED})
    assert page.js(f"return {opened}") == before
    key = page.key("body")
    page.click(key)
    page.run(y, {x: FED})
    assert page.box(key).get_attribute("aria-expanded") == "false"
    page.click(key)
    (slider,) = page.sliders()
    assert page.slide(slider, HOME, RIGHT) == "iteration 1 of 3" and f"{FED.norm():.3g}" in page.card("norm")


@pytest.mark.browser
def test_a_second_run_replaces_the_first_and_keeps_the_iteration(page: Live, program: Any) -> None:
    _, x, y = program
    page.run(y, {x: FED})
    page.slide(page.sliders()[0], HOME, RIGHT, RIGHT)
    page.run(y, {x: 8 * FED})
    (slider,) = page.sliders()
    assert slider.get_attribute("aria-valuetext") == "iteration 2 of 6" and f"{4 * FED.norm():.3g}" in page.card("norm")
    assert page.js("return document.querySelectorAll('#one .tfnb-timeline').length") == 1
    page.slide(slider, END)
    page.run(y, {x: FED})  # which has no sixth iteration
    assert page.sliders()[0].get_attribute("aria-valuetext") == "all 3 iterations"


@pytest.mark.browser
def test_a_graph_that_grew_is_drawn_with_what_is_new(page: Live, program: Any) -> None:
    graph, x, y = program
    page.run(y, {x: FED})
    names = {"owner": "cell:2", "label": "In[2]", "filename": "", "namespace": {}}
    with tfnb.recording.record_cell(graph.name, **names):
        doubled = y * 2
    page.run(doubled, {x: FED})
    assert page.js("return [...document.querySelectorAll('.box')].some(b => /mul/.test(b.textContent))")
    page.unfold()
    (slider,) = page.sliders()
    assert page.slide(slider, HOME, RIGHT) == "iteration 1 of 3" and f"{FED.norm():.3g}" in page.card("norm")


def test_a_click_inside_of_a_loop_tells_the_values_of_its_iterations() -> None:
    graph, x, y = nested()
    live = LiveDrawing(graph, None)
    inside = next(node.name for node in live.drawing.contents.nodes if node.name.endswith("mul"))
    assert "trace=True" in live.fetch(inside)["preview"]
    tfnb.run(y, {x: torch.tensor([1.0, 5.0, 3.0])}, trace=True)
    live.follow()
    told = live.fetch(inside)["preview"].splitlines()
    assert told == [f"iteration {k} in iteration {n}: float32[] {v}" for k, n, v in ((1, 1, 2), (2, 1, 4), (1, 3, 6))]
    assert live.fetch("x")["preview"].startswith("float32[B]: ok") and live.widget._value("nothing")["error"]


@pytest.mark.browser
def test_views_of_one_widget_share_the_iteration(page: Live, program: Any) -> None:
    _, x, y = program
    page.run(y, {x: FED})
    page.slide(page.sliders()[0], HOME, RIGHT, RIGHT)
    page.js("window.other = view('two')")
    while page.js("return !!document.querySelector('#two .box[aria-expanded=\"false\"]')"):
        page.js("[...document.querySelectorAll('#two button')].find(b => b.textContent === 'Unfold').click()")
        page.answer()
    texts = "[...document.querySelectorAll('.iterations')].map(s => s.getAttribute('aria-valuetext'))"
    assert page.js(f"return {texts}") == ["iteration 2 of 3"] * 2
    page.slide(page.sliders()[1], RIGHT)
    assert page.js(f"return {texts}") == ["iteration 3 of 3"] * 2
    page.js("window.cleanup(); document.getElementById('one').replaceChildren()")
    page.slide(page.sliders()[0], HOME)
    assert page.js(f"return {texts}") == ["all 3 iterations"]


@pytest.mark.browser
def test_the_timeline_follows_the_iteration_and_leads_to_it(driver: Any, tmp_path: Path) -> None:
    graph, x, y = nested()
    page = Live(driver, tmp_path, graph)
    page.unfold()
    page.run(y, {x: torch.tensor([1.0, 5.0, 3.0])})
    outer, inner = page.sliders()
    bars = "[...document.querySelectorAll('.tfnb-timeline [data-iteration]')]"
    pale = f"{bars}.map(b => [b.dataset.iteration, b.matches('.pale')])"
    assert not any(is_pale for _, is_pale in page.js(f"return {pale}"))
    page.slide(outer, HOME, RIGHT)
    loops = [iterations.depth for iterations in graph.attached["trace"].loops]
    first, second = loops.index(1), loops.index(2)
    inside = {
        at for at, iteration in enumerate(graph.attached["trace"].loops[second].kept) if iteration.around.number == 0
    }
    for name, is_pale in page.js(f"return {pale}"):
        loop, iteration = map(int, name.split())
        assert is_pale == ((iteration != 0) if loop == first else iteration not in inside), name
    page.slide(outer, HOME)
    bar = page.js(f"return document.querySelector('.tfnb-timeline [data-iteration=\"{second} 2\"][data-node*=mul]')")
    page.js("arguments[0].dispatchEvent(new MouseEvent('click', { bubbles: true }))", bar)
    assert outer.get_attribute("aria-valuetext") == "iteration 3 of 3"  # the second element took no iteration
    assert inner.get_attribute("aria-valuetext") == "iteration 1 of 1" and "6" in page.card("mul")
    assert page.errors() == []


@pytest.mark.browser
def test_markup_of_no_timeline_does_nothing(page: Live) -> None:
    bad = (
        '<div class="tfnb-timeline" onclick="window.hacked = 1"><svg><rect data-box="0"/></svg>'
        '<img src="x" onerror="window.hacked = 1"><script>window.hacked = 1</script></div>'
    )
    page.js("window.model.set('picture', { ...model.get('picture'), timeline: arguments[0] })", bad)
    page.js("document.querySelector('.tfnb-timeline rect').dispatchEvent(new MouseEvent('click', { bubbles: true }))")
    assert page.js("return [window.hacked || 0, document.querySelectorAll('#one script, #one img').length]") == [0, 0]


def test_a_cell_run_again_has_one_live_drawing(program: tuple[tfnb.Graph, Any, Any]) -> None:
    graph, x, y = program
    lives = Lives()
    first, other = lives.make(graph, None, "cell:1"), lives.make(graph)
    again = lives.make(graph, None, "cell:1")
    tfnb.run(y, {x: FED}, trace=True)
    lives.follow()
    sliders = [bool(live.widget.picture["iterations"]) for live in (first, other, again)]
    assert sliders == [False, True, True] and first.widget.comm is None
    assert lives.make(graph).with_run().widget.picture["iterations"]
