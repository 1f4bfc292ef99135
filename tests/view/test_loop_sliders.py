"""Sliders over the iterations of loops, lit and grey sides and folding, in a real browser and in what a page holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.view.browser import browser, unpacked
from tests.view.loops import END, FED, HOME, LEFT, RIGHT, TITLED, Loops, nested, traced, while_with_a_branch
from tfnb.execution import Trace
from tfnb.execution.tracing.iterations import LoopTrace, ValueSummary
from tfnb.view import Drawing, graph_html, loop_sliders, trace_html

# -- what a page holds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (ValueSummary(torch.float32, (), (0.123456,)), "0.123"),
        (ValueSummary(torch.int64, (2,), (3, 1234567)), "[3, 1234567]"),
        (ValueSummary(torch.float32, (9,), (-1.0, 2.5)), "-1 to 2.5"),
        (ValueSummary(torch.float32, (9,), (2.0, 2.0)), "2"),
        (ValueSummary(torch.float32, (9,), (), 2, 1), "2 NaN, 1 infinite"),
        (ValueSummary(torch.float32, (0, 3)), ""),
        (ValueSummary(torch.complex64, (5,)), ""),
    ],
)
def test_values_in_words(seen: ValueSummary, words: str) -> None:
    assert loop_sliders.value(seen) == words


def test_only_a_traced_loop_has_a_slider() -> None:
    graph, x, y = while_with_a_branch()
    assert 'class="tfnb-iterations"' not in graph_html(graph) and "function tfnbIterations" not in graph_html(graph)
    html = trace_html(traced((graph, x, y), FED))
    assert html.count('class="tfnb-iterations"') == 1
    none = traced((graph, x, y), FED * 0)  # no iteration at all
    assert none.loops[0].total == 0 and 'class="iterations"' not in trace_html(none)


def test_every_nth_iteration_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced(while_with_a_branch(), FED * 64)
    (loop,) = trace.loops
    few = LoopTrace(
        loop.path, None, [iteration for iteration in loop.kept if iteration.number % 4 == 0], 4, loop.total, 1
    )
    found = re.findall(r'class="tfnb-iterations">(.*?)</script>', trace_html(Trace(
        trace.graph, trace.fetches, trace.events, trace.live, trace.seconds, 0, inside=trace.inside, loops=(few,)
    )))  # fmt: skip
    (data,) = map(unpacked, found)
    assert data["loops"][0]["every"] == 4 and [n for n, _ in data["loops"][0]["iterations"]] == [0, 4, 8]


def test_arguments_that_nobody_uses_are_not_drawn() -> None:
    graph, *_ = while_with_a_branch()
    drawing = Drawing(graph)
    arguments = [box for box in drawing.root.walk() if not box.children and box.node.op == "tfnb.argument"]
    users = {value.node for node in drawing.contents.nodes for value in node.inputs}
    assert arguments and all(box.node.id in users for box in arguments)


# -- the browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser(size="1300,1200") as driver:
        yield driver


@pytest.fixture
def page(driver: Any, tmp_path: Path) -> Iterator[Loops]:
    page = Loops(driver, tmp_path, trace_html(traced(while_with_a_branch(), FED)))
    page.unfold()
    yield page
    assert page.errors() == []


@pytest.mark.browser
def test_a_slider_shows_the_values_and_times_of_an_iteration(page: Loops) -> None:
    (slider,) = page.sliders()
    assert page.slide(slider, HOME) == "all 3 iterations"
    assert "4 times" in page.card("norm") and any("%" in row for row in page.card("norm"))  # once it did not hold
    y = FED.double()
    for iteration, key in enumerate((RIGHT, RIGHT, RIGHT), 1):
        assert page.slide(slider, key) == f"iteration {iteration} of 3"
        rows = page.card("norm")
        assert f"{y.norm():.3g}" in rows and any(re.fullmatch(r"[\d.]+ [um]s", row) for row in rows), rows
        assert re.search(rf"iteration {iteration} of 3: float32\[\]  {y.norm():.3g}\n[\d.]+ [um]s$", page.tip("norm"))
        assert f"float32[3, 2]  {y.min():.3g} to {y.max():.3g}" in page.tip("y")
        y = y / 2
    assert page.slide(slider, RIGHT) == "iteration 3 of 3"
    assert page.slide(slider, HOME) == "all 3 iterations" and "4 times" in page.card("norm")
    assert page.slide(slider, END, LEFT) == "iteration 2 of 3"


@pytest.mark.browser
def test_the_side_that_an_iteration_took_is_lit_and_the_other_grey(page: Loops) -> None:
    (slider,) = page.sliders()
    assert (page.opacity("then"), page.opacity("else")) == (1, 1)  # both ran
    page.slide(slider, HOME, RIGHT)
    assert (page.opacity("then"), page.opacity("else")) == (1, pytest.approx(0.35))
    assert page.opacity("matmul") == pytest.approx(0.35)  # not twice
    page.slide(slider, RIGHT)
    assert (page.opacity("then"), page.opacity("else"), page.opacity("matmul")) == (pytest.approx(0.35), 1, 1)


@pytest.mark.browser
def test_a_run_that_took_one_side_greys_the_other_and_heats_its_own(driver: Any, tmp_path: Path) -> None:
    page = Loops(driver, tmp_path, trace_html(traced(while_with_a_branch(), FED / 6)))
    page.unfold()
    assert (page.opacity("then"), page.opacity("else"), page.opacity("matmul")) == (1, *[pytest.approx(0.35)] * 2)
    tone = f"return {TITLED}.querySelector(':scope > .face').getAttribute('class')"
    assert "heat" in page.js(tone, "then") and page.js(tone, "else") == "face t-plain"
    assert page.errors() == []


@pytest.mark.browser
def test_a_slider_is_dragged_without_moving_the_drawing(page: Loops) -> None:
    (slider,) = page.sliders()
    page.js("document.querySelector('button[aria-label=\"Show the whole graph\"]').click()")
    before, boxes = page.view(), page.js("return document.querySelectorAll('.box').length")
    track = page.js("return arguments[0].querySelector('.track')", slider)
    wide = page.js("return arguments[0].getBoundingClientRect().width", track)
    hands = page.hands().move_to_element_with_offset(track, -int(wide / 2) + 1, 0).click_and_hold()
    hands.move_by_offset(int(wide * 2 / 3), 0).release().perform()
    assert slider.get_attribute("aria-valuetext") == "iteration 2 of 3"
    assert page.view() == before and page.js("return document.querySelectorAll('.box').length") == boxes


@pytest.mark.browser
def test_folding_and_unfolding_keeps_the_iteration(page: Loops) -> None:
    (slider,) = page.sliders()
    page.slide(slider, HOME, RIGHT)
    key = page.key("body")
    page.click(key)
    assert page.box(key).get_attribute("aria-expanded") == "false"
    page.click(key)
    assert page.box(key).get_attribute("aria-expanded") == "true"
    norm = f"{FED.norm():.3g}"
    assert norm in page.card("norm") and page.sliders()[0].get_attribute("aria-valuetext") == "iteration 1 of 3"
    page.js("[...document.querySelectorAll('button')].find(b => b.textContent === 'Fold').click()")
    page.wait("!document.querySelector('.iterations')")
    page.unfold()
    assert norm in page.card("norm") and page.sliders()[0].get_attribute("aria-valuetext") == "iteration 1 of 3"


@pytest.mark.browser
def test_a_loop_in_a_loop_has_a_slider_of_its_own(driver: Any, tmp_path: Path) -> None:
    page = Loops(driver, tmp_path, trace_html(traced(nested(), torch.tensor([1.0, 5.0, 3.0]))))
    page.unfold()
    outer, inner = page.sliders()
    assert (page.slide(outer, HOME), page.slide(inner, HOME)) == ("all 3 iterations", "all 3 iterations")
    assert page.slide(inner, RIGHT) == "iteration 1 of 2"  # of the first iteration around it
    assert outer.get_attribute("aria-valuetext") == "iteration 1 of 3" and "2" in page.card("mul")
    assert page.slide(inner, RIGHT) == "iteration 2 of 2" and "4" in page.card("mul")
    assert page.slide(outer, RIGHT) == "iteration 2 of 3"
    assert inner.get_attribute("aria-valuetext") == "all 0 iterations" and "not run" in page.card("mul")
    assert page.opacity("mul") == pytest.approx(0.35)
    assert page.slide(outer, RIGHT) == "iteration 3 of 3"
    assert inner.get_attribute("aria-valuetext") == "all 1 iteration" and "6" in page.card("mul")
    assert page.slide(outer, HOME) == "all 3 iterations" and "3 times" in page.card("mul")
    assert page.errors() == []


@pytest.mark.slow
@pytest.mark.browser
def test_a_saved_notebook_has_the_slider_without_a_kernel(driver: Any, tmp_path: Path) -> None:
    nbformat, nbconvert = pytest.importorskip("nbformat"), pytest.importorskip("nbconvert")
    made = nbformat.v4.new_notebook()
    data = {"text/html": trace_html(traced(while_with_a_branch(), FED)), "text/plain": "trace"}
    outputs = [nbformat.v4.new_output("display_data", data=data)]
    made.cells = [nbformat.v4.new_code_cell("%tfprof", outputs=outputs, execution_count=1)]
    html, _ = nbconvert.HTMLExporter().from_notebook_node(made)
    page = Loops(driver, tmp_path, html)
    page.unfold()
    (slider,) = page.sliders()
    assert page.slide(slider, HOME, RIGHT) == "iteration 1 of 3" and f"{FED.norm():.3g}" in page.card("norm")
