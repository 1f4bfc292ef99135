"""The static page in a real browser, with the network off."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import Page, browser, needs_browser
from tfnb.graph import Graph
from tfnb.view import graph_html
from tfnb.view.escape import packed

pytestmark = needs_browser


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as driver:
        yield driver


@pytest.fixture
def page(driver: Any, digits: Graph, tmp_path: Path) -> Iterator[Page]:
    page = Page(driver, tmp_path, graph_html(digits))
    yield page
    assert page.errors() == []


def place(page: Page, key: str) -> dict[str, float]:
    return dict(page.js("return arguments[0].getBoundingClientRect().toJSON()", page.box(key)))


def test_a_click_unfolds_and_folds_a_box(page: Page) -> None:
    conv = page.key("0 conv2d")
    page.js("document.querySelector('button[aria-label=\"Show the whole graph\"]').click()")
    before = place(page, conv)
    page.click(conv)
    inside = [f"{conv}.{i}" for i in range(3)]
    assert all(page.box(key) for key in inside)
    assert place(page, conv)["height"] > before["height"]
    page.hands().click().perform()  # the title is still under the pointer
    assert not any(page.box(key) for key in inside)
    assert place(page, conv) == pytest.approx(before, abs=1.5)


def test_boxes_never_overlap_after_unfolding(page: Page) -> None:
    for title in ("0 conv2d", "3 linear", "cross_entropy"):
        page.click(page.key(title))
    overlapping = page.js("""
        const bad = [];
        for (const level of document.querySelectorAll('.level')) {
          const boxes = [...level.children].filter(el => el.classList.contains('box'));
          for (const a of boxes) for (const b of boxes) {
            const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
            if (a !== b && p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1)
              bad.push([a.dataset.key, b.dataset.key]);
          }
          const frame = level.parentNode.querySelector(':scope > .frame');
          if (frame) for (const box of boxes) {
            const f = frame.getBoundingClientRect(), b = box.getBoundingClientRect();
            if (b.left < f.left || b.right > f.right || b.top < f.top || b.bottom > f.bottom) bad.push(box.dataset.key);
          }
        }
        return bad""")
    assert overlapping == []


def test_edges_meet_their_boxes_after_unfolding(page: Page) -> None:
    page.click(page.key("0 conv2d"))
    page.click(page.key("3 linear"))
    loose = page.js("""
        const loose = [];
        for (const wire of document.querySelectorAll('.wire[data-head]')) {
          const head = document.querySelector(`.box[data-key='${wire.dataset.head}']`);
          const [x, y] = head.getAttribute('transform').match(/-?[\\d.]+/g).map(Number);
          const d = wire.getAttribute('d').split('M')[1].match(/-?[\\d.]+/g).map(Number);
          const [ex, ey] = d.slice(-2), w = head.querySelector('rect').getAttribute('width');
          if (Math.abs(ey - y) > 1 || ex < x - 1 || ex > x + +w + 1) loose.push([wire.dataset.head, ex, ey, x, y]);
        }
        return loose""")
    assert loose == []


def test_unfold_and_fold_all(page: Page) -> None:
    count = "return document.querySelectorAll('.box').length"
    before = page.js(count)
    press = "[...document.querySelectorAll('button')].find(b => b.textContent === arguments[0]).click()"
    page.js(press, "Unfold")
    page.wait(f"document.querySelectorAll('.box').length > {before}")
    page.js(press, "Fold")
    page.wait("document.querySelectorAll('.box').length === 5")


def test_buttons_and_wheel_zoom(page: Page) -> None:
    wide = page.view()[2]
    page.js("document.querySelector('button[aria-label=\"Zoom in\"]').click()")
    assert page.view()[2] < wide
    page.js("document.querySelector('button[aria-label=\"Show the whole graph\"]').click()")
    wide = page.view()[2]
    wheel = """const svg = document.querySelector('svg.tfnb');
        const how = {deltaY: -200, clientX: 300, clientY: 300, bubbles: true, cancelable: true};
        const event = new WheelEvent('wheel', how);
        svg.dispatchEvent(event); return event.defaultPrevented"""
    page.js("document.activeElement.blur()")
    assert page.js(wheel) is False and page.view()[2] == wide  # the page scrolls until the drawing has focus
    page.js("document.querySelector('svg.tfnb').focus()")
    assert page.js(wheel) is True and page.view()[2] < wide


def test_dragging_pans(page: Page) -> None:
    svg = page.js("return document.querySelector('svg.tfnb')")
    before = page.view()
    page.hands().move_to_element_with_offset(svg, -300, 100).click_and_hold().move_by_offset(60, 40).release().perform()
    after = page.view()
    pixel = before[2] / page.js("return arguments[0].clientWidth", svg)
    assert after[:2] == pytest.approx([before[0] - 60 * pixel, before[1] - 40 * pixel], abs=2)
    assert after[2:] == before[2:]


@pytest.mark.parametrize("text", ["convolution", "CONVOLUTION", "/conv.*lution$/"])
def test_search_finds_and_reveals_what_is_folded(page: Page, text: str) -> None:
    conv = page.key("0 conv2d")
    search = page.js("return document.querySelector('input[type=search]')")
    search.send_keys(text)
    assert page.wait("document.querySelector('.tfnb-tally').textContent").endswith("found")
    assert "holds" in page.box(conv).get_attribute("class") or "hit" in page.box(conv).get_attribute("class")
    search.send_keys("\ue007")
    page.wait(
        "document.querySelector('.box.hit') && document.querySelector('.tfnb-tally').textContent.startsWith('1 of')"
    )
    search.send_keys("\ue00c")
    assert page.js("return document.querySelectorAll('.hit,.holds').length") == 0


def test_a_search_that_is_no_regex_is_text(page: Page) -> None:
    page.js("return document.querySelector('input[type=search]')").send_keys("/(/")
    assert page.wait("document.querySelector('.tfnb-tally').textContent") == "0 found"


def test_hovering_shows_name_spec_and_line(page: Page) -> None:
    relu = page.key("model/1/relu")
    text = page.js("return document.querySelector(`.box[data-key='${arguments[0]}'] text`)", relu)
    page.hands().move_to_element(text).perform()
    words = page.wait("!document.querySelector('.tfnb-tip').hidden && document.querySelector('.tfnb-tip').textContent")
    for part in ("model/1/relu", "aten.relu.default(", "float32[B, 16, 6, 6]", "logits = model(x)"):
        assert part in words
    assert page.js("return document.querySelectorAll('.wire.lit').length") == 2


def test_everything_works_by_keyboard(page: Page) -> None:
    page.js("document.querySelector('svg.tfnb').focus()")
    page.keys("\ue015")  # down: the first box
    assert page.js("return document.activeElement.dataset.key") == "0"
    page.keys("\ue015")  # along the edge
    model = page.js("return document.activeElement.dataset.key")
    assert model == page.key("model")
    page.keys("\ue007")  # enter folds
    assert page.box(model).get_attribute("aria-expanded") == "false"
    page.keys(" ")
    assert page.box(model).get_attribute("aria-expanded") == "true"
    wide = page.view()[2]
    page.keys("+")
    assert page.view()[2] < wide
    page.keys("/")
    assert page.js("return document.activeElement.type") == "search"


def test_boxes_have_labels_for_a_screen_reader(page: Page) -> None:
    assert page.js(
        "return [...document.querySelectorAll('.box')].every(b => b.getAttribute('aria-label') && b.tabIndex === -1)"
    )
    assert page.js("return document.querySelector('svg.tfnb').getAttribute('aria-label')").startswith("Graph digits")


def test_one_page_may_hold_a_drawing_twice(driver: Any, digits: Graph, tmp_path: Path) -> None:
    page = Page(driver, tmp_path, graph_html(digits) * 2)
    assert page.js(
        "return [...document.querySelectorAll('.tfnb-page')].map(p => p.querySelectorAll('.tfnb-tools').length)"
    ) == [1, 1]
    conv = page.key("0 conv2d")
    page.click(conv)
    assert page.js(f"return document.querySelectorAll('.box[data-key=\"{conv}.0\"]').length") == 1


def test_without_its_script_the_picture_stays(driver: Any, digits: Graph, tmp_path: Path) -> None:
    stripped = re.sub(r"<script.*?</script>|<style>.*?</style>", "", graph_html(digits), flags=re.DOTALL)
    page = Page(driver, tmp_path, stripped)
    shape = page.js("return document.querySelector('svg').getBoundingClientRect().toJSON()")
    assert shape["width"] > 300 and shape["height"] > 500
    assert page.js("return document.querySelectorAll('.box').length") > 10
    fill = page.js("return getComputedStyle(document.querySelector('.t-forward > .card')).fill")
    assert fill == "rgb(234, 241, 254)"


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_legible_on_light_and_dark_pages(dark: bool, digits: Graph, tmp_path: Path) -> None:
    with browser(dark=dark) as driver:
        page = Page(driver, tmp_path, graph_html(digits))
        contrasts = page.js("""
            const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
            const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => linear(v / 255));
              return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
            return [...document.querySelectorAll('.face > text')].map(text => {
              const ground = text.parentNode.querySelector(':scope > .card:not(:has(~ .card)), :scope > .frame');
              const [a, b] = [light(getComputedStyle(text).fill), light(getComputedStyle(ground).fill)];
              return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); })""")
        assert min(contrasts) > 4


def test_a_large_graph_says_what_only_the_live_drawing_unfolds(driver: Any, digits: Graph, tmp_path: Path) -> None:
    page = Page(
        driver,
        tmp_path,
        re.sub(r'(class="tfnb-faces">).*?</script>', rf"\1{packed({})}</script>", graph_html(digits)),
    )
    page.click(page.key("0 conv2d"))
    assert "live" in page.wait("document.querySelector('.tfnb-note').textContent")
