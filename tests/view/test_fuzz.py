"""C-70: whatever names, lines and errors hold, a page has the elements of one with plain ones, and runs nothing."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tfnb
from tests.graph.build import Builder
from tests.view.browser import Page, browser
from tfnb.graph import Dim, Graph, Ref, SourceLine, Spec, Variable
from tfnb.view import difference_html, graph_bundle, graph_html, tensor_html, variable_html
from tfnb.view.drawing import Drawing

PIECES = (
    "<script>window.hacked = 1</script>", "</script>", "<img src=x onerror='window.hacked = 1'>", "</title>",
    "</desc>", "</style>", "]]>", "<!--", "-->", '"', "'", "`", "${window.hacked = 1}", "&lt;", "&#60;", "\\u003c",
    "\u2028", "\x00",
    "\n", " onload=window.hacked=1 ", "javascript:window.hacked=1", "<svg/onload=window.hacked=1>", "{{", "\ud800", "a",
)  # fmt: skip
nasty = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), min_size=1, max_size=5).map("".join)


class Elements(HTMLParser):
    """Names of elements and of attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, tuple(sorted(name for name, _ in attrs))))


def named(text: str) -> Graph:
    """A graph in which this is the name of whatever has one."""
    b = Builder()
    row = Spec(torch.float32, (Dim("B"), 3))
    variable = Variable(torch.zeros(3), name=text)
    x = b.placeholder(f"{text} x", ("B", 3))
    where = {"source": SourceLine(text, 1, text), "scope": (text, "relu")}
    w = b.node(f"{text} w", "tfnb.read", (Spec(torch.float32, (3,)),), attrs={"variable": variable})
    y = b.node(f"{text} y", "aten.add.Tensor", (row,), inputs=(x, w), attrs={"self": Ref(0), "other": Ref(1)}, **where)
    b.node(f"{text} z", "aten.relu.default", (row,), inputs=(y,), attrs={"self": Ref(0)}, **where)
    return Graph(text, b.contents())


class Sample:
    """What looks like a recorded tensor."""

    def __init__(self, graph: Graph) -> None:
        self.node = graph.nodes[-1]
        self.name, self.spec = self.node.name, self.node.outputs[0]

    def found_sample(self) -> torch.Tensor:
        return torch.linspace(0, 1, 9)


def pages(text: str) -> list[str]:
    """All that is shown of a graph."""
    graph = named(text)
    badges = {graph.nodes[-1].id: "added"}
    drawing = Drawing(graph, badges=badges)
    return [
        graph_html(graph), graph_bundle(graph, cell=text, badges=badges)["text/html"], drawing.svg,
        *dict(drawing.faces()).values(),
        difference_html(graph.diff(named("plain"))), tensor_html(Sample(graph)), variable_html(graph.variables[0]),
    ]  # fmt: skip


PLAIN = {element for page in pages("plain") for element in Elements(page).found}


@given(nasty)
@settings(max_examples=40, deadline=None)
def test_names_add_no_element_and_no_attribute(text: str) -> None:
    for page in pages(text):
        assert {tag for tag, _ in Elements(page).found} <= {tag for tag, _ in PLAIN}
        names = {name for _, attrs in Elements(page).found for name in attrs}
        assert names <= {name for _, attrs in PLAIN for name in attrs}


@pytest.mark.browser
def test_names_values_and_errors_never_run(tmp_path: Any) -> None:
    text = "".join(piece for piece in PIECES if piece not in ("\x00", "\ud800"))
    with browser() as driver:
        page = Page(driver, tmp_path, "".join(pages(text)))
        drawn = len(page.js("return document.querySelectorAll('.tfnb-tools')"))
        assert drawn == 3
        page.js("""
            for (const box of document.querySelectorAll('.box')) {
              box.focus();
              box.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true }));
            }""")
        page.wait("document.querySelector('.tfnb-panel:not([hidden])')")
        assert page.js("return document.querySelectorAll('.tfnb-panel script, .tfnb-panel img').length") == 0
        assert page.js("return window.hacked || 0") == 0


@pytest.mark.parametrize("text", PIECES)
def test_an_error_of_a_layout_is_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_source: str) -> Any:
        raise tfnb.view.layout.LayoutFailed(text)

    monkeypatch.setattr("tfnb.view.level.layout", fails)
    assert {tag for tag, _ in Elements(graph_html(named(text))).found} == {"div", "p", "pre"}
