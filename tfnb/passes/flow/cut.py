"""One dataflow form cut into parts, one for each place (white paper §3.2.2, EuroSys'18 §4.4, S-150, S-152).

`Partition` follows what is wanted back from its ends: an op is done at its home, or anew where it is wanted (`places`).
A value that is wanted elsewhere crosses on one `Edge` for each port and destination, whatever the number of its
consumers. A receive inside of a loop begins once for each iteration, when the counter's Merge there fires, live or
dead; a send fires once for each iteration, too. So every message meets who wants it. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

from tfnb.graph import Node
from tfnb.graph.ops import LATE
from tfnb.passes.flow import frames
from tfnb.passes.flow.frames import Flow, Op, Port, StaticFrame
from tfnb.passes.flow.microbatch_schedules import stages, window
from tfnb.passes.flow.places import Home, Place

SEND, RECV, ELSEWHERE = "send", "recv", "elsewhere"


class Kind(IntEnum):
    """How much of a value crosses an edge: its completion only, its sizes, or all elements."""

    DONE, SIZE, VALUE = range(3)


class Edge(NamedTuple):
    """An edge from one place to another, with a number agreed on by all parts."""

    number: int
    port: Port
    source: Place
    to: Place
    kind: Kind


class End(NamedTuple):
    """A requested result: a port or none; ports to be completed; and the requesting place, if not the home."""

    port: Port | None
    after: tuple[Port, ...] = ()
    at: Place | None = None


@dataclass(frozen=True)
class Part:
    """The part of a step at one place.

    flow: the whole's, with its numbers, in which an op of another place is `ELSEWHERE`; sends and receives are behind.
    ends: those that are here, by their position among all. feeds: of each fed op that is wanted here whether its value
    is, or its sizes only. effects: ops that are done for what they do.
    """

    place: Place
    flow: Flow
    ends: Mapping[int, End]
    feeds: Mapping[int, Kind]
    effects: tuple[int, ...]
    sends: tuple[Edge, ...]
    receives: tuple[Edge, ...]


def needed(flow: Flow, ends: Sequence[Port], effects: Sequence[int] = ()) -> list[int]:
    """Ops needed for the ends, queue operations, and checks inside needed loops and branches, in order."""
    checks: dict[tuple[int, int], list[int]] = {}  # by the node that holds them, and where that stands
    for number, op in enumerate(flow.ops):
        scope = flow.scopes[op.scope]
        if scope.node is not None and frames.checks(op):
            checks.setdefault((scope.parent, scope.node.id), []).append(number)
    stack = [*(port.op for port in ends), *effects, *(n for n, op in enumerate(flow.ops) if frames.uses_queue(op))]
    found: set[int] = set()
    while stack:
        number = stack.pop()
        if number not in found:
            found.add(number)
            op = flow.ops[number]
            stack.extend(port.op for port in op.sources)
            stack.extend(() if op.node is None else checks.pop((op.scope, op.node.id), ()))
    return sorted(found)


def uncut(flow: Flow, ends: Sequence[End]) -> Part:
    """The flow as one part."""
    feeds = {number: Kind.VALUE for number, op in enumerate(flow.ops) if op.kind == frames.FEED}
    return Part(Place(0), flow, dict(enumerate(ends)), feeds, tuple(guards(flow)), (), ())


def guards(flow: Flow) -> list[int]:
    """The checks of branches that Python took outside of loops and branches: values and steps have them as effects."""
    return [
        number for number, op in enumerate(flow.ops)
        if flow.scopes[op.scope].node is None and op.node is not None and op.node.op == "tfnb.guard"
    ]  # fmt: skip


class Partition:
    """The partition of a flow into places; deterministic, so that each place can compute the same cut.

    ends: what is wanted of the step. homes: of each op. done: by place the ops that are done there, and of what is fed
    how much is wanted.
    """

    def __init__(self, flow: Flow, ends: Sequence[End], homes: Sequence[Home]) -> None:
        self.flow, self.ends, self.homes = flow, ends, homes
        self._default = min((home.place for home in homes if home.place is not None), default=Place(0))
        self._counters = {
            op.frame: Port(n) for n, op in enumerate(flow.ops)
            if op.kind == frames.MERGE and op.part == frames.COUNTER
        }  # fmt: skip
        self.done: dict[Place, dict[int, Kind]] = {}
        self._received: dict[Place, dict[Port, Kind]] = {}  # what each place receives
        self._todo: list[tuple[Place, Port, Kind]] = []
        self._of_end = [self._by_place(end) for end in ends]
        self.effects = self._effects()
        for place, end in ((place, end) for ends in self._of_end for place, end in ends.items()):
            self.done.setdefault(place, {})
            self._todo += [(place, end.port, Kind.VALUE)] if end.port is not None else []
            self._todo += [(place, port, Kind.DONE) for port in end.after]
        self._todo += [(self._home(Port(number)), Port(number), Kind.VALUE) for number in self.effects]
        while self._todo:
            self._want(*self._todo.pop())
        crossing = [(place, port, kind) for place, ports in self._received.items() for port, kind in ports.items()]
        self.edges = [
            Edge(number, port, self._home(port), place, kind)
            for number, (place, port, kind) in enumerate(sorted(crossing))
        ]
        self._after = self._waits_of_sends()

    def parts(self) -> tuple[Part, ...]:
        """The parts, by place."""
        return tuple(self._part(place) for place in sorted(self.done))

    def nodes(self, place: Place) -> list[Node]:
        """The nodes that a place does, in program order; of loops and branches in ops, each op's."""
        ops = (self.flow.ops[number] for number in sorted(self.done.get(place, ())))
        return [op.node for op in ops if op.kind == frames.NODE and op.node is not None]

    def _home(self, port: Port) -> Place:
        return self._only_home(port) or self._default

    def _only_home(self, port: Port) -> Place | None:
        op = self.flow.ops[port.op]
        if op.kind == frames.ROWS and port.index == 0:
            return None  # what gives a row by its number, of a stack
        return self.homes[port.op].place

    def _by_place(self, end: End) -> dict[Place, End]:
        """The end of each place. An end that only waits for ports is split by the homes of these ports."""
        if end.port is not None or end.at is not None or not end.after:
            return {self._place(end): end}
        homes: dict[Place, list[Port]] = {}
        for port in end.after:
            homes.setdefault(self._home(port), []).append(port)
        return {place: End(None, tuple(ports)) for place, ports in homes.items()}

    def _place(self, end: End) -> Place:
        ports = end.after if end.port is None else (end.port, *end.after)
        return end.at or next((home for port in ports if (home := self._only_home(port)) is not None), self._default)

    def _effects(self) -> list[int]:
        """Ops executed for their effects: checks, and queue operations."""
        wanted = [port for end in self.ends for port in (end.port, *end.after) if port is not None]
        reached = needed(self.flow, wanted, guards(self.flow))
        return [n for n in reached if frames.checks(op := self.flow.ops[n]) or frames.uses_queue(op)]

    def _want(self, place: Place, port: Port, kind: Kind) -> None:
        """Make a port available at a place: compute its op there, or receive its value."""
        home = self._only_home(port)
        if home is None or home == place or place in self.homes[port.op].also:
            self._do(place, port.op, kind)
            return
        ports = self._received.setdefault(place, {})
        before = ports.get(port)
        ports[port] = kind if before is None else max(before, kind)
        if before is None:
            self.done.setdefault(place, {})
            self._todo.append((home, port, Kind.VALUE))
            frame = self._frame(port)
            if frame:
                self._todo.append((place, self._counters[frame], Kind.DONE))

    def _do(self, place: Place, number: int, kind: Kind) -> None:
        op, ops = self.flow.ops[number], self.done.setdefault(place, {})
        before = ops.get(number)
        ops[number] = kind if before is None else max(before, kind)
        if before is None:
            self._todo += [(place, port, how) for port, how in _sources(op)]

    def _frame(self, port: Port) -> int:
        """The frame that the value of a port is in."""
        op = self.flow.ops[port.op]
        return self.flow.frames[op.frame].parent if op.kind == frames.EXIT else op.frame

    def _part(self, place: Place) -> Part:
        flow, here, edges = self.flow, self.done[place], self.edges
        sends = tuple(edge for edge in edges if edge.source == place)
        receives = tuple(edge for edge in edges if edge.to == place)
        moved = {edge.port: Port(len(flow.ops) + at) for at, edge in enumerate(receives)}
        own = [
            frames.moved(op, moved) if number in here or op.kind in (frames.RUN, frames.FEED)
            else Op(ELSEWHERE, (), op.frame, op.scope, op.node)
            for number, op in enumerate(flow.ops)
        ]  # fmt: skip
        own += [self._crossing(RECV, edge, ()) for edge in receives]
        own += [self._crossing(SEND, edge, (edge.port,), self._after[edge.number]) for edge in sends]
        ends = {
            at: _moved_end(ends[place], moved) for at, ends in enumerate(self._of_end) if place in ends
        }  # fmt: skip
        feeds = {number: kind for number, kind in here.items() if flow.ops[number].kind == frames.FEED}
        effects = tuple(n for n in self.effects if self._home(Port(n)) == place)
        own_flow = replace(flow, ops=tuple(own), frames=self._windows(place))
        return Part(place, own_flow, ends, feeds, effects, sends, receives)

    def _windows(self, place: Place) -> tuple[StaticFrame, ...]:
        """The frames, with as many iterations at once as the schedule of a loop gives the stage of a place."""
        found = list(self.flow.frames)
        for number, frame in enumerate(found):
            if frame.schedule and place in (places := stages(self.flow, self.homes, number)):
                stage, most = places.index(place), frame.parallel
                parallel = window(frame.schedule, stage, len(places), most)
                found[number] = replace(frame, parallel=parallel)
        return tuple(found)

    def _waits_of_sends(self) -> list[tuple[Port, ...]]:
        """By edge, the ends of ops that its Send waits for beside the value (S-154).

        A value whose node is tagged `LATE` is sent when the ops of its own place that use it are done, as it is held
        for them anyway. An op is not waited for if it depends on the receiver's ops, also by the Sends that wait.
        """
        found: list[tuple[Port, ...]] = [() for _ in self.edges]
        is_late = [self._is_late(edge.port) for edge in self.edges]
        if not any(is_late):
            return found
        users: list[set[int]] = [set() for _ in self.flow.ops]
        for number, op in enumerate(self.flow.ops):
            for port in op.sources:
                users[port.op].add(number)
        for edge in (edge for edge, late in zip(self.edges, is_late, strict=True) if late):
            taking = [n for n in users[edge.port.op] if edge.port in self.flow.ops[n].sources]
            there = {n for n in taking if n in self.done[edge.to]}
            behind = _reached(users, there)
            here = [n for n in taking if n in self.done[edge.source] and n not in behind and self._is_node(n)]
            for number in here:
                users[number] |= there
            found[edge.number] = tuple(_end(self.flow.ops[n], n) for n in sorted(here))
        return found

    def _is_late(self, port: Port) -> bool:
        """Whether a value, outside of loops and branches that are cut, is sent late."""
        node = self.flow.ops[port.op].node
        return self._is_node(port.op) and node is not None and LATE in node.tags

    def _is_node(self, number: int) -> bool:
        """Whether an op is a kernel outside of all loops and branches that are cut, and has a place."""
        op = self.flow.ops[number]
        is_kernel = op.node is not None and op.kind == frames.NODE and op.node.op.count(".") > 1
        return is_kernel and not op.frame and not op.scope and self.homes[number].place is not None

    def _crossing(self, kind: str, edge: Edge, inputs: tuple[Port, ...], waits: tuple[Port, ...] = ()) -> Op:
        """A send or a receive, in the frame of the value. waits: ends of ops before a send."""
        frame = self._frame(edge.port)
        after = (self._counters[frame],) if frame and kind == RECV else waits
        return Op(kind, inputs, frame, self.flow.ops[edge.port.op].scope, part=edge, after=after)


def _sources(op: Op) -> Iterator[tuple[Port, Kind]]:
    """The input ports of an op, each with the part of its value that is used."""
    is_group = op.kind == frames.NODE and op.node is not None and op.node.op == "tfnb.group"
    of_size = op.kind == frames.SWITCH and op.part == "size"
    for at, port in enumerate(op.inputs):
        yield port, Kind.DONE if is_group else Kind.SIZE if of_size and at == 0 else Kind.VALUE
    yield from ((port, Kind.DONE) for port in op.after)
    yield from ((port, Kind.SIZE) for _, port in op.sizes)
    if op.run is not None:
        yield op.run, Kind.VALUE


def _end(op: Op, number: int) -> Port:
    """The port that tells that a node is done, and has no value."""
    return Port(number, 0 if op.node is None else len(op.node.outputs))


def _reached(users: Sequence[Collection[int]], starts: Iterable[int]) -> set[int]:
    """The ops that depend on these, and these."""
    found, stack = set[int](), [*starts]
    while stack:
        number = stack.pop()
        if number not in found:
            found.add(number)
            stack.extend(users[number])
    return found


def _moved_end(end: End, moved: Mapping[Port, Port]) -> End:
    """An end with ports replaced by the received ones of its place."""
    port = None if end.port is None else moved.get(end.port, end.port)
    return End(port, tuple(moved.get(p, p) for p in end.after), end.at)
