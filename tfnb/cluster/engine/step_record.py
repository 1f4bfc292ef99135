"""The record of one traced step on a cluster: reports of the places by their clocks, made into a `Trace` by our clock.

Each call of the step and of its tasks to servers is a round trip between two clocks; after the step every place on
another host is pinged some times more. Processes of one host share a clock. The record is of the last round: a step
that began again has the times of its last try only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tfnb.cluster.tasks.step_notes import PostTime, ShardCall, TaskNotes
from tfnb.cluster.wire.envelope import size
from tfnb.cluster.wire.messages import Ask, Ok
from tfnb.errors import Internal
from tfnb.execution.tracing.clock_offsets import Flight, Offset, clock_name, offsets
from tfnb.execution.tracing.trace import Event, Trace, Transmission
from tfnb.graph import Node
from tfnb.graph.subgraph import subgraphs
from tfnb.passes import StepGraph

HERE = "notebook"
PINGS = 8  # of each place, after the step
CALLS = {"prepare": "update", "look_up": "look-up"}  # what is shown of the methods of servers


class _Task(NamedTuple):
    """A task's part: the times of its call and its answer, by our clock; bytes of its feeds and fetches; its notes."""

    sent: int
    received: int
    given: int
    found: int
    notes: TaskNotes


class StepRecord:
    """The collected reports of one step."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self.start()
        self._tasks: dict[str, _Task] = {}
        self._calls: list[tuple[Ask, int, Ok, int]] = []  # of the notebook
        self._pings: list[Flight] = []
        self._round = -1

    def start(self) -> None:
        """The step begins."""
        self._began, self._zero = time.time_ns(), time.monotonic_ns()
        self._end = self._zero

    def ran(self, task: str, number: int, sent: int, feeds: Sequence[torch.Tensor], answer: Ok) -> None:
        """A task has done its part of a round; earlier rounds were in vain. Raises ProtocolError."""
        received = time.monotonic_ns()
        if number != self._round:
            self._round = number
            self._tasks.clear()
            self._calls.clear()
        notes = TaskNotes.read(answer)
        fetched = size(answer.tensors[: sum(answer.meta["some"])])
        self._tasks[task] = _Task(sent, received, size(feeds), fetched, notes)

    def wrote(self, ask: Ask, sent: int, answer: Ok) -> None:
        """Note a server's answer to a call of the notebook."""
        self._calls.append((ask, sent, answer, time.monotonic_ns()))

    def end(self) -> None:
        """The step is over."""
        self._end = time.monotonic_ns()

    def pinged(self, place: str, sent: int, answer: Ok) -> bool:
        """Note a place's clock; returns whether to ping again, since the clock is not ours."""
        received = time.monotonic_ns()
        began, ended = map(int, answer.meta["at"])
        is_ours = answer.meta["clock"] == clock_name() != ""
        if is_ours:
            sent = began = ended = received = 0
        self._pings += [Flight(HERE, place, sent, began), Flight(place, HERE, ended, received)]
        return not is_ours

    @property
    def tasks(self) -> Collection[str]:
        """The tasks that took part."""
        return self._tasks.keys()

    @property
    def shards(self) -> set[int]:
        """The shards that took part."""
        return {call.shard for _, call in self._all_calls()}

    def trace(self) -> Trace:
        """The trace of the step. Raises ProtocolError or Internal where the places told no times that fit."""
        found = offsets(HERE, self._flights())
        times = _Times(self._zero, found)
        events = sorted(self._events(times), key=lambda event: event.start)
        sent = sorted(self._transmissions(times), key=lambda each: each.start)
        codes = {task.notes.code for task in self._tasks.values()}
        return Trace(
            self._step.whole, self._step.fetches, tuple(events), tuple(self._live(times)), times.at(HERE, self._end),
            self._began, untraced=codes.pop() if len(codes) == 1 else "", transmissions=tuple(sent),
            clocks={place: offset.error * 1e-9 for place, offset in found.items() if place != HERE},
        )  # fmt: skip

    # -- the clocks -------------------------------------------------------------------------------------------------

    def _all_calls(self) -> Iterator[tuple[str, ShardCall]]:
        yield from ((HERE, ShardCall.of(*call)) for call in self._calls)
        yield from ((name, call) for name, task in self._tasks.items() for call in task.notes.calls)

    def _posts(self) -> Iterator[tuple[str, str, PostTime, int]]:
        """Messages between parts: sender, receiver, message, and time of arrival."""
        arrived = {(name, p.edge, p.tag): p.at for name, task in self._tasks.items() for p in task.notes.got}
        for name, task in self._tasks.items():
            for post in task.notes.sent:
                to = f"task:{post.part}"
                at = arrived.get((to, post.edge, post.tag))
                if at is None:
                    raise Internal(f"{to} does not know when edge {post.edge} tag {post.tag} of a traced step came")
                yield name, to, post, at

    def _flights(self) -> Iterator[Flight]:
        yield from self._pings
        for name, task in self._tasks.items():
            yield Flight(HERE, name, task.sent, task.notes.arrived)
            yield Flight(name, HERE, task.notes.answered, task.received)
        for name, call in self._all_calls():
            yield Flight(name, _server(call), call.sent, call.began)
            yield Flight(_server(call), name, call.ended, call.received)
        yield from (Flight(name, to, post.at, at) for name, to, post, at in self._posts())

    # -- what ran ---------------------------------------------------------------------------------------------------

    def _events(self, times: _Times) -> Iterator[Event]:
        find = _finder(self._step.whole.nodes)
        for name, task in self._tasks.items():
            for span in task.notes.spans:
                path, node = find(span.top, span.inner, span.op)
                start, end = times.at(name, span.start), times.at(name, span.end)
                yield Event(node, start, end, span.bytes, span.device, name, path=path, call=span.inner or span.top)
        for _, call in self._all_calls():
            place = _server(call)
            start, end = times.at(place, call.began), times.at(place, call.ended)
            yield Event(None, start, end, call.given or call.found, "cpu", place, call=_shown(call))

    def _transmissions(self, times: _Times) -> Iterator[Transmission]:
        find = _finder(self._step.whole.nodes)
        for name, task in self._tasks.items():
            notes = task.notes
            yield times.sent(HERE, name, task.sent, notes.arrived, task.given, call="feeds")
            yield times.sent(name, HERE, notes.answered, task.received, task.found, call="fetches")
        for name, call in self._all_calls():
            place, shown = _server(call), _shown(call)
            yield times.sent(name, place, call.sent, call.began, call.given, call=shown)
            yield times.sent(place, name, call.ended, call.received, call.found, call=f"{shown}, answer")
        edges = {edge: names for task in self._tasks.values() for edge, *names in task.notes.edges}
        for name, to, post, at in self._posts():
            top, inner, op = edges[post.edge]
            _, node = find(top, inner, op)
            yield times.sent(name, to, post.at, at, post.bytes, node, inner or top)

    def _live(self, times: _Times) -> Iterator[tuple[float, int]]:
        """Live bytes of a step on one task; nothing for several tasks, whose live bytes at one moment are unknown."""
        for name, task in self._tasks.items() if len(self._tasks) == 1 else ():
            yield from ((times.at(name, at), count) for at, count in task.notes.points)


class _Times(NamedTuple):
    """Conversion of the places' clocks to seconds since the step began."""

    zero: int
    offsets: Mapping[str, Offset]

    def at(self, place: str, when: int) -> float:
        return (when - self.offsets[place].value - self.zero) * 1e-9

    def sent(
        self, source: str, to: str, sent: int, received: int, nbytes: int, node: Node | None = None, call: str = ""
    ) -> Transmission:
        return Transmission(source, to, self.at(source, sent), self.at(to, received), nbytes, node, call)


def _server(call: ShardCall) -> str:
    return f"ps:{call.shard}"


def _shown(call: ShardCall) -> str:
    return CALLS.get(call.method, call.method)


Found = tuple[tuple[int, ...], Node | None]


def _finder(nodes: Sequence[Node]) -> Callable[[str, str, str], Found]:
    """Maps the names in a plan to the recorded node, and to the path of a node inside of a loop or branch.

    A node made by a pass has the name of its origin and a suffix, ``conv`` of ``conv.layout7``. Where several nodes
    inside have the same name and op, as on both sides of a branch, it is the node around them.
    """
    by_name = {node.name: node for node in nodes}
    known: dict[tuple[str, str, str], Found] = {}

    def find(top: str, inner: str, op: str) -> Found:
        around = _first(by_name, top)
        if around is None:
            return (), None
        if not inner:
            return (), around
        inside: dict[str, list[tuple[int, ...]]] = {}
        of: dict[int, Node] = {}
        for path, node in _inside((around.id,), around):
            inside.setdefault(node.name, []).append(path)
            of[path[-1]] = node
        paths = _first(inside, inner) or []
        chosen = [path for path in paths if of[path[-1]].op == op] or paths
        return (chosen[0], of[chosen[0][-1]]) if len(chosen) == 1 else ((), around)

    def found(top: str, inner: str, op: str) -> Found:
        key = top, inner, op
        if key not in known:
            known[key] = find(*key)
        return known[key]

    return found


def _first(of: Mapping[str, Any], name: str) -> Any:
    """The entry of a mapping under a name or, without one, under the longest prefix of the name before a dot."""
    while name and name not in of:
        name = name.rpartition(".")[0]
    return of.get(name)


def _inside(path: tuple[int, ...], node: Node) -> Iterator[tuple[tuple[int, ...], Node]]:
    """Every node inside of a node, with its path."""
    for subgraph in subgraphs(node):
        for inner in subgraph.contents.nodes:
            yield (*path, inner.id), inner
            yield from _inside((*path, inner.id), inner)
