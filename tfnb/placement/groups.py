"""The groups of a step that are placed as a whole, with the places where each may be (S-145, S-146, S-148). Pure.

Union-find over a step's nodes. A colocation group (`tfnb.graph.colocation_groups`) is one group, and so is all that
uses one queue. Then, as far as no requests of the user contradict each other: a gradient and its forward node, a view
and its operand, the accesses to a Variable with the first op that takes its value, an update with the Variable, and an
op that takes nothing with its only user.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfnb.errors import InvalidArgument
from tfnb.graph import Node, Value
from tfnb.graph.colocation_groups import DisjointSets
from tfnb.graph.device_request import parse, readable
from tfnb.graph.op_facts import facts_of
from tfnb.graph.subgraph import group_keys, nested
from tfnb.passes import StepGraph
from tfnb.passes.flow.places import Place, asked_places, is_anywhere
from tfnb.passes.resolve import ResolvedStep, resolve
from tfnb.placement.module_calls import forward_nodes, is_gradient
from tfnb.placement.requests import asked, tasks_of
from tfnb.placement.simulation import OpValue, PlacementProblem


@dataclass(frozen=True)
class OpGroup:
    """Nodes that are placed as a whole. places: where they may be; asked: a node whose request says where."""

    nodes: tuple[Node, ...]
    places: tuple[Place, ...]
    asked: Node | None = None

    @property
    def name(self) -> str:
        """The name of the first node that computes."""
        return next((node for node in self.nodes if node.op != "tfnb.read"), self.nodes[0]).name

    @property
    def title(self) -> str:
        """The group in words."""
        return f"with {self.name} and what belongs to it" if len(self.nodes) > 1 else "by itself"


@dataclass(frozen=True)
class GroupedStep:
    """A step in groups. state: the step without its writes. nodes: all nodes of groups, in program order.

    group_of: the number of each node's group, by the node's id. free: ids of nodes that may be given a request; other
    nodes, such as updates, follow what they take.
    """

    step: StepGraph
    state: ResolvedStep
    groups: tuple[OpGroup, ...]
    nodes: tuple[Node, ...]
    group_of: Mapping[int, int]
    free: frozenset[int]

    def problem(
        self, seconds: Callable[[Node], float], size: Callable[[Node, int], int], *, has_server: bool = True
    ) -> PlacementProblem:
        """The step as ops and values. seconds: of a node; size: bytes of an output of a node.

        has_server: whether one server takes all that the step writes, from one task.
        """
        numbers = {node.id: number for number, node in enumerate(self.nodes)}
        values: dict[Value, int] = {}
        makers: list[OpValue] = []

        def value_of(value: Value) -> int:
            if value not in values:
                values[value] = len(makers)
                makers.append(OpValue(numbers[value.node], size(self.state.nodes[value.node], value.index)))
            return values[value]

        takes, kept, stored, staged = [], set[int](), set[int](), set[int]()
        for node in self.nodes:
            taken = [value_of(value) for value in _operands(node) if value.node in numbers]
            takes.append([*dict.fromkeys(taken)])
            if "update" in node.tags:  # done when the step is written
                staged.update(taken)
        for value in map(self.state.resolved, self.state.final.values()):
            if value.node in numbers and "update" not in self.state.nodes[value.node].tags:
                staged.add(value_of(value))
        for value in map(self.state.resolved, self.step.fetches):
            if value.node in numbers:
                kept.add(value_of(value))
        for value, number in values.items():
            if self.state.nodes[value.node].op == "tfnb.read":
                stored.add(number)
        staged -= stored
        return PlacementProblem(
            [seconds(node) for node in self.nodes], takes, makers, [self.group_of[node.id] for node in self.nodes],
            [tuple(place.number for place in group.places) for group in self.groups],
            frozenset(kept | staged), frozenset(stored), frozenset(staged) if has_server else frozenset(),
        )  # fmt: skip


def grouped(step: StepGraph, tasks: int) -> GroupedStep:
    """The groups of a step over so many tasks.

    Raises InvalidArgument for a request of a task that is not there, for one that no values of the node can meet, and
    for two requests of one queue's users that contradict each other.
    """
    names = [f"task:{number}" for number in range(tasks)]
    tasks_of([each for each in asked(step.graph.nodes) if each.request.job != "ps"], names)
    sites = asked_places(step.graph.nodes, range(tasks))
    state = resolve(step.graph, step.feeds)
    fed = {value.node for value in step.feeds}
    nodes = tuple(node for node in state.nodes.values() if _has_place(node, fed))
    pins = {node.id: (sites[node.id], node) for node in nodes if node.id in sites}
    union = _Groups(nodes, pins)
    free = {node.id for node in (*forward_nodes(step), *filter(is_gradient, nodes))}
    _join(union, nodes, free)
    every = tuple(map(Place, range(tasks)))
    members: dict[int, list[Node]] = {}
    for node in nodes:
        members.setdefault(union.root(node.id), []).append(node)
    groups = []
    for root, of in members.items():
        pin = union.pins.get(root)
        groups.append(OpGroup(tuple(of), every) if pin is None else OpGroup(tuple(of), (pin[0],), pin[1]))
    group_of = {node.id: number for number, group in enumerate(groups) for node in group.nodes}
    return GroupedStep(step, state, tuple(groups), nodes, group_of, frozenset(free & group_of.keys()))


class _Groups(DisjointSets[int]):
    """Sets of the ids of nodes. pins: by root, the place that a node of the group asks for, and that node."""

    def __init__(self, nodes: Iterable[Node], pins: Mapping[int, tuple[Place, Node]]) -> None:
        super().__init__(node.id for node in nodes)
        self.pins = {**pins}

    def join(self, one: int, other: int) -> tuple[Node, Node] | None:
        """Make one group of two. Where requests contradict each other, return these two nodes, and join nothing."""
        first, second = self.root(one), self.root(other)
        if first == second:
            return None
        pins = self.pins.get(first), self.pins.get(second)
        if pins[0] is not None and pins[1] is not None and pins[0][0] != pins[1][0]:
            return pins[0][1], pins[1][1]
        self.unite(first, second)
        pin = pins[0] or pins[1]
        if pin is not None:
            self.pins[first] = pin
        return None


def _has_place(node: Node, fed: Collection[int]) -> bool:
    """Whether a node has a place. Fed nodes have none, and nodes that are computed anew wherever they are used."""
    if node.id in fed or node.op == "tfnb.placeholder":
        return False
    return not is_anywhere(node, all(value.node in fed for value in node.inputs))


def _join(union: _Groups, nodes: Sequence[Node], free: Collection[int]) -> None:
    """Make groups of nodes. free: ids of the nodes that may be given a request."""
    users: dict[int, list[Node]] = {}
    for node in nodes:
        for number in dict.fromkeys(value.node for value in _operands(node)):
            users.setdefault(number, []).append(node)
    members: dict[str, Node] = {}  # the first one of each colocation group
    for node in nodes:
        for key in group_keys(node):
            union.join(members.setdefault(key, node).id, node.id)
    queues: dict[object, Node] = {}
    for node in (node for node in nodes if "queue" in node.attrs):
        first = queues.setdefault(node.attrs["queue"], node)
        conflict = union.join(first.id, node.id)
        if conflict is not None:
            _ensure_soft(node, conflict)
    variables: dict[object, Node] = {}
    for node in nodes:
        before = [value.node for value in _operands(node) if value.node in union]
        if is_gradient(node) and node.forward in union:
            union.join(node.forward or 0, node.id)
        elif node.op == "tfnb.read":
            union.join(variables.setdefault(node.attrs["variable"], node).id, node.id)
        elif before and (_is_view(node) or node.id not in free):
            union.join(before[0], node.id)
    for node in nodes:
        mine = users.get(node.id, [])
        if node.op == "tfnb.read" and mine:
            union.join(_first_user(node, users).id, node.id)
        elif len(mine) == 1 and not any(value.node in union for value in _operands(node)):
            union.join(mine[0].id, node.id)


def _first_user(node: Node, users: Mapping[int, Sequence[Node]]) -> Node:
    """The first op that computes with the value of a read, through views."""
    while users.get(node.id) and (node.op == "tfnb.read" or _is_view(node)):
        node = users[node.id][0]
    return node


def _operands(node: Node) -> Iterator[Value]:
    """The values that a node waits for. Control edges have values without bytes."""
    yield from node.inputs
    yield from (Value(number, -1) for number in node.control)


def _is_view(node: Node) -> bool:
    """Whether a node only looks at its operand in another way."""
    return facts_of(node.op).is_view or facts_of(node.op).view_or_copy


def _ensure_soft(node: Node, conflict: tuple[Node, Node]) -> None:
    """Raise InvalidArgument where two nodes that must be together ask for different places, and neither softly."""
    one, other = conflict
    if any(each.device is not None and parse(each.device).soft for each in conflict):
        return
    asks = " and ".join(f"{each.name} asks for {_request(each)!r} ({each.source})" for each in (one, other))
    raise InvalidArgument(
        f"could not satisfy explicit device specification {_request(other)!r} of node {other.name}: all that uses "
        f"queue {node.attrs['queue'].name} is one group, and {asks}; ask for one task, or for soft=True",
        node=other.name,
    )


def _request(node: Node) -> str | None:
    """The request of a node, or of the first node inside of a loop or branch that has one."""
    return readable(node.device or next((inner.device for inner in nested(node) if inner.device is not None), None))
