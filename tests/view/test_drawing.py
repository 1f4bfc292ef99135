"""The picture: what it shows at first, its colours, its size, and that it is the same everywhere."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings

import tfnb
from tests.graph.build import Builder, dense
from tests.graph.strategies import graphs
from tests.view.models import ResNet
from tfnb.graph import Contents, Dim, Graph, Ref, SourceLine, Spec
from tfnb.view import Drawing, graph_bundle, graph_html, graph_svg
from tfnb.view.colours import STRIP
from tfnb.view.style import LIGHT

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[ElementTree.Element]:
    """The box elements of a picture or face."""
    root = ElementTree.fromstring(svg if svg.startswith("<svg") else f'<g xmlns="{SVG[1:-1]}">{svg}</g>')
    return [el for el in root.iter(f"{SVG}g") if el.get("class") == "box"]


def title(box: ElementTree.Element) -> str:
    return box.findtext(f"{SVG}title") or ""


def test_the_first_view_shows_lines_modules_and_functions(digits: Graph) -> None:
    seen = [title(box).split("\n")[0] for box in boxes(graph_svg(digits))]
    assert [name for name in ("x", "y", "model", "0 conv2d", "1 relu", "3 linear", "cross_entropy") if name in seen]
    assert not any("aten.convolution.default" in title(box).split("\n")[0] for box in boxes(graph_svg(digits)))


def test_both_towers_of_a_siamese_net_lead_on() -> None:
    tower = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    with tfnb.record("towers") as graph:
        left, right = tfnb.placeholder(torch.ones(2, 3)), tfnb.placeholder(torch.ones(2, 3))
        (tower(left) - tower(right)).norm()
    root = ElementTree.fromstring(graph_svg(graph))
    ports = {port for port in root.iter(f"{SVG}circle") if port.get("data-out")}
    wires = [wire for wire in root.iter(f"{SVG}path") if (wire.get("class") or "").startswith("wire")]
    assert len(ports) == 2
    assert len({wire.get("d") for wire in wires if wire.get("data-tail") == key_of(root, "tower")}) == 2


def key_of(root: ElementTree.Element, name: str) -> str | None:
    """The key of the box whose title begins so."""
    return next(
        el.get("data-key") for el in root.iter(f"{SVG}g") if el.get("class") == "box" and title(el).startswith(name)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "resnet", "gpt"])
def test_the_first_view_is_small(name: str, request: pytest.FixtureRequest) -> None:
    svg = graph_svg(request.getfixturevalue(name))
    assert len(boxes(svg)) <= 30
    assert float(re.search(r'height="([\d.]+)"', svg).group(1)) < 1600  # type: ignore[union-attr]


def test_the_output_of_a_large_graph_stays_below_150_kilobytes(gpt: Graph) -> None:
    assert len(gpt.nodes) > 2000
    shown = graph_bundle(gpt)
    assert sum(len(text.encode()) for text in shown.values()) < 150_000, {kind: len(shown[kind]) for kind in shown}


def test_a_box_budget_is_kept(gpt: Graph) -> None:
    assert len(boxes(graph_svg(gpt, boxes=10**6))) <= 150
    assert len(boxes(graph_svg(gpt, boxes=0))) < 8


def test_every_node_can_be_reached_by_unfolding(digits: Graph) -> None:
    drawing = Drawing(digits)
    shown = {box.get("data-key") for svg in (drawing.svg, *dict(drawing.faces()).values()) for box in boxes(svg)}
    assert shown == {box.name for box in drawing.root.walk() if box.key}


def test_boxes_have_titles_with_name_op_spec_and_line(digits: Graph) -> None:
    drawing = Drawing(digits)
    svg = "".join(dict(drawing.faces()).values())
    (conv,) = [
        box for box in boxes(svg) if box.get("data-node") == "model/0/conv2d/convolution" and "\naten." in title(box)
    ]
    assert "aten.convolution.default(x, 0.weight, 0.bias, stride=[1, 1]" in title(conv)
    assert "float32[B, 16, 6, 6]" in title(conv)
    assert "models.py line" in title(conv) and "logits = model(x)" in title(conv)
    assert all(title(box) for box in boxes(svg))


def test_the_picture_is_an_image_with_a_name(digits: Graph) -> None:
    root = ElementTree.fromstring(graph_svg(digits))
    assert (root.get("role"), root.get("aria-label", "").split(":")[0]) == ("img", "Graph digits")


def test_gradients_updates_and_variables_have_their_own_colours(digits: Graph) -> None:
    drawing = Drawing(digits)
    tones = {
        face.get("class", "").removeprefix("face t-"): title(box)
        for svg in (drawing.svg, *dict(drawing.faces()).values())
        for box in boxes(svg)
        for face in box.findall(f"{SVG}g")
    }
    assert {"forward", "gradient", "update", "variable", "input"} <= tones.keys()
    assert f'stroke="{LIGHT["gradient"].line}"' in drawing.svg


def test_colours_are_attributes_and_dark_pages_have_rules(digits: Graph) -> None:
    svg = graph_svg(digits)
    assert "prefers-color-scheme:dark" in svg
    without_style = re.sub("<style>.*?</style>", "", svg)
    assert all(
        f'fill="{paint.fill}"' in without_style for paint in (LIGHT["forward"], LIGHT["gradient"], LIGHT["update"])
    )


def test_a_failing_node_is_red_and_unfolded(digits: Graph) -> None:
    svg = graph_svg(digits, failing="model/0/conv2d/convolution")
    red = [box for box in boxes(svg) if box.find(f"{SVG}g").get("class") == "face t-failing"]  # type: ignore[union-attr]
    assert [box.get("data-node") for box in red if box.get("aria-expanded") is None] == ["model/0/conv2d/convolution"]
    assert all(box.get("aria-expanded") == "true" for box in red[:-1])


@pytest.mark.slow
def test_a_trained_residual_net_is_a_straight_chain() -> None:
    with tfnb.record("net") as graph:
        x = tfnb.placeholder(torch.rand(2, 3, 32, 32))
        loss = ResNet(blocks=(1, 1, 1, 1)).train()(x).square().mean()
        step = tfnb.train.SGD(0.1, momentum=0.9).minimize(loss)
    drawing = Drawing(graph)
    assert len(step.node.effects) > 6, "statistics of batch norm"
    level = drawing.root.at(max((k for k in drawing.opened if k), key=lambda k: len(drawing.root.at(k).children)))
    taken = [edge.tail for edge in drawing.wiring.edges(level) if isinstance(edge.tail, int)]
    assert len(level.children) > 6 and len(taken) == len(set(taken)), "each box has one user: no counter goes aside"
    assert all(drawing.root.at(key).kind != "pass" for key in drawing.opened), "gradients and updates are folded"


def test_health_is_a_strip_on_each_card_and_the_first_bad_op_is_red() -> None:
    with tfnb.record("g") as graph:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        low = x - 5
        bad = low.log()
        bad.sum()
    session = tfnb.Session(graph)
    session.run("bad", {x: torch.ones(2, 3)}, trace="health")
    drawing = Drawing(graph, trace=session.trace, boxes=150)
    found = {title(box).split("\n")[0]: box for box in boxes(drawing.svg) if box.get("aria-expanded") is None}
    strips = {
        name: [path.get("fill") for path in box.iter(f"{SVG}path") if path.get("class") == "vital"]
        for name, box in found.items()
    }
    assert strips["low"] == [STRIP["negative"]] and strips["bad"] == [STRIP["nan"]]
    assert "6 numbers: 6 nan" in title(found["bad"]) and "6 numbers: 6 negative" in title(found["low"])
    faces = {name: box.find(f"{SVG}g").get("class") for name, box in found.items()}  # type: ignore[union-attr]
    assert faces["bad"] == "face t-failing" and faces["low"] != "face t-failing"


def test_an_unfolded_drawing_is_laid_out_anew(digits: Graph) -> None:
    drawing = Drawing(digits)
    folded = [box.get("data-key") for box in boxes(drawing.picture([])) if box.get("aria-expanded")]
    (conv,) = [box.name for box in drawing.root.walk() if box.title == "0" and box.detail == "conv2d" and box.children]
    around = [conv[:at] for at, char in enumerate(conv) if char == "."]
    shown = {box.get("data-key"): box for box in boxes(drawing.picture([*around, conv]))}
    assert conv not in folded and shown[conv].get("aria-expanded") == "true" and f"{conv}.0" in shown
    with pytest.raises(ValueError):
        drawing.picture(["nonsense"])


def test_grey_nodes_are_pale(digits: Graph) -> None:
    assert 'opacity="0.35"' in graph_svg(digits, grey={digits["y"].id})


def test_a_cell_folds_the_others() -> None:
    b = Builder()
    x = b.placeholder("x", ("B", 3))
    row = Spec(torch.float32, (Dim("B"), 3))
    for cell, op in (("In[1]", "relu"), ("In[1]", "tanh"), ("In[2]", "sin")):
        source = SourceLine(cell, len(b.nodes), f"y = {op}(x)")
        x = b.node(op, f"aten.{op}.default", (row,), inputs=(x,), attrs={"self": Ref(0)}, source=source)
    names = [title(box).split("\n")[0] for box in boxes(graph_svg(Graph("g", b.contents()), cell="In[2]"))]
    assert names == ["x", "In[1]", "sin"]


def test_constants_show_at_most_64_numbers() -> None:
    b = Builder()
    b.constant(torch.arange(1000.0) + 1000)
    drawing = Drawing(Graph("g", b.contents()))
    numbers = set(re.findall(r"\b1\d{3}\b", drawing.svg + "".join(dict(drawing.faces()).values())))
    assert len(numbers) <= 64


def test_a_group_of_an_operation_is_drawn() -> None:
    v = tfnb.Variable(torch.zeros(3), name="v")
    with tfnb.record() as graph:
        tfnb.group(tfnb.group(v.assign_add(torch.ones(3))), v.assign_add(torch.ones(3)), name="both")
    assert "both" in graph_svg(graph)


def test_an_empty_graph_is_a_picture() -> None:
    assert boxes(graph_svg(Graph("empty"))) == []


def test_many_edges_in_one_level_are_drawn() -> None:
    b = Builder()
    values = [b.placeholder("x", (3,))]
    row = Spec(torch.float32, (3,))
    for place in range(40):
        fields = {"inputs": tuple(values), "attrs": {"tensors": [Ref(i) for i in range(len(values))]}}
        values.append(b.node(f"n{place}", "aten.stack.default", (row,), **fields))
    svg = graph_svg(Graph("dense", b.contents()))
    assert svg.count('class="wire"') == 40 * 41 // 2


PROGRAM = """
import hashlib
from tests.graph.build import dense
from tfnb.graph import Graph
from tfnb.view import graph_dot, graph_html, text_tree
graph = Graph("net", dense())
print(hashlib.sha256("".join(f(graph) for f in (graph_dot, graph_html, text_tree)).encode()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_same_graph_gives_the_same_bytes_in_every_process(seed: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    from tfnb.view import graph_dot, text_tree

    here = "".join(draw(Graph("net", dense())) for draw in (graph_dot, graph_html, text_tree))
    assert ran.stdout.strip() == hashlib.sha256(here.encode()).hexdigest()


@given(graphs(size=20))
@settings(max_examples=25)
def test_any_graph_can_be_drawn(contents: Contents) -> None:
    drawing = Drawing(Graph("any", contents), boxes=5)
    shown = [box for svg in (drawing.svg, *dict(drawing.faces()).values()) for box in boxes(svg)]
    assert {box.get("data-key") for box in shown} == {box.name for box in drawing.root.walk() if box.key}


@pytest.mark.parametrize("kind", ["asked for", "tied weights"])
def test_a_densified_gradient_is_a_red_edge_with_its_bytes(kind: str) -> None:
    w = tfnb.Variable(torch.zeros(50, 4), name="table")
    with tfnb.record() as g:
        i = tfnb.placeholder(torch.tensor([1, 2, 1]))
        rows = w.read()[i]
        (grad,) = tfnb.gradients((rows @ w.t() if kind == "tied weights" else rows).square().sum(), [w])
        with tfnb.name_scope("after"):
            if isinstance(grad, tfnb.IndexedSlices):
                grad = grad.to_dense()
            grad.sum()
            step = tfnb.train.SGD(0.1).apply_gradients([(grad, w)])
    assert step.node in g.nodes
    svg = Drawing(g, boxes=10_000).svg
    red = [part for part in svg.split("<path") if 'class="wire' in part and f'stroke="{LIGHT["failing"].line}"' in part]
    assert red
    assert all("made dense: 800 bytes" in part for part in red)
