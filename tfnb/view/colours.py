"""Colours of a drawing: measurements of a traced run (`Heat`), changes of nodes (`ChangeMarks`), and places (`Sites`).

A trace is anything with ``events`` that have ``node``, ``seconds`` and ``bytes``, and ``inside``. For a difference both
graphs are drawn as one. Imports the words and the box.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tfnb.errors import InvalidArgument
from tfnb.graph import Contents, Graph, Node, Value
from tfnb.graph.colocation_groups import colocated
from tfnb.graph.contents import Names
from tfnb.graph.difference import Difference
from tfnb.passes.flow.places import Place, requested
from tfnb.passes.flow.reasons import Crossing, parts_of_graph
from tfnb.view import facts
from tfnb.view.box import Box
from tfnb.view.inside import ARGUMENT, Path
from tfnb.view.style import LIGHT
from tfnb.view.wiring import NodeLink

LEVELS = 5  # of colour; a level is three times the share of the one below
BY = ("time", "bytes")
HOT = {"heat4": "over 33 %", "heat3": "11 %", "heat2": "4 %", "heat1": "1 %"}


@dataclass(frozen=True, slots=True)
class Heat:
    """Amounts by node id with their total, in seconds of ``time`` or in ``bytes``."""

    amounts: dict[int, float]
    total: float
    by: str = "time"
    lit: frozenset[int] = frozenset()  # nodes that ran, and nobody measured

    def of(self, box: Box) -> float | None:
        """The amount of all nodes of a box; None if none of them ran."""
        found = [self.amounts[node.id] for node in box.nodes if node.id in self.amounts]
        return sum(found) if found else None

    def tone(self, box: Box) -> str:
        """The colour of a box: by its share of the whole."""
        amount = self.of(box)
        if amount is None:
            return "heat0" if self.lit.issuperset(node.id for node in box.nodes) else "plain"
        return f"heat{level(self._share(amount))}"

    def words(self, box: Box) -> str:
        """``1.2 ms · 14 %``, or nothing."""
        amount = self.of(box)
        if amount is None:
            return ""
        text, percent = duration(amount) if self.by == "time" else facts.amount(amount), 100 * self._share(amount)
        return f"{text} · {percent:.0f} %" if percent >= 1 else f"{text} · <1 %"

    @property
    def kinds(self) -> dict[str, str]:
        """Words by colour, as a legend lists them."""
        return {tone: f"{words} of the {self.by}" for tone, words in HOT.items()}

    def _share(self, amount: float) -> float:
        return amount / self.total if self.total else 0.0


def heat(
    trace: Any, by: str = "time", lit: frozenset[int] = frozenset(), paths: Mapping[int, Path] | None = None
) -> Heat:  # fmt: skip
    """The amounts of a trace by node; a share of time is relative to the whole step. Raises InvalidArgument.

    paths: of the drawing's nodes in loops and branches.
    """
    if by not in BY:
        raise InvalidArgument(f"a drawing is coloured by {' or by '.join(BY)}, not by {by!r}")
    amounts: dict[int, float] = {}
    places = {path: node for node, path in (paths or {}).items()}
    for event in trace.events:
        if event.node is not None:
            amount = event.seconds if by == "time" else event.bytes
            amounts[event.node.id] = amounts.get(event.node.id, 0.0) + amount
    for path, inside in trace.inside.items():  # in time they are part of the node around all of them
        node = places.get(path)
        if node is not None:
            amounts[node] = amounts.get(node, 0.0) + (inside.seconds if by == "time" else inside.bytes)
            if by == "time":
                amounts[path[0]] = max(0.0, amounts.get(path[0], 0.0) - inside.seconds)
    return Heat(amounts, trace.seconds if by == "time" else sum(amounts.values()), by, lit)


def level(share: float) -> int:
    """The colour of a share: above 1/3, 1/9, 1/27, 1/81, or below.

    >>> [level(share) for share in (0.5, 0.2, 0.05, 0.02, 0.001)]
    [4, 3, 2, 1, 0]
    """
    return sum(share > 3.0**-power for power in range(1, LEVELS))


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.00123), duration(2.5), duration(4e-6)
    ('1.23 ms', '2.50 s', '4 us')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


# -- health ----------------------------------------------------------------------------------------------------

STRIP = {
    "nan": "#dc2f26", "-inf": "#ee7b15", "negative": "#5b8def", "zero": "#a9b0bb", "positive": "#33a98a",
    "+inf": "#ee7b15",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Vitals:
    """Counts of numbers by kind in a traced run, by the recorded path of a node."""

    by_path: Mapping[Path, Any]  # of objects with ``counts`` and ``size`` that add up
    paths: Mapping[int, Path]

    def of(self, box: Box) -> Any:
        """The health of all values of a box; None if none was checked."""
        found = [self.by_path.get(self.paths.get(node.id, (node.id,))) for node in box.nodes]
        seen = [health for health in found if health is not None]
        return sum(seen[1:], seen[0]) if seen else None

    def words(self, box: Box) -> str:
        """The counts, and the range of the finite ones."""
        health = self.of(box)
        return "" if health is None else repr(health)

    def shares(self, box: Box) -> list[tuple[str, float]]:
        """Colours with their shares of the whole; tiny shares are enlarged to be visible."""
        health = self.of(box)
        if health is None or not health.size:
            return []
        shares = [(STRIP[word], max(0.04, count / health.size)) for word, count in health.counts if count]
        total = sum(share for _, share in shares)
        return [(colour, share / total) for colour, share in shares]


# -- places ----------------------------------------------------------------------------------------------------

STRIPES = ("#0072b2", "#d55e00", "#2a9d76", "#c2699a", "#c98a0a", "#3d9fd8")  # on light and on dark pages


@dataclass(frozen=True, slots=True)
class Sites:
    """The place of each node of a drawing, by its id, and crossings, by recorded id and receiving place."""

    at: Mapping[int, Place]
    crossings: Mapping[tuple[int, Place], Crossing]
    paths: Mapping[int, Path]

    @property
    def colours(self) -> dict[Place, str]:
        """The colour of each place, in order of places."""
        return {place: STRIPES[n % len(STRIPES)] for n, place in enumerate(sorted({*self.at.values()}))}

    def of(self, box: Box) -> list[Place]:
        """The places of a box's nodes."""
        return sorted({self.at[node.id] for node in box.nodes if node.id in self.at})

    def words(self, box: Box) -> str:
        """``at task:0, task:1``."""
        found = self.of(box)
        return f"at {', '.join(map(str, found))}" if found else ""

    def crossing(self, link: NodeLink) -> str | None:
        """How a value crosses to its user: ``task:0 -> task:1, value, 96 bytes``; None if both are at one place.

        Of a control dependency only the word that the producer is done crosses.
        """
        source, to = self.at.get(link.producer), self.at.get(link.consumer)
        if source is None or to is None or source == to:
            return None
        known = self.crossings.get((self.paths.get(link.producer, (link.producer,))[-1], to))
        words = "done" if link.value is None else "" if known is None else known.words
        return ", ".join(filter(None, [f"{source} -> {to}", words]))


def sites(graph: Graph, contents: Contents, paths: Mapping[int, Path]) -> Sites | None:
    """Where the nodes of a drawing are done; None where they do not ask for several tasks.

    contents, paths: the graph with its loops and branches opened. Of a graph that cannot be cut, what nodes ask for.
    """
    try:
        places = requested(colocated(graph).nodes)
    except InvalidArgument:  # requests that contradict each other, or a device of a stranger's file
        return None
    if len({*places.values()}) < 2:
        return None
    crossings: Mapping[tuple[int, Place], Crossing] = {}
    with suppress(Exception):  # a graph that no run takes is drawn, too
        whole = parts_of_graph(graph)
        places, crossings = {**places, **whole.places}, whole.crossings
    at: dict[int, Place] = {}
    for node in contents.nodes:
        way = (places.get(number) for number in reversed(paths.get(node.id, (node.id,))))
        place = next((each for each in way if each is not None), None)
        if node.op == ARGUMENT and node.inputs:
            place = at.get(node.inputs[0].node, place)
        if place is not None:
            at[node.id] = place
    return Sites(at, crossings, paths)


# -- differences -----------------------------------------------------------------------------------------------

TONES = {"added": "update", "removed": "failing", "changed": "variable"}


@dataclass(frozen=True, slots=True)
class ChangeMarks:
    """Colours boxes by the changes of their nodes; unchanged ones are plain."""

    by_id: Mapping[int, str]
    paths: Mapping[int, tuple[int, ...]]  # of the drawing's nodes in loops and branches: they follow what is around

    def _of(self, node: Node) -> str | None:
        return self.by_id.get(self.paths.get(node.id, (node.id,))[0])

    def of(self, box: Box) -> str | None:
        """The change of a box: that of its nodes if they agree, else "changed"."""
        found = {self._of(node) for node in box.nodes}
        return found.pop() if len(found) == 1 else "changed"

    def tone(self, box: Box) -> str:
        """The colour of a box."""
        mark = self.of(box)
        return "plain" if mark is None else TONES[mark]

    def words(self, box: Box) -> str:
        """``2 added, 1 removed``; nothing where nothing is marked."""
        found = [self._of(node) for node in box.nodes]
        if not box.children:
            return found[0] or ""
        return ", ".join(f"{found.count(mark)} {mark}" for mark in TONES if mark in found)

    @property
    def kinds(self) -> dict[str, str]:
        """Words for the changes by colour; a group of several kinds has the colour of changed ones."""
        return {tone: mark for mark, tone in TONES.items() if mark in self.by_id.values()}


def legend(colours: Heat | ChangeMarks, root: Box) -> list[list[str]]:
    """Words and colours that boxes inside of ``root`` have."""
    tones = {colours.tone(box) for child in root.children for box in child.walk()}
    return [[words, LIGHT[tone].line] for tone, words in colours.kinds.items() if tone in tones]


def marks(difference: Difference) -> dict[int, str]:
    """The change of each node of `union`, without unchanged nodes."""
    parts = {"added": difference.added, "removed": difference.removed, "changed": difference.changed}
    return {node.id: mark for mark, nodes in parts.items() for node in nodes}


def union(difference: Difference) -> Graph:
    """The graph after, with removed nodes inserted below their inputs."""
    after, names = difference.after, Names(node.name for node in difference.after.nodes)
    place: dict[int, int] = dict(after.position)  # of nodes after, and of those that are gone: behind which of them
    gone, last = [], -1
    for node in difference.before.nodes:
        now = difference.same.get(node.id)
        if now is not None:
            last = place[now]
            continue
        inputs = tuple(Value(difference.same.get(v.node, v.node), v.index) for v in node.inputs)
        place[node.id] = last = max([last, *(place[v.node] for v in inputs if v.node in place)])
        control = tuple(difference.same.get(i, i) for i in node.control)
        gone.append(replace(node, name=names.fresh(node.name), inputs=inputs, control=control, effects=()))
    nodes = sorted([*after.nodes, *gone], key=lambda node: (place[node.id], node.id not in after.by_id))
    return Graph(difference.name, Contents(tuple(nodes), after.guards))
