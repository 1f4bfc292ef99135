"""A graph's drawing: the boxes unfolded at first, their faces, and the whole picture as SVG.

Every box has a card (folded) and, if it holds others, a frame (unfolded). The page gets the picture and the other face
of each group, so it can fold and unfold without asking anyone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from typing import Any

from tfnb.graph import Contents, Graph, Node, Value
from tfnb.view import facts
from tfnb.view.box import Box, Key, key_name
from tfnb.view.colours import ChangeMarks, Heat, Vitals, heat, sites
from tfnb.view.face import HEAD, Face, Painter, n, times
from tfnb.view.inside import opened
from tfnb.view.level import BoxLevel, LevelDrawing, PlacedBox, Ports
from tfnb.view.loop_sliders import LoopSliders
from tfnb.view.style import HOT_SHEET, LEGIBLE, PAPER, SANS, SHEET
from tfnb.view.tree import tree
from tfnb.view.wiring import Wiring
from tfnb.widgets.escaping import shorten, xml

BOXES = 26  # boxes and frames of the first view, where the graph allows a choice
MOST = 150
OUTLINE = 12  # boxes of the outermost level that a description names
MARKED = 12  # nodes that are new, gone or changed, which are shown at first

Which = Node | Value | str | int | None


class Drawing:
    """Draws one version of a graph; ``cell`` folds other cells, ``failing`` is red, ``grey`` pale.

    ``trace`` colours boxes by what a traced run measured: ``by`` is ``"time"`` or ``"bytes"``; sides of branches that
    it took are lit, others pale, and its loops have sliders over their iterations. What it knows of the health of
    values is a strip on each card, and what made the first bad numbers is red. ``marks`` says which nodes were
    ``"added"``, ``"removed"`` or ``"changed"``: colours for those, the groups around them unfolded; ``badges`` says
    the same of a cell that ran again: dots on boxes that keep their colours. Where nodes ask for several tasks, each
    card has a stripe in the colour of its task, and edges between tasks are dashed.
    """

    def __init__(
        self, graph: Graph, *, cell: str | None = None, failing: Which = None, grey: Collection[int] = (),
        boxes: int = BOXES, trace: Any = None, by: str = "time", marks: Mapping[int, str] | None = None,
        badges: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        self.name = graph.name
        keep = {*getattr(trace, "fetched", ()), _id_of(failing, graph.contents)}
        inside = opened(graph.contents, getattr(trace, "taken", None), keep)
        self.contents: Contents = inside.contents
        self._paths = inside.paths
        self.root = tree(self.contents, cell=cell)
        self.wiring = Wiring(self.contents, self.root)
        failed = _id_of(failing, self.contents)
        self.vitals = Vitals(trace.health, inside.paths) if trace is not None and trace.health else None
        red = self._origins(trace, inside.paths) | ({failed} if failed is not None else set())
        self.colours: Heat | ChangeMarks | None = None if marks is None else ChangeMarks(marks, inside.paths)
        if trace is not None:
            self.colours = heat(trace, by, inside.lit, inside.paths)
        self.sliders = LoopSliders(trace, inside, self.wiring) if trace is not None and trace.loops else None
        self.badges = ChangeMarks(badges, inside.paths) if badges else None
        self.sites = sites(graph, self.contents, inside.paths)
        self.painter = Painter(
            self.wiring, red, inside.dead.union(grey), self.colours, self.sliders, self.badges, self.vitals, self.sites
        )
        wanted = next((ids for ids in (red, marks, badges) if ids), ())
        self.opened = self._opened(min(boxes, MOST), wanted if len(wanted) <= MARKED else ())

    def path(self, node: int) -> tuple[int, ...]:
        """The recorded ids of a node of the drawing and of its enclosing nodes."""
        return self._paths.get(node, (node,))

    @staticmethod
    def _origins(trace: object, paths: Mapping[int, tuple[int, ...]]) -> frozenset[int]:
        """The nodes of the drawing that made the first bad numbers of a traced run."""
        found = {origin.path for origin in getattr(trace, "origins", {}).values() if origin.node is not None}
        places = {path: node for node, path in paths.items()}
        return frozenset(places.get(path, path[0]) for path in found if len(path) == 1 or path in places)

    # -- which boxes are unfolded -----------------------------------------------------------------------------

    def _opened(self, budget: int, wanted: Collection[int]) -> frozenset[Key]:
        """Groups above the wanted nodes; then lines and modules, a whole depth of a line at a time, while they fit.

        Gradients and updates stay folded where there is a forward pass: they are its mirror.
        """
        where = self.wiring.where
        ways = [where[node] for node in wanted if node in where]
        opened = {way[:depth] for way in ways for depth in range(len(way))} | {()}
        seen = sum(len(box.children) + 1 for box in self.root.walk() if box.key in opened) - 1
        groups = [box for box in self.root.walk() if _has_functions(box)]
        if "forward" in {facts.tone(node) for node in self.root.nodes}:
            groups = [box for box in groups if "forward" in _passes(box) or box.kind in ("line", "cell")]
        for _, boxes in groupby(sorted(groups, key=_priority), key=_priority):
            inner = [box for box in boxes if box.key not in opened and box.key[:-1] in opened]
            more = sum(len(box.children) + 1 for box in inner)
            if seen + more <= budget:
                opened.update(box.key for box in inner)
                seen += more
        return frozenset(opened)

    def seen(self, key: Key) -> Key:
        """The key of the visible box for a node: itself, or the outermost folded box around it."""
        return next((key[:depth] for depth in range(1, len(key)) if key[:depth] not in self.opened), key)

    # -- faces ------------------------------------------------------------------------------------------------

    def card(self, box: Box) -> Face:
        """The folded face."""
        return self.painter.card(box)

    def frame(self, box: Box, opened: Collection[Key]) -> tuple[Face, Ports]:
        """The unfolded face, with the boxes in ``opened`` unfolded inside."""
        drawn = self._level(box, opened)
        empty = self.painter.frame(box, "", drawn.width, drawn.height)
        shift = (empty.width - drawn.width) / 2
        size = f'data-w="{n(drawn.width)}" data-h="{n(drawn.height)}"'
        inside = f'<g class="level" {size} transform="translate({n(shift)},{HEAD})">{drawn.svg}</g>'
        return self.painter.frame(box, inside, drawn.width, drawn.height), drawn.ports.moved(shift)

    def _level(self, box: Box, opened: Collection[Key]) -> LevelDrawing:
        return BoxLevel(box, [self._placed(child, opened) for child in box.children], self.wiring, self.sites).draw()

    def _placed(self, box: Box, opened: Collection[Key]) -> PlacedBox:
        unfolded = box.key in opened
        face, ports = self.frame(box, opened) if unfolded else (self.card(box), Ports())
        return PlacedBox(face, ports, lambda x, y: self._wrapped(box, face, x, y, unfolded))

    def _wrapped(self, box: Box, face: Face, x: float, y: float, unfolded: bool) -> str:
        words = [f'class="box" data-key="{box.name}" transform="translate({n(x)},{n(y)})" tabindex="0"']
        if box.children:
            words.append(f'aria-expanded="{str(unfolded).lower()}" role="button"')
        results = self.wiring.results(box)
        if len(results) == 1:
            words.append(f'data-node="{xml(results[0][0].name)}"')
        uses = self.wiring.uses(box)
        if (passes := _passes(box)) != ["forward"]:
            words.append(f'data-pass="{" ".join(passes)}"')
        if uses:
            words.append(f'data-uses="{" ".join(key_name(self.wiring.where[node.id]) for node in uses)}"')
        return f"<g {' '.join(words)}><title>{xml(self.title(box))}</title>{face.svg}</g>"

    def title(self, box: Box) -> str:
        """The lines of a box's tooltip."""
        more = [each.words(box) for each in (self.badges, self.vitals, self.sites) if each is not None]
        return "\n".join(filter(None, (*self._lines(box), *more)))

    def _lines(self, box: Box) -> list[str]:
        if not box.children:
            return facts.describe(box.node, self.contents)
        name = [box.title, times(box) if box.times > 1 else "", box.detail]
        lines = [" ".join(filter(None, name)), facts.plural(len(box.nodes), "node")]
        for node, places in self.wiring.results(box)[:4]:
            lines.append(f"gives {self.contents.shown(node)}  {node.outputs[places[0]].readable()}")
        variables = dict.fromkeys(facts.variable_name(node) for node in box.nodes if node.op == "tfnb.read")
        lines += [f"reads {facts.joined(variables, 6)}"] if variables else []
        lines += facts.quoted(box.nodes[0])
        return [shorten(line, 200) for line in lines]

    def face(self, name: str, unfolded: bool) -> str:
        """One face of the group with this key as SVG, on request of a live view."""
        box = self.root.at(tuple(map(int, name.split("."))))
        return self.frame(box, ())[0].svg if unfolded else self.card(box).svg

    def faces(self) -> Iterator[tuple[str, str]]:
        """The key of every group and its face that is not shown at first: the own cell's first, outer groups first."""
        stubs = {child.key for child in self.root.children if child.kind == "cell"}
        for box in sorted(self._groups(), key=lambda box: (box.key[:1] in stubs, len(box.key), box.key)):
            yield box.name, self.face(box.name, box.key not in self.opened)

    def _groups(self) -> Iterator[Box]:
        return (box for box in self.root.walk() if box.children and box.key)

    @cached_property
    def outline(self) -> str:
        """A description of the picture in words, for users who cannot see it."""
        seen = [f"{box.title} {box.detail}".strip() for box in self.root.children[:OUTLINE]]
        more = f", and {len(self.root.children) - OUTLINE} more" if len(self.root.children) > OUTLINE else ""
        return f"A dataflow graph from top to bottom: {', then '.join(shorten(word, 60) for word in seen)}{more}."

    # -- the picture ------------------------------------------------------------------------------------------

    @cached_property
    def svg(self) -> str:
        """The first view as a complete SVG document; raises LayoutFailed."""
        return self.picture(self.opened)

    def picture(self, opened: Collection[Key | str]) -> str:
        """The drawing with these boxes (by key or name) unfolded, laid out anew; raises LayoutFailed."""
        keys = {tuple(map(int, key.split("."))) if isinstance(key, str) else key for key in opened}
        drawn = self._level(self.root, keys)
        wide, high = n(drawn.width), n(drawn.height)
        words = f"Graph {self.name}: {facts.counts(self.contents)}"
        sheet = HOT_SHEET if isinstance(self.colours, Heat) else SHEET
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="tfnb" role="img" aria-label="{xml(words)}" '
            f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" font-family="{SANS}" '
            f'style="min-width:{n(LEGIBLE * drawn.width)}px;max-width:100%;height:auto">'
            f"<desc>{xml(self.outline)}</desc><style>{sheet}</style>"
            f'<rect class="paper" width="100%" height="100%" fill="{PAPER}"/>'
            f'<g class="level" data-w="{wide}" data-h="{high}">{drawn.svg}</g></svg>'
        )


def _id_of(which: Which, contents: Contents) -> int | None:
    match which:
        case None:
            return None
        case Node(id=number) | Value(node=number):
            return number if number in contents.by_id else None
        case str():
            node = contents.by_name.get(which)
            return node.id if node else None
    return which if which in contents.by_id else None


def _passes(box: Box) -> list[str]:
    """The switches that toggle a box: the passes of its nodes; small nodes have only their own."""
    if box.is_small:
        return ["variable"]
    return sorted({facts.tone(node) for node in box.nodes if node.op not in facts.SMALL})


def _has_functions(box: Box) -> bool:
    """Whether unfolding shows torch functions of a line, or the modules of a module."""
    if box.kind in ("line", "cell", "pass") or box.code:
        return box.times == 1 and any(child.kind != "op" for child in box.children)
    return box.kind == "scope" and any(child.kind == "scope" or child.is_module for child in box.children)


def _priority(box: Box) -> tuple[bool, int, Key]:
    """The forward pass before gradients and updates, outer boxes first; boxes of one line and depth are equal."""
    return any(node.tags & {"gradient", "update"} for node in box.nodes), len(box.key), box.key[:1]
