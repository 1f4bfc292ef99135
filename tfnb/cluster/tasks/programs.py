"""Plans: the parts of a split step as messages, and as compiled programs on the tasks.

A plan is registered once on a task, under the sha256 of its content, in tfnb's own graph format; nothing is pickled.
The notebook makes `Plan`s; a compute task turns one into a `ComputeProgram`, a server into a `ShardProgram`.
Imports the graph, placement and execution; no Dask.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, TypeVar

import torch

from tfnb.cluster.modes.joins import Join
from tfnb.cluster.server.parts import GRADIENTS
from tfnb.cluster.tasks.rows_there import LookedUp, RowRequest
from tfnb.cluster.wire.lossy import FORMATS, is_lossy, narrowed
from tfnb.errors import (
    GraphFormatError,
    InvalidArgument,
    NonFinite,
    NonFiniteGradient,
    ShapeError,
    TfnbError,
    Unimplemented,
)
from tfnb.execution import Pending, Program
from tfnb.execution.dataflow.executor import Meet
from tfnb.execution.explain import explained
from tfnb.execution.step_code import StepCode
from tfnb.execution.tiers.tiered import Mode
from tfnb.execution.tracing.checked_steps import CheckedTracer, try_update
from tfnb.execution.tracing.health import is_finite
from tfnb.execution.tracing.origins import not_finite
from tfnb.execution.tracing.place_tracer import PlaceTracer
from tfnb.execution.tracing.value_health import ValueHealth
from tfnb.graph import Graph, Node, Spec, Value
from tfnb.graph.files import sha256
from tfnb.graph.forms.serial import dumps, loads
from tfnb.graph.graph import new_id
from tfnb.graph.ops import DEQUEUE, ENQUEUE
from tfnb.graph.queue import Queue
from tfnb.graph.subgraph import nested, queues_of
from tfnb.passes import step_graph
from tfnb.passes.flow.merges import ROWS, SUM, Weight, merged, number_of
from tfnb.placement.lookups import lookups
from tfnb.placement.partition import Late, Server, Split
from tfnb.placement.placement import Homes, Piece, Placement, Transfer, joined, read_from
from tfnb.placement.row_guards import NO_GUARDS, RowGuards
from tfnb.state.queue_machine import whole_steps

Meta = Mapping[str, Any]
T = TypeVar("T", torch.Tensor, torch.Tensor | None)
LARGEST_CHANGE = 1e9  # see `change_of`


@dataclass(frozen=True)
class Plan:
    """One part of a step, ready to be registered: ``id``, JSON facts, and the graph's text and constants as tensors."""

    id: str
    meta: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class PartPlan:
    """The plan of the part of a step that one task does.

    feeds: of each feed how much it wants, see `tfnb.passes.flow.cut.Kind`; None: nothing. shards: that it reads, or
    sends to.
    """

    task: int
    plan: Plan
    feeds: tuple[int | None, ...]
    shards: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PlacedStep:
    """A step placed on the cluster.

    ``fetched``: for each fetch its place among the results of the compute plan, followed by those of the ``late`` plan,
    run by one replica when a step is written; None for a fetch without a value. ``joins``: how what replicas have of
    each becomes that of the whole batch. ``divides``, ``undivided``: as of
    `tfnb.placement.partition.Split`.
    """

    compute: Plan
    servers: Mapping[int, Plan]
    fetched: tuple[int | None, ...]
    placement: Placement
    late: Plan | None = None
    divides: bool = False
    undivided: str | None = None
    queues: tuple[Queue, ...] = ()  # that the compute plan uses, in its order
    puts: bool = False  # into one of them
    read: tuple[str, ...] = ()  # keys of Variables that no other step may write while a step with queues waits
    parts: tuple[PartPlan, ...] = ()  # of a step over several tasks, in place of ``compute``
    guards: RowGuards = NO_GUARDS  # for the rows of a task
    joins: Sequence[Join] = ()
    senders: Mapping[int, tuple[int, ...]] | None = None  # then of each shard the parts that send to it, by position
    outer: PlacedOuterStep | None = None

    @property
    def writes(self) -> tuple[int, ...]:
        """Shards that the step writes."""
        return self.placement.writes

    @property
    def written(self) -> tuple[str, ...]:
        """Keys of the Variables that the step, or its outer step, writes."""
        return self.placement.changed if self.outer is None else (*self.placement.changed, *self.outer.placed.written)

    @property
    def written_there(self) -> set[str]:
        """Keys of the written Variables' pieces on their shards."""
        own = {piece.key for key in self.placement.changed for piece in self.placement.homes[key]}
        return own if self.outer is None else own | self.outer.placed.written_there

    @property
    def used_there(self) -> set[str]:
        """Keys, on shards, of the pieces of all Variables that the step reads or writes."""
        plans = [self.compute, *(part.plan for part in self.parts), *([] if self.late is None else [self.late])]
        read = {piece.key for plan in plans for pieces in plan.meta["homes"].values() for piece in pieces}
        read = read.union(*(plan.meta["keys"].values() for plan in self.servers.values()))
        return read if self.outer is None else read | self.outer.placed.used_there

    @property
    def tasks(self) -> tuple[int, ...]:
        """The tasks that the graph asks for; none where any will do."""
        return tuple(part.task for part in self.parts) or self.placement.tasks

    def plan(self, task: int) -> Plan:
        """The plan of a task, by its number."""
        return next((part.plan for part in self.parts if part.task == task), self.compute)


@dataclass(frozen=True)
class PlacedOuterStep:
    """The plans of an outer step, and of each of its feeds the pieces of the Variable whose difference it is."""

    placed: PlacedStep
    pieces: tuple[Sequence[Piece], ...]


# -- the notebook's side --------------------------------------------------------------------------------------


def place(split: Split, *, check: bool = False, compile: Mode = "off", format: str = "") -> PlacedStep:
    """The plans of a split step, without the plans of parts (`tfnb.cluster.tasks.part_programs`).

    check: refuse to take or write numbers that are not finite. compile: the tasks' mode of compiling long steps.
    format: of gradients on their way to servers, see `tfnb.cluster.wire.lossy`.
    """
    homes = split.placement.homes
    servers = {server.shard: server_plan(server, homes, check, format) for server in split.servers}
    wanted = [value for value in split.fetches if value is not None]
    borders = list(dict.fromkeys(b.value for server in split.servers for b in server.borders))
    pushes = [
        {
            "shard": s.shard, "plan": servers[s.shard].id,
            "at": [len(wanted) + borders.index(b.value) for b in s.borders],
            "grads": [b.variable if b.kind in GRADIENTS else None for b in s.borders],
            "rows": [b.rows for b in s.borders], "weights": weights_of(s.borders),
            "formats": servers[s.shard].meta["formats"],
        }
        for s in split.servers
    ]  # fmt: skip
    outputs = (*wanted, *borders, *split.checks)
    found = () if check else lookups(split.compute, outputs, split.feeds, written=split.placement.changed)
    about = {"count": len(wanted), "pushes": pushes, "check": check}
    about["lookups"] = [
        {"index": name_of(split.compute, index), "length": len(variable), "homes": homes[variable.key]}
        for _, index, variable in found
    ]  # fmt: skip
    feeds = (*split.feeds, *(look.value for look in found))
    is_here = all(spec.device == "cpu" for node in split.compute.nodes for spec in node.outputs)
    about["compile"] = compile if is_here and not check else "off"
    compute = plan_of(split.compute, outputs, feeds, {"homes": homes_of(split.compute, homes), **about})
    queues = queues_of(split.compute.nodes)
    inner = (inner for node in split.compute.nodes for inner in (node, *nested(node)))
    puts = any(node.op == ENQUEUE for node in inner)
    read: tuple[str, ...] = ()
    if queues and split.placement.writes:
        used = (*split.placement.changed, *(v.key for v in split.compute.contents.variables.values()))
        read = tuple(key for key in used if key not in split.placement.free)
    _ensure_read_first(split.compute, checked=read)
    late = None if split.late is None else late_plan(split.late, homes)
    return PlacedStep(
        compute, servers, _places(split), split.placement, late, split.divides, split.undivided, queues, puts, read,
    )  # fmt: skip


def _ensure_read_first(graph: Graph, checked: Collection[str]) -> None:
    """Raise Unimplemented for a Variable that the program reads after a dequeue: a task pulls it when the step begins.

    checked: keys of Variables whose values may not change while the step waits, so that their order does not matter.
    """
    behind: dict[int, Node] = {}  # by the id of a node, the dequeue that it comes after
    for node in graph.nodes:
        before = (*(value.node for value in node.inputs), *node.control)
        found = next((behind[at] for at in before if at in behind), None)
        if node.op == DEQUEUE or any(inner.op == DEQUEUE for inner in nested(node)):
            found = node
        if found is None:
            continue
        behind[node.id] = found
        variable = node.attrs["variable"] if node.op == "tfnb.read" else None
        if variable is not None and variable.key not in checked:
            raise Unimplemented(
                f"{variable.name} is read after {found.name}, which waits for a queue, and on a cluster a step reads "
                "its Variables when it begins: dequeue in a run of its own, and feed this step what it gave\n"
                f"  at {node.source}", **node.where,
            )  # fmt: skip


def late_plan(late: Late, homes: Homes) -> Plan:
    """The plan of late fetches."""
    facts = {
        "late": True, "homes": homes_of(late.graph, homes), "after": [homes[variable.key] for variable in late.after],
        "averages": [average.feeds for average in late.averages], "has_rows": late.has_rows,
    }  # fmt: skip
    return plan_of(late.graph, [value for value in late.fetches if value is not None], late.feeds, facts)


def _places(split: Split) -> tuple[int | None, ...]:
    """The place of each fetch among the results of the compute plan, followed by the results of the late plan."""
    early, late = split.fetches, () if split.late is None else split.late.fetches
    count = sum(value is not None for value in early)
    behind = [None if place is None else count + place for place in numbered(late)]
    return tuple(b if a is None else a for a, b in zip_longest(numbered(early), behind))


def numbered(values: Iterable[Value | None]) -> tuple[int | None, ...]:
    """Places of the values that are not None, counted."""
    found: list[int | None] = []
    for value in values:
        found.append(None if value is None else sum(place is not None for place in found))
    return tuple(found)


def homes_of(graph: Graph, homes: Homes) -> dict[str, Sequence[Piece]]:
    """The pieces of each variable label of a graph."""
    return {label: homes[v.key] for label, v in graph.contents.variables.items()}


def server_plan(server: Server, homes: Homes, check: bool, format: str = "") -> Plan:
    """The plan of a server. format: of the gradients that it takes; of each feed the plan has one, or none."""
    keys = {
        label: next(piece.key for piece in homes[variable.key] if piece.shard == server.shard)
        for label, variable in server.graph.contents.variables.items()
    }
    borders = server.borders
    facts = {"kinds": [b.kind for b in borders], "rows": [b.rows for b in borders], "keys": keys, "check": check}
    facts["weights"] = weights_of(borders)
    by_id = server.graph.contents.by_id
    dtypes = [by_id[value.node].outputs[value.index].dtype for value in server.feeds]
    facts["formats"] = [
        format if border.is_gradient and is_lossy(dtype) else ""
        for border, dtype in zip(borders, dtypes, strict=True)
    ] if format else []  # fmt: skip
    return plan_of(server.graph, (server.target,), server.feeds, facts)


def weights_of(borders: Sequence[Transfer]) -> list[list[Any]]:
    """The weights of values sent to a server, with the places of their totals, as data."""
    at = {border.value: place for place, border in enumerate(borders)}
    each = [border.weight.at(at) for border in borders]
    return [[w.total, w.shift, w.least if w.least > -math.inf else None] for w in each]


def read_weights(facts: Sequence[Sequence[Any]]) -> list[Weight]:
    """The weights of `weights_of`.

    >>> read_weights([[None, 0.0, None]]) == [ROWS]
    True
    """
    return [Weight(at, shift, -math.inf if least is None else least) for at, shift, least in facts]


def plan_of(
    graph: Graph, fetches: Sequence[Value], feeds: Sequence[Value], facts: Meta, unused: Collection[int] = ()
) -> Plan:  # fmt: skip
    """The plan of a graph. unused: ids of the graph's constants with no use on the receiving task.

    Of these dtype and sizes are sent, and not the values.
    """
    text, constants = dumps(graph.name, graph.seed, graph.contents)
    constants = {key: each.to("meta") if id(each) in unused else each for key, each in constants.items()}
    meta = {
        **facts, "constants": list(constants),
        "fetches": [name_of(graph, value) for value in fetches], "feeds": [name_of(graph, value) for value in feeds],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps([meta, text], sort_keys=True).encode())
    for tensor in constants.values():
        digest.update(b"unused" if tensor.is_meta else sha256(tensor).encode())
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return Plan(digest.hexdigest(), {"plan": digest.hexdigest(), **meta}, (raw, *constants.values()))


def name_of(graph: Graph, value: Value) -> str:
    return f"{graph.contents.by_id[value.node].name}:{value.index}"


def updates_of(placed: PlacedStep) -> dict[int, Plan]:
    """The plans of servers, by shard, for a task with copies of its own: it may know both, under names of their own."""
    return {
        shard: replace(plan, id=f"{plan.id}/update", meta={**plan.meta, "plan": f"{plan.id}/update"})
        for shard, plan in placed.servers.items()
    }


# -- the tasks' side ------------------------------------------------------------------------------------------


def graph_of(meta: Meta, tensors: Sequence[torch.Tensor]) -> Graph:
    """The graph of a registered plan."""
    try:
        text = bytes(tensors[0].numpy()).decode()
        constants = dict(zip(meta["constants"], tensors[1:], strict=True))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise GraphFormatError(f"not a plan: {type(error).__name__}: {error}") from error
    name, seed, contents = loads(text, constants, new_id, trusted=True)
    return Graph(name, contents, seed=seed)


def _code(graph: Graph, fetches: Iterable[str], feeds: Iterable[str], compile: Mode = "off") -> StepCode:
    return StepCode(step_graph(graph, map(graph.value, fetches), map(graph.value, feeds)), compile=compile)


def keys_of(program: Program, keys: Mapping[str, Any]) -> list[Any]:
    """The entries of ``keys`` for the program's variables, in the program's order."""
    labels = {variable: label for label, variable in program.whole.contents.variables.items()}
    return [keys[labels[variable]] for variable in program.variables]


class ShardProgram:
    """The update of a server, applied at commit; a `tfnb.cluster.server.core.ServerProgram`."""

    def __init__(self, meta: Meta, tensors: Sequence[torch.Tensor]) -> None:
        self.program: Program = _code(graph_of(meta, tensors), meta["fetches"], meta["feeds"]).program
        self._is_checked = bool(meta["check"])
        self.kinds: Sequence[str] = list(meta["kinds"])
        self.weights: Sequence[Weight] = read_weights(meta["weights"])
        self._formats: Sequence[str] = list(meta["formats"])
        self.reads: Sequence[str] = keys_of(self.program, meta["keys"])
        key_of = dict(zip(self.program.variables, self.reads, strict=True))
        self.writes: Sequence[str] = [key_of[variable] for variable in self.program.writes]
        nodes = self.program.whole.contents.by_id
        whole = [nodes[value.node].outputs[value.index] for value in self.program.feeds]
        self.feeds = [_rows_of(spec, rows) for spec, rows in zip(whole, meta["rows"], strict=True)]
        sizes = [math.prod(spec.sizes({})) * spec.dtype.itemsize for spec in self.feeds if not spec.symbols]
        self.nbytes = sum(sizes) if len(sizes) == len(self.feeds) else None

    def fitting(self, feeds: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The feeds, of which those that crossed in a format have the dtypes of the graph again.

        Raises ShapeError for feeds whose dtypes or sizes do not fit the plan: the write would fail half-way.
        """
        if self._formats:
            each = zip(feeds, self._formats, self.feeds, strict=True)
            feeds = [
                FORMATS[format].widen(feed, spec.dtype) if format and feed.dtype is FORMATS[format].dtype else feed
                for feed, format, spec in each
            ]
        symbols: dict[str, int] = {}
        for place, (feed, wanted) in enumerate(zip(feeds, self.feeds, strict=True)):
            if feed.is_meta or feed.dtype is not wanted.dtype or not wanted.fits(feed.shape, symbols):
                raise ShapeError(f"part {place} of this push is {Spec.of(feed)}, and its plan takes {wanted}")
        return tuple(feeds)

    def compute(self, feeds: Sequence[torch.Tensor], storages: Sequence[torch.Tensor], run_index: int) -> Pending:
        """Compute the pending update; writes nothing."""
        try:
            if self._is_checked:
                try_update(self.program, feeds, storages, run_index)
            return self.program.compute(feeds, list(storages), run_index)[1]
        except TfnbError:
            raise
        except Exception as error:
            raise explained(self.program, error, feeds) from error

    def commit(self, pending: Pending) -> None:
        """Write the pending update."""
        self.program.commit(pending)


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's message to one shard: feeds of a server plan.

    ``grads``: of each tensor that is a gradient the name of its variable, else None; ``weights``: of each tensor.
    ``formats``: of each tensor, see `tfnb.cluster.wire.lossy`; empty where all travel as they are.
    """

    shard: int
    plan: str
    tensors: tuple[torch.Tensor, ...]
    grads: tuple[str | None, ...] = ()
    weights: tuple[Weight, ...] = ()
    formats: tuple[str, ...] = ()

    @property
    def sent(self) -> tuple[torch.Tensor, ...]:
        """The tensors as they travel. Raises NonFinite for a gradient beyond the range of its format."""
        if not self.formats:
            return self.tensors
        return tuple(
            narrowed(tensor, format, f"the gradient of {name or 'a variable'}") if format else tensor
            for tensor, format, name in zip(self.tensors, self.formats, self.grads, strict=True)
        )

    def ensure_finite(self, task: str) -> None:
        """Raise NonFiniteGradient naming the variable, before any server sees anything of the step.

        A part that weighs nothing may have any gradient: the divisor of its loss is 0.
        """
        weights = self.weights or (ROWS,) * len(self.tensors)
        for name, tensor, weight in zip(self.grads, self.tensors, weights, strict=False):
            if name is not None and not is_finite(tensor) and weight.of(number_of(weight, self.tensors, 1.0)):
                whose = f"variable {name}" if name else "a variable"
                raise NonFiniteGradient(
                    f"the gradient of {whose}, {Spec.of(tensor)}, that {task} computed holds NaN or infinity; the step "
                    "was dropped on every server", node=name or None, task=task,
                )  # fmt: skip

    @property
    def counted(self) -> Push:
        """The same, with gradients of zero where nothing counts in the loss of its rows."""
        weights = self.weights or (ROWS,) * len(self.tensors)
        tensors = [
            torch.zeros_like(tensor)
            if name is not None and not weight.of(number_of(weight, self.tensors, 1.0)) else tensor
            for name, tensor, weight in zip(self.grads, self.tensors, weights, strict=True)
        ]  # fmt: skip
        return replace(self, tensors=tuple(tensors))

    def plus(self, other: Push, kinds: Sequence[str]) -> Push:
        """Both as one: sums of gradients, and of all else that is sent what the ``other``, later one has."""
        tensors = merged(kinds, [SUM] * len(kinds), [other.tensors, self.tensors], [1, 1])
        return replace(other, tensors=tuple(tensors))


def change_of(before: Sequence[Push], now: Sequence[Push]) -> float:
    """The norm of the difference of two gradients of the same rows, as a share of the norm of the first.

    Of all Variables together, in float64. 0 where both are 0, `LARGEST_CHANGE` where the first alone is.

    >>> pushes = [[Push(0, "", (torch.tensor([3.0, x]), torch.tensor(7)), ("w", None))] for x in (4.0, 1.0)]
    >>> change_of(*pushes)
    0.6
    """
    whole = changed = 0.0
    for old, new in zip(before, now, strict=True):
        for name, a, b in zip(old.grads, old.tensors, new.tensors, strict=False):
            if name is not None:
                a, b = (each.to(torch.promote_types(each.dtype, torch.float64)) for each in (a, b))
                whole += float(torch.linalg.vector_norm(a)) ** 2
                changed += float(torch.linalg.vector_norm(b - a)) ** 2
    return (changed / whole) ** 0.5 if whole else LARGEST_CHANGE * bool(changed)


@dataclass
class ComputeProgram:
    """The program of a compute task: takes reads of some shards, and feeds; gives fetches and pushes.

    The last feeds are rows of large Variables, requested from servers by ``lookups``.
    """

    meta: Meta
    tensors: Sequence[torch.Tensor]
    program: Program = field(init=False)
    code: StepCode = field(init=False)  # that runs it
    homes: list[tuple[Piece, ...]] = field(init=False)  # of each of the program's variables
    queues: tuple[Queue, ...] = field(init=False)
    lookups: list[tuple[int, list[Piece]]] = field(init=False)  # of each its number of rows, and where they are

    def __post_init__(self) -> None:
        graph, looks, feeds = graph_of(self.meta, self.tensors), self.meta["lookups"], self.meta["feeds"]
        self.code = _code(graph, self.meta["fetches"], feeds, self.meta["compile"])
        self.program = self.code.program
        self.lookups = [(int(look["length"]), [*map(piece_of, look["homes"])]) for look in looks]
        if looks:
            self._indices: Program = _code(graph, [look["index"] for look in looks], feeds[: -len(looks)]).program
        self.tensors, self.queues = (), queues_of(self.program.whole.nodes)
        self.homes = [tuple(map(piece_of, pieces)) for pieces in keys_of(self.program, self.meta["homes"])]

    @property
    def reads(self) -> dict[int, list[str]]:
        """Keys to pull from each shard."""
        return keys_by_shard(self.homes)

    @cached_property
    def tracer(self) -> PlaceTracer:
        """The tracer of single steps, with its code prepared."""
        tracer = PlaceTracer()
        tracer.prepare([self.program])
        return tracer

    @property
    def sent_nodes(self) -> Mapping[int, tuple[Node | None, str]]:
        """Of each edge to another part, by number, the node whose value crosses, and the op."""
        return {}

    @property
    def usual_code(self) -> str:
        """A description of the code that runs without a tracer."""
        return self.code.tiers.code()

    def fed(self, tensors: Sequence[torch.Tensor], meta: Meta) -> list[Any]:
        """All feeds of a request."""
        return [*tensors]

    def looked_up(self, feeds: Sequence[torch.Tensor], run_index: int) -> LookedUp:
        """The rows that a step of these feeds and draws takes. Raises InvalidArgument for one that there is not."""
        if not self.lookups:
            return LookedUp((), ())
        fed = [self._fed(value, tensor) for value, tensor in zip(self._indices.feeds, feeds, strict=True)]
        try:
            indices, _ = self._indices.compute(fed, [], run_index)
        except TfnbError:
            raise
        except Exception as error:
            raise explained(self._indices, error, fed) from error
        wanted, empty = [], []
        for index, (length, pieces), value in zip(indices, self.lookups, self.program.feeds[len(feeds) :], strict=True):
            node = self.program.whole.contents.by_id[value.node]
            assert index is not None  # a value of the graph
            spec = node.outputs[0]
            row = [size for size in spec.shape[index.dim() :] if isinstance(size, int)]  # all sizes: of a table
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < length:
                raise InvalidArgument(
                    f"{node.op} failed: an index is not within the {length} rows of the table\n  node {node.name}"
                    f"\n  at {node.source}", **node.where,
                )  # fmt: skip
            wanted.append(RowRequest.of(index, pieces))
            empty.append(torch.empty(0, *row, dtype=spec.dtype))
        return LookedUp.of(wanted, empty)

    def run(
        self, feeds: Sequence[torch.Tensor], values: Mapping[str, torch.Tensor], run_index: int, task: str,
        looked: Sequence[torch.Tensor] = (), meet: Meet | None = None, is_traced: bool = False,
    ) -> tuple[list[torch.Tensor | None], list[Push]]:  # fmt: skip
        """Fetched values, and pushes to shards. ``values`` (by key) are not written. ``looked``: rows. ``meet``: joins
        the other parts of a step over several tasks. ``is_traced``: run under `tracer`.

        Raises NonFiniteGradient for gradients that are not finite: with the name of the ``task``, the op and line that
        made the first number of them, and the fetched values as details.
        """
        storages = storages_of(self.program, self.homes, values)
        feeds = [self._fed(value, tensor) for value, tensor in zip(self.program.feeds, (*feeds, *looked), strict=True)]
        checked = CheckedTracer(self.program).forward if self.meta["check"] else None
        forward = checked or self.code.tiers.forward(tuple([feed.shape for feed in feeds]))
        if is_traced:
            forward = self.tracer.whole(self.program)
        try:
            out, _ = self._computed(feeds, storages, run_index, forward)
        except NonFinite as error:
            error.task = task
            raise
        pushes = self._pushes(out)
        try:
            for push in pushes:
                push.ensure_finite(task)
        except NonFiniteGradient as error:
            self._locate(error, [*feeds, *storages, run_index])
            error.details = out[: self.meta["count"]]
            raise
        return out[: self.meta["count"]], pushes

    def _computed(self, feeds: Sequence[Any], storages: list[torch.Tensor], *args: Any, **options: Any) -> Any:
        """The results of the program; errors name the node and the line."""
        try:
            with whole_steps() if self.program.waits else nullcontext():
                return self.program.compute(feeds, storages, *args, **options)
        except TfnbError:
            raise
        except Exception as error:
            raise explained(self.program, error, feeds) from error

    def _pushes(self, out: Sequence[torch.Tensor | None]) -> list[Push]:
        """The pushes to shards, from the computed values."""
        return [
            Push(
                int(to["shard"]), to["plan"],
                tuple(rows_of(out[i], rows) for i, rows in zip(to["at"], to["rows"], strict=True)), tuple(to["grads"]),
                tuple(read_weights(to["weights"])), tuple(to["formats"]),
            )
            for to in self.meta["pushes"]
        ]  # fmt: skip

    def _locate(self, error: NonFiniteGradient, args: Sequence[Any]) -> None:
        """Compute once more, with probes, and say where the gradient became NaN or infinite."""
        if self.queues:  # the dequeued elements are gone
            return
        tracer = ValueHealth(self.program)
        tracer.forward(*args)
        found = not_finite(tracer.results, self.program.whole)
        error.message += f"\nComputed again there: {found.message}"
        error.cell, error.line, error.op = found.cell, found.line, found.op

    def _fed(self, value: Value, tensor: torch.Tensor) -> torch.Tensor:
        spec = self.program.whole.contents.by_id[value.node].outputs[value.index]
        return tensor if spec.is_on(tensor.device) else tensor.to(spec.device)


class LateProgram:
    """Fetches that one replica computes after the step is written: from averaged gradients, or updated Variables.

    ``after``: pieces of the Variables whose new values it takes; ``has_rows``: whether it takes all rows of the batch.
    """

    def __init__(self, meta: Meta, tensors: Sequence[torch.Tensor]) -> None:
        self.code = _code(graph_of(meta, tensors), meta["fetches"], meta["feeds"])
        self.program: Program = self.code.program
        self.homes = [tuple(map(piece_of, pieces)) for pieces in keys_of(self.program, meta["homes"])]
        self.after = [tuple(map(piece_of, pieces)) for pieces in meta["after"]]
        self.has_rows, self.count = bool(meta["has_rows"]), len(meta["fetches"])
        self._averages = [[(int(shard), int(at)) for shard, at in feeds] for feeds in meta["averages"]]

    @property
    def reads(self) -> dict[int, list[str]]:
        """Keys to pull from each shard, for values before or after the step."""
        return keys_by_shard((*self.homes, *self.after))

    @property
    def shown(self) -> dict[int, list[int]]:
        """By shard, the feeds whose averages the program takes."""
        found: dict[int, dict[int, None]] = {}
        for shard, at in (feed for feeds in self._averages for feed in feeds):
            found.setdefault(shard, {})[at] = None
        return {shard: list(feeds) for shard, feeds in found.items()}

    def run(
        self, feeds: Sequence[torch.Tensor], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor],
        averages: Mapping[tuple[int, int], torch.Tensor], run_index: int,
    ) -> list[torch.Tensor | None]:  # fmt: skip
        """The fetched values. feeds: of the step. before, after: values by key; averages: by shard and feed."""
        storages = storages_of(self.program, self.homes, before)
        new = [joined(pieces, after) for pieces in self.after]
        merged = [[averages[feed] for feed in feeds] for feeds in self._averages]
        means = [pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in merged]
        given = [
            tensor if (spec := self._spec(value)).is_on(tensor.device) else tensor.to(spec.device)
            for value, tensor in zip(self.program.feeds, (*feeds, *new, *means), strict=True)
        ]
        try:
            return self.program.compute(given, storages, run_index)[0]
        except TfnbError:
            raise
        except Exception as error:
            raise explained(self.program, error, given) from error

    def _spec(self, value: Value) -> Spec:
        return self.program.whole.contents.by_id[value.node].outputs[value.index]


def apart_from(memory: Iterable[torch.Tensor], values: Iterable[T]) -> list[T]:
    """The values, copied where they lie in memory of these tensors, which are to be overwritten."""
    own = {tensor.untyped_storage().data_ptr() for tensor in memory}
    return [v.clone() if v is not None and v.untyped_storage().data_ptr() in own else v for v in values]


def storages_of(
    program: Program, homes: Iterable[tuple[Piece, ...]], values: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The values of a program's Variables, joined from their pieces, on the devices of its graph."""
    found = zip(program.variables, homes, strict=True)
    return [joined(pieces, values).to(variable.spec.device) for variable, pieces in found]


def keys_by_shard(homes: Iterable[tuple[Piece, ...]]) -> dict[int, list[str]]:
    """Keys to pull from each shard for Variables in these pieces."""
    found: dict[int, dict[str, None]] = {}
    for pieces in homes:
        for piece in read_from(pieces):
            found.setdefault(piece.shard, {})[piece.key] = None
    return {shard: list(keys) for shard, keys in found.items()}


def piece_of(fields: Sequence[Any]) -> Piece:
    shard, key, rows = fields
    return Piece(int(shard), str(key), None if rows is None else (int(rows[0]), int(rows[1])))


def _rows_of(spec: Spec, rows: Sequence[int] | None) -> Spec:
    """The Spec of the value of `rows_of`."""
    return spec if rows is None else replace(spec, shape=(rows[1] - rows[0], *spec.shape[1:]))


def rows_of(value: torch.Tensor | None, rows: Sequence[int] | None) -> torch.Tensor:
    """A shard's rows of a value; the whole value if ``rows`` is None."""
    assert value is not None  # values for servers are outputs
    return value if rows is None else value[rows[0] : rows[1]]
