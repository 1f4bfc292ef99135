"""A step over several tasks: a plan for each part, made in the notebook, and the task's program for its plan.

All parts are registered as one graph, with the passes before the cut done; each task cuts for itself. Values go
straight from task to task (`tfnb.execution.dataflow.machine.Peers`). The inputs of a server come from one task, the one
that computes most of them; the other tasks send theirs to this one. If the tasks are the servers of their stages, each
reads and writes its own shard only: other stages get a Variable's value from the stage that holds it, as they get
activations, and send their part of its gradient there.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tfnb.cluster.server.parts import GRADIENTS
from tfnb.cluster.tasks.programs import (
    ComputeProgram,
    Meta,
    PartPlan,
    Plan,
    Push,
    graph_of,
    homes_of,
    keys_of,
    piece_of,
    plan_of,
    storages_of,
)
from tfnb.cluster.wire.lossy import LossyPeers, is_lossy
from tfnb.errors import NonFinite, TfnbError, VersionMismatch
from tfnb.execution.dataflow.executor import Meet
from tfnb.execution.step_code import StepCode
from tfnb.execution.tracing.health import is_finite
from tfnb.execution.tracing.place_tracer import PlaceTracer
from tfnb.graph import Graph, Node, Value
from tfnb.graph.device_request import DeviceRequest, parse
from tfnb.graph.node import leaves
from tfnb.graph.op_facts import facts_of
from tfnb.graph.subgraph import nested, queues_of
from tfnb.passes import StepGraph, step_graph
from tfnb.passes.flow import frames
from tfnb.passes.flow.cut import ELSEWHERE, Kind, Part
from tfnb.passes.flow.places import Place
from tfnb.passes.flow.reasons import StepParts
from tfnb.passes.flow.step_flow import CutOptions, StepFlow, in_parts, optimized_step
from tfnb.placement.partition import Split
from tfnb.placement.placement import Homes


class SentValue(NamedTuple):
    """A value that goes to a shard: a feed of its plan."""

    shard: int
    value: Value
    rows: tuple[int, int] | None
    gradient: str | None = None


def part_plans(
    split: Split,
    servers: Mapping[int, Plan],
    tasks: Sequence[int],
    check: bool,
    *,
    is_staged: bool = False,
    format: str = "",
) -> tuple[tuple[PartPlan, ...], dict[int, tuple[int, ...]]]:
    """The plans of a step's parts, and by shard the positions of the parts that send to the shard.

    tasks: numbers of the cluster's tasks. is_staged: whether task k holds shard k. format: of values between tasks, see
    `tfnb.cluster.wire.lossy`. Raises InvalidArgument for requests
    that contradict each other.
    """
    wanted = [value for value in split.fetches if value is not None]
    sent = [*_sent(split)]
    borders = list(dict.fromkeys(each.value for each in sent))
    graph = _reading_at_home(split) if is_staged else split.compute
    step = optimized_step(step_graph(graph, (*wanted, *borders, *split.checks), split.feeds), tasks)
    uncrossed = in_parts(step, CutOptions(tasks, is_optimized=True, has_writes=False))
    first = uncrossed.parts[0].place  # tells the shards that need no value of tasks, such as those of counters
    sender = dict.fromkeys(servers, first)
    if is_staged:
        sender |= {each.shard: Place(each.shard) for each in sent}
    else:
        sender |= _senders(uncrossed, sent, len(wanted), borders)
    crossing = list(dict.fromkeys((each.value, sender[each.shard]) for each in sent))
    new = {border.value for server in split.servers for border in server.borders if not border.is_gradient}
    outputs = (*wanted, *(value for value, _ in crossing), *split.checks)
    places = [*([None] * len(wanted)), *(place for _, place in crossing), *([None] * len(split.checks))]
    step = StepGraph(step.whole, step.graph, outputs, split.feeds)
    found = in_parts(step, CutOptions(tasks, places, is_optimized=True, has_writes=False))
    at = {pair: len(wanted) + position for position, pair in enumerate(crossing)}
    facts = {
        "homes": homes_of(step.graph, split.placement.homes), "count": len(wanted), "check": check, "tasks": [*tasks],
        "places": [None if place is None else place.number for place in places], "edges": digest(found.parts),
        "format": format, "kept": [len(wanted) + at for at, (value, _) in enumerate(crossing) if value in new],
    }  # fmt: skip
    constants = {id(node.attrs["value"]) for node in step.graph.nodes if node.op == "tfnb.constant"}
    plans = []
    for part in found.parts:
        pushes = [_push(shard, sent, servers, at, part.place) for shard, place in sender.items() if place == part.place]
        mine = {**facts, "part": part.place.number, "pushes": pushes}
        plan = plan_of(step.graph, outputs, split.feeds, mine, constants - _tensors_in(part))
        kinds = tuple(None if kind is None else int(kind) for kind in found.kinds(part))
        shards = _read_by(part, split.placement.homes) | {push["shard"] for push in pushes}
        plans.append(PartPlan(part.place.number, plan, kinds, shards))
    position = {part.place: at for at, part in enumerate(found.parts)}
    return tuple(plans), {shard: (position[place],) for shard, place in sender.items()}


def _reading_at_home(split: Split) -> Graph:
    """The graph of a step's tasks, in which each Variable is read by the task of the one shard that it lies on."""

    def placed(node: Node) -> Node:
        shards = {piece.shard for piece in split.placement.homes[node.attrs["variable"].key]}
        if len(shards) != 1:
            return node
        request = DeviceRequest() if node.device is None else parse(node.device)
        at_home = request._replace(job=None, task=shards.pop(), soft=False, groups=())  # others are elsewhere
        return replace(node, device=str(at_home))

    contents = split.compute.contents
    return split.compute.derive(
        replace(contents, nodes=tuple(placed(n) if n.op == "tfnb.read" else n for n in contents.nodes))
    )


def _sent(split: Split) -> Iterator[SentValue]:
    """The values that go to servers."""
    for server in split.servers:
        for border in server.borders:
            gradient = border.variable if border.kind in GRADIENTS else None
            yield SentValue(server.shard, border.value, border.rows, gradient)


def _senders(found: StepFlow, sent: Sequence[SentValue], first: int, borders: Sequence[Value]) -> dict[int, Place]:
    """The part that sends to each shard: the one that computes most bytes of the shard's inputs."""
    ends = {end: part.place for part in found.parts for end in part.ends}
    home = {value: ends[first + position] for position, value in enumerate(borders)}
    weight: dict[int, Counter[Place]] = {}
    by_id = found.step.whole.contents.by_id
    for each in sent:
        spec = by_id[each.value.node].outputs[each.value.index]
        count = math.prod(size for size in spec.shape if isinstance(size, int))
        weight.setdefault(each.shard, Counter())[home[each.value]] += 1 + count * spec.dtype.itemsize
    return {shard: min(places, key=lambda place: (-places[place], place)) for shard, places in weight.items()}


def _push(
    shard: int,
    sent: Sequence[SentValue],
    servers: Mapping[int, Plan],
    at: Mapping[tuple[Value, Place], int],
    place: Place,
) -> dict[str, Any]:
    """The description of a part's push to a shard, see `ComputeProgram`."""
    mine = [each for each in sent if each.shard == shard]
    return {
        "shard": shard, "plan": servers[shard].id,
        "at": [at[each.value, place] for each in mine], "rows": [each.rows for each in mine],
        "grads": [each.gradient for each in mine], "weights": [],  # of one part that has all rows
        "formats": servers[shard].meta["formats"],
    }  # fmt: skip


def _read_by(part: Part, homes: Homes) -> frozenset[int]:
    """The shards that a part reads."""
    nodes = [op.node for op in part.flow.ops if op.node is not None and op.kind != ELSEWHERE]
    read = [node.attrs["variable"] for node in nodes if node.op == "tfnb.read"]
    return frozenset(piece.shard for variable in read for piece in homes[variable.key])


def _is_stored(flow: frames.Flow, port: frames.Port) -> bool:
    """Whether a port has elements of the value of a Variable, in whatever shape."""
    op = flow.ops[port.op]
    name = "" if op.node is None else op.node.op
    if op.kind == frames.ENTER or (op.kind == frames.NODE and facts_of(name).keeps_elements):
        return _is_stored(flow, op.inputs[0])
    return op.kind == frames.NODE and name == "tfnb.read"


def _tensors_in(part: Part) -> set[int]:
    """Ids of the constants that a part computes with."""
    found: set[int] = set()
    for op in part.flow.ops:
        if op.node is not None and op.kind != ELSEWHERE:
            inside = nested(op.node) if op.kind == frames.NODE else ()  # what a split loop has inside are ops
            found.update(id(leaf) for node in (op.node, *inside) for leaf in leaves(node.attrs))
    return found


def task_of(step: StepGraph, tasks: Sequence[int], error: TfnbError) -> int | None:
    """The number of the task that runs the node named in an error of a step over several tasks; None if none does."""
    for part in in_parts(optimized_step(step, tasks), CutOptions(tasks, is_optimized=True, has_writes=False)).parts:
        for node in (op.node for op in part.flow.ops if op.kind == frames.NODE and op.node is not None):
            if any(_is_named(error, each) for each in (node, *nested(node))):
                return part.place.number
    return None


def _is_named(error: TfnbError, node: Node) -> bool:
    return error.node == node.name and all(getattr(error, what) == found for what, found in node.where.items())


def digest(parts: Iterable[Part]) -> str:
    """The sha256 of all edges: parts that were cut alike have the same."""
    edges = sorted(edge for part in parts for edge in part.sends)
    return hashlib.sha256(repr(edges).encode()).hexdigest()


class PartProgram(ComputeProgram):
    """The program of one part of a step over several tasks. A run waits for values of other parts."""

    def __post_init__(self) -> None:
        meta = self.meta
        graph: Graph = graph_of(meta, self.tensors)
        feeds, outputs = (tuple(map(graph.value, meta[names])) for names in ("feeds", "fetches"))
        places = tuple(None if number is None else Place(number) for number in meta["places"])
        here = Place(int(meta["part"]))
        wanted = CutOptions([*meta["tasks"]], places, is_optimized=True, has_writes=False, here=here)
        self.code = StepCode(StepGraph(graph, graph, outputs, feeds), executor="parts", parts=wanted)
        self.part = self.code.program
        found: StepFlow = self.part.found
        if digest(found.parts) != meta["edges"]:
            text = f"{here} cuts this step otherwise than the notebook: do they run the same tfnb and torch?"
            raise VersionMismatch(text)
        self.program = self.part
        self._kinds = found.kinds(self.part.parts[0])
        self.lookups, self.tensors, self.queues = [], (), queues_of(graph.nodes)
        self.homes = [tuple(map(piece_of, pieces)) for pieces in keys_of(self.part, meta["homes"])]
        about = StepParts(graph, found)
        new = {outputs[at] for at in meta["kept"]}
        edges = [edge for edge in about.edges if meta["format"] and edge.kind is Kind.VALUE]
        made = [e for e in edges if about.value(e.port) not in new and not _is_stored(found.flow, e.port)]
        specs = {edge.number: about.spec(edge.port) for edge in made}
        self._lossy = {
            number: spec.dtype for number, spec in specs.items() if spec is not None and is_lossy(spec.dtype)
        }

    @property
    def tracer(self) -> PlaceTracer:  # type: ignore[override]
        """See `ComputeProgram.tracer`."""
        tracer, _ = self.part.traced
        tracer.prepare(program for plan in self.part.traced[1] for program in plan.programs)
        return tracer

    @property
    def sent_nodes(self) -> Mapping[int, tuple[Node | None, str]]:
        """See `ComputeProgram.sent_nodes`."""
        ops = {edge.number: self.part.flow.ops[edge.port.op] for edge in self.part.parts[0].sends}
        return {number: (op.node, op.kind if op.node is None else op.node.op) for number, op in ops.items()}

    @property
    def usual_code(self) -> str:
        """See `ComputeProgram.usual_code`."""
        return ""

    def fed(self, tensors: Sequence[torch.Tensor], meta: Meta) -> list[Any]:
        """All feeds: the sent values, meta tensors for feeds whose sizes are enough, and None for unused ones."""
        values, sizes = iter(tensors), iter(meta["sizes"])
        specs = [self.part.whole.contents.by_id[value.node].outputs[value.index] for value in self.part.feeds]
        found: list[Any] = []
        for kind, spec in zip(self._kinds, specs, strict=True):
            if kind is Kind.SIZE:
                found.append(torch.empty(next(sizes), dtype=spec.dtype, device="meta"))
            else:
                found.append(None if kind is None else next(values))
        return found

    def run(
        self, feeds: Sequence[Any], values: Mapping[str, torch.Tensor], run_index: int, task: str,
        looked: Sequence[torch.Tensor] = (), meet: Meet | None = None, is_traced: bool = False,
    ) -> tuple[list[torch.Tensor | None], list[Push]]:  # fmt: skip
        """The fetches computed by this part, None for others, and the pushes to shards; see `ComputeProgram.run`."""
        storages = storages_of(self.part, self.homes, values)
        given = [
            value if value is None or value.is_meta else self._fed(at, value)
            for at, value in zip(self.part.feeds, feeds, strict=True)
        ]
        if self._lossy and (crossing := meet) is not None:
            meet = lambda put: LossyPeers(crossing(put), self.meta["format"], self._lossy)  # noqa: E731
        out = self._computed(given, storages, run_index, None, None, meet, is_traced=is_traced)[0]
        if self.meta["check"]:
            self._ensure_finite(out, task)
        pushes = self._pushes(out)
        for push in pushes:
            push.ensure_finite(task)
        return out[: self.meta["count"]], pushes

    def _ensure_finite(self, out: Sequence[torch.Tensor | None], task: str) -> None:
        """Raise NonFinite naming the first fetch or border that holds a number that is not finite."""
        for value, found in zip(self.part.fetches, out, strict=True):
            if found is not None and found.is_floating_point() and not is_finite(found):
                node = self.part.whole.contents.by_id[value.node]
                at = f"\n  at {node.source}" if node.source else ""
                error = NonFinite(f"{node.name} holds NaN or infinity, computed on {task}{at}", **node.where)
                error.task = task
                raise error
