"""Generated code with probes: a call of the observer after each call of the code."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.captured_steps import device_of
from tfnb.graph import Graph, Node


class Probe:
    """The observer of probes: ``probe(place, value)`` after call number ``place`` of the code; ``code`` for errors."""

    __slots__ = ()
    code: ProbedCode

    def probe(self, place: int, value: object) -> None:
        """A call of the code gave this."""
        raise NotImplementedError


class ProbedCode:
    """The code of a program with probes, whose first argument is a `Probe`.

    ``nodes``: for each probe the recorded node that made the value; ``calls``: the call of the program's code;
    ``owned``: whether the value is that of the node, not a copy or a size of it; ``dead``: the probes whose values were
    used for the last time.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.inputs = program, [value.node for value in program.feeds]
        self.device = device_of(program)
        self.nodes: list[Node | None] = []
        self.owned: list[bool] = []
        self.dead: list[tuple[int, ...]] = []
        self.calls: list[fx.Node] = []  # of the program's own code
        graph, new, places = fx.Graph(), dict[fx.Node, Any](), dict[fx.Node, int]()
        self.node_of: dict[str, Node] = {}  # by the name on a line; also of probes: a step may be stopped there
        probe = graph.placeholder("probe")
        last_uses = fx.Interpreter(program.module).user_to_last_uses
        for node in program.module.graph.nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
            lines = [new[node].name]
            if node.op == "call_function":
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
    def of(cls, program: Program) -> ProbedCode:
        """The probed code of a program, made once."""
        if program.probed is None:
            program.probed = cls(program)
        found: ProbedCode = program.probed
        return found

    def _maker(self, at: fx.Node) -> Node | None:
        """The recorded node of a call; copies and sizes belong to the node of their operand, items to none."""
        known = self.program.node_of
        if at.target is operator.getitem:
            return None
        found: fx.Node | None = at
        while found is not None and found.name not in known:
            found = next(iter(found.all_input_nodes), None)
        return None if found is None else recorded(known[found.name], self.program.whole)


def recorded(node: Node, whole: Graph) -> Node:
    """The node of a graph that a node of a pass came from, and is named after: ``conv`` of ``conv.layout7``."""
    contents, name = whole.contents, node.name
    while node.id not in contents.by_id and name:
        name = name.rpartition(".")[0]
        node = contents.by_name.get(name, node)
    return node
