"""A step that is no single straight piece, as segments that a compiler takes, and generated code between them.

Each segment is a program of its own, from the values that cross into it to those that are taken outside of it. Views
never cross: whoever takes one makes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import fx

from tfnb.errors import Unimplemented
from tfnb.execution.lowering.control_flow_code import Loop
from tfnb.execution.lowering.lower import _evaluated, lower_optimized
from tfnb.execution.lowering.program import Program, unwritten
from tfnb.graph import Contents, Dim, Graph, Node, Value, ops
from tfnb.graph.op_facts import facts_of
from tfnb.passes import LAID_OUT, feed_symbols

FEWEST = 8  # calls of a segment
MOST = 8  # segments of one step, those with the most calls
_TAGS = frozenset({ops.IN_PLACE, LAID_OUT})  # of what is not so in a segment


class StepSegment:
    """One straight segment, as a call in the generated code: takes the run's number and the crossing values."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.forward: Callable[..., Sequence[Any]] | None = None  # in place of the program's
        self.__name__ = "segment"  # for the generated code

    def __call__(self, run: int, *given: object) -> Sequence[Any]:
        return (self.forward or self.program.forward)(*given, run)


def cut(program: Program, unfit: Set[fx.Node]) -> tuple[fx.GraphModule, list[StepSegment]] | None:
    """Generated code with straight segments as calls, and these segments; None if there are none.

    unfit: calls that stay generated code. Segments follow one another where calls of one need what an unfit call makes
    of another one. Loops share rows that nobody stacks, so they are in one segment or in none.
    """
    split = _Split(program, unfit)
    loops = {node for node in program.module.graph.nodes if isinstance(node.target, Loop)}
    if len({split.segment_of.get(node) for node in loops}) > 1:
        split = _Split(program, unfit | loops)
    return split.made() if split.segments else None


def behind(program: Program) -> set[fx.Node]:
    """Nodes with sizes not determined by feeds, and all dependent nodes."""
    known = feed_symbols(program.whole.contents, program.feeds).keys()
    found = {node for node in program.module.graph.nodes if not sizes(program, node) <= known}
    for node in program.module.graph.nodes:
        if node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def sizes(program: Program, node: fx.Node) -> set[str]:
    """The symbols in the shapes that a call gives."""
    owner = program.node_of.get(node.name) if node.op == "call_function" else None
    specs = () if owner is None else owner.outputs
    return {s for spec in specs for d in spec.shape if isinstance(d, Dim) for s in d.symbols}


class _Split:
    """Assigns calls to segments: ``segments`` has the calls of each, in order."""

    def __init__(self, program: Program, unfit: Set[fx.Node]) -> None:
        self.program, self.unfit = program, unfit
        self.nodes = [node for node in program.module.graph.nodes if node.op != "output"]
        self.by_name = {node.name: node for node in self.nodes}
        self.value_at: dict[str, Value] = {}
        for value, name in program.names.items():  # the first one is what a node gives, others are names of it
            self.value_at.setdefault(name, value)
        self.light = {node for node in self.nodes if self._is_light(node)}
        self.segments = self._found()
        self.segment_of = {node: level for level, nodes in self.segments.items() for node in nodes}

    def _is_light(self, node: fx.Node) -> bool:
        """Whether consumers recompute a node themselves: constants, sizes, their arithmetic, and views."""
        owner = self.program.node_of.get(node.name)
        if node.op != "call_function":
            return node.op != "placeholder"
        if owner is None or node.name not in self.value_at:
            arithmetic = getattr(node.target, "__module__", "") == operator.add.__module__
            return node.target is _evaluated or (arithmetic and node.target is not operator.getitem)
        return node not in self.unfit and facts_of(owner.op).is_view

    def _is_fit(self, node: fx.Node, fit: Set[fx.Node]) -> bool:
        if node.op != "call_function" or node in self.light or node in self.unfit:
            return False
        if node.target is operator.getitem:
            return node.args[0] in fit
        owner = self.program.node_of.get(node.name)
        return owner is not None and (owner.op == ops.WHILE or owner.op not in ops.STRUCTURAL)

    def _found(self) -> dict[int, list[fx.Node]]:
        """The calls of each segment, by level: a segment follows the segments and generated code of lower levels.

        level: for each node the level of a segment that may take it, and that of generated code, which comes after it.
        """
        self.level: dict[fx.Node, tuple[int, int]] = {}
        fit: set[fx.Node] = set()
        for node in self.nodes:
            given = [self.level[source] for source in node.all_input_nodes]
            inside, outside = (max((level[side] for level in given), default=0) for side in (0, 1))
            if self._is_fit(node, fit):
                fit.add(node)
                self.level[node] = inside, inside
            else:
                makes = node.op == "call_function" and node not in self.light
                self.level[node] = (outside + 1 if makes else inside), outside
        found: dict[int, list[fx.Node]] = {}
        for node in self.nodes:
            if node in fit:
                found.setdefault(self.level[node][0], []).append(node)
        counts = {level: sum(n.target is not operator.getitem for n in nodes) for level, nodes in found.items()}
        largest = sorted(counts, key=lambda level: -counts[level])[:MOST]
        return {level: found[level] for level in sorted(largest) if counts[level] >= FEWEST}

    def made(self) -> tuple[fx.GraphModule, list[StepSegment]]:
        """Build the code, with a call for each segment."""
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        segments = []

        def copied(node: fx.Node) -> fx.Node:
            if node not in new:  # light ones that somebody takes
                for source in node.all_input_nodes:
                    copied(source)
                new[node] = graph.node_copy(node, new.__getitem__)
            return new[node]

        rest: dict[int, list[fx.Node]] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                copied(node)
            elif node not in self.light and node not in self.segment_of:
                rest.setdefault(self.level[node][1], []).append(node)
        run = next(new[node] for node in self.nodes if node.op == "placeholder" and node.name == "run")
        for level in sorted({*rest, *self.segments}):
            if level in self.segments:
                segment, given, made = self._segment(level)
                segments.append(segment)
                call = graph.call_function(segment, (run, *map(copied, given)))
                for place, node in enumerate(made):
                    new[node] = graph.call_function(operator.getitem, (call, place))
            for node in rest.get(level, ()):
                copied(node)
        returned: Any = self.program.module.graph.output_node().args[0]
        graph.output(tuple(None if node is None else copied(node) for node in returned))
        return unwritten(self.program.module, graph), segments

    def _segment(self, level: int) -> tuple[StepSegment, list[fx.Node], list[fx.Node]]:
        """A segment, its crossing inputs, and its outputs."""
        members = dict.fromkeys(self.segments[level])
        made = [node for node in members if not members.keys() >= {*self._takers(node)}]
        inside = _Inside(self, members)
        for node in members:
            inside.value(node)
        graph, given = inside.graph()
        fetches = tuple(inside.value(node) for node in made)
        feeds = tuple(inside.known[node] for node in given)
        return StepSegment(lower_optimized(graph, graph, fetches, feeds).undonated()), given, made

    def _takers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Consumers of a value, looking through light nodes."""
        for user in node.users:
            if user in self.light:
                yield from self._takers(user)
            else:
                yield user


class _Inside:
    """The graph of a segment under construction. known: the value that stands for a node of the generated code."""

    def __init__(self, split: _Split, members: Mapping[fx.Node, None]) -> None:
        self.split, self.program, self.members = split, split.program, members
        self.known: dict[fx.Node, Value] = {}
        self.nodes: dict[int, Node] = {}
        self.given: dict[fx.Node, Node] = {}
        contents = self.program.whole.contents.nodes, self.program.graph.nodes
        self.next = 1 + max(node.id for nodes in contents for node in nodes)

    def value(self, at: fx.Node) -> Value:
        """The value of a node: part of the segment if a member, else a crossing input."""
        if at not in self.known:
            value = self.split.value_at.get(at.name)
            if at in self.members or (value is not None and at in self.split.light):
                self._take(self._owner(at))
                self.known[at] = value or Value(-1)  # of several outputs each is a node of its own
            else:
                self.known[at] = self._crossing(at)
        return self.known[at]

    def _owner(self, at: fx.Node) -> Node:
        while at.target is operator.getitem:
            at = at.args[0]  # type: ignore[assignment]
        return self.program.node_of[at.name]

    def _take(self, node: Node) -> None:
        if node.id not in self.nodes:
            names, by_name = self.program.names, self.split.by_name
            inputs = tuple([self.value(by_name[names[value]]) for value in node.inputs])
            self.nodes[node.id] = replace(node, inputs=inputs, control=(), tags=node.tags - _TAGS)

    def _crossing(self, at: fx.Node) -> Value:
        spec = self.program.specs.get(at.name)
        if spec is None:
            raise Unimplemented(f"{at.name} is no tensor")
        self.given[at] = Node(id=self.next, name=f"crossing{self.next}", op="tfnb.placeholder", outputs=(spec,))
        self.next += 1
        return self.given[at].value()

    def graph(self) -> tuple[Graph, list[fx.Node]]:
        """The segment's graph, and its crossing inputs, including feeds that bind a size."""
        shown = feed_symbols(Contents((*self.given.values(),)), [node.value() for node in self.given.values()])
        feeds = feed_symbols(self.program.whole.contents, self.program.feeds)
        for symbol in sorted({s for node in self.nodes.values() for s in node.symbols} - shown.keys()):
            self.value(self.split.by_name[self.program.names[feeds[symbol][0]]])
        contents = Contents((*self.given.values(), *self.nodes.values()))
        return self.program.graph.derive(contents), [*self.given]
