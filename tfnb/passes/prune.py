"""Prune: cut at the feeds, keep the ancestors of the fetches. White paper §4.2, partial execution."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from tfnb.graph import Contents, Graph, Node, Ref, Value, Variable
from tfnb.graph.colocation_groups import colocated
from tfnb.graph.ops import WITH_GRADIENT
from tfnb.graph.spec import Dim


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The part of a graph needed for one choice of fetches and feeds, to be lowered here or sent to a cluster."""

    whole: Graph
    graph: Graph  # pruned
    fetches: tuple[Value, ...]
    feeds: tuple[Value, ...]

    def also(self, values: Iterable[Value]) -> StepGraph:
        """The same with further fetches behind its own."""
        more = tuple(values)
        return step_graph(self.whole, (*self.fetches, *more), self.feeds) if more else self

    @cached_property
    def variables(self) -> tuple[Variable, ...]:
        """Variables that the step reads or writes."""
        return tuple(self.graph.contents.variables.values())

    @cached_property
    def writes(self) -> tuple[Variable, ...]:
        """Variables that the step writes."""
        return tuple(
            dict.fromkeys(node.attrs["variable"] for node in self.graph.nodes if node.op == "tfnb.assign")
        )  # fmt: skip


def groups_of(graph: Graph) -> list[int]:
    """Ids of the groups and guards of a pruned graph: a pass may do without the node whose effects they are.

    >>> groups_of(Graph())
    []
    """
    return [node.id for node in graph.nodes if node.op in ("tfnb.group", "tfnb.guard")]


def step_graph(graph: Graph, fetches: Iterable[Value], feeds: Iterable[Value]) -> StepGraph:
    """Prune a graph once, for all that will be done with the result.

    Members of a colocation group have the request of the group, also of members that the step does without.
    """
    fetches, feeds = tuple(fetches), tuple(feeds)
    return StepGraph(graph, colocated(prune(graph, fetches, feeds), graph), fetches, feeds)


def prune(graph: Graph, fetches: Iterable[Value], feeds: Iterable[Value], groups: Iterable[int] = ()) -> Graph:
    """The part of ``graph`` that computes ``fetches`` when ``feeds`` are given.

    Fed values stand as placeholders of their own ids. A symbol that a kept node needs and no fed value shows keeps the
    node that binds it. groups: ids of nodes that run in any case.
    """
    contents = graph.contents
    fed = dict.fromkeys(feeds)
    needed = _reach(contents, [*(f for f in fetches if f not in fed), *map(Value, groups)], fed)
    bound = feed_symbols(contents, fed)
    while True:
        missing = {s for node in contents.nodes if node.id in needed for s in node.symbols if s not in bound}
        binders = {contents.symbols[s][0] for s in missing if s in contents.symbols}
        more = _reach(contents, (v for v in binders if v.node not in needed), fed) - needed
        if not more:
            break
        needed |= more
    nodes = tuple(_run(node) for node in contents.nodes if node.id in needed)
    return graph.derive(Contents(nodes, contents.guards))


def _reach(contents: Contents, roots: Iterable[Value], fed: dict[Value, None]) -> set[int]:
    """Ids of nodes reached backwards over data and control edges, and as effects, stopping at fed values."""
    needed: set[int] = set()
    stack = [root.node for root in roots]
    by_id = contents.by_id
    while stack:
        node_id = stack.pop()
        if node_id in needed:
            continue
        needed.add(node_id)
        node: Node = by_id[node_id]
        inputs = node.inputs if node.op != WITH_GRADIENT else _run(node).inputs
        stack.extend([v.node for v in inputs if v.node not in needed and v not in fed])
        stack.extend(node.control)
        stack.extend(node.effects)
    return needed


def _run(node: Node) -> Node:
    """The node as a step runs it, without inputs needed for differentiation alone."""
    if node.op != WITH_GRADIENT:
        return node
    values = tuple(node.inputs[ref.input] for ref in node.attrs["values"])
    return replace(node, inputs=values, attrs={"values": tuple(map(Ref, range(len(values))))})


def feed_symbols(contents: Contents, feeds: Iterable[Value]) -> dict[str, tuple[Value, int]]:
    """Symbols that the feeds show: symbol -> (fed value, axis)."""
    bound: dict[str, tuple[Value, int]] = {}
    for value in feeds:
        outputs = contents.by_id[value.node].outputs
        if value.index >= len(outputs):
            continue
        for axis, size in enumerate(outputs[value.index].shape):
            if isinstance(size, Dim) and size.is_symbol:
                bound.setdefault(size.expr, (value, axis))
    return bound


def without_writes(step: StepGraph) -> StepGraph:
    """The step whose assigns are reads; the step itself where it writes nothing.

    Statistics, counts and averages that its values would move stay as they are.
    """
    if not step.writes:
        return step
    nodes = tuple(map(_unwritten, step.whole.nodes))
    return step_graph(step.whole.derive(Contents(nodes, step.whole.contents.guards)), step.fetches, step.feeds)


def _unwritten(node: Node) -> Node:
    if node.op != "tfnb.assign":
        return node
    return replace(node, op="tfnb.read", inputs=(), attrs={"variable": node.attrs["variable"]}, control=(), effects=())
