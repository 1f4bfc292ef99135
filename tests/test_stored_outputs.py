"""Stored outputs of the notebooks where a host strips scripts and styles: a text, and a picture of each drawing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import tfnb

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SHAPES = {"rect", "path", "polygon", "polyline", "circle", "ellipse", "line", "text"}
DRAWN = {"svg", "g", "title", "desc", "tspan", "a", "style", *SHAPES}  # of an SVG that a host takes for harmless
UNNAMED = re.compile(r"<[\w.]+ object( at 0x[0-9a-f]+)?>")


def stored(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The bundle of each stored output, with its cell."""
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        for output in cell.get("outputs", ()):
            if data := output.get("data"):
                yield f"{path.name}[{number}]", {kind: "".join(form) for kind, form in data.items()}


def plain(html: str) -> str:
    """The text of a page as a host shows it: without scripts, styles and inline SVG, whose tags it strips."""
    return re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(script|style|svg)\b.*?</\1>", "", html)).strip()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_output_has_a_text(path: Path) -> None:
    for where, data in stored(path):
        assert data.get("text/plain", "").strip() and not UNNAMED.search(data["text/plain"]), where
        assert "text/html" not in data or plain(data["text/html"]), where


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_drawing_has_a_picture_that_needs_neither_script_nor_style(path: Path) -> None:
    for where, data in stored(path):
        assert "tfnb-page" not in data.get("text/html", "") or "image/svg+xml" in data, where
        if "image/svg+xml" in data:
            assert list(faults(ElementTree.fromstring(data["image/svg+xml"]))) == [], where


def faults(picture: ElementTree.Element) -> Iterator[str]:
    """Elements and attributes that a host strips, and shapes that only a style colours."""
    coloured = {picture: False}
    for parent in picture.iter():
        name = parent.tag.rpartition("}")[2]
        if name not in DRAWN:
            yield f"an element {name}"
        yield from (f"{name} {key}" for key in parent.attrib if key.startswith("on") or key.endswith("href"))
        here = coloured[parent] = coloured[parent] or bool({"fill", "stroke"} & parent.attrib.keys())
        if name in SHAPES and not here:
            yield f"{name} without a colour: {parent.attrib}"
        coloured.update(dict.fromkeys(parent, here))


def test_faults_of_a_picture_are_found() -> None:
    namespace = 'xmlns="http://www.w3.org/2000/svg"'
    bad = f'<svg {namespace}><script/><rect class="box"/><g fill="red" onclick="f()"><text>a</text></g></svg>'
    assert len(list(faults(ElementTree.fromstring(bad)))) == 3
    assert plain("<div>a<svg><text>b</text></svg><script>c</script></div>") == "a"


def test_traces_passes_and_differences_have_a_picture() -> None:
    with tfnb.record("pictured") as graph:
        x = tfnb.placeholder(torch.ones(4))
        y = (x * 2).sum()
    session = tfnb.Session(graph)
    session.run(y, {x: torch.ones(3)}, trace=True)
    for shown in (session.trace, graph.diff(graph), session.passes(y)):
        assert list(faults(ElementTree.fromstring(shown._repr_svg_()))) == []
