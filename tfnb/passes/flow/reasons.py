"""A step in parts, for people: the place of each node, the rule, and the edges cut. Pure."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tfnb.errors import InvalidArgument, NotFound
from tfnb.graph import Contents, Dim, Graph, Node, Spec, Value
from tfnb.graph.colocation_groups import groups_in
from tfnb.graph.device_request import parse, readable
from tfnb.graph.subgraph import nested, with_inner
from tfnb.passes.flow import frames
from tfnb.passes.flow.cut import ELSEWHERE, RECV, SEND, Edge, Kind, Part
from tfnb.passes.flow.frames import Op, Port
from tfnb.passes.flow.places import Home, Place, PlacementRule, homes, requested
from tfnb.passes.flow.step_flow import CutOptions, StepFlow, in_parts
from tfnb.passes.prune import step_graph

_UNSEEN = (ELSEWHERE, frames.RUN, frames.START)


@dataclass(frozen=True)
class Crossing:
    """A crossing from one place to another: the name of the value, its size in words, and the kind of the edge."""

    name: str
    source: Place
    to: Place
    kind: Kind
    size: str

    @property
    def words(self) -> str:
        """``value, 96 bytes``, ``sizes only`` or ``done``."""
        words = {Kind.DONE: "done", Kind.SIZE: "sizes only", Kind.VALUE: "value"}[self.kind]
        return f"{words}, {self.size}" if self.kind == Kind.VALUE and self.size else words

    def __str__(self) -> str:
        return f"{self.name}: {self.source} -> {self.to} ({self.words})"


@dataclass(frozen=True)
class Why:
    """Explanation of a node's place; prints in a few lines.

    request: the device string, None where it asks for nothing. place: None for a node that is done wherever it is
    wanted, or is divided. possible: the tasks where it may be. crossing: what it takes from, and gives to, others.
    """

    name: str
    request: str | None
    where: str
    place: Place | None
    rule: str
    possible: tuple[Place, ...]
    crossing: tuple[Crossing, ...]

    def __repr__(self) -> str:
        at = f" at {self.place}" if self.place is not None else ""
        asks = f"asks for {self.request}" if self.request else "asks for nothing"
        lines = [f"{self.name} is done{at}: {self.rule}"]
        lines.append(f"{asks} ({self.where}); possible: {', '.join(map(str, self.possible))}")
        lines.append(f"crosses: {'; '.join(map(str, self.crossing)) or 'nothing'}")
        return "\n".join(lines)


class StepParts:
    """A step in parts, by the device requests of its nodes; the result of `tfnb.place`. A notebook draws the parts.

    ``parts``: what each place does, in order of places. `why` says why a node is done where it is.
    """

    def __init__(self, graph: Graph, step: StepFlow) -> None:
        self.graph, self._step = graph, step
        self.parts = tuple(PlacedPart(self, part) for part in step.parts)

    @cached_property
    def _sites(self) -> dict[int, Place]:
        return requested(self._step.graph.nodes)

    @cached_property
    def _homes(self) -> tuple[Home, ...]:
        return homes(self._step.flow, self._sites)

    @cached_property
    def _ops(self) -> dict[int, int]:
        """The op of each node that became one, by the node's id; fed nodes included."""
        values = ((self._step.flow.value(Port(n)), n) for n in range(len(self._step.flow.ops)))
        return {value.node: n for value, n in values if value is not None}

    @cached_property
    def _values(self) -> dict[Port, Value]:
        return {port: value for value, port in self._step.flow.ports.items()}

    @cached_property
    def _nodes(self) -> dict[int, Node]:
        fed = [self.graph.contents.by_id[value.node] for value in self._step.step.feeds]
        everyone = (inner for node in self._step.graph.nodes for inner in (node, *nested(node)))
        return {node.id: node for node in (*fed, *everyone)}

    @cached_property
    def _around(self) -> dict[int, Node]:
        """The innermost loop or branch around each node that is an op of its own, by the node's id."""
        found: dict[int, Node] = {}
        for node in self._step.graph.nodes:
            for outer in (node, *nested(node)):
                if outer.id in self._ops:
                    found.update((inner.id, outer) for inner in nested(outer))
        return found

    @cached_property
    def places(self) -> Mapping[int, Place]:
        """The place of each node, by id; without nodes recomputed wherever needed."""
        found = {node: self._homes[op].place for node, op in self._ops.items()}
        return {node: place for node, place in found.items() if place is not None}

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All that crosses, in order."""
        return tuple(sorted(edge for part in self._step.parts for edge in part.sends))

    @cached_property
    def crossings(self) -> Mapping[tuple[int, Place], Crossing]:
        """The crossings of each node, by its id and the receiving place; the largest if there are several."""
        found: dict[tuple[int, Place], Crossing] = {}
        for edge in self.edges:
            value = self.value(edge.port)
            if value is not None:
                key, crossing = (value.node, edge.to), self.crossing(edge)
                found[key] = max(found.get(key, crossing), crossing, key=lambda each: each.kind)
        return found

    def value(self, port: Port) -> Value | None:
        """The graph value of a port, if any."""
        return self._step.flow.value(port) or self._values.get(port)

    def spec(self, port: Port) -> Spec | None:
        """The spec of a port; for control ops of loops and branches, the spec of their input."""
        ops, seen = self._step.flow.ops, set[int]()
        while port.op not in seen:
            seen.add(port.op)
            value = self.value(port)
            if value is not None:
                outputs = self._nodes[value.node].outputs if value.node in self._nodes else ()
                return outputs[value.index] if value.index < len(outputs) else None
            if ops[port.op].kind not in (frames.SWITCH, frames.MERGE, frames.ENTER, frames.EXIT, frames.NEXT):
                return None
            port = ops[port.op].inputs[0]
        return None

    def name(self, port: Port) -> str:
        """The name of a port's value; for control ops, the name of the loop or branch and the kind of op."""
        value, op = self.value(port), self._step.flow.ops[port.op]
        if value is not None and value.node in self._nodes:
            node = self._nodes[value.node]
            return f"{node.name}:{value.index}" if 0 < value.index < len(node.outputs) else node.name
        return f"{op.node.name}/{op.kind}" if op.node is not None else op.kind

    def crossing(self, edge: Edge) -> Crossing:
        """An edge in words."""
        spec = self.spec(edge.port)
        return Crossing(self.name(edge.port), edge.source, edge.to, edge.kind, "" if spec is None else _size(spec))

    def why(self, node: Node | torch.Tensor | str) -> Why:
        """Explain the place of a node. node: a Node, a recorded tensor, or a name.

        Raises NotFound, with names that are near, where the step has no such node.
        """
        found = self._find(node)
        around = self._around.get(found.id)
        if around is not None and found.id not in self._ops and around.id in self._ops:
            outer, where = self.why(around), str(found.source or "made by a pass").strip()
            rule = f"inside of {around.name}, which is done there as a whole"
            return replace(outer, name=found.name, request=readable(found.device), where=where, rule=rule)
        ops = [n for n, op in enumerate(self._step.flow.ops) if op.node is not None and op.node.id == found.id]
        op = self._ops.get(found.id)
        home = Home(self._sites.get(found.id)) if op is None else self._homes[op]
        site = self._sites.get(found.id)
        is_asked = site is not None and not (found.device and parse(found.device).soft)
        possible = (site,) if site is not None and is_asked else tuple(sorted({*self._sites.values()})) or (Place(0),)
        sources = {port for n in ops for port in self._step.flow.ops[n].sources}
        crossing = [
            self.crossing(edge) for edge in self.edges
            if edge.port.op in ops or (edge.port in sources and any(self._homes[n].place == edge.to for n in ops))
        ]  # fmt: skip
        where = str(found.source or "made by a pass").strip()
        rule = self._divided(found, ops) if op is None else self._rule(found, self._step.flow.ops[op], home)
        return Why(found.name, readable(found.device), where, home.place, rule, possible, tuple(crossing))

    def _rule(self, node: Node, op: Op, home: Home) -> str:
        beside = "" if home.beside is None else self.name(Port(home.beside))
        match home.rule:
            case PlacementRule.REQUEST if node.forward in self._nodes and "gradient" in node.tags:
                return f"its gradient: where {self._nodes[node.forward].name} is"
            case PlacementRule.REQUEST if node.device is None:
                return f"all inside of it that asks for a place asks for {home.place}"
            case PlacementRule.REQUEST:
                return self._colocated(node) or f"asks for {home.place}"
            case PlacementRule.QUEUE:
                return f"queue {node.attrs['queue'].name}: all that uses it is done at one place"
            case PlacementRule.OPERAND:
                first = "first operand" if op.inputs and op.inputs[0].op == home.beside else "operand"
                return f"beside its {first} {beside}"
            case PlacementRule.USER:
                return f"where it is first used, by {beside}"
            case PlacementRule.DEFAULT:
                return "the first place, as nothing beside it has one"
        return "wherever it is wanted"

    def _colocated(self, node: Node) -> str:
        """The reason of a node that is where its colocation group is; empty if it asks for that place itself."""
        keys = parse(node.device or "/soft").keys
        members = [each for key in keys for each in self._groups.get(key, ())]
        asking = [each for each in members if each.device is not None and parse(each.device).has_place]
        if not keys or any(each.id == node.id for each in asking):
            return ""
        if asking:
            return f"colocated with {asking[0].name}, which asks for {readable(asking[0].device)}"
        others = [each.name for each in members if each.id != node.id] or [str(readable(node.device))]
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return f"colocated with {others[0]}{more}, and no node of that group asks for a place"

    @cached_property
    def _groups(self) -> Mapping[str, Sequence[Node]]:
        """The members of each colocation group by its key, as recorded, also those that the step does without."""
        return {group.key: group.nodes for group in groups_in(tuple(with_inner(self._step.step.whole.nodes)))}

    def _divided(self, node: Node, ops: Sequence[int]) -> str:
        places = sorted({place for n in ops if (place := self._homes[n].place) is not None})
        if not places:
            return "wherever it is wanted"
        inner = sorted({self._sites[each.id] for each in nested(node) if each.id in self._sites})
        return f"what is inside of it is done at {', '.join(map(str, inner or places))}"

    def _find(self, item: object) -> Node:
        owner = getattr(item, "graph", self.graph)
        if owner is not self.graph:
            raise InvalidArgument(f"{getattr(item, 'name', item)} is of graph {owner.name}, not of {self.graph.name}")
        value = item if isinstance(item, Value) else getattr(item, "value", None)
        if isinstance(item, Node):
            number: int | None = item.id
        elif isinstance(value, Value):
            number = value.node
        elif isinstance(item, str):
            named = self.graph.contents.names.get(item)
            inner = {node.name: node.id for node in self._nodes.values()}
            number = named.node if named is not None else inner.get(item)
        else:
            raise InvalidArgument(f"why takes a Node, a recorded tensor or a name, not {item!r:.60}")
        if number in self._nodes:
            return self._nodes[number]
        name = item if isinstance(item, str) else item.name if isinstance(item, Node) else repr(item)
        near = difflib.get_close_matches(name, [node.name for node in self._nodes.values()], 3)
        hint = f"; near: {', '.join(near)}" if near else ""
        gone = "; passes removed it, or nothing wanted needs it" if number in self.graph.contents.by_id else ""
        raise NotFound(f"the step of graph {self.graph.name} has no node {name[:60]!r}{gone}{hint}")

    def __repr__(self) -> str:
        rows = [("task", "nodes", "sends", "receives", "feeds", "bytes sent"), *(part.row for part in self.parts)]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [[row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])] for row in rows]
        return "\n".join("  ".join(line).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        from tfnb.view import parts_html  # listed exception: a repr asks view

        return parts_html(self)


class PlacedPart:
    """The part of a step at one place; a notebook draws the part with its sends and receives."""

    def __init__(self, whole: StepParts, part: Part) -> None:
        self._whole, self._part, self.place = whole, part, part.place

    @cached_property
    def graph(self) -> Graph:
        """The part as a graph for drawings: edges cut are nodes ``send h -> task:1`` or ``recv h <- task:0``."""
        nodes = tuple(self._drawn())
        return Graph(f"{self._whole.graph.name} at {self.place}", Contents(nodes))

    @property
    def sends(self) -> tuple[Crossing, ...]:
        """The values sent to other places."""
        return tuple(map(self._whole.crossing, self._part.sends))

    @property
    def receives(self) -> tuple[Crossing, ...]:
        """The values received from other places."""
        return tuple(map(self._whole.crossing, self._part.receives))

    @property
    def feeds(self) -> tuple[str, ...]:
        """Names of the feeds used at this place."""
        return tuple(self._whole.name(Port(number)) for number in sorted(self._part.feeds))

    @property
    def row(self) -> tuple[str, ...]:
        """The line of the table."""
        nodes = sum(op.kind == frames.NODE for op in self._part.flow.ops)
        sizes = [each.size for each in self.sends if each.kind == Kind.VALUE]
        return (
            str(self.place), str(nodes), str(len(self.sends)), str(len(self.receives)),
            ", ".join(self.feeds) or "-", _total(sizes),
        )  # fmt: skip

    def _drawn(self) -> Iterator[Node]:
        """The ops as nodes in topological order, without back edges of loops."""
        ops = self._part.flow.ops
        seen: set[int] = set()
        made: dict[int, int] = {}  # how many outputs each node has that is drawn
        for root in range(len(ops)):
            stack = [(root, False)]
            while stack:
                number, is_ready = stack.pop()
                if not is_ready and number not in seen and self._is_shown(number):
                    seen.add(number)
                    stack.append((number, True))
                    stack += [(port.op, False) for port in reversed((*ops[number].inputs, *ops[number].after))]
                elif is_ready:
                    node = self._node(number, made)
                    made[number] = len(node.outputs)
                    yield node

    def _is_shown(self, number: int) -> bool:
        op = self._part.flow.ops[number]
        return op.kind not in _UNSEEN and (op.kind != frames.FEED or number in self._part.feeds)

    def _node(self, number: int, made: Mapping[int, int]) -> Node:
        """The node of an op; operands without a value, and ops that only must be done before, are control edges."""
        op, whole = self._part.flow.ops[number], self._whole
        inputs = tuple(Value(self._id(port.op), port.index) for port in op.inputs if port.index < made.get(port.op, 0))
        waits = [port for port in op.inputs if port.index >= made.get(port.op, 0)] + [*op.after]
        control = tuple(dict.fromkeys(self._id(port.op) for port in waits if port.op in made))
        if op.kind == frames.NODE and op.node is not None:
            return replace(op.node, inputs=inputs, control=control, effects=(), device=None)
        if op.kind == frames.FEED:
            name, spec = whole.name(Port(number)), whole.spec(Port(number))
            return Node(id=self._id(number), name=name, op="tfnb.placeholder", outputs=() if spec is None else (spec,))
        if op.kind in (SEND, RECV):
            edge: Edge = op.part
            to = f"send {{}} -> {edge.to}" if op.kind == SEND else f"recv {{}} <- {edge.source}"
            name, spec = to.format(whole.name(edge.port)), whole.spec(edge.port)
        else:
            name, spec = whole.name(Port(number)), whole.spec(Port(number))
        outputs = () if spec is None else (spec,) * (2 if op.kind == frames.SWITCH else 1)
        return Node(
            id=self._id(number), name=f"{name} {number}" if op.kind not in (SEND, RECV) else name,
            op=f"tfnb.{op.kind}", inputs=inputs, outputs=outputs, control=control,
        )  # fmt: skip

    def _id(self, number: int) -> int:
        op = self._part.flow.ops[number]
        return op.node.id if op.kind == frames.NODE and op.node is not None else -1 - number

    def __repr__(self) -> str:
        lines = [f"{self.place}: {self.row[1]} nodes, feeds {self.row[4]}"]
        lines += [f"send {each}" for each in self.sends]
        lines += [f"recv {each}" for each in self.receives]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.graph._repr_html_()


def parts_of_graph(graph: Graph) -> StepParts:
    """A whole graph in parts, as recorded: for a run of all nodes, before passes."""
    used = {value for node in graph.nodes for value in node.inputs}
    made = [node.value(i) for node in graph.nodes for i in range(max(1, len(node.outputs)))]
    feeds = tuple(node.value(i) for node in graph.placeholders for i in range(len(node.outputs)))
    ends = [value for value in made if value not in used or value in feeds]
    return StepParts(graph, in_parts(step_graph(graph, ends, feeds), CutOptions(is_optimized=True)))


def _size(spec: Spec) -> str:
    """Bytes of a value; with the sizes that vary by name."""
    fixed = math.prod(size for size in spec.shape if not isinstance(size, Dim)) * spec.dtype.itemsize
    names = [size.short() for size in spec.shape if isinstance(size, Dim)]
    names = [name if name.isidentifier() else f"({name})" for name in names]
    return f"{'*'.join([f'{fixed:,}' if not names else str(fixed), *names])} bytes"


def _total(sizes: Sequence[str]) -> str:
    """The sum of sizes in words."""
    plain = [int(size.removesuffix(" bytes").replace(",", "")) for size in sizes if size and "*" not in size]
    varied = [size.removesuffix(" bytes") for size in sizes if "*" in size]
    unknown = ["?"] if "" in sizes else []
    return " + ".join([*([f"{sum(plain):,}"] if plain or not (varied or unknown) else []), *varied, *unknown])
