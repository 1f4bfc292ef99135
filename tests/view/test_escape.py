"""Names, lines and titles are data: in every form of a drawing they come out as text and as nothing else."""

from __future__ import annotations

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

from tests.graph.build import Builder
from tests.view.browser import unpacked
from tfnb.graph import Graph, Ref, SourceLine, Spec, Variable
from tfnb.view import graph_dot, graph_html, graph_svg, tensor_html, text_tree, variable_html
from tfnb.view.escape import packed
from tfnb.view.layout import layout
from tfnb.widgets.escaping import shorten, visible, xml

NASTY = [
    "<script>alert(1)</script>", "</script><script>alert(1)</script>", "</svg><img src=x onerror=alert(1)>",
    '" onload="alert(1)', "' onmouseover='alert(1)", "]]><script>", "<!-- x", "--><b>", "a\nb\r\nc", "&amp;&lt;",
    "\u202eevil", "\u2028", "\x00\x07\x1b[31m", "%s{}{{}}", "\\N\\l\\n", "<b>html label</b>", "n0 -> n1; x",
    "näme 漢字", "\ud800", "", " ",
]  # fmt: skip


class Page(HTMLParser):
    """Collects what a page would do: elements, attributes, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def graph(text: str) -> Graph:
    """A graph in which everything a user can name is ``text``."""
    b = Builder()
    row = Spec(torch.float32, (3,))
    x = b.placeholder(text, (3,))
    w = b.read(Variable(torch.zeros(3), name=text))
    source = SourceLine(text, 1, text)
    attrs = {"self": Ref(0), "other": Ref(1), "rounding_mode": text}
    where = {"scope": (text, text, "f"), "source": source, "device": text}
    y = b.node(text, "aten.div.Tensor_mode", (row,), inputs=(x, w), attrs=attrs, **where)
    b.node(text, f"aten.{text}.default", (row,), inputs=(y,), attrs={"self": Ref(0)}, **where)
    return Graph(text, b.contents())


@pytest.mark.parametrize("text", NASTY)
def test_a_name_adds_no_element_and_no_attribute_to_a_page(text: str) -> None:
    plain, page = Page(graph_html(graph("plain"))), Page(graph_html(graph(text)))
    assert set(page.tags) <= set(plain.tags)
    assert page.tags.count("script") == 3, "faces, the code, and what unpacks it"
    assert page.attributes <= plain.attributes


@pytest.mark.parametrize("text", NASTY)
def test_a_name_leaves_the_picture_well_formed(text: str) -> None:
    root = ElementTree.fromstring(graph_svg(graph(text)))
    known = {"svg", "desc", "style", "rect", "g", "path", "title", "text", "circle"}
    assert {el.tag.rpartition("}")[2] for el in root.iter()} <= known


@pytest.mark.parametrize("text", NASTY)
def test_a_name_leaves_dot_and_text_well_formed(text: str) -> None:
    plain = layout(graph_dot(graph("plain")))
    assert layout(graph_dot(graph(text))).nodes.keys() == plain.nodes.keys()
    assert "\n".join(text_tree(graph(text)).splitlines()) == text_tree(graph(text))


@pytest.mark.parametrize("text", NASTY)
def test_small_reprs_are_text(text: str) -> None:
    variable = Variable(torch.zeros(3), name=text)
    plain = Page(variable_html(Variable(torch.zeros(3), name="plain")))
    page = Page(variable_html(variable))
    assert (page.tags, page.attributes) == (plain.tags, plain.attributes)


def test_what_does_not_print_is_spelled_out() -> None:
    assert visible("a\nb") == "a⏎b"
    assert visible("\u202e\x00\ud800") == "\\u202e\\u0000\\ud800"
    assert visible("näme 漢字") == "näme 漢字"


def test_markup_becomes_text() -> None:
    assert xml('<a href="x">&\'</a>') == "&lt;a href=&quot;x&quot;&gt;&amp;&#x27;&lt;/a&gt;"


def test_packed_data_cannot_end_its_script_element() -> None:
    text = packed({"</script>": "<!--"})
    assert "<" not in text
    assert unpacked(text) == {"</script>": "<!--"}


def test_a_long_text_is_cut() -> None:
    assert shorten("x" * 50, 10) == "x" * 9 + "…"


def test_a_recorded_tensor_is_text(digits: Graph) -> None:
    class Tensor:
        name, spec, node = "<b>", digits["loss"].outputs[0], digits["loss"]

        def found_sample(self) -> torch.Tensor:
            return torch.linspace(0, 1, 5)

    assert "<b>" not in tensor_html(Tensor())
