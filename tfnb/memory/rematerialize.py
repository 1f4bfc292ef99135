"""Rematerialization: values of straight code that live across the peak are dropped and recomputed after it.

Without a budget, those that cost next to nothing: `spare`. Under one (semantics S-188 and S-190) a fixed sequence of
plans, each with a lower peak than the one before: where the most is held, the values that are taken again later are
dropped, the cheapest to compute again for each byte first. The first plan that fits and leaves room for rows of loops
is taken, else the one with the lowest peak of those that fit. Copies are the same nodes on the same values: random ops
draw from their stream's place, what writes or comes from another library is kept. So every value has the bits that it
has without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from tfnb.errors import ResourceExhausted
from tfnb.graph import Graph, Node, Value
from tfnb.graph.graph import new_id
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import WITH_GRADIENT
from tfnb.memory.loop_rows import kept_by_loops
from tfnb.memory.prices import cost, repeats
from tfnb.memory.scratch import scratch, state_bytes
from tfnb.passes.donate import donate
from tfnb.passes.liveness import Memory
from tfnb.passes.rewrite import with_nodes

AGAIN = "rematerialized"  # tag of copies
AT_ONCE = 32  # a plan drops at least this fraction of the peak more than the one before
SMALL = 16  # what a copy takes is kept for it, if it is smaller than the dropped value by this factor
WORTH_SPARING = 8 << 20  # bytes; a step that needs less computes nothing again
PIECE = 64 << 10  # bytes that are worth a kernel
SHARE = 64  # all that is computed again costs at most this part of the step
GAIN = 20  # and lowers the peak by at least this part


def spare(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Drop values that are nearly free to recompute from live values, if the peak is clearly lower then.

    A layer norm before a product, for one: in a transformer a tenth of what lives between forward and backward.
    """
    if not any(facts_of(node.op).cheap for node in graph.nodes):
        return graph
    dropping = _Dropping(graph, fetches, feeds, {}, _nominal)
    curve = dropping.memory.curve()
    most = max(curve, default=0)
    chosen = dropping.spared(curve.index(most)) if most >= WORTH_SPARING else {}
    if not chosen:
        return graph
    found = dropping.tried(chosen)
    return with_nodes(graph, found.nodes) if most - found.peak >= most / GAIN else graph


def _nominal(
    graph: Graph, fetches: Collection[Value], feeds: Collection[Value], sizes: Mapping[str, int]
) -> Memory:  # fmt: skip
    """The memory of a graph by its shapes alone: no kernel is run to measure its scratch."""
    return Memory(graph, fetches, feeds, sizes, kept_by_loops(graph, fetches, sizes))


def infeasible(
    graph: Graph, fetches: Collection[Value], feeds: Collection[Value], sizes: Mapping[str, int] | None,
    budget: int, lowest: int,
) -> ResourceExhausted:  # fmt: skip
    """The error of a step that no plan fits into the budget; ``lowest``: bytes of the smallest plan."""
    memory = counted(graph, fetches, feeds, sizes or {})
    working, state = _working(memory), state_bytes(graph)
    place = max(range(len(working)), key=working.__getitem__)
    node, inside = graph.nodes[place], memory.scratch[place]
    where = f" ({node.source})" if node.source else ""
    variables = f"its Variables are {state:,} bytes, and " if state else ""
    beside = f" with {inside:,} bytes of scratch" if inside else ""
    return ResourceExhausted(
        f"a memory budget of {budget:,} bytes is too small for this step: {variables}the inputs and outputs of its "
        f"largest node, {node.name}{where}, are {working[place]:,} bytes{beside}; the smallest feasible budget is "
        f"{lowest:,} bytes. Give at least that, or feed fewer rows",
        details=lowest, **node.where,
    )  # fmt: skip


def counted(
    graph: Graph, fetches: Collection[Value], feeds: Collection[Value], sizes: Mapping[str, int]
) -> Memory:  # fmt: skip
    """The memory of a graph under a budget: without rows of loops, with the scratch of convolutions.

    The graph has the nodes of what is fed.
    """
    aside = kept_by_loops(graph, fetches, sizes)
    return Memory(graph, fetches, feeds, sizes, aside, partial(scratch, contents=graph.contents, sizes=sizes))


def least_budgets(graph: Graph) -> tuple[int, int]:
    """Bytes of the inputs and outputs of the smallest node of a graph, and of its largest, with every symbol at 1.

    No node fits into less than the first; every one fits into the second, for feeds of one row.
    """
    symbols = {symbol for node in graph.nodes for spec in node.outputs for symbol in spec.symbols}
    working = [size for size in _working(Memory(graph, (), (), dict.fromkeys(symbols, 1))) if size]
    return min(working, default=0), max(working, default=0)


def _working(memory: Memory) -> list[int]:
    """Bytes of the inputs, outputs and scratch of each node."""
    sums = (sum(memory.size[owner] for owner in touched) for touched in memory.touched)
    return [size + inside for size, inside in zip(sums, memory.scratch, strict=True)]


def plans(
    graph: Graph, fetches: Collection[Value], feeds: Collection[Value], sizes: Mapping[str, int] | None = None
) -> Iterator[tuple[int, Graph]]:
    """The graph itself, and then graphs of lower and lower predicted peaks, each with its peak without Variables."""
    dropping = _Dropping(graph, fetches, feeds, sizes or {}, counted)
    found = dropping.tried({})
    yield found.peak, graph
    while True:
        better = dropping.lower(found)
        if better is None:
            return
        found = better
        yield found.peak, with_nodes(graph, found.nodes)


@dataclass(slots=True)
class _Trial:
    """A choice of dropped pieces, each with the place of the drop, and the resulting program."""

    dropped: dict[Value, int]
    nodes: list[Node]
    peak: int
    times: int  # nodes at which the peak is held
    place: int  # the first of them, by the places of the graph as it was


class _Dropping:
    """The search for pieces to drop: a graph, and its memory without drops."""

    def __init__(
        self, graph: Graph, fetches: Collection[Value], feeds: Collection[Value], sizes: Mapping[str, int],
        measure: Callable[[Graph, Collection[Value], Collection[Value], Mapping[str, int]], Memory],
    ) -> None:  # fmt: skip
        self.graph, self.fetches, self.feeds, self.sizes, self._measure = graph, fetches, feeds, sizes, measure
        self.memory = measure(graph, fetches, feeds, sizes)
        self.last = self.memory.last()
        self.uses: dict[Value, list[int]] = {}
        for place, touched in enumerate(self.memory.touched):
            for owner in touched:
                self.uses.setdefault(owner, []).append(place)
        self._costs: dict[int, float] = {}
        self._banned: set[Value] = set()

    def tried(self, dropped: dict[Value, int]) -> _Trial:
        """The program after dropping these pieces."""
        nodes, places = _Copying(self, dropped).program()
        graph = donate(self.graph if not dropped else with_nodes(self.graph, nodes), self.fetches, self.feeds)
        curve = self._measure(graph, self.fetches, self.feeds, self.sizes).curve()
        peak = max(curve, default=0)
        at = next((i for i, held in enumerate(curve) if held == peak), 0)
        return _Trial(dropped, nodes, peak, curve.count(peak), places[at] if places else 0)

    def lower(self, now: _Trial) -> _Trial | None:
        """The next plan, with a lower peak; None if nothing helps."""
        while True:
            choice = self._cheapest(now)
            if not choice:
                return None
            for chosen in (choice, choice[:1]):
                found = self.tried(now.dropped | dict.fromkeys(chosen, now.place))
                if found.peak < now.peak:
                    return found
                if found.peak == now.peak and found.times < now.times:
                    now = found  # another node holds as much: go on from there
                    break
            else:
                self._banned.update(choice[:1])

    def spared(self, at: int) -> dict[Value, int]:
        """Pieces to drop at a place that are nearly free to recompute, by cheap ops on live values."""
        nodes = self.graph.contents.by_id
        priced: list[tuple[float, int, Value]] = []
        for owner, uses in self.uses.items():
            lives = uses[0] < at < uses[-1] and at not in uses and self.memory.size[owner] >= PIECE
            if lives and facts_of(nodes[owner.node].op).cheap and self._may_drop(owner, {}):
                chain, kept = self._chain(owner, at, {})
                if not kept and all(facts_of(nodes[number].op).cheap for number in chain):
                    priced.append((sum(map(self._cost, chain)), len(priced), owner))
        if not priced:
            return {}
        left = sum(self._cost(node.id) for node in self.graph.nodes if node.op.count(".") > 1) / SHARE
        chosen: dict[Value, int] = {}
        for price, _, owner in sorted(priced, key=lambda one: one[0] / self.memory.size[one[2]]):
            left -= price
            if left < 0:
                break
            chosen[owner] = at
        return chosen

    def _cheapest(self, now: _Trial) -> list[Value]:
        """Pieces to drop at the peak, the cheapest first."""
        at = now.place
        priced: list[tuple[float, int, Value, int]] = []
        for owner, uses in self.uses.items():
            if uses[0] < at < uses[-1] and at not in uses and self._may_drop(owner, now.dropped):
                chain, kept = self._chain(owner, at, now.dropped)
                gain = self.memory.size[owner] - sum(self.memory.size[piece] for piece in kept)
                if gain > 0:
                    priced.append((sum(map(self._cost, chain)) / gain, len(priced), owner, gain))
        chosen, total = [], 0
        for _, _, owner, gain in sorted(priced):
            chosen.append(owner)
            total += gain
            if total * AT_ONCE >= now.peak:
                break
        return chosen

    def _may_drop(self, owner: Value, dropped: Mapping[Value, int]) -> bool:
        kept = owner in self.memory.kept or owner in dropped or owner in self._banned
        return not kept and repeats(self.graph.contents.by_id[owner.node])

    def _chain(self, owner: Value, at: int, dropped: Mapping[Value, int]) -> tuple[list[int], set[Value]]:
        """Nodes to run again for a piece dropped at a place, and pieces kept alive for them."""
        again = next(place for place in self.uses[owner] if place > at)
        chain: dict[int, None] = {}  # in an order that no id decides: costs are summed along it
        kept: set[Value] = set()
        stack = [owner.node]
        while stack:
            number = stack.pop()
            if number in chain:
                continue
            chain[number] = None
            for value in self.graph.contents.by_id[number].inputs:
                piece = self.memory.owner.get(value)
                if piece in dropped:
                    continue  # computed again anyway
                if self.runs_again(value, again, self.memory.size[owner]):
                    stack.append(value.node)
                elif piece in self.memory.size and self.last[piece] <= at and piece not in self.memory.kept:
                    kept.add(piece)
        return list(chain), kept

    def runs_again(self, value: Value, place: int, size: int) -> bool:
        """Whether a copy that runs at a place, for a piece of so many bytes, takes a copy of this value too."""
        piece = self.memory.owner.get(value)
        if piece is None or piece not in self.memory.size or piece in self.memory.kept or self.last[piece] >= place:
            return False  # there anyway
        nodes = self.graph.contents.by_id
        return self.memory.size[piece] * SMALL > size and repeats(nodes[value.node]) and repeats(nodes[piece.node])

    def _cost(self, number: int) -> float:
        if number not in self._costs:
            node = self.graph.contents.by_id[number]
            self._costs[number] = 0.0 if node.op == WITH_GRADIENT else cost(node, self.graph.contents, self.sizes)
        return self._costs[number]


class _Copying:
    """The program with some pieces dropped: each copy stands before its first consumer."""

    def __init__(self, dropping: _Dropping, dropped: Mapping[Value, int]) -> None:
        self.of, self.dropped = dropping, dropped
        self.by_id = dropping.graph.contents.by_id
        self.copies: dict[int, Node] = {}
        self.nodes: list[Node] = []
        self.places: list[int] = []  # where each node stood; a copy belongs to what comes before it

    def program(self) -> tuple[list[Node], list[int]]:
        """The nodes, and their places as they were."""
        for place, node in enumerate(self.of.graph.nodes):
            gone = tuple(value for value in dict.fromkeys(node.inputs) if self._is_gone(value, place))
            for value in gone:
                self._copy(value, place)
            self._put(node, place, gone)
        return self.nodes, self.places

    def _is_gone(self, value: Value, place: int) -> bool:
        piece = self.of.memory.owner.get(value)
        return piece is not None and piece in self.dropped and self.dropped[piece] < place

    def _put(self, node: Node, place: int, gone: Collection[Value]) -> None:
        if gone:
            inputs = tuple(self.copies[v.node].value(v.index) if v in gone else v for v in node.inputs)
            node = replace(node, inputs=inputs)
        self.nodes.append(node)
        self.places.append(place)

    def _copy(self, value: Value, place: int) -> None:
        """Insert a copy of the value's node, after copies of its dropped operands."""
        size = self.of.memory.size[self.of.memory.owner[value]]
        stack = [value.node]
        while stack:
            node = self.by_id[stack[-1]]
            if node.id in self.copies:
                stack.pop()
                continue
            again = [v for v in node.inputs if self._is_gone(v, place) or self.of.runs_again(v, place, size)]
            missing = [v.node for v in again if v.node not in self.copies]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            number = new_id()
            name, tags = f"{node.name}.again{number}", node.tags | {AGAIN}
            self.copies[node.id] = replace(node, id=number, name=name, tags=tags, control=())
            self._put(self.copies[node.id], place - 1, again)
            self.copies[node.id] = self.nodes[-1]
