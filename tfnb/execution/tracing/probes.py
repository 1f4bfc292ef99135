"""Generated code with probes: a call of what watches the run after each call of the code, or after each part of it.

A part is a run of nodes of one scope, at least eight of them, so that probes between parts cost next to nothing.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.captured_steps import device_of
from tfnb.graph import Graph, Node
from tfnb.passes import Memory, feed_symbols

FEWEST = 8  # nodes of a part
MOST = 64  # parts, about


class Probe:
    """What a probe calls: ``probe(place, value)`` after call number ``place`` of the code; ``code`` for errors."""

    __slots__ = ()
    code: Probed

    def probe(self, place: int, value: Any) -> None:
        """A call of the code gave this."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Part:
    """Generated nodes that follow one another, named by the scope of most of them."""

    name: str
    nodes: tuple[fx.Node, ...]


def parts(program: Program) -> list[Part]:
    """The parts of a program: a new one begins where the scope changes, if the one before has enough nodes."""
    calls = [node for node in program.module.graph.nodes if node.op == "call_function"]
    enough = max(FEWEST, len(calls) // MOST)
    found: list[tuple[list[tuple[str, ...]], list[fx.Node]]] = []
    scope: tuple[str, ...] = ()
    for call in calls:
        node = program.node_of.get(call.name)
        scope = scope if node is None else node.scope[:-1]  # a copy or size belongs to what is around it
        if not found or (len(found[-1][1]) >= enough and scope != found[-1][0][-1]):
            found.append(([], []))
        found[-1][0].append(scope)
        found[-1][1].append(call)
    return [Part("/".join(Counter(scopes).most_common(1)[0][0]) or "no scope", tuple(n)) for scopes, n in found]


class Probed:
    """The code of a program with probes, whose first argument is a `Probe`.

    by_parts: a probe after each of its ``parts``, else after each call. ``nodes``: for each probe the recorded node
    that made the value; ``calls``: the call of the program's code; ``owned``: whether the value is that of the node,
    not a copy or a size of it; ``dead``: the probes whose values were used for the last time.
    """

    def __init__(self, program: Program, *, by_parts: bool) -> None:
        self.program, self.inputs = program, [value.node for value in program.feeds]
        self.parts = parts(program) if by_parts else []
        self.device = device_of(program)
        self.nodes: list[Node | None] = []
        self.owned: list[bool] = []
        self.dead: list[tuple[int, ...]] = []
        self.calls: list[fx.Node] = []  # of the program's own code
        ends = {part.nodes[-1] for part in self.parts}
        graph, new, places = fx.Graph(), dict[fx.Node, Any](), dict[fx.Node, int]()
        self.node_of: dict[str, Node] = {}  # by the name on a line; also of probes: a step may be stopped there
        probe = graph.placeholder("probe")
        last_uses = {} if by_parts else fx.Interpreter(program.module).user_to_last_uses
        for node in program.module.graph.nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
            lines = [new[node].name]
            if node in ends or (node.op == "call_function" and not by_parts):
                place = places[node] = len(self.nodes)
                self.calls.append(node)
                self.nodes.append(self._maker(node))
                self.owned.append(node.name in program.node_of)
                unused = [] if node.users else [node]
                self.dead.append(tuple(places[n] for n in (*last_uses.get(node, ()), *unused) if n in places))
                lines.append(graph.call_method("probe", (probe, place, new[node])).name)
            if node.name in program.node_of:
                self.node_of |= dict.fromkeys(lines, program.node_of[node.name])
        module = fx.GraphModule(program.module, graph)
        module.__dict__.update(module.named_buffers())  # constants, found without a call of __getattr__
        self.constants = tuple(module.buffers())
        self.forward: Callable[..., tuple[Any, ...]] = module.forward
        self.code = module.code

    @classmethod
    def of(cls, program: Program, *, by_parts: bool = False) -> Probed:
        """That of a program, made once."""
        if by_parts not in program.probed:
            program.probed[by_parts] = cls(program, by_parts=by_parts)
        found: Probed = program.probed[by_parts]
        return found

    def _maker(self, at: fx.Node) -> Node | None:
        """The recorded node of a call; a copy or size belongs to the node whose value it takes, an item to nobody."""
        known = self.program.node_of
        if at.target is operator.getitem:
            return None
        found: fx.Node | None = at
        while found is not None and found.name not in known:
            found = next(iter(found.all_input_nodes), None)
        return None if found is None else recorded(known[found.name], self.program.whole)

    def predicted(self, shapes: Sequence[torch.Size]) -> tuple[list[int], list[int]]:
        """Bytes that each part makes, and that are held after it, for feeds of these shapes."""
        program = self.program
        bound = feed_symbols(program.whole.contents, program.feeds)
        sizes = {symbol: shapes[program.feeds.index(value)][axis] for symbol, (value, axis) in bound.items()}
        memory = Memory(program.graph, program.fetches, program.feeds, sizes)
        place = {node.id: i for i, node in enumerate(program.graph.nodes)}
        last = {owner: i for i, owners in enumerate(memory.touched) for owner in owners}
        made, held, alive = [], [], {}
        for part in self.parts:
            places = [place[n.id] for call in part.nodes if (n := program.node_of.get(call.name)) and n.id in place]
            owners = [owner for i in places for owner in memory.made[i]]
            made.append(sum(memory.size[owner] for owner in owners))
            alive.update({owner: last[owner] for owner in owners})
            at = max(places, default=-1)
            alive = {o: until for o, until in alive.items() if until > at or o in memory.kept}
            held.append(sum(memory.size[owner] for owner in alive))
        return made, held


def recorded(node: Node, whole: Graph) -> Node:
    """The node of a graph that a node of a pass came from, and is named after: ``conv`` of ``conv.layout7``."""
    contents, name = whole.contents, node.name
    while node.id not in contents.by_id and name:
        name = name.rpartition(".")[0]
        node = contents.by_name.get(name, node)
    return node
