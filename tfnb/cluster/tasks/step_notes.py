"""The notes of a task on one traced step, and their form in the answer to the notebook.

All times are nanoseconds of the monotonic clock of the task's own process, of calls to servers also of theirs; the
notebook finds out how far these clocks are apart (`tfnb.execution.tracing.clock_offsets`). Nodes travel by name, since
the plan's node ids differ from the notebook's. Rows of numbers travel as tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tfnb.cluster.wire.envelope import size
from tfnb.cluster.wire.messages import Ask, Dead, Ok, Tag
from tfnb.errors import ProtocolError, ResourceExhausted
from tfnb.execution.dataflow.executor import Meet, WaitingPeers
from tfnb.execution.dataflow.machine import ACKNOWLEDGE
from tfnb.execution.tracing.place_tracer import MOST, PlaceTracer
from tfnb.graph import Graph, Node
from tfnb.graph.subgraph import nested
from tfnb.state.waits import Inbox


class ShardCall(NamedTuple):
    """A call to a shard: ``sent`` and ``received`` by the caller's clock, ``began`` and ``ended`` by the server's.

    given, found: bytes of the tensors in the request, and in the answer.
    """

    method: str
    shard: int
    sent: int
    began: int
    ended: int
    received: int
    given: int
    found: int

    @classmethod
    def of(cls, ask: Ask, sent: int, answer: Ok, received: int) -> ShardCall:
        """The call with this answer. Raises ProtocolError for an answer without times."""
        try:
            began, ended = map(int, answer.meta["at"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"server {ask.shard} did not say when it did {ask.method!r}: {error}") from error
        return cls(ask.method, ask.shard, sent, began, ended, received, size(ask.tensors), size(answer.tensors))


class PostTime(NamedTuple):
    """The time of a value sent to another part, or received; ``part``: number of the other part, if known."""

    edge: int
    part: int
    at: int
    bytes: int
    tag: Tag


class NodeSpan(NamedTuple):
    """A node that ran: ``top`` is its name in the graph, or that of the loop or branch around the node ``inner``."""

    top: str
    inner: str
    op: str
    start: int
    end: int
    bytes: int
    device: str


class TaskNotes(NamedTuple):
    """A task's notes on its part of a step. ``code``: a description of the code that runs without a tracer."""

    arrived: int
    answered: int
    code: str
    calls: tuple[ShardCall, ...]
    edges: tuple[tuple[int, str, str, str], ...]  # that it sends on: number, and names of the node as of a `NodeSpan`
    spans: tuple[NodeSpan, ...]
    points: tuple[tuple[int, int], ...]
    sent: tuple[PostTime, ...]
    got: tuple[PostTime, ...]

    @classmethod
    def read(cls, answer: Ok) -> TaskNotes:
        """The notes in an answer, behind its fetches. Raises ProtocolError."""
        try:
            meta, tensors = answer.meta["trace"], answer.tensors[sum(answer.meta["some"]) :]
            spans, points, sent, got = (tensor.tolist() for tensor in tensors)
            names, devices = meta["names"], meta["devices"]
            return cls(
                int(meta["arrived"]), int(meta["answered"]), str(meta["code"]),
                tuple(ShardCall(str(method), *map(int, rest)) for method, *rest in meta["calls"]),
                tuple((int(edge), str(top), str(inner), str(op)) for edge, top, inner, op in meta["edges"]),
                tuple(_span(names[at], str(devices[device]), *rest) for at, device, *rest in spans),
                tuple((at, count) for at, count in points), tuple(_posts(sent)), tuple(_posts(got)),
            )  # fmt: skip
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"not the trace of a step: {type(error).__name__}: {error}") from error


class StepNotes:
    """The notes on a traced step, taken while the step runs on a task.

    tracer: of the step's nodes. graph: of the plan. edges: by number of an edge to another part, the node and op whose
    value crosses. code: describes the code that runs without a tracer.
    """

    def __init__(
        self, tracer: PlaceTracer, graph: Graph, edges: Mapping[int, tuple[Node | None, str]], code: Callable[[], str]
    ) -> None:
        self.arrived, self.tracer, self._graph, self._code = time.monotonic_ns(), tracer, graph, code
        self._edges = edges
        self.calls: list[ShardCall] = []
        self._sent: list[PostTime] = []
        tracer.begin()

    def meeting(self, meet: Meet) -> Meet:
        """A `Meet` that joins the other parts, and notes the messages sent to them."""
        return lambda failed: _Noting(meet(failed), self._sent)

    def answer(self, arrivals: Collection[tuple[int, int, Tag, int]], number: int) -> tuple[dict[str, Any], list[Any]]:
        """Facts and tensors of the answer. arrivals: round, edge, tag and time of values received from other parts.

        Raises ResourceExhausted where there were too many messages.
        """
        if max(len(arrivals), len(self._sent)) >= MOST:
            raise ResourceExhausted(
                f"a trace holds {MOST:,} messages of one place, and this step has more: trace one with fewer "
                "iterations, or run without trace"
            )
        got = [PostTime(edge, -1, at, 0, tag) for of, edge, tag, at in arrivals if of == number and edge != ACKNOWLEDGE]
        names, devices = dict[tuple[str, str, str], int](), dict[str, int]()
        at, rows = _addresses(self._graph), []
        for span in self.tracer.spans:
            top, inner = at.get(span.node.id, (span.node.name, ""))
            name = names.setdefault((top, inner, span.node.op), len(names))
            device = devices.setdefault(span.device, len(devices))
            rows.append((name, device, span.start, span.end, span.bytes))
        edges = [
            [number, *(at.get(node.id, (node.name, "")) if node is not None else (op, "")), op]
            for number, (node, op) in self._edges.items()
        ]
        facts = {
            "edges": edges,
            "arrived": self.arrived, "calls": list(map(list, self.calls)), "code": self._code(),
            "names": list(map(list, names)), "devices": list(devices),
        }  # fmt: skip
        numbers = [_numbers(rows, 5), _numbers(self.tracer.points, 2), _flat(self._sent), _flat(got)]
        return {**facts, "answered": time.monotonic_ns()}, numbers


class _Noting:
    """`WaitingPeers` that note sent messages."""

    def __init__(self, peers: WaitingPeers, sent: list[PostTime]) -> None:
        self._peers, self._sent = peers, sent

    @property
    def round(self) -> int:
        return self._peers.round

    def tell(self, edge: int, to: int, tag: Tag, value: object, dead: Dead | None) -> None:
        if edge != ACKNOWLEDGE:
            nbytes = value.nbytes if isinstance(value, torch.Tensor) and not value.is_meta else 0
            self._sent.append(PostTime(edge, to, time.monotonic_ns(), nbytes, tag))
        self._peers.tell(edge, to, tag, value, dead)

    def want(self, edge: int, tag: Tag, deliver: Callable[[Any, Dead | None], None]) -> None:
        self._peers.want(edge, tag, deliver)

    def wait(self, inbox: Inbox, seconds: float) -> Any:
        return self._peers.wait(inbox, seconds)

    def leave(self) -> None:
        self._peers.leave()


Arrivals = deque[tuple[int, int, Tag, int]]


def arrivals() -> Arrivals:
    """Room for round, edge, tag and time of values that come from other parts, while a step is traced."""
    return deque(maxlen=MOST)


def _addresses(graph: Graph) -> Mapping[int, tuple[str, str]]:
    """By node id, the name of the outermost node, and the name of the inner node (empty outside of loops and
    branches).
    """
    found = {node.id: (node.name, "") for node in graph.nodes}
    found.update((inner.id, (node.name, inner.name)) for node in graph.nodes for inner in nested(node))
    return found


def _span(names: Sequence[Any], device: str, start: int, end: int, nbytes: int) -> NodeSpan:
    top, inner, op = map(str, names)
    return NodeSpan(top, inner, op, start, end, nbytes, device)


def _numbers(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)


def _flat(posts: Iterable[PostTime]) -> torch.Tensor:
    found: list[int] = []
    for post in posts:
        found += (post.edge, post.part, post.at, post.bytes, len(post.tag), *post.tag)
    return torch.tensor(found, dtype=torch.int64)


def _posts(numbers: Sequence[int]) -> Iterator[PostTime]:
    at = 0
    while at < len(numbers):
        edge, part, when, nbytes, count = numbers[at : at + 5]
        yield PostTime(edge, part, when, nbytes, tuple(numbers[at + 5 : at + 5 + count]))
        at += 5 + count
