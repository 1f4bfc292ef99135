"""The trace of a run: times of each node, its outputs, and the live memory of the step over time.

Tables by node, op, line and scope, and a file for trace viewers. The drawing of it is the view's.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from typing import Any, Literal

from tfnb.errors import InvalidArgument, NotFound
from tfnb.execution.tracing.health import Health
from tfnb.execution.tracing.iterations import Amount, IterationTrace, LoopTrace, NodeNote, Path
from tfnb.execution.tracing.origins import Origin
from tfnb.graph import Graph, Node, Value
from tfnb.graph.files import replace_file
from tfnb.graph.ops import REGIONS

By = Literal["node", "op", "line", "scope", "place"]
Lane = tuple[str, str]  # a thread and a device, or a place and a device, or a link


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that ran: a node, or with ``node`` None the commit. Times are seconds from the step's start."""

    node: Node | None
    start: float
    end: float
    bytes: int  # of the outputs, a view's too; of the commit: what was written
    device: str
    thread: str
    path: Path = ()  # of a node in a loop or branch
    depth: int = 0  # loops around it
    kernel: str = ""  # torch's name of what ran, where its profiler saw it
    iteration: IterationTrace | None = None  # of the innermost loop around it
    call: str = "commit"  # what ran, where that is no node

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """The node's name, as in a drawing, or torch's of the kernel."""
        return self.kernel or self.node.name if self.node else self.call

    @property
    def op(self) -> str:
        """The op's qualified name."""
        return self.node.op if self.node else self.call

    @property
    def line(self) -> str:
        """Cell and line: ``In[3]:4``."""
        source = self.node.source if self.node else None
        return f"{source.label}:{source.line}" if source else ""

    @property
    def code(self) -> str:
        """The user's line of code."""
        return self.node.source.text.strip() if self.node and self.node.source else ""

    @property
    def scope(self) -> str:
        """The path of modules, name scopes and passes, without the torch function at its end."""
        return "/".join(self.node.scope[:-1]) if self.node else self.call

    @property
    def lane(self) -> Lane:
        """The thread and device."""
        return self.thread, self.device


@dataclass(frozen=True, slots=True)
class Transmission:
    """A message between two places of a step on a cluster: a value of ``node``, or a ``call``.

    ``start``: when it was sent, ``end``: when it was there, in seconds from the step's start.
    """

    source: str
    to: str
    start: float
    end: float
    bytes: int
    node: Node | None = None
    call: str = ""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """The node of the value, or the purpose of the message."""
        return self.node.name if self.node else self.call

    @property
    def lane(self) -> Lane:
        """The link of the message."""
        return f"{self.source} → {self.to}", "link"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One row of `Trace.table`; ``share`` is of the whole step, ``bytes`` the sum of the outputs."""

    name: str
    detail: str
    seconds: float
    share: float
    bytes: int
    calls: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of a run: ``events`` in order, and the ``live`` bytes of the step as (seconds, bytes) steps.

    A traced run is generated code; ``untraced`` says which code runs the step else, why, and what compiling it cost.
    ``seconds`` is the wall time of computing and committing, ``began`` its start in nanoseconds of the system's clock.
    ``taken`` has the sides that branches took, by the id of their node, also of branches in loops. ``inside`` has what
    nodes in loops and branches took, which is part of the events, ``once`` when those ran that are in branches but in
    no loop, and ``loops`` the iterations of each loop.
    With ``trace="kernels"`` ``profile`` is what ``torch.profiler`` wrote, and ``kernels`` are those of accelerators, or
    where there are none torch's calls.

    Of a run on a cluster the threads of events are its places (``task:0``, ``ps:0``), ``transmissions`` are the
    messages between them, and ``clocks`` has the error, in seconds, with which the clock of each place is known: all
    times are those of the notebook's clock. A loop or branch of one task is one event then, and there are bytes alive
    of a step on one task only.

    >>> import tfnb, torch
    >>> with tfnb.record() as g:
    ...     x = tfnb.placeholder(torch.zeros(2, 3))
    ...     y = (x + 1).exp()
    >>> session = tfnb.Session(g)
    >>> values = session.run(y, {x: torch.zeros(4, 3)}, trace=True)
    >>> [(event.op, event.bytes) for event in session.trace.events], session.trace.peak
    ([('aten.add.Tensor', 48), ('aten.exp.default', 48)], 96)
    """

    graph: Graph
    fetches: tuple[Value, ...]
    events: tuple[Event, ...]
    live: tuple[tuple[float, int], ...]
    seconds: float
    began: int
    rows: int = 10  # of the tables that are shown
    colours: str = "time"  # or "bytes": what the drawing is coloured by
    grouped: By = "node"  # of the table that is printed, and open below the drawing
    taken: Mapping[int, frozenset[bool]] = field(default_factory=dict)
    inside: Mapping[Path, Amount] = field(default_factory=dict)
    once: Mapping[Path, NodeNote] = field(default_factory=dict)
    loops: tuple[LoopTrace, ...] = ()
    kernels: tuple[Event, ...] = ()
    profile: Mapping[str, Any] = field(default_factory=dict)
    untraced: str = ""
    health: Mapping[Path, Health] = field(default_factory=dict)
    origins: Mapping[Path, Origin] = field(default_factory=dict)
    transmissions: tuple[Transmission, ...] = ()
    clocks: Mapping[str, float] = field(default_factory=dict)

    @property
    def fetched(self) -> frozenset[int]:
        """Ids of the nodes that were fetched."""
        return frozenset(value.node for value in self.fetches)

    @property
    def title(self) -> str:
        """Names of the fetches."""
        contents = self.graph.contents
        names = contents.assigned
        known = {v: names.get(v) or contents.by_id[v.node].name for v in self.fetches if v.node in contents.by_id}
        return ", ".join(known.get(value, "?") for value in dict.fromkeys(self.fetches))

    @property
    def peak(self) -> int:
        """The most bytes that the step held at once."""
        return max((count for _, count in self.live), default=0)

    def table(self, top: int | None = None, *, by: By = "node") -> tuple[TraceRow, ...]:
        """The ``top`` rows that took longest: by node, op, line of a cell, scope, or place. Raises InvalidArgument.

        The places are threads here, and tasks, servers and the links between them on a cluster.
        """
        if by not in _GROUPS:
            raise InvalidArgument(f"a trace has tables by {', '.join(_GROUPS)}, not by {by!r}")
        groups: dict[tuple[str, str], list[tuple[Event | Transmission, int]]] = {}
        for event, calls in ((event, 1) for event in self.events) if by == "place" else self._amounts():
            groups.setdefault(_GROUPS[by](event), []).append((event, calls))
        for sent in self.transmissions if by == "place" else ():
            groups.setdefault(sent.lane, []).append((sent, 1))
        rows = [self._row(name, detail, found) for (name, detail), found in groups.items()]
        return tuple(sorted(rows, key=lambda row: -row.seconds)[:top])

    def origin(self, node: Node | str) -> Origin | None:
        """The first bad ancestor of a node: where its NaN or infinite numbers began; None where all are finite.

        Needs a run with ``trace="health"``. Raises NotFound for a node that did not run.
        """
        name = node if isinstance(node, str) else node.name
        ids = {path[-1]: path for path in self.health}
        known: dict[str, Path] = {event.node.name: (event.node.id,) for event in self.events if event.node}
        known |= {amount.node.name: path for path, amount in self.inside.items()}
        path = known.get(name)
        if path is None or path[-1] not in ids:
            raise NotFound(f"{name} has no health in this trace: run what needs it with trace='health'")
        return self.origins.get(path)

    def _row(self, name: str, detail: str, found: list[tuple[Event | Transmission, int]]) -> TraceRow:
        seconds = sum(event.seconds for event, _ in found)
        size, calls = sum(event.bytes for event, _ in found), sum(calls for _, calls in found)
        return TraceRow(name, detail, seconds, seconds / self.seconds if self.seconds else 0.0, size, calls)

    def _amounts(self) -> Iterator[tuple[Event, int]]:
        """The events without their inner nodes, then the inner nodes; each with its count."""
        inner: dict[int, float] = {}
        for path, amount in self.inside.items():
            inner[path[0]] = inner.get(path[0], 0.0) + amount.seconds
        for event in self.events:
            took = inner.pop(event.node.id, 0.0) if event.node else 0.0  # what copies its results comes later
            yield replace(event, end=max(event.start, event.end - took)) if took else event, 1
        for path, amount in self.inside.items():
            yield Event(amount.node, 0.0, amount.seconds, amount.bytes, "", "", path=path), amount.calls

    @property
    def spans(self) -> tuple[Event, ...]:
        """The events, the events of nodes in branches and kept iterations, and kernels."""
        around = {event.node.id: event for event in reversed(self.events) if event.node}
        once = ((None, 1, path, note) for path, note in self.once.items())
        kept = ((one, loop.depth, *item) for loop in self.loops for one in loop.kept for item in one.notes.items())
        found = list(self.events)
        for one, depth, path, note in (*once, *kept):
            amount, event = self.inside.get(path), around.get(path[0])
            if amount is not None and event is not None and amount.node.op not in REGIONS:
                end, where = note.start + note.seconds, (event.device, event.thread)
                inner = Event(amount.node, note.start, end, note.bytes, *where, path=path, depth=depth, iteration=one)
                found.append(inner)
        return (*found, *self.kernels)

    def save(self, path: str | File, *, profile: str | File | None = None) -> File:
        """Write a trace file that Perfetto and ``chrome://tracing`` open; returns its path.

        What ``torch.profiler`` saw of a run with ``trace="kernels"`` is in it, too. profile: a file of its
        ``export_chrome_trace`` from around this run, to be written beside it. Raises CheckpointWriteError where the
        file cannot be written; one that was there is unchanged then.
        """
        found: dict[str, Any] = json.loads(File(profile).read_text()) if profile is not None else dict(self.profile)
        base = found.setdefault("baseTimeNanoseconds", self.began)
        found["traceEvents"] = [*found.get("traceEvents", ()), *self._chrome((self.began - base) / 1000)]
        text = json.dumps(found)
        replace_file(File(path), lambda draft: draft.write_text(text))
        return File(path)

    def _chrome(self, shift: float) -> Iterator[dict[str, Any]]:
        """Chrome's events; its unit is the microsecond."""
        pid = os.getpid()
        lanes = {lane: place for place, lane in enumerate((*self.lanes, *self.links), 1)}
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": f"tfnb {self.graph.name}"}}
        for lane, tid in lanes.items():
            of_lane = {"ph": "M", "pid": pid, "tid": tid}
            yield {**of_lane, "name": "thread_name", "args": {"name": lane_name(lane)}}
            if self.clocks:  # viewers order threads by name
                yield {**of_lane, "name": "thread_sort_index", "args": {"sort_index": tid}}
        for event in (span for span in self.spans if not span.kernel):
            args = {
                "node": event.node.id if event.node else None, "op": event.op, "bytes": event.bytes,
                "line": str(event.node.source or "") if event.node else "", "scope": event.scope,
            }  # fmt: skip
            yield {
                "ph": "X", "pid": pid, "tid": lanes[event.thread, event.device], "name": event.name, "cat": "tfnb",
                "ts": shift + 1e6 * event.start, "dur": 1e6 * event.seconds, "args": args,
            }  # fmt: skip
        around = {event.node.id: (event.thread, event.device) for event in self.events if event.node}
        for loop in self.loops:
            tid = lanes.get(around.get(loop.path[0], ("", "")), 0)
            for one in loop.kept:
                yield {
                    "ph": "X", "pid": pid, "tid": tid, "name": f"iteration {one.number + 1}", "cat": "tfnb",
                    "ts": shift + 1e6 * one.start, "dur": 1e6 * (one.end - one.start), "args": {},
                }  # fmt: skip
        for sent in self.transmissions:
            args = {"node": sent.node.id if sent.node else None, "bytes": sent.bytes}
            yield {
                "ph": "X", "pid": pid, "tid": lanes[sent.lane], "name": sent.name, "cat": "tfnb link",
                "ts": shift + 1e6 * sent.start, "dur": 1e6 * sent.seconds, "args": args,
            }  # fmt: skip
        for number, (producer, consumer) in enumerate((*self._flows(), *self._arrows())):
            flow = {"pid": pid, "name": "dataflow", "cat": "tfnb", "id": number, "args": {}}
            middle = (producer.start + producer.end) / 2  # an arrow starts and ends inside of bars
            early = consumer.start + consumer.seconds / 8
            yield {**flow, "ph": "s", "tid": lanes[producer.lane], "ts": shift + 1e6 * middle}
            yield {**flow, "ph": "f", "bp": "e", "tid": lanes[consumer.lane], "ts": shift + 1e6 * early}
        for at, count in self.live:
            yield {
                "ph": "C", "pid": pid, "tid": 0, "name": "live bytes", "ts": shift + 1e6 * at, "args": {"bytes": count}
            }  # fmt: skip

    def _flows(self) -> Iterator[tuple[Event, Event]]:
        """Pairs of events in producer-consumer relation; between places of a cluster messages take their role."""
        made: dict[tuple[str, int], Event] = {}
        for event in self.events:
            if event.node is not None:
                place = event.thread if self.clocks else ""
                sources = dict.fromkeys((place, value.node) for value in event.node.inputs)
                yield from ((made[source], event) for source in sources if source in made)
                made[place, event.node.id] = event

    def _arrows(self) -> Iterator[tuple[Event | Transmission, Event | Transmission]]:
        """Pairs (last event before a message, the message) and (the message, next event at its destination)."""
        starts: dict[str, list[Event]] = {}
        for event in sorted(self.events, key=lambda event: event.start):
            starts.setdefault(event.thread, []).append(event)
        ends = {place: sorted(events, key=lambda event: event.end) for place, events in starts.items()}
        for sent in self.transmissions:
            before = bisect_right(ends.get(sent.source, ()), sent.start, key=lambda event: event.end)
            after = bisect_left(starts.get(sent.to, ()), sent.end, key=lambda event: event.start)
            if before:
                yield ends[sent.source][before - 1], sent
            if after < len(starts.get(sent.to, ())):
                yield sent, starts[sent.to][after]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Each thread and device that something ran on, in order of first use; of a cluster each place, by name."""
        found = dict.fromkeys(event.lane for event in (*self.events, *self.kernels))
        busy = {thread for thread, _ in found}
        idle = {place for sent in self.transmissions for place in (sent.source, sent.to)} - busy
        found |= dict.fromkeys((place, "") for place in idle)
        return tuple(sorted(found, key=_place_order) if self.clocks else found)

    @property
    def links(self) -> tuple[Lane, ...]:
        """Each link that a message took on a cluster, as a lane."""
        return tuple(sorted({sent.lane for sent in self.transmissions}, key=_place_order))

    @property
    def clock_note(self) -> str:
        """How well the clocks of a cluster's places agree, in words; else empty."""
        if not self.clocks:
            return ""
        place = max(self.clocks, key=lambda place: self.clocks[place])
        if not self.clocks[place]:
            return "all places share one clock"
        return f"clocks are aligned within {1e6 * self.clocks[place]:,.1f} us ({place})"

    @property
    def other_code(self) -> str:
        """The kind of code that runs the step untraced, if different from the traced code; else empty."""
        return "" if self.untraced in ("", "generated code") else f"untraced it is {self.untraced}"

    def __repr__(self) -> str:
        rows = self.table(self.rows, by=self.grouped)
        wide = max((len(row.name) for row in rows), default=0)
        lines = [
            f"{1e3 * row.seconds:10.3f} ms {100 * row.share:5.1f} % {row.bytes:>13,} bytes  "
            f"{row.name:{wide}}  {row.detail}"
            for row in rows
        ]
        most = f", at most {self.peak:,} bytes" if self.live else ""
        head = (
            f"<Trace of {self.title} in graph {self.graph.name}: {len(self.events)} events in "
            f"{1e3 * self.seconds:.3f} ms{most}>"
        )
        return "\n".join([head, *filter(None, [self.other_code, self.clock_note]), *map(str.rstrip, lines)])

    def _repr_html_(self) -> str:
        from tfnb.view import trace_html

        return trace_html(self, by=self.colours)

    def _repr_svg_(self) -> str | None:
        from tfnb.view import trace_svg

        return trace_svg(self)


_GROUPS: dict[str, Callable[[Event], tuple[str, str]]] = {
    "node": lambda event: (event.name, f"{event.op}  {event.line}".rstrip() if event.node else ""),
    "op": lambda event: (event.op, ""),
    "line": lambda event: (event.line or event.name, event.code),
    "scope": lambda event: (event.scope or "no scope", ""),
    "place": lambda event: event.lane,
}


def lane_name(lane: Lane) -> str:
    """The words for a lane: a link has no device, and neither has a place where nothing ran."""
    place, device = lane
    return place if device in ("", "link") else f"{place}, {device}"


def _place_order(lane: Lane) -> list[tuple[int, int]]:
    """Tasks before servers before the notebook, each by number."""
    return [(_JOBS.get(job, len(_JOBS)), int(number or 0)) for job, number in _PLACE.findall(lane[0])]


_JOBS = {"task": 0, "ps": 1}


_PLACE = re.compile(r"([^\W\d]+):?(\d*)")
