"""Where each op of the dataflow form is done. Pure.

An op has a home, or it is done anew at each place that wants its value: what is fed and views of it, constants, tensors
of constant size that are filled with one number, the number of the run, and all that a loop counts with. The control
loop of EuroSys'18 §4.4 is the loop's own counter, done anew at each place: a counted loop ends everywhere by itself. A
condition that is computed from tensors has a home; its truth is sent to each other place once for each iteration.

A node's home is the place that it asks for. One that asks for nothing goes where its first operand is, or where it is
first used if that has no home; the ops that a loop or branch is made of go with the values that they pass on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

from tfnb.errors import InvalidArgument, Unimplemented
from tfnb.graph import Node
from tfnb.graph.device_request import DeviceRequest, parse, readable
from tfnb.graph.ops import CALL
from tfnb.graph.subgraph import nested, subgraphs, with_inner
from tfnb.passes.flow import frames
from tfnb.passes.flow.frames import Flow, Op, Port


class Place(NamedTuple):
    """A process that computes: a task of a cluster, a parameter server, or one of several parts of a step here.

    >>> str(Place(1)), str(Place(0, "ps")), str(TASK)
    ('task:1', 'ps:0', 'task')
    """

    number: int
    job: str = "task"

    def __str__(self) -> str:
        return self.job if self.number < 0 else f"{self.job}:{self.number}"


TASK = Place(-1)
"""Whichever task computes a step, or each data-parallel replica on its rows."""


class PlacementRule(Enum):
    """The rule that placed an op. Rules by other ops name the op in `Home.beside`."""

    REQUEST, QUEUE, OPERAND, USER, LOOP, DEFAULT, ANYWHERE = (
        "request", "queue", "operand", "user", "loop", "default", "anywhere",
    )  # fmt: skip


class Home(NamedTuple):
    """The place of an op, the rule, and the neighbouring op that decided. No place: recomputed wherever needed.

    also: places that do it anew instead of receiving its value from there.
    """

    place: Place | None
    rule: PlacementRule = PlacementRule.ANYWHERE
    beside: int | None = None
    also: frozenset[Place] = frozenset()


ANYWHERE = frozenset({
    frames.START, frames.FEED, frames.RUN, frames.COUNT, frames.BELOW, frames.MIX, frames.ITERATIONS, frames.ROW,
    frames.ABSENT, frames.SIZES,
})  # fmt: skip
_GATES = ("pred", "size", ("below", 0), ("below", -1))  # Switches of values that each place has, or has sizes of


def asked_places(
    nodes: Iterable[Node], tasks: Collection[int] | None = None, of_groups: Mapping[str, Place] | None = None
) -> dict[int, Place]:
    """The places that nodes ask for, by id, also inside of loops, branches and recursive functions.

    A loop, branch or call that asks for nothing is done at the one place that something inside of it asks for. tasks:
    numbers of those there are, None for all that are asked for; a soft request for another one asks for nothing.
    of_groups: the places of colocation groups that ask for nothing, by key.
    """

    def own(node: Node) -> Place | None:
        request = DeviceRequest() if node.device is None else parse(node.device)
        number = None if request.job == "ps" else request.task
        if number is not None and (tasks is None or number in tasks):
            return Place(number)
        return next((of_groups[key] for key in request.keys if key in of_groups), None) if of_groups else None

    found: dict[int, Place] = {}
    for node in nodes:
        if node.op == CALL:
            inside = {each.id: at for each in with_inner([node]) if each is not node and (at := own(each)) is not None}
        else:
            parts = (part.contents.nodes for part in subgraphs(node))
            inside = asked_places(chain.from_iterable(parts), tasks, of_groups)
        place = own(node)
        if place is not None:
            found[node.id] = place
        elif len({*inside.values()}) == 1:
            found[node.id] = next(iter(inside.values()))
        found |= inside
    return found


def ensure_whole_calls(nodes: Iterable[Node], sites: Mapping[int, Place]) -> None:
    """Raise Unimplemented for a call of a recursive function whose inside asks for another place than the call."""
    for call in (node for node in with_inner(nodes) if node.op == CALL):
        hard = [node for node in with_inner([call]) if node.id in sites and _is_hard(node)]
        other = next((node for node in hard if sites[node.id] != sites[hard[0].id]), None)
        if other is not None:
            raise Unimplemented(
                f"{call.name} calls a function that calls itself, which is done at one place as a whole, and "
                f"{hard[0].name} asks for {sites[hard[0].id]} ({hard[0].source}), {other.name} for {sites[other.id]} "
                f"({other.source}): ask for one place", node=other.name,
            )  # fmt: skip


def requested(nodes: Iterable[Node], tasks: Collection[int] | None = None) -> dict[int, Place]:
    """`asked_places`, with those of colocation groups that ask for nothing, where other nodes ask for a place.

    Such a group is where its first member would be alone: beside its operands, else where it is first used.
    """
    nodes = tuple(nodes)
    found = asked_places(nodes, tasks)
    groups: dict[str, list[int]] = {}  # by key, the members; of one inside of a loop or branch that node, too
    for node in nodes if found else ():
        for inner in with_inner([node]):
            for key in () if inner.device is None else parse(inner.device).keys:
                groups.setdefault(key, []).extend((inner.id, node.id))
    if not groups:
        return found
    near = _Neighbours(nodes)
    places: dict[str, Place] = {}
    for key, members in groups.items():
        at = next((found[member] for member in members if member in found), None)
        places[key] = at or near.place(members[1], found)
    return asked_places(nodes, tasks, places)


class _Neighbours:
    """The nodes of a step, by id, with their users."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = {node.id: node for node in nodes}
        self._users: dict[int, list[int]] = {}
        for node in nodes:
            for value in node.inputs:
                self._users.setdefault(value.node, []).append(node.id)

    def place(self, start: int, found: Mapping[int, Place]) -> Place:
        """The place of the nearest node before this one, else of the nearest behind, else the first place."""
        for ahead in (self._before, self._behind):
            queue, seen = deque([start]), {start}
            while queue:
                number = queue.popleft()
                if number in found:
                    return found[number]
                more = [each for each in ahead(number) if each not in seen]
                seen.update(more)
                queue.extend(more)
        return min(found.values())

    def _before(self, number: int) -> Iterable[int]:
        return dict.fromkeys(value.node for value in self.nodes[number].inputs if value.node in self.nodes)

    def _behind(self, number: int) -> Iterable[int]:
        return dict.fromkeys(self._users.get(number, ()))


def is_split(node: Node, sites: Mapping[int, Place]) -> bool:
    """Whether the inside of a loop or branch spans several places, or lies at another place than the node."""
    return len({sites[inner.id] for inner in (node, *nested(node)) if inner.id in sites}) > 1


def homes(flow: Flow, sites: Mapping[int, Place]) -> tuple[Home, ...]:
    """The home of each op, with its rule. sites: places requested by nodes, by id."""
    anew = [_is_anew(flow, op) for op in flow.ops]
    asked = [None if free else _asked(op, sites) for op, free in zip(flow.ops, anew, strict=True)]
    found = [Home(None) if place is None else Home(place, PlacementRule.REQUEST) for place in asked]
    queues = _queues(flow, asked)
    for number, op in enumerate(flow.ops):
        if frames.uses_queue(op) and op.node is not None:
            found[number] = Home(
                queues.get(op.node.attrs["queue"]), PlacementRule.QUEUE
            )  # all that uses it, in one order
    going, users = _going_round(flow), _users(flow)
    strong = [_with(flow, op) for op in flow.ops]
    weak = [tuple(_before(flow, op)) for op in flow.ops]
    order = [n for n in range(len(flow.ops)) if not anew[n] and n not in going]
    rules = (
        (PlacementRule.OPERAND, strong, order),
        (PlacementRule.OPERAND, weak, order),
        (PlacementRule.USER, users, order[::-1]),
    )
    for rule, beside, numbers in rules:
        has_changed = True
        while has_changed:
            has_changed = False
            for number in numbers:
                if found[number].place is None:
                    beside_it = (going.get(n, n) for n in beside[number])
                    other = next((n for n in beside_it if found[n].place is not None), None)
                    if other is not None:
                        found[number] = Home(found[other].place, rule, other)
                        has_changed = True
    default = min(sites.values(), default=Place(0))
    for number in order:
        if found[number].place is None:
            found[number] = Home(default, PlacementRule.DEFAULT)
    for number, merge in going.items():
        found[number] = Home(found[merge].place, PlacementRule.LOOP, merge)
    return tuple(found)


def _queues(flow: Flow, asked: Sequence[Place | None]) -> dict[Any, Place]:
    """Where each queue is used. Raises InvalidArgument for requests of several places that are not soft."""
    found: dict[Any, tuple[Place, Node]] = {}
    for op, place in zip(flow.ops, asked, strict=True):
        if not frames.uses_queue(op) or op.node is None or place is None:
            continue
        node, queue = op.node, op.node.attrs["queue"]
        other, first = found.setdefault(queue, (place, node))
        if other != place and _is_hard(node) and _is_hard(first):
            raise InvalidArgument(
                f"queue {queue.name} is used at one task in a step, and nodes ask for several: {first.name} for "
                f"{readable(first.device)!r} ({first.source}), {node.name} for {readable(node.device)!r} "
                f"({node.source})",
                node=node.name,
            )  # fmt: skip
    return {queue: place for queue, (place, _) in found.items()}


def _is_hard(node: Node) -> bool:
    """Whether a node has a hard device request."""
    return node.device is not None and not parse(node.device).soft


def _asked(op: Op, sites: Mapping[int, Place]) -> Place | None:
    return sites.get(op.node.id) if op.kind == frames.NODE and op.node is not None else None


def _is_anew(flow: Flow, op: Op) -> bool:
    """Whether an op is done anew wherever its value is wanted."""
    match op.kind:
        case frames.NODE:
            return op.node is not None and is_anywhere(
                op.node, all(flow.ops[port.op].kind == frames.FEED for port in op.inputs)
            )
        case frames.ROWS:  # of microbatches: their shares, whose number all stages count by
            return op.node is not None and "replicas" in op.node.attrs and flow.ops[op.inputs[0].op].kind == frames.FEED
        case frames.ENTER:
            return op.part[1] or op.part[0] == frames.COUNTER
        case frames.SWITCH if op.part in _GATES:
            return True
        case frames.LOOPCOND:
            return flow.ops[op.inputs[0].op].kind == frames.BELOW
    return op.kind in ANYWHERE or op.part == frames.COUNTER


def is_anywhere(node: Node, takes_feeds: bool) -> bool:
    """Whether a node without a request is computed anew at each place that uses its value: a Send would cost more.

    So is a constant, and what fills a tensor of known size with a number, or only views what is fed. takes_feeds:
    whether all of its inputs are fed.

    >>> is_anywhere(Node(id=1, name="a", op="tfnb.constant"), False)
    True
    """
    if node.op == "tfnb.constant":
        return True
    is_bare = not (node.device or node.control)
    is_filled = node.op == "aten.full.default" and not (node.inputs or node.symbols)
    return is_bare and (is_filled or (node.op == "aten.reshape.default" and takes_feeds))


def _with(flow: Flow, op: Op) -> tuple[int, ...]:
    """The ops that determine the home of an op with priority."""
    ports: Sequence[Port] = op.inputs
    match op.kind:
        case frames.MERGE if len(ports) == 2 and flow.ops[ports[1].op].kind == frames.NEXT:
            ports = flow.ops[ports[1].op].inputs  # where the body makes the next value
        case frames.MERGE | frames.PUSH:  # of branches: with `then`; of rows: where a row is made
            ports = ports[-1:]
        case frames.SWITCH | frames.EXIT | frames.TRUTH:
            ports = ports[:1]
    return tuple(port.op for port in ports)


def _before(flow: Flow, op: Op) -> Iterator[int]:
    """Fallbacks of `_with`: the producers of an op's inputs; for a loop, of its initial value."""
    for port in op.inputs:
        source = flow.ops[port.op]
        yield source.inputs[0].op if op.kind == frames.MERGE and source.kind == frames.ENTER else port.op


def _going_round(flow: Flow) -> dict[int, int]:
    """The Merge of a carried value, by its Enter and its NextIteration."""
    return {
        port.op: number for number, op in enumerate(flow.ops) if op.kind == frames.MERGE for port in op.inputs
        if flow.ops[port.op].kind in (frames.NEXT, frames.ENTER) and flow.ops[op.inputs[-1].op].kind == frames.NEXT
    }  # fmt: skip


def _users(flow: Flow) -> list[list[int]]:
    """By op, the ops that take its values."""
    found: list[list[int]] = [[] for _ in flow.ops]
    for number, op in enumerate(flow.ops):
        for port in op.inputs:
            found[port.op].append(number)
    return found
