"""One level of a drawing as SVG: boxes where the layout put them, edges that meet the ports of unfolded boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tfnb.graph import Value
from tfnb.view import dot, facts
from tfnb.view.box import Box, Key, key_name
from tfnb.view.colours import Sites
from tfnb.view.face import HEAD, Face, n
from tfnb.view.layout import Point, layout
from tfnb.view.style import LIGHT, WIRE
from tfnb.view.wiring import DrawnEdge, End, Inlet, Outlet, Wiring
from tfnb.widgets.escaping import xml

MARGIN = 14
TOP, INLETS, OUTLETS = 4, -10, 0  # margins below a frame's title: without ports, with ports; above its lower edge
TIP = 4.5  # pixels, half the width of an arrow's tip
APART = 6  # children of one box whose values leave it on wires of their own
PALE = 0.3  # opacity of the edges of a port with very many users


@dataclass(frozen=True, slots=True)
class Ports:
    """Where edges enter and leave an unfolded box: by the key of the source, and of the child that gives."""

    inlets: Mapping[Key, float] = field(default_factory=dict)
    outlets: Mapping[int, float] = field(default_factory=dict)

    def moved(self, shift: float) -> Ports:
        """The ports, that much further right."""
        return Ports(
            {key: x + shift for key, x in self.inlets.items()}, {key: x + shift for key, x in self.outlets.items()}
        )


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A drawn child: its face, its ports if unfolded, and a function that makes SVG at a position."""

    face: Face
    ports: Ports
    wrap: Callable[[float, float], str]


@dataclass(frozen=True, slots=True)
class LevelDrawing:
    """The inside of a box."""

    svg: str
    width: float
    height: float
    ports: Ports


class BoxLevel:
    """The children of ``box`` and the edges between them, laid out."""

    def __init__(
        self, box: Box, children: Sequence[PlacedBox], wiring: Wiring, sites: Sites | None = None
    ) -> None:  # fmt: skip
        self.box, self.children, self.wiring, self.sites = box, children, wiring, sites
        self.edges = wiring.edges(box)
        self.names = dot.ends(self.edges)
        sizes = [(child.face.width, child.face.height) for child in children]
        self.plan = layout(dot.level(sizes, self.edges))
        ports = self._ports()
        self.top = MARGIN if not box.key else INLETS if ports.inlets else TOP
        self.width = self.plan.width + 2 * MARGIN
        self.height = self.plan.height + self.top + (OUTLETS if ports.outlets else MARGIN)

    def draw(self) -> LevelDrawing:
        """The level as SVG, its ports and its size."""
        svg = "".join((*self._wires(), *self._boxes(), *self._dots()))
        return LevelDrawing(svg, self.width, self.height, self._ports())

    def _centre(self, end: End) -> Point:
        x, y = self.plan.nodes[self.names.get(end, str(end))]
        return x + MARGIN, y + self.top

    def _boxes(self) -> Iterator[str]:
        for place, child in enumerate(self.children):
            x, y = self._centre(place)
            yield child.wrap(x - child.face.width / 2, y - child.face.height / 2)

    def _ports(self) -> Ports:
        def across(end: End) -> float:
            return self.plan.nodes[self.names[end]][0] + MARGIN

        inlets = {edge.tail.source: across(edge.tail) for edge in self.edges if isinstance(edge.tail, Inlet)}
        outlets = {edge.head.child: across(edge.head) for edge in self.edges if isinstance(edge.head, Outlet)}
        return Ports(inlets, outlets)

    def _dots(self) -> Iterator[str]:
        ports = self._ports()
        busy = {end for edge in self.edges if edge.values for end in (edge.tail, edge.head)}

        def dot_at(end: Inlet | Outlet, name: str, x: float, y: float) -> str:
            look = "port" if end in busy else "port order"
            return f'<circle class="{look}" {name} cx="{n(x)}" cy="{n(y)}" r="2.5" fill="{WIRE}"/>'

        for key, x in ports.inlets.items():
            yield dot_at(Inlet(key), f'data-in="{key_name(key)}"', x, -HEAD)
        for place, x in ports.outlets.items():
            yield dot_at(Outlet(place), f'data-out="{place}"', x, self.height)

    # -- edges --------------------------------------------------------------------------------------------

    def _wires(self) -> Iterator[str]:
        busy = dot.busy_inlets(self.edges)
        for place, edge in enumerate(self.edges):
            pale = edge.tail in busy or place not in self.plan.edges
            for part in self._parts(edge):
                yield self._wire(part, self._points(place, part), pale=pale)

    def _parts(self, edge: DrawnEdge) -> Iterator[DrawnEdge]:
        """The edge, once for each child of its tail that gives values: they leave an unfolded box apart."""
        depth = len(self.box.key) + 1
        by_child: dict[Key, list[Value]] = {}
        for value in edge.values if isinstance(edge.tail, int) else ():
            by_child.setdefault(self.wiring.where[value.node][depth : depth + 1], []).append(value)
        if not 1 < len(by_child) <= APART:
            yield edge
            return
        for values in by_child.values():
            yield DrawnEdge(edge.tail, edge.head, tuple(values))

    def _points(self, place: int, edge: DrawnEdge) -> list[Point]:
        """Bezier points from the layout, with both ends moved to the ports they belong to."""
        laid = self.plan.edges.get(place)
        points = [(x + MARGIN, y + self.top) for x, y in laid] if laid else self._direct(edge)
        (x0, y0), (x1, y1) = self._start(edge, points[0]), self._stop(edge, points[-1])
        before, after = x0 - points[0][0], x1 - points[-1][0]
        points[0], points[1] = (x0, y0), (points[1][0] + before, points[1][1])
        points[-2], points[-1] = (points[-2][0] + after, points[-2][1]), (x1, y1)
        return _falling(points)

    def _direct(self, edge: DrawnEdge) -> list[Point]:
        """A curve for an edge without a layout."""
        (x0, y0), (x1, y1) = self._centre(edge.tail), self._centre(edge.head)
        y0 += self.children[edge.tail].face.height / 2 if isinstance(edge.tail, int) else 0
        y1 -= self.children[edge.head].face.height / 2 if isinstance(edge.head, int) else 0
        return [(x0, y0), (x0, (y0 + y1) / 2), (x1, (y0 + y1) / 2), (x1, y1)]

    def _start(self, edge: DrawnEdge, point: Point) -> Point:
        if isinstance(edge.tail, Inlet):
            return point[0], -HEAD
        outlets = self.children[edge.tail].ports.outlets if isinstance(edge.tail, int) else {}
        depth = len(self.box.key) + 1
        keys = (self.wiring.where[value.node] for value in edge.values)
        gives = [outlets[key[depth]] for key in keys if len(key) > depth and key[depth] in outlets]
        return (self._left(edge.tail) + gives[0], point[1]) if gives else point

    def _stop(self, edge: DrawnEdge, point: Point) -> Point:
        if isinstance(edge.head, Outlet):
            return point[0], self.height
        if not isinstance(edge.head, int):
            return point
        x = self.children[edge.head].ports.inlets.get(self._source(edge.tail))
        return point if x is None else (self._left(edge.head) + x, point[1])

    def _source(self, tail: End) -> Key:
        return tail.source if isinstance(tail, Inlet) else (*self.box.key, int(tail))  # type: ignore[arg-type]

    def _left(self, end: End) -> float:
        return self._centre(end)[0] - self.children[int(end)].face.width / 2  # type: ignore[arg-type]

    def _wire(self, edge: DrawnEdge, points: list[Point], *, pale: bool) -> str:
        contents = self.wiring.contents
        tone = facts.tone(contents.by_id[edge.values[0].node]) if edge.values else "forward"
        if any(facts.is_densified(contents.by_id[value.node]) for value in edge.values):
            tone = "failing"
        colour = LIGHT[tone].line if tone in ("gradient", "update", "failing") else WIRE
        crossing = self._crossing(edge)
        kind = (
            ("" if edge.values else " order")
            + (" cross" if crossing else "")
            + (f" w-{tone}" if colour != WIRE else "")
        )
        look = f'class="wire{kind}" stroke="{colour}" fill="none"'
        look += f' stroke-width="{n(_thickness(edge.values, self.wiring))}"'
        look += "" if edge.values else ' stroke-dasharray="4 3"'
        look += ' stroke-dasharray="8 4"' if edge.values and crossing else ""
        look += f' opacity="{PALE}"' if pale else ""
        ends = f'data-tail="{key_name(self._source(edge.tail))}"'
        if isinstance(edge.head, int):
            ends += f' data-head="{key_name((*self.box.key, edge.head))}"'
        if edge.values:
            ends += f' data-from="{key_name(self.wiring.where[edge.values[0].node])}"'
        title = xml("\n".join((*_words(edge.values, self.wiring), *crossing)))
        return f'<path {look} {ends} d="{path(points, tip=isinstance(edge.head, int))}"><title>{title}</title></path>'

    def _crossing(self, edge: DrawnEdge) -> list[str]:
        """How an edge crosses to places where its head uses the values, or waits for the tail; empty if it does not."""
        if self.sites is None:
            return []
        level, where = self.box.key, self.wiring.where
        links = (link for value in edge.values for link in self.wiring.links.get(value.node, ()) if link.value == value)
        if not edge.values:
            tail, every = self._source(edge.tail), {link for some in self.wiring.links.values() for link in some}
            links = (each for each in every if each.value is None and where[each.producer][: len(tail)] == tail)
        if isinstance(edge.head, int):
            head = (*level, edge.head)
            users = [link for link in links if where[link.consumer][: len(head)] == head]
        else:
            users = [link for link in links if where[link.consumer][: len(level)] != level]
        found = (self.sites.crossing(link) for link in users if not link.quiet)
        return sorted({words for words in found if words is not None})


def _falling(points: list[Point]) -> list[Point]:
    """The curve without loops: between two knots the control points stay at heights between theirs."""
    for at in range(0, len(points) - 3, 3):
        low, high = sorted((points[at][1], points[at + 3][1]))
        for inner in (at + 1, at + 2):
            points[inner] = (points[inner][0], min(max(points[inner][1], low), high))
    return points


def _words(values: Sequence[Value], wiring: Wiring) -> Iterator[str]:
    """Lines of an edge's tooltip."""
    contents = wiring.contents
    for value in values[:4]:
        node = contents.by_id[value.node]
        specs = "".join(out.readable() for out in node.outputs[value.index : value.index + 1])  # none of an operation
        yield f"{facts.value_name(value, contents)}  {specs}".rstrip()
        if facts.is_densified(node):
            yield f"a row-sparse gradient made dense: {facts.bytes_of(node.outputs[value.index])} bytes"
    if len(values) > 4:
        yield f"and {len(values) - 4} more"
    if not values:
        yield "runs first"


def _thickness(values: Sequence[Value], wiring: Wiring) -> float:
    """1 for a kilobyte and less, 3 for gigabytes."""
    nodes = wiring.contents.by_id
    size = sum(facts.bytes_of(spec) for v in values for spec in nodes[v.node].outputs[v.index : v.index + 1])
    return min(3.0, 1 + max(0.0, math.log10(max(size, 1) / 1000) / 3))


def path(points: Sequence[Point], *, tip: bool) -> str:
    """SVG path data of Bezier points, with an arrow's tip."""
    words = [f"{n(x)},{n(y)}" for x, y in points]
    return f"M{words[0]}C{' '.join(words[1:])}" + (_tip(points[-2], points[-1]) if tip else "")


def _tip(before: Point, end: Point) -> str:
    x, y = end
    dx, dy = x - before[0], y - before[1]
    length = math.hypot(dx, dy) or 1.0
    ux, uy = dx / length * TIP, dy / length * TIP
    left, right = (x - 1.4 * ux - uy, y - 1.4 * uy + ux), (x - 1.4 * ux + uy, y - 1.4 * uy - ux)
    return f"M{n(left[0])},{n(left[1])}L{n(x)},{n(y)}L{n(right[0])},{n(right[1])}"
