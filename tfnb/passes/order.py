"""An order of the nodes with a lower peak memory. Semantics S-155, white paper §5.2.

Two moves that never make the values held between the old and the new place more: a node that frees more than it makes
comes as soon as it can (a sum of partial gradients), and a node that makes more than it takes comes as late as it can
(the gradient of a large weight). Only pure nodes move; the others keep their order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tfnb.graph import Graph, Node, Value
from tfnb.graph.graph import new_id
from tfnb.passes.liveness import Memory
from tfnb.passes.rewrite import is_pure, with_nodes

WORTH_ORDERING = 256 << 10  # bytes; a step that needs less runs in program order


def split(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """A backward op whose ``output_mask`` asks for the gradients of an input and of larger weights becomes two.

    Then the weights' part can wait. The kernels compute the parts apart from each other anyway.
    """
    if not any("output_mask" in node.attrs for node in graph.nodes):
        return graph
    memory = Memory(graph, fetches, feeds)
    fixed = {value.node for value in (*fetches, *feeds)}
    later: dict[Value, Value] = {}
    nodes: list[Node] = []
    for place, node in enumerate(graph.nodes):
        if any(value in later for value in node.inputs):
            node = replace(node, inputs=tuple(later.get(value, value) for value in node.inputs))
        mask: Sequence[bool] = node.attrs.get("output_mask") or ()
        wanted = [i for i, asked in enumerate(mask) if asked]
        taken = sum(memory.size[owner] for owner in memory.touched[place] if owner not in memory.made[place])
        heavy = sum(memory.size.get(node.value(i), 0) for i in wanted[1:])
        if node.id in fixed or wanted[:1] != [0] or heavy <= taken or not is_pure(node):
            nodes.append(node)
            continue
        first = {**node.attrs, "output_mask": [i == 0 for i in range(len(mask))]}
        rest = {**node.attrs, "output_mask": [i > 0 and bool(asked) for i, asked in enumerate(mask)]}
        twin = replace(node, id=new_id(), name=f"{node.name}.weight", attrs=rest)
        nodes += [replace(node, attrs=first), twin]
        later.update({node.value(i): twin.value(i) for i in range(1, len(mask))})
    return with_nodes(graph, nodes)


def order(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """The nodes in the order with the lowest peak, among the orders reached by the two moves."""
    memory = Memory(graph, fetches, feeds)
    best: Sequence[int] = range(len(graph.nodes))
    lowest = memory.peak()
    if lowest < WORTH_ORDERING:
        return graph
    moves = _Moves(graph, memory)
    late = moves.late()
    for found in (late, moves.early(late), moves.early()):
        most = memory.peak(found)
        if most < lowest:
            best, lowest = found, most
    return with_nodes(graph, [graph.nodes[place] for place in best])


class _Moves:
    """The two moves, over the places of a graph's nodes."""

    def __init__(self, graph: Graph, memory: Memory) -> None:
        self.memory = memory
        self.before = _before(graph)
        self.after: list[list[int]] = [[] for _ in graph.nodes]
        for place, places in enumerate(self.before):
            for earlier in places:
                self.after[earlier].append(place)
        self.movable = [is_pure(node) for node in graph.nodes]

    def early(self, turns: Sequence[int] | None = None) -> list[int]:
        """An order with nodes that free more than they allocate as early as possible."""
        turns = range(len(self.before)) if turns is None else turns
        return self._eager(turns, self.before, self.after, _HeldMemory(self.memory, from_end=False))

    def late(self) -> list[int]:
        """Order in which nodes that allocate more than they free come as late as possible: `early` with time
        reversed.
        """
        turns = range(len(self.before) - 1, -1, -1)
        return self._eager(turns, self.after, self.before, _HeldMemory(self.memory, from_end=True))[::-1]

    def _eager(
        self, turns: Sequence[int], before: list[list[int]], after: list[list[int]], held: _HeldMemory
    ) -> list[int]:
        """The places in the order of ``turns``, each moved to the front while the held memory does not grow.

        A node that neither adds nor frees anything (a view) comes too: what it leads to may free something.
        """
        waits = [len(places) for places in before]
        placed = [False] * len(before)
        found: list[int] = []

        def put(place: int) -> list[int]:
            placed[place] = True
            found.append(place)
            ready = held.place(place)
            for follower in after[place]:
                waits[follower] -= 1
                ready.append(follower)
            return [p for p in ready if not waits[p] and not placed[p] and self.movable[p]]

        for turn in turns:
            pending = [] if placed[turn] else put(turn)
            while pending:
                place = pending.pop()
                if not placed[place] and held.is_worth(place):
                    pending.extend(put(place))
        return found


def _before(graph: Graph) -> list[list[int]]:
    """For each node the places of its predecessors."""
    contents = graph.contents
    position = contents.position
    before: list[list[int]] = []
    fixed: int | None = None  # the last node that does not move
    for place, node in enumerate(contents.nodes):
        needed = {value.node for value in node.inputs} | set(node.control)
        needed |= {contents.symbols[s][0].node for s in node.symbols if s in contents.symbols}
        places = {position[i] for i in needed if i in position and position[i] < place}
        if not is_pure(node):
            if fixed is not None:
                places.add(fixed)
            fixed = place
        before.append(list(places))
    return before


class _HeldMemory:
    """Memory added by each node, as an order grows; with time reversed if ``from_end``."""

    def __init__(self, memory: Memory, *, from_end: bool) -> None:
        self.size, self.touched, self.made = memory.size, memory.touched, memory.made
        self.from_end, self.kept = from_end, memory.kept
        self.held = set(memory.kept) if from_end else set()
        # of the nodes that touch a piece and are not placed yet: how many, and the sum of their places
        self.left: dict[Value, int] = dict.fromkeys(memory.size, 0)
        self.sums: dict[Value, int] = dict.fromkeys(memory.size, 0)
        for place, owners in enumerate(memory.touched):
            for owner in owners:
                self.left[owner] += 1
                self.sums[owner] += place

    def is_worth(self, place: int) -> bool:
        """Whether less is held after the node than before, or the same and the node makes nothing."""
        size, made, touched = self.size, self.made[place], self.touched[place]
        grows = 0
        if self.from_end:
            for owner in touched:
                if owner not in self.held:
                    grows += size[owner]
            for owner in made:
                grows -= size[owner]
        else:
            for owner in touched:
                if self.left[owner] == 1 and owner not in self.kept:
                    grows -= size[owner]
            for owner in made:
                grows += size[owner]
        return grows < 0 or (grows == 0 and not made)

    def place(self, place: int) -> list[int]:
        """Note that a node has been placed; returns nodes that now may add less than before."""
        nearer = []
        for owner in self.touched[place]:
            self.left[owner] -= 1
            self.sums[owner] -= place
            if self.left[owner] == 1:
                nearer.append(self.sums[owner])
        if self.from_end:
            self.held.update(self.touched[place])
        return nearer
