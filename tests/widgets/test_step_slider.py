"""The slider over the steps of a live view, in a real browser; its Python in a kernel is in tests/magics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.view.browser import MODEL, Page, browser
from tests.view.loops import HOME, RIGHT
from tfnb.widgets.step_slider import StateHistory, _StepSliderWidget

CARD = '<div><b>step {0}</b><svg width="9" height="9"><g tabindex="0"><title>task:0</title></g></svg>{1}</div>'
DETAILS = "<details><summary>more</summary><span>inside</span></details>"
STATIC = '<div id="out"><div data-tfnb="live-1">static</div></div>'


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as driver:
        yield driver


class Slider(Page):
    """A page with the widget, which hears what Python would send."""

    def __init__(self, driver: Any, folder: Path, *, most: int = 120) -> None:
        self.history = StateHistory(most)
        self.history.add(1, CARD.format(1, DETAILS))
        state = {"html": CARD.format(1, DETAILS), "twin": "live-1"}
        data = json.dumps({"esm": _StepSliderWidget._esm, "state": state}).replace("</", "<\\/")
        super().__init__(driver, folder, STATIC + MODEL % ("", data))
        self.wait("window.ready")

    def tell(self, message: dict[str, Any]) -> None:
        self.js("window.model.emit('msg:custom', arguments[0])", message)

    def show(self, step: int, html: str | None = None) -> None:
        state = self.history.add(step, CARD.format(step, DETAILS) if html is None else html)
        self.tell({"kind": "state", **state._asdict(), "kept": [each.number for each in self.history.states]})

    def past(self) -> None:
        self.tell({"kind": "states", "states": list(self.history.states)})

    @property
    def shown(self) -> str:
        return str(self.js("return document.querySelector('#one b')?.textContent ?? ''"))

    @property
    def words(self) -> str:
        return str(self.js("return document.querySelector('#one input').nextSibling.textContent"))

    def slide(self, *keys: str) -> None:
        self.js("document.querySelector('#one input').focus()")
        self.keys(*keys)


def test_an_earlier_step_is_chosen_and_stands_still_until_now_is_asked_for(driver, tmp_path):
    page = Slider(driver, tmp_path)
    assert page.js("return window.model.sent") == [{"kind": "past"}]
    assert page.shown == "step 1" and not page.js("return document.querySelector('#one input').offsetHeight")
    page.past()
    for step in (20, 300, 4000):
        page.show(step)
    assert (page.shown, page.words) == ("step 4000", "step 4,000")
    page.slide(HOME, RIGHT)
    assert (page.shown, page.words) == ("step 20", "step 20 of 4,000")
    page.show(5000)
    assert (page.shown, page.words) == ("step 20", "step 20 of 5,000")
    page.js("document.querySelector('#one button').click()")
    assert page.shown == "step 5000" and page.js("return document.querySelector('#one button').disabled")
    page.show(6000)
    assert page.shown == "step 6000"
    assert page.errors() == []


def test_two_views_share_the_states_and_one_that_begins_late_has_them_all(driver, tmp_path):
    page = Slider(driver, tmp_path)
    page.past()
    page.show(2)
    page.js("window.view('two')")
    assert page.js("return [...document.querySelectorAll('input')].map((one) => one.max)") == ["1", "1"]
    page.slide(HOME)
    assert page.js("return [...document.querySelectorAll('b')].map((one) => one.textContent)") == ["step 1", "step 2"]


def test_states_that_came_before_the_answer_stay(driver, tmp_path):
    page = Slider(driver, tmp_path)
    page.show(2)
    page.show(3)
    page.past()
    assert page.words == "step 3" and page.js("return document.querySelector('#one input').max") == "2"


def test_a_thinned_state_that_is_looked_at_gives_way_to_the_one_before(driver, tmp_path):
    page = Slider(driver, tmp_path, most=4)
    page.past()
    for step in (2, 3, 4):
        page.show(step)
    page.slide(HOME, RIGHT)
    assert page.shown == "step 2"
    page.show(5)
    assert page.shown == "step 1" and page.js("return document.querySelector('#one input').max") == "2"


def test_focus_and_open_details_outlive_a_renewal(driver, tmp_path):
    page = Slider(driver, tmp_path)
    page.past()
    page.js("document.querySelector('#one summary').click(); document.querySelector('#one [tabindex]').focus()")
    page.show(2)
    assert page.shown == "step 2" and page.js("return document.querySelector('#one details').open")
    assert page.js("return document.activeElement.querySelector('title')?.textContent") == "task:0"
    assert page.js("return document.querySelector('#one').contains(document.activeElement)")


def test_the_static_output_is_hidden_while_there_is_a_view_however_often_it_is_renewed(driver, tmp_path):
    page = Slider(driver, tmp_path)
    high = "return document.querySelector('[data-tfnb]').offsetHeight"
    assert not page.js(high)
    page.js("document.getElementById('out').innerHTML = arguments[0]", '<div data-tfnb="live-1">renewed</div>')
    assert not page.js(high)
    page.js("window.cleanup(); document.getElementById('one').replaceChildren()")
    assert page.js(high) > 0


def test_nothing_of_a_state_is_executed(driver, tmp_path):
    page = Slider(driver, tmp_path)
    page.past()
    page.show(
        2, '<div><b>step 2</b><img src="x" onerror="window.bad = 1"><span onclick="1">a</span><iframe></iframe></div>'
    )
    assert page.shown == "step 2"
    assert page.js("return document.querySelector('#one').innerHTML").count("<") and not page.js("return window.bad")
    assert not page.js("return document.querySelector('#one :is(img, iframe, [onclick])')")


@given(st.lists(st.integers(0, 3), max_size=300), st.integers(2, 9))
def test_a_history_is_bounded_has_both_ends_and_is_even(more, most):
    history, step, told = StateHistory(most), 0, []
    for grown in more:
        step += grown
        told.append(step)
        history.add(step, str(len(told)))
    states = history.states
    assert len(states) <= most
    if not told:
        return
    different = list(dict.fromkeys(told))
    assert states[0].step == different[0] and states[-1].step == different[-1] and states[-1].html == str(len(told))
    places = [different.index(state.step) for state in states]
    gaps = {later - sooner for sooner, later in pairwise(places[:-1])}
    assert len(gaps) <= 1 and len(set(state.number for state in states)) == len(states)
