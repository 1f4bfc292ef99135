"""The static page in a real browser, with the network off."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.view.browser import Page, browser
from tfnb.graph import Graph
from tfnb.view import graph_html
from tfnb.view.escape import packed
from tfnb.view.style import LEGIBLE

pytestmark = pytest.mark.browser


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


def test_what_matches_inside_of_a_box_that_matches_is_one_hit(page: Page) -> None:
    search = page.js("return document.querySelector('input[type=search]')")
    search.send_keys("model")
    count = int(page.wait("document.querySelector('.tfnb-tally').textContent").split()[0])
    for place in range(1, count + 1):
        search.send_keys("\ue007")
        page.wait(f"document.querySelector('.tfnb-tally').textContent === '{place} of {count}'")
    page.wait(f"document.querySelectorAll('.box.hit').length === {count}")
    keys = page.js("return [...document.querySelectorAll('.box.hit')].map((box) => box.dataset.key)")
    assert not [key for key in keys for other in keys if other.startswith(f"{key}.")]


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


SHOWN = "[...document.querySelectorAll('.box')].filter(b => b.getBoundingClientRect().height)"
BOXES = f"return {SHOWN}.map(b => b.dataset.key)"
PANEL = "document.querySelector('.tfnb-panel')"


def test_escape_and_tab_stay_in_order(page: Page) -> None:
    page.js("document.activeElement.blur(); document.querySelector('.tfnb-tools button:last-of-type').focus()")
    page.keys("\ue004")  # tab: the drawing is one stop
    assert page.js("return document.activeElement === document.querySelector('svg.tfnb')")
    page.keys("\ue015", "\ue015", "\ue007", "\ue007")  # to the model, folded, unfolded
    page.hands().key_down("\ue008").send_keys("\ue015").key_up("\ue008").perform()  # shift and down: into it
    model = page.key("model")
    assert page.js("return document.activeElement.dataset.key") == f"{model}.0"
    page.keys("\ue00c")
    assert page.js("return document.activeElement.dataset.key") == model
    assert page.js(f"return {PANEL}.hidden") is False
    page.keys("\ue00c")
    page.keys("\ue00c")  # out of the outermost box the focus stays in the drawing
    assert page.js("return document.activeElement === document.querySelector('svg.tfnb')")
    assert page.js(f"return {PANEL}.hidden") is True


def test_details_stay_and_lead_on(page: Page) -> None:
    page.click(page.key("model/1/relu"))
    page.hands().move_by_offset(0, 400).perform()  # off the box, and off the drawing
    words = page.js(f"return {PANEL}.textContent")
    for part in ("model/1/relu", "aten.relu.default(", "float32[B, 16, 6, 6]", "logits = model(x)", "used by"):
        assert part in words
    links = page.js(f"return [...{PANEL}.querySelectorAll('.tfnb-links button')].map(b => b.textContent)")
    assert "2" in links and any("convolution" in link for link in links), links
    page.js(f"[...{PANEL}.querySelectorAll('.tfnb-links button')].find(b => b.textContent === '2').click()")
    page.wait(f"{PANEL}.querySelector('b').textContent.startsWith('model/2')")
    page.js(f"{PANEL}.querySelector('[aria-label=\"Close the details\"]').click()")
    assert page.js(f"return {PANEL}.hidden") is True


def test_a_pass_is_switched_off_and_its_room_is_closed(page: Page) -> None:
    entry = "[...document.querySelectorAll('.tfnb-key')].find(k => k.textContent === arguments[0])"
    before, high = page.js(BOXES), page.js("return +document.querySelector('svg .level').dataset.h")
    for word in ("gradient", "update"):
        page.js(f"{entry}.click()", word)
    after = page.js(BOXES)
    step = page.key("step")
    assert set(before) - set(after) == {key for key in before if key == step or key.startswith(f"{step}.")}
    assert page.js("return +document.querySelector('svg .level').dataset.h") < high - 120
    page.js(f"{entry}.focus()", "gradient")
    page.keys(" ")
    assert page.js(f"return {entry}.getAttribute('aria-checked')", "gradient") == "true"
    page.js(f"{entry}.click()", "update")
    assert page.js(BOXES) == before
    assert page.js("return +document.querySelector('svg .level').dataset.h") == pytest.approx(high)


def test_shapes_are_written_beside_edges(page: Page) -> None:
    press = "[...document.querySelectorAll('button')].find(b => b.textContent === 'Shapes').click()"
    specs = "return [...document.querySelectorAll('text.spec')].map(t => t.textContent)"
    assert page.js(specs) == []
    page.js(press)
    assert {"f32[B, 1, 8, 8]", "f32[B, 576]", "i64[B]"} <= set(page.js(specs))
    page.js(press)
    assert page.js(specs) == []


def test_a_narrow_page_has_the_details_below(digits: Graph, tmp_path: Path) -> None:
    with browser(size="520,900") as driver:
        page = Page(driver, tmp_path, graph_html(digits))
        page.click(page.key("model/1/relu"))
        wide = page.js("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0
        panel, svg = (
            page.js(f"return document.querySelector('{at}').getBoundingClientRect().toJSON()")
            for at in (".tfnb-panel", "svg.tfnb")
        )
        assert panel["top"] >= svg["bottom"] and panel["right"] <= 520 and svg["right"] <= 520


def test_nothing_moves_where_motion_is_unwanted(driver: Any, digits: Graph, tmp_path: Path) -> None:
    wanted = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
    try:
        page = Page(driver, tmp_path, graph_html(digits))
        took = page.js(
            "return [...document.querySelectorAll('.tfnb-page *')].map(e => getComputedStyle(e).transitionDuration)"
        )
        assert {float(each.removesuffix("s")) for text in took for each in text.split(", ")} == {0.0}
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_one_output_unpacks_the_script_for_all_and_any_may_go(driver: Any, digits: Graph, tmp_path: Path) -> None:
    page = Page(driver, tmp_path, f"<div id=a>{graph_html(digits)}</div><div id=b></div>")
    assert page.js("return document.head.querySelectorAll('script').length") == 1
    page.js("document.getElementById('a').remove()")
    page.js(
        """const b = document.getElementById('b');
        b.innerHTML = arguments[0];
        for (const old of b.querySelectorAll('script:not([type])')) {  // as a notebook runs the scripts of an output
          const made = document.createElement('script');
          made.textContent = old.textContent;
          old.replaceWith(made);
        }""",
        graph_html(digits),
    )
    page.wait("document.querySelector('#b .tfnb-page').dataset.on === '1'")
    assert page.js("return document.head.querySelectorAll('script').length") == 1
    assert page.js("return document.querySelectorAll('#b .tfnb-tools').length") == 1


EVIL = packed({"style": "", "script": "document.title = 'ran'; function tfnbStartPage() {}"})


def ran(driver: Any, folder: Path, body: str, where: str) -> Page:
    """A page whose scripts are run as front ends do it: in their place, or in the document's head."""
    page = Page(driver, folder, "")
    page.js(
        """document.body.innerHTML = arguments[0];
        for (const old of document.body.querySelectorAll('script:not([type])')) {
          const made = document.createElement('script');
          made.textContent = old.textContent;
          if (arguments[1] === 'head') { old.remove(); document.head.appendChild(made); } else old.replaceWith(made);
        }
        return new Promise((done) => setTimeout(done, 300));""",
        body,
        where,
    )
    return page


@pytest.mark.parametrize("where", ["place", "head"])
@pytest.mark.parametrize("tag", ["div", "pre", "script"])
def test_code_of_a_stranger_is_not_run(driver: Any, digits: Graph, tmp_path: Path, where: str, tag: str) -> None:
    code = f'<{tag} type="text/plain" class="tfnb-code" data-name="x">{EVIL}</{tag}>'
    stranger = f'<div class="tfnb-page" id="stranger">{code}</div>'
    for body in (stranger + graph_html(digits), graph_html(digits) + stranger):
        page = ran(driver, tmp_path, body, where)
        assert page.js("return [document.title, document.getElementById('stranger').dataset.on]") == ["", None]


@pytest.mark.parametrize("evil", [
    f'<div class="tfnb-code" data-name="x">{EVIL}</div>',
    f'<div><script type="text/plain" class="tfnb-code" data-name="x">{EVIL}</script></div>',
])  # fmt: skip
def test_only_a_script_right_in_the_page_is_code(driver: Any, digits: Graph, tmp_path: Path, evil: str) -> None:
    page = ran(driver, tmp_path, graph_html(digits).replace("<svg", f"{evil}<svg", 1), "place")
    page.wait("document.querySelector('.tfnb-page').dataset.on === '1'")
    assert page.js("return document.title") == ""


def test_boxes_have_labels_for_a_screen_reader(page: Page) -> None:
    assert page.js(
        "return [...document.querySelectorAll('.box')].every(b => b.getAttribute('aria-label') && b.tabIndex === -1)"
    )
    assert page.js("return document.querySelector('svg.tfnb').getAttribute('aria-label')").startswith("Graph digits")
    described = page.js("return document.querySelector('svg.tfnb > desc').textContent")
    assert "model, then cross_entropy" in described


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


CHAIN = (
    "sin", "cos", "tanh", "sigmoid", "relu", "exp", "atan", "erf", "sinh", "abs", "neg", "square", "cosh", "log1p",
    "expm1", "asinh", "sqrt", "tan", "erfc", "exp2", "rsqrt", "sinc",
)  # fmt: skip


SHAPES = {  # lines that make h of it, and how large its text is at first
    "tall": ([f"h = torch.{name}(h)" for name in CHAIN], 1.0),
    "wide": ([f"h{n} = torch.{name}(h)" for n, name in enumerate(CHAIN)] + ["h = h21 * 2"], LEGIBLE),
}  # fmt: skip


def drawn(shape: str, trains: bool) -> Graph:
    """A graph of that shape, whose loss comes last of what is no training."""
    names = {"tfnb": tfnb, "torch": torch, "w": torch.nn.Parameter(torch.ones(4))}
    lines = ["x = tfnb.placeholder(torch.ones(2, 4))", "h = x * w", *SHAPES[shape][0]]
    lines += ["loss = h.mean()", "step = tfnb.train.SGD(0.1).minimize(loss)" if trains else ""]
    text = "with tfnb.record() as graph:\n" + "".join(f"    {line}\n" for line in lines)
    linecache.cache[f"<{shape}>"] = (len(text), None, text.splitlines(True), f"<{shape}>")
    exec(compile(text, f"<{shape}>", "exec"), names)
    return names["graph"]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_view_of_a_large_drawing_shows_the_loss_and_its_text_can_be_read(
    driver: Any, tmp_path: Path, shape: str, trains: bool
) -> None:
    page = Page(driver, tmp_path, graph_html(drawn(shape, trains)))
    window = page.js("return document.querySelector('svg.tfnb').getBoundingClientRect().toJSON()")
    box = page.js("return document.querySelector('[data-node=\"loss\"]').getBoundingClientRect().toJSON()")
    assert all(
        window[low] <= box[low] and box[high] <= window[high] for low, high in (("top", "bottom"), ("left", "right"))
    )
    x, y, *shown = page.view()
    svg = "document.querySelector('svg.tfnb')"
    assert shown == pytest.approx(
        [v / SHAPES[shape][1] for v in page.js(f"return [{svg}.clientWidth, {svg}.clientHeight]")]
    )
    assert y > 0 if shape == "tall" else x > 0, "else nothing was to be decided"
    assert page.errors() == []


def test_a_wide_picture_without_its_script_keeps_text_that_can_be_read(driver: Any, tmp_path: Path) -> None:
    stripped = re.sub(r"<script.*?</script>|<style>.*?</style>", "", graph_html(drawn("wide", False)), flags=re.DOTALL)
    page = Page(driver, tmp_path, stripped)
    svg = "document.querySelector('svg')"
    wide, natural, window = page.js(f"return [{svg}.clientWidth, +{svg}.getAttribute('width'), window.innerWidth]")
    assert wide == pytest.approx(LEGIBLE * natural, abs=2) and wide > window, "what is wider scrolls"
