"""The live drawing: traits and messages in Python, and its module in a browser against a fake model."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.view.browser import Page, browser
from tests.view.models import digits
from tfnb.graph import Graph
from tfnb.view import Drawing, graph_html, page
from tfnb.view.reprs import histogram
from tfnb.widgets import GraphWidget

PICTURE = {"svg": "<svg/>", "name": "", "title": "", "legend": [], "iterations": {}, "timeline": ""}


class Sent(GraphWidget):
    """Keeps what it would send."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: list[Any] = []
        super().__init__(*args, **kwargs)

    def send(self, content: Any, buffers: Any = None) -> None:
        self.sent.append(content)


def tell(widget: Sent, message: Any) -> list[Any]:
    """Deliver a message of the page; what is answered."""
    widget.sent.clear()
    widget._handle_custom_msg(message, [])
    return list(widget.sent)


def test_a_click_fetches_a_value() -> None:
    widget = Sent(PICTURE, on_fetch=lambda node: {"preview": f"{node} is 3"})
    assert tell(widget, {"kind": "fetch", "node": "loss"}) == [
        {"kind": "value", "node": "loss", "preview": "loss is 3"}
    ]


def test_a_fetch_that_fails_is_told_to_the_page() -> None:
    def fetch(node: str) -> dict[str, str]:
        raise ValueError("x is not fed")

    answer = {"kind": "value", "node": "loss", "error": "ValueError: x is not fed"}
    assert tell(Sent(PICTURE, on_fetch=fetch), {"kind": "fetch", "node": "loss"}) == [answer]


def test_unfolding_asks_python() -> None:
    widget = Sent(PICTURE, on_face=lambda key, unfolded: f"<g>{key} {unfolded}</g>")
    assert tell(widget, {"kind": "unfold", "scope": "2.1"}) == [
        {"kind": "face", "scope": "2.1", "svg": "<g>2.1 True</g>"}
    ]
    assert tell(widget, {"kind": "fold", "scope": "2"})[0]["svg"] == "<g>2 False</g>"


def test_a_layout_is_answered_with_the_boxes_that_it_is_for() -> None:
    widget = Sent(PICTURE, on_layout=lambda keys: f"<svg>{keys}</svg>")
    answer = {"kind": "layout", "opened": ["0", "2.1"], "svg": "<svg>['0', '2.1']</svg>"}
    assert tell(widget, {"kind": "layout", "opened": ["0", "2.1"]}) == [answer]
    assert tell(Sent(PICTURE), {"kind": "layout", "opened": []}) == [{"kind": "layout", "opened": [], "svg": ""}]


def test_many_numbers_have_a_histogram() -> None:
    shown = {"preview": "8 numbers", **histogram(torch.tensor([0.0, 0, 0, 1, 1, 2, float("nan"), float("inf")]))}
    (answer,) = tell(Sent(PICTURE, on_fetch=lambda node: shown), {"kind": "fetch", "node": "h"})
    counts = answer["histogram"]["counts"]
    assert [counts[0], counts[len(counts) // 2], counts[-1], sum(counts)] == [3, 2, 1, 6]
    assert (answer["histogram"]["low"], answer["histogram"]["high"]) == ("0", "2")
    assert histogram(torch.zeros(9)) == histogram(torch.ones(2)) == histogram(None) == {}


def test_a_face_that_cannot_be_drawn_is_empty() -> None:
    def face(key: str, unfolded: bool) -> str:
        raise IndexError(key)

    assert tell(Sent(PICTURE, on_face=face), {"kind": "unfold", "scope": "9"})[0]["svg"] == ""


@pytest.mark.parametrize("message", [None, {}, {"kind": "fetch"}, {"kind": "fetch", "node": 3}, {"kind": "other"}, []])
def test_messages_of_no_known_kind_are_ignored(message: Any) -> None:
    assert tell(Sent(PICTURE, on_fetch=lambda node: {}), message) == []


def test_the_bundle_has_a_text_fallback() -> None:
    bundle = GraphWidget(PICTURE, text="digits: 3 nodes")._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    assert data["text/plain"] == "digits: 3 nodes"
    assert "application/vnd.jupyter.widget-view+json" in data
    assert "text/html" not in data and "image/svg+xml" not in data


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to check the module's syntax")
def test_the_module_is_well_formed(tmp_path: Path) -> None:
    path = tmp_path / "graph.mjs"
    path.write_text(GraphWidget._esm if isinstance(GraphWidget._esm, str) else GraphWidget._esm.read_text())
    subprocess.run(["node", "--check", str(path)], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the function")
def test_the_first_view_of_any_drawing_has_its_loss_and_leaves_no_edge_of_it() -> None:
    chance = random.Random(0)
    tried = []
    for _ in range(500):
        size = {"w": chance.randint(60, 6000), "h": chance.randint(60, 9000)}
        shown = {"w": chance.choice([320, 1000, 1333, 6000]), "h": chance.choice([120, 680, 907, 9000])}
        tried.append([size, {"x": chance.uniform(30, size["w"] - 30), "end": chance.uniform(50, size["h"])}, shown])
    code = f"{page.asset('drawing.js')}\nconsole.log(JSON.stringify({json.dumps(tried)}.map(one => tfnbBegin(...one))))"
    done = subprocess.run(["node", "-"], input=code, check=True, capture_output=True, text=True)
    for (size, loss, shown), found in zip(tried, json.loads(done.stdout), strict=True):
        x, y = found["x"], found["y"]
        assert x <= loss["x"] <= x + shown["w"] and y <= loss["end"] <= y + shown["h"]
        assert y >= 0 and (y == 0 or y + shown["h"] <= size["h"] + 1e-6)
        if shown["w"] < size["w"]:
            assert 0 <= x <= size["w"] - shown["w"]
        else:
            assert 2 * x + shown["w"] == pytest.approx(size["w"]), "in the middle"


FAKE = """
<div id="here"></div>
<script type="application/json" id="data">%s</script>
<script type="module">
class Model {  // what anywidget gives a module, and a kernel that answers from a table
  constructor(state, faces) { this.state = state; this.faces = faces; this.heard = {}; this.sent = []; this.saved = 0; }
  get(name) { return this.state[name]; }
  set(name, value) { this.state[name] = value; this.emit(`change:${name}`); }
  save_changes() { this.saved += 1; }
  on(kind, call) { (this.heard[kind] ||= []).push(call); }
  off(kind, call) { this.heard[kind] = (this.heard[kind] || []).filter((each) => each !== call); }
  emit(kind, ...args) { for (const call of this.heard[kind] || []) call(...args); }
  send(message) {
    this.sent.push(message);
    const answer = message.kind === "fetch"
      ? { kind: "value", node: message.node, preview: `<b>${message.node}</b> = 2.31` }
      : { kind: "face", scope: message.scope, svg: this.faces[message.scope] || "" };
    setTimeout(() => this.emit("msg:custom", answer), 5);
  }
}
const data = JSON.parse(document.getElementById("data").textContent);
const module = await import(URL.createObjectURL(new Blob([data.esm], { type: "text/javascript" })));
window.model = new Model(data.state, data.faces);
window.cleanup = module.default.render({ model: window.model, el: document.getElementById("here") });
window.ready = true;
</script>"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as driver:
        yield driver


def shown(driver: Any, folder: Path, *, twin: bool, graph: Graph | None = None) -> Page:
    """A live drawing, below a static one if ``twin``."""
    graph = graph or digits()
    drawing = Drawing(graph)
    picture = page.live(drawing)
    state = {"picture": picture, "twin": picture["name"], "selection": "", "chosen": []}
    data = {"esm": GraphWidget._esm, "state": state, "faces": dict(drawing.faces())}
    static = graph_html(graph) if twin else f"<style>{GraphWidget._css}</style>"
    shown = Page(driver, folder, static + FAKE % json.dumps(data, default=str).replace("</", "<\\/"))
    shown.wait("window.ready")
    return shown


@pytest.fixture
def live(driver: Any, tmp_path: Path) -> Iterator[Page]:
    page = shown(driver, tmp_path, twin=False)
    yield page
    assert page.errors() == []


@pytest.fixture
def pair(driver: Any, tmp_path: Path) -> Iterator[Page]:
    page = shown(driver, tmp_path, twin=True)
    yield page
    assert page.errors() == []


@pytest.mark.browser
def test_the_live_drawing_hides_its_static_twin_and_gives_it_back(pair: Page) -> None:
    hidden = "getComputedStyle(document.querySelector('.tfnb-page[data-tfnb]')).display"
    assert pair.js(f"return {hidden}") == "none"
    assert pair.js("return document.querySelector('#here svg').getBoundingClientRect().height") > 300
    pair.js("window.cleanup()")
    assert pair.js(f"return {hidden}") == "block"


@pytest.mark.browser
def test_faces_of_the_twin_need_no_kernel(pair: Page) -> None:
    pair.js(
        "window.model.send = () => { throw new Error('no kernel'); }; document.querySelector('.tfnb-page').remove()"
    )
    pair.js("document.querySelector(`.box[data-key='2.0'] > .face`).parentNode.removeAttribute('data-node')")
    pair.click("2.0")
    pair.wait("document.querySelector(`.box[data-key='2.0.0']`)")


@pytest.mark.browser
def test_unfolding_goes_through_python(live: Page) -> None:
    conv = live.key("0 conv2d")
    live.click(conv)
    live.wait(f"document.querySelector(`.box[data-key='{conv}.0']`)")
    kinds = live.js("return window.model.sent.map(m => [m.kind, m.scope])")
    assert ["unfold", conv] in kinds


@pytest.mark.browser
def test_a_click_selects_and_shows_the_value_as_text(live: Page) -> None:
    live.click(live.key("model/1/relu"))
    shown = "document.querySelector('.tfnb-value').textContent"
    words = live.wait(f"{shown}.includes('2.31') && {shown}")
    assert words == "model/1/relu\n<b>model/1/relu</b> = 2.31"
    assert live.js("return document.querySelectorAll('.tfnb-value b').length") == 0
    assert live.js("return [window.model.get('selection'), window.model.saved]") == ["model/1/relu", 1]


ROOTS = [("script", "http://www.w3.org/1999/xhtml"), ("script", "http://www.w3.org/2000/svg")]
EMPTY = """<svg xmlns="http://www.w3.org/2000/svg" class="tfnb" onload="window.hacked = 1"><rect class="paper"/>
<script>window.hacked = 1</script><g class="level" data-w="9" data-h="9"/></svg>"""


@pytest.mark.browser
def test_stripes_of_a_place_glow_as_its_share_says(driver: Any, tmp_path: Path) -> None:
    with tfnb.record("placed") as graph:
        with tfnb.device("task:0", soft=True):
            a = tfnb.placeholder(torch.ones(4)) * 2
        with tfnb.device("task:1", soft=True):
            a + 1
    page = shown(driver, tmp_path, twin=False, graph=graph)
    colours = list(Drawing(graph).sites.colours.values())
    stripes = "[...document.querySelectorAll(`rect.site[fill='${arguments[0]}']`)]"
    width = f"return {stripes}.map((one) => one.style.strokeWidth)"
    page.js("window.model.set('glow', {[arguments[0]]: 1})", colours[1])
    assert {*page.js(width, colours[0])} == {"0px"} and {*page.js(width, colours[1])} == {"7px"}
    page.js("window.model.set('glow', {})")
    assert {*page.js(width, colours[1])} == {"0px"}
    assert page.errors() == []


@pytest.mark.browser
def test_a_new_picture_is_shown(live: Page) -> None:
    live.js("window.model.set('picture', { svg: arguments[0] })", EMPTY)
    assert live.js("return document.querySelectorAll('#here .box').length") == 0


@pytest.mark.browser
@pytest.mark.parametrize(
    "svg", ["<svg", EMPTY, *(f'<{tag} xmlns="{space}">window.hacked = 1</{tag}>' for tag, space in ROOTS)]
)
def test_markup_that_is_no_picture_does_nothing(live: Page, svg: str) -> None:
    live.js("window.model.set('picture', { svg: arguments[0] })", svg)
    assert live.js("return [window.hacked || 0, document.querySelectorAll('#here script').length]") == [0, 0]


@pytest.mark.browser
def test_bodies_and_sides_fold_and_unfold(driver: Any, tmp_path: Path) -> None:
    with tfnb.record("loops") as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        tfnb.while_loop(lambda v: v.sum() < 9, lambda v: tfnb.cond(v.sum() > 4, lambda: v.exp() * 2, lambda: v + 1), x)
    page = shown(driver, tmp_path, twin=False, graph=graph)
    titles = "[...document.querySelectorAll('.box')].map(b => b.querySelector(':scope > .face > text').textContent)"
    unfold = "[...document.querySelectorAll('button')].find(b => b.textContent === 'Unfold').click()"
    folded = "[...document.querySelectorAll('.box[aria-expanded=\"false\"]')].map(b => b.dataset.key)"
    while level := page.js(f"return {folded}"):
        page.js(f"{unfold}; {unfold}")  # pressed twice: what the first opens stays open
        page.wait(f"!{folded}.some(key => {level}.includes(key))")
    unfolded = page.js(f"return {titles}")
    assert {"while_loop", "body", "cond", "then", "else", "exp"} <= set(unfolded)
    body = page.key("body")
    page.click(body)
    page.wait(f"document.querySelector(`.box[data-key='{body}']`).getAttribute('aria-expanded') === 'false'")
    assert not {"then", "else", "exp"} & set(page.js(f"return {titles}"))
    page.click(body)
    page.wait(f"document.querySelector(`.box[data-key='{body}.0']`)")
    assert page.errors() == []
