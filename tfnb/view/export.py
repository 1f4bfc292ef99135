"""A graph as a string: HTML for notebooks, SVG and DOT for files.

Options of all: ``cell`` (a label such as ``In[3]``) folds other cells to one box each, ``failing`` (a node,
its name or id) is drawn red with all that holds it unfolded, ``grey`` (ids) is drawn pale, ``boxes`` is how many to
show at first, ``trace`` (of a traced run) colours boxes ``by`` ``"time"`` or ``"bytes"``. The same graph gives the
same bytes in every process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import graphviz

from tfnb.errors import FailedPrecondition
from tfnb.graph import Graph, Node
from tfnb.graph.difference import Difference
from tfnb.view import page
from tfnb.view.box import Box, Key, key_name
from tfnb.view.colours import marks, union
from tfnb.view.drawing import Drawing
from tfnb.view.escape import dot as quoted
from tfnb.view.layout import LayoutFailed
from tfnb.view.listing import listing, text_tree
from tfnb.view.style import LIGHT, MONO, SANS
from tfnb.view.timeline import timeline
from tfnb.widgets.escaping import visible, xml


def graph_html(graph: Graph, *, limit: int = page.BYTES, **options: Any) -> str:
    """A self-contained interactive drawing, or an indented listing as fallback, with the timeline of a ``trace`` below.

    limit: bytes up to which it takes along what is folded at first.
    """
    drawing = Drawing(graph, **options)
    below = timeline_of(options.get("trace"), drawing)
    return page.html(drawing, lambda: text_tree(graph, cell=options.get("cell")), below=below, limit=limit)


def graph_bundle(
    graph: Graph, *, cell: str | None = None, failing: Node | None = None, badges: Mapping[int, str] | None = None
) -> dict[str, str]:
    """The output of a cell for a graph: HTML, the picture alone for front ends that sanitize HTML, and text."""
    drawing = Drawing(graph, cell=cell, failing=failing, badges=badges)
    is_whole = drawing.contents is graph.contents  # no loop or branch is opened, so the trees are the same
    text = listing(graph.name, drawing.wiring) if is_whole else text_tree(graph, cell=cell)
    shown = {"text/plain": text}
    with suppress(LayoutFailed):
        shown["image/svg+xml"] = drawing.svg
    room = OUTPUT - sum(len(form.encode()) for form in shown.values())
    return {"text/html": page.html(drawing, lambda: text, limit=min(page.BYTES, room)), **shown}


def timeline_of(trace: object, drawing: Drawing) -> str:
    """The timeline below the drawing of a traced run, linked to its boxes; empty without a trace."""
    keys = {drawing.path(node): key_name(key) for node, key in drawing.wiring.where.items()}
    return "" if trace is None else timeline(trace, keys)


def trace_html(trace: Any, *, by: str = "time") -> str:
    """A traced run: its graph coloured by time or bytes, the timeline with the live bytes, and the longest items."""
    return graph_html(trace.graph, trace=trace, by=by)


def trace_svg(trace: Any) -> str | None:
    """The first view of `trace_html` as an SVG document; None without a layout."""
    with suppress(LayoutFailed):
        return Drawing(trace.graph, trace=trace, by=trace.colours).svg
    return None


def difference_html(difference: Difference) -> str:
    """Two graphs as one, coloured by new, gone and changed nodes."""
    return page.html(Drawing(union(difference), marks=marks(difference)), lambda: str(difference))


def difference_svg(difference: Difference) -> str | None:
    """The first view of `difference_html` as an SVG document; None without a layout."""
    with suppress(LayoutFailed):
        return Drawing(union(difference), marks=marks(difference)).svg
    return None


def passes_html(passes: Any) -> str:
    """The table of the passes' effects on a run, above the first and the last graph as one."""
    return f"<pre>{xml(repr(passes))}</pre>{difference_html(passes.diff())}"


def parts_html(step: Any) -> str:
    """The table of a step in parts, above each part as a drawing of its own."""
    drawn = "".join(f"<p><b>{xml(str(part.place))}</b></p>{part._repr_html_()}" for part in step.parts)
    return f"<pre>{xml(repr(step))}</pre>{drawn}"


def stages_html(step: object) -> str:
    """The table of a step in stages."""
    return f"<pre>{xml(repr(step))}</pre>"


def auto_placement_html(step: Any) -> str:
    """The table of a step placed by a search, its predicted timeline, the measured one below, and its parts."""
    drawn = [("predicted", step.predicted), *([] if step.measured is None else [("measured", step.measured)])]
    lanes = "".join(f"<p><b>{words}</b></p>{timeline(trace, {})}" for words, trace in drawn)
    parts = "".join(f"<p><b>{xml(str(part.place))}</b></p>{part._repr_html_()}" for part in step.parts)
    return f"<pre>{xml(repr(step))}</pre>{lanes}<details><summary>parts</summary>{parts}</details>"


def graph_svg(graph: Graph, **options: Any) -> str:
    """The first view as an SVG document; raises LayoutFailed."""
    return Drawing(graph, **options).svg


def graph_png(graph: Graph, *, zoom: float = 2.0, **options: object) -> bytes:
    """The first view as a PNG image in light colours, ``zoom`` pixels for one of the drawing.

    Raises FailedPrecondition without the optional package, or without a font that it can write with, LayoutFailed.
    """
    try:
        import resvg_py  # listed exception: optional extra [png]
    except ImportError as missing:
        raise FailedPrecondition("a PNG image needs resvg-py: pip install 'tfnb[png]'") from missing
    plain = re.sub(r"<style>.*?</style>", "", graph_svg(graph, **options), flags=re.DOTALL)  # it knows no variables
    sans, mono = (_font(resvg_py.svg_to_bytes, names) for names in FONTS)
    plain = plain.replace(SANS, sans).replace(MONO, mono or sans)
    return bytes(resvg_py.svg_to_bytes(svg_string=plain, zoom=zoom))


OUTPUT = 148_000  # bytes of all forms of one output
FONTS = (
    ("Helvetica", "Arial", "Liberation Sans", "DejaVu Sans", "Noto Sans", "Segoe UI", "Verdana", "Roboto", "Ubuntu"),
    ("Menlo", "Consolas", "Liberation Mono", "DejaVu Sans Mono", "Noto Sans Mono", "Courier New", "Ubuntu Mono"),
)


@cache
def _font(drawn: Callable[..., Any], names: tuple[str, ...]) -> str:
    """The first of these fonts that this machine has: with another one letters would be left out without a word."""
    page = '<svg xmlns="http://www.w3.org/2000/svg" width="30" height="20"><text y="9" font-family="{}">{}</text></svg>'
    empty = bytes(drawn(svg_string=page.format("", "")))
    for name in names:
        if bytes(drawn(svg_string=page.format(name, "M"))) != empty:
            return name
    if names == FONTS[0]:
        raise FailedPrecondition(
            f"a PNG image needs a font, and none is installed here: install one of {', '.join(names)}, "
            "or export .svg or .html"
        )
    return ""


def graph_dot(graph: Graph, **options: Any) -> str:
    """The first view as DOT text: unfolded boxes are clusters."""
    drawing = Drawing(graph, **options)
    source = graphviz.Digraph(
        quoted(graph.name),
        graph_attr={"fontname": "Helvetica,Arial,sans-serif"},
        node_attr={"shape": "box", "style": "rounded,filled", "fontname": "Helvetica,Arial,sans-serif"},
    )
    _cluster(source, drawing.root, drawing)
    for tail, head in _visible_edges(drawing):
        source.edge(_id(tail), _id(head))
    return str(source.source)


def graph_graphml(graph: Graph) -> str:
    """The nodes and values as GraphML, for networkx, Gephi and yEd; ``name``, ``op``, ``spec`` and ``line`` of each."""
    import networkx

    return "\n".join(networkx.generate_graphml(graph_networkx(graph)))


def graph_networkx(graph: Graph) -> Any:
    """The nodes and values as a MultiDiGraph; names are as they are shown."""
    import networkx

    found = networkx.MultiDiGraph(name=visible(graph.name))
    for node in graph.contents.nodes:
        specs = ", ".join(map(str, node.outputs))
        found.add_node(
            node.id, name=visible(node.name), op=visible(node.op), spec=specs, line=visible(str(node.source or ""))
        )
    for node in graph.contents.nodes:
        found.add_edges_from((value.node, node.id, {"kind": "value", "output": value.index}) for value in node.inputs)
        found.add_edges_from((before, node.id, {"kind": "control"}) for before in node.control)
    return found


def _cluster(source: graphviz.Digraph, box: Box, drawing: Drawing) -> None:
    for child in box.children:
        paint = LIGHT[drawing.painter.tone(child)]
        label = quoted(" ".join(word for word in (child.title, child.detail) if word))
        if child.key not in drawing.opened:
            source.node(_id(child.key), label, fillcolor=paint.fill, color=paint.line, fontcolor=paint.ink)
            continue
        name = f"cluster_{_id(child.key)}"
        with source.subgraph(name=name, graph_attr={"label": label, "id": name, "color": paint.line}) as inner:
            _cluster(inner, child, drawing)


def _visible_edges(drawing: Drawing) -> dict[tuple[Key, Key], None]:
    where, links = drawing.wiring.where, drawing.wiring.links.values()
    drawn = (link for found in links for link in found if not link.quiet)
    ends = ((drawing.seen(where[link.producer]), drawing.seen(where[link.consumer])) for link in drawn)
    return dict.fromkeys(pair for pair in ends if pair[0] != pair[1])


def _id(key: Key) -> str:
    return "n" + "_".join(map(str, key))
