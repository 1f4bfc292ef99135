"""Cut a step into a compute graph and one server graph for each shard with writes. Pure; imports graph and passes.

This module assigns nodes to places; `tfnb.passes.flow.cut` then finds the nodes and edges that each place needs. Every
node has its home at the task; servers repeat the nodes of `_Cut._also`.

The compute graph holds all nodes but the writes and the nodes that depend on an optimizer update; it reads variables of
any shard and gives border values. A server graph holds the update nodes and assigns of its shard, with operands that
only they need from variables on that server (optimizer slots, a step counter, a learning rate).

Between data-parallel workers, border values of kind ``grad`` are averaged, weighted by rows or by a number of each
worker that is sent along, of kind ``weight`` (`tfnb.passes.flow.row_weights`). A row-sparse gradient (the two outputs
of a ``tfnb.slices``) is sent sparse, and the workers' entries are concatenated: values of kind ``rows`` weighted as for
an average, and ``entries``, such as row numbers, unchanged. The border of a gradient lies where the recorded derivative
ends (tag ``gradient``): computations on gradients, such as clipping, run on the server, on the average, as they would
on one machine. Other values are the first worker's. Element-wise updates of a Variable that lies whole on one server
run on that server, too, so that concurrent tasks do not overwrite each other.

A fetch that depends on the update, or on averaged gradients, is computed on the task as well if one task has all rows:
the task has the operands of the update. Where replicas divide the rows, no replica has the average: the first replica
computes such fetches when the step is committed, see `Late`. A step that replicas cannot divide exactly is computed by
one task from all rows; a new value that a server cannot compute from its pieces is sent whole (`Split.undivided`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tfnb.graph import Contents, Dim, Graph, Node, Ref, Spec, Value, Variable
from tfnb.graph.contents import unique
from tfnb.graph.graph import new_id
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import GRADIENT, PRESENT, STRUCTURAL
from tfnb.graph.spec import flows
from tfnb.graph.subgraph import nested, uses_queues
from tfnb.passes import StepGraph
from tfnb.passes.flow import frames
from tfnb.passes.flow.cut import End, Partition
from tfnb.passes.flow.cut import Kind as Amount
from tfnb.passes.flow.merges import ROWS, Weight
from tfnb.passes.flow.places import TASK, Home, Place
from tfnb.passes.flow.row_weights import WeighedStep
from tfnb.passes.flow.step_flow import symbols_of
from tfnb.passes.resolve import ResolvedStep, resolve
from tfnb.passes.unordered import unordered
from tfnb.placement.placement import Homes, Kind, Placement, Rows, Transfer, server
from tfnb.placement.shards import BY_ROWS

NOWHERE: frozenset[Place] = frozenset()
WEIGHTED: tuple[Kind, ...] = ("grad", "rows", "mean")


class Undivided(Exception):
    """Replicas, or servers that hold rows of a Variable, cannot do their parts of a step; says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """The work of one shard at commit: ``graph``, run for ``target`` with one feed for each value sent to the server.

    Of a Variable in pieces the graph is that of the whole; it works on the shard's rows as well.
    """

    shard: int
    graph: Graph
    feeds: tuple[Value, ...]
    borders: tuple[Transfer, ...]
    target: Value


@dataclass(frozen=True, slots=True)
class Average:
    """A gradient averaged over the replicas: ``feeds`` of servers, by shard and position; pieces of rows in order."""

    feeds: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Late:
    """Fetches that depend on averaged gradients or updated Variables, as one replica computes them at commit.

    ``graph`` reads Variables as they were before the step. Its ``feeds`` are those of the step, of all rows of the
    batch, then the new values of the Variables ``after``, then ``averages``. ``fetches``: None for those that each
    replica computes. ``has_rows``: whether any depends on the rows that were fed.
    """

    graph: Graph
    feeds: tuple[Value, ...]
    fetches: tuple[Value | None, ...]
    after: tuple[Variable, ...]
    averages: tuple[Average, ...]
    has_rows: bool


@dataclass(frozen=True, slots=True)
class Split:
    """A step in parts.

    ``compute`` has one placeholder for each feed (``feeds``) and gives ``fetches`` (None: ``late`` gives it), the
    border values and ``checks``, nodes that are done for what they do. ``divides``: whether data-parallel replicas may
    divide the rows of a batch; ``undivided``: why not, where that was asked for, or why servers do no updates.
    """

    compute: Graph
    feeds: tuple[Value, ...]
    fetches: tuple[Value | None, ...]
    placement: Placement
    checks: tuple[Value, ...] = ()
    servers: tuple[Server, ...] = ()
    late: Late | None = None
    divides: bool = False
    undivided: str | None = None


def split(
    step: StepGraph, homes: Homes, *, parallel: bool, tasks: tuple[int, ...] = (), is_staged: bool = False,
    weighed: WeighedStep | None = None,
) -> Split:  # fmt: skip
    """Split a step; ``homes``: where each variable lies.

    ``parallel``: the rows of a batch will be divided over replicas, so no single one of them can give a fetch that
    depends on averaged gradients. ``tasks``: those that the graph asks for. ``is_staged``: whether these are stages
    that hold their Variables: what is computed from gradients, such as a norm over all of them, is then done by the
    tasks, so that no server needs the gradients of other stages. ``weighed``: the step, with the weights of values.
    """
    why = None
    for divides in (True, False) if parallel else (False,):
        try:
            cut = _Cut(step.whole, step.graph, step.fetches, step.feeds, homes, tasks, divides, is_staged, weighed)
            return replace(cut.parts(), undivided=why)
        except Undivided as error:
            why = why or str(error)
    cut = _Cut(step.whole, step.graph, step.fetches, step.feeds, homes, tasks)
    return replace(cut.assigned(), undivided=why)


@dataclass
class _LateSources:
    """The sources of late fetches: new values of Variables, averaged gradients, and nodes to compute again.

    has_rows: whether any of it depends on the rows that were fed.
    """

    after: dict[Value, Variable] = field(default_factory=dict)
    averages: dict[Value, None] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)
    has_rows: bool = False


@dataclass
class _Cut:
    """One split in the making."""

    graph: Graph
    pruned: Graph
    fetches: tuple[Value, ...]
    feeds: tuple[Value, ...]
    homes: Homes
    tasks: tuple[int, ...]
    divides: bool = False
    is_staged: bool = False
    weighed: WeighedStep | None = None
    state: ResolvedStep = field(init=False)
    gradient: set[int] = field(default_factory=set)  # nodes that depend on a recorded derivative

    def __post_init__(self) -> None:
        self.state = resolve(self.pruned, set(self.feeds))
        for node in self.state.nodes.values():
            above = any(v.node in self.gradient for v in node.inputs if v not in self.feeds)
            if above or "gradient" in node.tags:
                self.gradient.add(node.id)

    @cached_property
    def checks(self) -> list[Node]:
        """Nodes with side effects that must run: guards and queue operations."""
        return [node for node in self.state.nodes.values() if node.op == "tfnb.guard" or uses_queues(node)]

    def _is_behind(self, node: Node) -> bool:
        """Whether a node depends on an update, or on gradients after their average."""
        return node.id in self.state.updated or (node.id in self.gradient and "gradient" not in node.tags)

    def _is_late(self, value: Value) -> bool:
        """Whether no replica has a fetch before the averaged step."""
        value = self.state.resolved(value)
        node = self.state.nodes.get(value.node)
        is_made = node is not None and value not in self.feeds and bool(node.outputs)
        return self.divides and is_made and node is not None and self._is_behind(node)

    # -- compute ----------------------------------------------------------------------------------------------

    def parts(self) -> Split:
        """Compute graph, server graphs, and the late graph that one replica computes at commit. Raises Undivided."""
        late = [self._is_late(value) for value in self.fetches]
        behind = next((node for node in self.checks if self.divides and node.id in self.state.updated), None)
        if behind is not None:
            raise Undivided(
                f"{behind.name} is done with a value behind the update, which no task has of averaged gradients"
            )
        found = self._found_late([v for v, is_late in zip(self.fetches, late, strict=True) if is_late])
        fed = _Feeds(self.graph, self.feeds)
        fetches = [
            None if is_late or not self._gives(v) else self.state.resolved(v)
            for v, is_late in zip(self.fetches, late, strict=True)
        ]
        cut = self._cut(fetches, found.averages)
        servers = [self._server(cut, shard, mine) for shard, mine in self._targets.items()]
        return Split(
            self._derived(fed, cut.nodes(TASK)),
            fed.values,
            tuple(None if value is None else fed.of(value) for value in fetches),
            self._placed(cut, servers),
            tuple(Value(node.id) for node in self.checks),
            self._fed_by(fed, servers),
            self._late(found, late, servers) if any(late) else None,
            self.divides,
        )

    def assigned(self) -> Split:
        """One task computes everything, including new values; servers assign them unchanged."""
        fed = _Feeds(self.graph, self.feeds)
        fetches = [self.state.resolved(v) if self._gives(v) else None for v in self.fetches]
        servers = [self._assigning(shard, mine) for shard, mine in self._targets.items()]
        places = {node.id: (TASK,) for node in self.pruned.nodes}
        transfers = tuple(border for server in servers for border in server.borders)
        return Split(
            self._derived(fed, self.state.nodes.values()),
            fed.values,
            tuple(None if value is None else fed.of(value) for value in fetches),
            Placement(places, self.homes, transfers, tuple(self._targets), self.tasks, self._changed),
            tuple(Value(node.id) for node in self.checks),
            self._fed_by(fed, servers),
        )

    @staticmethod
    def _fed_by(fed: _Feeds, servers: Iterable[Server]) -> tuple[Server, ...]:
        """The servers, whose borders are values of the compute graph."""
        return tuple(replace(s, borders=tuple(b._replace(value=fed.of(b.value)) for b in s.borders)) for s in servers)

    def _cut(self, fetches: Iterable[Value | None], averages: Collection[Value] = ()) -> Partition:
        """The step by places: fetches and checks are wanted of the task, new values of the servers that hold them.

        averages: gradients that some server is to have: the first one has those that no update takes.
        """
        symbols, native = symbols_of(self.graph, self.feeds), lambda node: True
        flow = frames.lower(Contents(tuple(self.state.nodes.values())), self.feeds, symbols, native=native)
        ends = [End(flow.ports[value], at=TASK) for value in fetches if value is not None]
        ends += [End(None, flow.done[node.id], TASK) for node in self.checks]
        ends += [End(flow.ports[v], at=server(shard)) for shard, mine in self._targets.items() for v in mine.values()]
        also = self._also()
        homes = [
            Home(None) if op.kind == frames.RUN
            else Home(TASK, also=NOWHERE if op.node is None else also[op.node.id])
            for op in flow.ops
        ]  # fmt: skip
        found = Partition(flow, ends, homes)
        sent = {flow.value(e.port) for e in found.edges if e.to != TASK and e.kind == Amount.VALUE}
        more = [End(flow.ports[value], at=server(min(self._targets))) for value in averages if value not in sent]
        return Partition(flow, [*ends, *more], homes) if more else found

    def _gives(self, value: Value) -> bool:
        """Whether the fetched node has outputs at all."""
        return value in self.feeds or bool(self.graph.contents.by_id[value.node].outputs)

    def _derived(self, fed: _Feeds, nodes: Iterable[Node]) -> Graph:
        rewired = [fed.rewired(node) for node in nodes]
        return self.graph.derive(Contents(_sized((*fed.nodes, *rewired))))

    # -- servers ------------------------------------------------------------------------------------------------

    @cached_property
    def _targets(self) -> dict[int, dict[Variable, Value]]:
        """New values by shard and variable."""
        found: dict[int, dict[Variable, Value]] = {}
        for variable, value in self.state.final.items():
            for piece in self.homes[variable.key]:
                found.setdefault(piece.shard, {})[variable] = value
        return dict(sorted(found.items()))

    @property
    def _changed(self) -> tuple[str, ...]:
        return tuple(variable.key for variable in self.state.final)

    def _of_rows(self, transfers: Sequence[Transfer]) -> tuple[tuple[str, ...], ...]:
        """Names of Variables, no statistics of batch norm, whose server takes values of the rows that are fed, and no
        gradients: from the first task only, and from all tasks as a mean or sum; and of the latter those whose new
        value is fetched, or leads to what is.
        """
        shapes = {value: self._spec(value).shape for value in self.feeds}
        fed = {value for value, shape in shapes.items() if shape and not isinstance(shape[0], int)}  # the divided ones
        sizes = {symbol for value in fed for symbol in _first_symbols(shapes[value])}
        of_feeds = {symbol for value in self.feeds for symbol in self._spec(value).symbols}
        hangs: set[int] = set()
        for node in self.state.nodes.values():
            at = _gradient_of(node)
            is_of_rows = any((v in fed or v.node in hangs) and i != at for i, v in enumerate(node.inputs))
            if is_of_rows or (at is None and not sizes.isdisjoint(node.symbols)):
                hangs.add(node.id)
                sizes.update({symbol for spec in node.outputs for symbol in spec.symbols} - of_feeds)  # that data tell
        own = {t.value for t in transfers if t.kind == "value" and (t.value in fed or t.value.node in hangs)}
        joined = {t.value for t in transfers if t.kind in ("mean", "sum")}
        apart, summed, shown = list[str](), list[str](), list[str]()
        for variable, value in self.state.final.items() if own or joined else ():
            sent = self._made_of(variable, value, transfers)[1]
            if not _is_of_norm(variable):
                apart += [] if own.isdisjoint(sent) else [variable.name]
                summed += [] if joined.isdisjoint(sent) else [variable.name]
                shown += [] if joined.isdisjoint(sent) or value not in self._fetched else [variable.name]
        return tuple(apart), tuple(summed), tuple(shown)

    @cached_property
    def _fetched(self) -> set[Value]:
        """The values that fetched values are computed of, and these."""
        found, stack = set[Value](), [self.state.resolved(v) for v in self.fetches if self._gives(v)]
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                stack.extend(() if value in self.feeds else self.state.nodes[value.node].inputs)
        return found

    def _made_of(
        self, variable: Variable, value: Value, transfers: Iterable[Transfer]
    ) -> tuple[set[Value], set[Value]]:  # fmt: skip
        """The operands of a Variable's new value on its server: values computed there, and values sent by tasks."""
        shards = {piece.shard for piece in self.homes[variable.key]}
        borders = {t.value for t in transfers if t.shard in shards}
        stack, seen = [value], {value}
        while stack:
            value = stack.pop()
            if value not in borders:
                new = {*self.state.nodes[value.node].inputs} - seen
                stack.extend(new)
                seen |= new
        return seen - borders, seen & borders

    def _raced(self, transfers: Iterable[Transfer]) -> Iterator[str]:
        """Variables, other than batch-norm statistics, whose new value a task computes from a possibly outdated read.

        Where the server adds what a task made of it to the value now, nothing is lost: so it is with gradients.
        """
        loose = [t.value for t in transfers if t.value.node not in self.gradient]
        for variable, value in self.state.final.items():
            if not any(self._hangs_on(v, variable) for v in loose):
                continue
            there, sent = self._made_of(variable, value, transfers)
            own = {v for v in there if self.state.nodes[v.node].op == "tfnb.read"}
            is_added = any(self.state.nodes[v.node].attrs["variable"] is variable for v in own)
            made = any(v.node not in self.gradient and self._hangs_on(v, variable) for v in sent)
            if made and not is_added and not _is_of_norm(variable):
                yield variable.name

    def _placed(self, cut: Partition, servers: Iterable[Server]) -> Placement:
        """The placement of the whole step: places of nodes, homes of Variables, transfers."""
        places: dict[int, tuple[Place, ...]] = {}
        for place in sorted(cut.done):
            for node in cut.nodes(place):
                places[node.id] = (*places.get(node.id, ()), place)
        transfers = tuple(border for server in servers for border in server.borders)
        (apart, joined, shown), raced = self._of_rows(transfers), tuple(self._raced(transfers))
        free = tuple(variable.key for variable in unordered(self.pruned) if variable.name not in raced)
        return Placement(
            places, self.homes, transfers, tuple(self._targets), self.tasks, self._changed,
            apart, raced, free, joined, shown,
        )  # fmt: skip

    def _server(self, cut: Partition, shard: int, targets: Mapping[Variable, Value]) -> Server:
        """The graph that computes and assigns the new values of one shard from the tasks' values. Raises Undivided."""
        place = server(shard)
        mine, edges = cut.nodes(place), [edge for edge in cut.edges if edge.to == place]
        sized = next((node for edge in edges if edge.kind == Amount.SIZE for node in mine if node.symbols), None)
        if sized is not None:
            raise Undivided(f"{sized.name} depends on the update, and on the size of a value that tasks have")
        gradients = {node.inputs[at] for node in mine if (at := _gradient_of(node)) is not None}
        sent = [cut.flow.value(edge.port) for edge in edges if edge.kind == Amount.VALUE]
        kinds = {value: self._kind(value, value in gradients) for value in sent if value is not None}
        rows, contents = self._rows(shard, targets, mine, kinds), self.pruned.contents
        weights = {v: self._weight(v, kind) for v, kind in kinds.items() if kind in WEIGHTED}
        borders = tuple(
            Transfer(
                v,
                shard,
                kind,
                rows.get(v),
                _changed_by(v, contents),
                weights.get(v, ROWS),
                kind in ("grad", "rows") and (v in gradients or self._is_derivative(v)),
            )
            for v, kind in kinds.items()
        )
        totals = dict.fromkeys(w.total for w in weights.values() if isinstance(w.total, Value))
        borders += tuple(Transfer(total, shard, "weight") for total in totals)
        fed = _Feeds(self.graph, tuple(border.value for border in borders))
        nodes = [fed.rewired(replace(node, control=()) if node.control else node) for node in mine]
        new = {variable: fed.of(value) for variable, value in targets.items()}
        return self._applying(shard, fed, nodes, new, borders)

    def _weight(self, value: Value, kind: Kind) -> Weight:
        if self.weighed is None or not self.divides:
            return ROWS
        return self.weighed.merges[value] if kind == "mean" else self.weighed.of(value)

    def _is_derivative(self, value: Value) -> bool:
        """Whether a value is made by a node of a backward pass."""
        node = self.state.nodes.get(value.node)
        return node is not None and not GRADIENT.isdisjoint(node.tags)

    def _assigning(self, shard: int, targets: Mapping[Variable, Value]) -> Server:
        """The graph that assigns the new values of one shard as a task sends them."""
        pieces = {v: piece.rows for v in targets for piece in self.homes[v.key] if piece.shard == shard}
        borders = tuple(Transfer(value, shard, "value", pieces[v], v.name) for v, value in targets.items())
        fed = _Feeds(self.graph, tuple(targets.values()))
        return self._applying(shard, fed, (), dict(zip(targets, fed.values, strict=True)), borders)

    def _applying(
        self, shard: int, fed: _Feeds, nodes: Iterable[Node], new: Mapping[Variable, Value],
        borders: tuple[Transfer, ...],
    ) -> Server:  # fmt: skip
        """The graph of a server that does ``nodes`` and assigns new values."""
        last = {node.attrs["variable"]: node for node in self.pruned.nodes if node.op == "tfnb.assign"}
        assigns = [replace(last[variable], inputs=(value,), control=()) for variable, value in new.items()]
        done = tuple(Value(node.id) for node in assigns)
        attrs = {"values": tuple(map(Ref, range(len(done))))}
        group = Node(id=new_id(), name="apply", op="tfnb.group", inputs=done, attrs=attrs)
        graph = self.graph.derive(Contents(_sized((*fed.nodes, *nodes, *assigns, group))))
        return Server(shard, graph, fed.values, borders, Value(group.id))

    def _rows(
        self, shard: int, targets: Mapping[Variable, Value], nodes: Iterable[Node], kinds: Mapping[Value, Kind]
    ) -> dict[Value, Rows]:
        """The rows, of values sent to a shard, that its pieces need; raises Undivided if an update needs others."""
        pieces = {v: p.rows for v in self.pruned.variables for p in self.homes[v.key] if p.shard == shard}
        held: dict[Value, Rows] = {}  # what is there in part
        sent: dict[Value, Rows | None] = {}
        for node in nodes:
            if node.op == "tfnb.read":
                rows = pieces[node.attrs["variable"]]
                if rows is not None:
                    held[Value(node.id)] = rows
                continue
            found = {held.get(value) for value in node.inputs if self._spec(value).shape and value not in kinds}
            some = found.pop() if found else None
            if found or (some is not None and node.op not in BY_ROWS):
                raise Undivided(f"{node.name} needs all of a variable that lies in parts on several servers")
            for value in node.inputs:
                if value in kinds and self._spec(value).shape:
                    _same(sent, value, some, node.name)
            if some is not None:
                held |= {Value(node.id, i): some for i, spec in enumerate(node.outputs) if spec.shape}
        for variable, value in targets.items():
            rows = pieces[variable]
            if value in kinds:
                _same(sent, value, rows, variable.name)
            elif held.get(value) != rows:
                raise Undivided(f"{variable.name} lies in parts on several servers, and its new value does not")
        return {value: rows for value, rows in sent.items() if rows is not None}

    def _kind(self, value: Value, is_gradient: bool) -> Kind:
        """The kind of a border value, by which the workers' values become one."""
        derived = value.node in self.gradient and value not in self.feeds
        spec, node = self._spec(value), self.graph.contents.by_id[value.node]
        if PRESENT in node.tags:
            return "any"
        if node.op == "tfnb.slices.default":
            if derived:
                return "rows" if value.index == 0 else "entries"
            return "value" if isinstance(spec.shape[0], int) else "entries"  # divided with the batch that was fed
        if (is_gradient or derived) and flows(spec.dtype):
            return "grad"
        if self.divides and self.weighed is not None and value in self.weighed.merges:
            return "mean" if flows(spec.dtype) else "sum"
        return "value"

    def _also(self) -> dict[int, frozenset[Place]]:
        """The servers that repeat a node of the task if their writes need its value, by the node's id.

        All do what is behind the border of the gradients (of stages, behind the updates); one does what depends on
        nothing but constants and Variables that it holds, or goes on to the next value of one that it holds whole. None
        does checks.
        """
        everywhere, checks = frozenset(map(server, self._targets)), {node.id for node in self.checks}
        found: dict[int, frozenset[Place]] = {}
        for node in self.state.nodes.values():
            is_processed = node.id in self.gradient and "gradient" not in node.tags and _is_plain(node)
            if node.op == "tfnb.read":
                found[node.id] = frozenset(server(p.shard) for p in self.homes[node.attrs["variable"].key])
            elif node.id in checks:
                found[node.id] = NOWHERE
            elif node.id in self.state.updated or (is_processed and not self.is_staged):
                found[node.id] = everywhere
            elif node.id in self.gradient or not _is_plain(node):
                found[node.id] = NOWHERE
            else:
                above = (NOWHERE if v in self.feeds else found[v.node] for v in node.inputs)
                found[node.id] = everywhere.intersection(*above)
        for node_id, place in tuple(self._onward(found)):
            found[node_id] |= {place}
        return found

    def _onward(self, local: Mapping[int, frozenset[Place]]) -> Iterator[tuple[int, Place]]:
        """Nodes on the way from a Variable that lies whole on a server to its next value, number by number.

        Leaves out derivatives, which are averaged over tasks, and nodes that need the whole of a Variable of which the
        server has only rows.
        """
        parts = sum(self._bits[v] for v in self._bits if self.homes[v.key][0].rows is not None)
        seen: set[tuple[int, Place]] = set()
        for variable, value in self.state.final.items():
            first, *others = self.homes[variable.key]
            place = server(first.shard)
            stack = [] if value.node in self.state.updated or others or first.rows is not None else [value]
            while stack:
                value = stack.pop()
                node = None if value in self.feeds else self.state.nodes.get(value.node)
                if node is None or (node.id, place) in seen or node.id in self.gradient or not _is_safe(node):
                    continue
                in_part = any(
                    place in local.get(v.node, ()) and self._reads.get(v.node, 0) & parts for v in node.inputs
                )
                if self._hangs_on(value, variable) and not in_part:
                    seen.add((node.id, place))
                    yield node.id, place
                    stack.extend(node.inputs)

    def _hangs_on(self, value: Value, variable: Variable) -> bool:
        """Whether a value is computed from that of a Variable before the step."""
        return value not in self.feeds and bool(self._reads.get(value.node, 0) & self._bits[variable])

    @cached_property
    def _bits(self) -> dict[Variable, int]:
        """A bit for each Variable."""
        return {variable: 1 << place for place, variable in enumerate(self.pruned.variables)}

    @cached_property
    def _reads(self) -> dict[int, int]:
        """By id of a node: the Variables whose values before the step the node depends on, as bits."""
        found: dict[int, int] = {}
        for node in self.state.nodes.values():
            above = self._bits[node.attrs["variable"]] if node.op == "tfnb.read" else 0
            for value in node.inputs:
                if value not in self.feeds:
                    above |= found.get(value.node, 0)
            found[node.id] = above
        return found

    def _spec(self, value: Value) -> Spec:
        return self.graph.contents.by_id[value.node].outputs[value.index]

    # -- late ---------------------------------------------------------------------------------------------------

    def _found_late(self, late: Sequence[Value]) -> _LateSources:
        """The sources of late fetches. Raises Undivided naming a node that one replica cannot know or repeat."""
        found, finals = _LateSources(), {value: variable for variable, value in self.state.final.items()}
        stack, seen = [(self.state.resolved(value), value) for value in late], set[Value]()
        while stack:
            value, end = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self.feeds:
                found.has_rows |= any(isinstance(size, Dim) for size in self._spec(value).shape)
                continue
            node = self.state.nodes[value.node]
            if value in finals and (self._is_behind(node) or _is_buffer(finals[value])):
                found.after[value] = finals[value]
            elif "gradient" in node.tags:
                self._ensure_averaged(value, end)
                found.averages[value] = None
            else:
                if why := _not_again(node):
                    raise Undivided(f"{self._named(end)} depends on {node.name}, which {why}")
                found.has_rows |= bool(node.symbols) or any(spec.symbols for spec in node.outputs)
                found.nodes.add(node.id)
                stack.extend((v, end) for v in node.inputs)
        return found

    def _ensure_averaged(self, value: Value, end: Value) -> None:
        """Raise Undivided for a gradient that a late fetch depends on and that servers do not average."""
        spec, node = self._spec(value), self.state.nodes[value.node]
        why = ""
        if not self._targets:
            why = "the step writes nothing, so no server averages it"
        elif node.id in self.state.updated:
            why = "which is one of values behind an update"
        elif spec.symbols or not flows(spec.dtype) or node.op == "tfnb.slices.default":
            why = "which has rows of its own on each task"
        if why:
            raise Undivided(f"{self._named(end)} depends on the gradient {node.name}, {why}")

    def _named(self, value: Value) -> str:
        return self.graph.contents.by_id[value.node].name

    def _late(self, found: _LateSources, late: Sequence[bool], servers: Sequence[Server]) -> Late:
        """The graph of late fetches; its averages are feeds of the servers' graphs."""
        at: dict[Value, list[tuple[Rows | None, tuple[int, int]]]] = {}
        for each in servers:
            for position, border in enumerate(each.borders):
                at.setdefault(border.value, []).append((border.rows, (each.shard, position)))
        averages = []
        for value in found.averages:
            whole = next((feed for rows, feed in at[value] if rows is None), None)
            pieces = sorted((rows, feed) for rows, feed in at[value] if rows is not None)
            averages.append(Average((whole,) if whole is not None else tuple(feed for _, feed in pieces)))
        fed = _Feeds(self.graph, (*self.feeds, *found.after, *found.averages))
        kept = [
            replace(node, control=tuple(i for i in node.control if i in found.nodes))
            for node in self.state.nodes.values() if node.id in found.nodes
        ]  # fmt: skip
        ends = [
            fed.of(self.state.resolved(value)) if is_late else None
            for value, is_late in zip(self.fetches, late, strict=True)
        ]
        return Late(
            self._derived(fed, kept), fed.values, tuple(ends), tuple(found.after.values()), tuple(averages),
            found.has_rows,
        )  # fmt: skip


class _Feeds:
    """Placeholders in place of values that come from outside."""

    def __init__(self, graph: Graph, values: Sequence[Value]) -> None:
        nodes = [graph.contents.by_id[value.node] for value in values]
        self.nodes = [
            Node(
                id=new_id(), name=_fed_name(node, value), op="tfnb.placeholder",
                outputs=(node.outputs[value.index],), source=node.source,
            )
            for node, value in zip(nodes, values, strict=True)
        ]  # fmt: skip
        self.values = tuple(Value(node.id) for node in self.nodes)
        self._of = dict(zip(values, self.values, strict=True))

    def of(self, value: Value) -> Value:
        """The placeholder's value, or the value itself."""
        return self._of.get(value, value)

    def rewired(self, node: Node) -> Node:
        """The node with its inputs taken from the placeholders."""
        inputs = tuple(map(self.of, node.inputs))
        return node if inputs == node.inputs else replace(node, inputs=inputs)


def _fed_name(node: Node, value: Value) -> str:
    """The name of a feed: a placeholder keeps its name, for errors; other nodes get ``name.index``, free of clashes."""
    return node.name if node.op == "tfnb.placeholder" else f"{node.name}.{value.index}"


def _same(sent: dict[Value, Rows | None], value: Value, rows: Rows | None, name: str) -> None:
    """Register the rows of a value for a shard; raises Undivided if another update needs other rows of the value."""
    if sent.setdefault(value, rows) != rows:
        raise Undivided(f"{name} needs other rows than another update of the same values")


def _gradient_of(node: Node) -> int | None:
    """The place of the gradient among the inputs of an update; None for other nodes."""
    grad = node.attrs.get("grad") if "update" in node.tags else None
    return grad.input if isinstance(grad, Ref) else None


def _changed_by(value: Value, contents: Contents) -> str:
    """The name of the nearest Variable that a value helps to write, a trained one first."""
    nearest, seen = [value], set[Value]()
    while nearest:
        nodes = [contents.by_id[user] for v in nearest for user in contents.consumers.get(v, ())]
        written = [node.attrs["variable"] for node in nodes if node.op == "tfnb.assign"]
        if written:
            return next((v for v in written if v.trainable), written[0]).name
        seen.update(nearest)
        given = {Value(node.id, index) for node in nodes for index in range(len(node.outputs))}
        nearest = [v for v in given if v not in seen]
    return ""


def _sized(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes, with sizes over symbols that stayed behind (the 2*B entries of a gradient) as symbols of their own."""
    sizes = [d for n in nodes for spec in n.outputs for d in spec.shape if isinstance(d, Dim)]
    bound = {d.expr for d in sizes if d.is_symbol}
    own: dict[str, Dim] = {}
    for d in sizes:
        if not bound.issuperset(d.symbols) and d.expr not in own:
            own[d.expr] = Dim(unique("S", bound | {name.expr for name in own.values()}))
    if not own:
        return tuple(nodes)

    def resized(spec: Spec) -> Spec:
        return Spec(spec.dtype, tuple(own.get(d.expr, d) if isinstance(d, Dim) else d for d in spec.shape), spec.device)

    return tuple(replace(node, outputs=tuple(map(resized, node.outputs))) for node in nodes)


def _not_again(node: Node) -> str:
    """The reason why a replica cannot compute a node a second time; empty if repeatable."""
    if any(uses_queues(each) for each in (node, *nested(node))):
        return "uses a queue"
    if any(each.stream is not None for each in (node, *nested(node))):
        return "draws random numbers"
    return ""


def _is_buffer(variable: Variable) -> bool:
    """Whether a Variable is a module's buffer: running statistics, moved by the rows of any task."""
    return variable.held is not None and variable.held.is_buffer()


def _first_symbols(shape: Sequence[int | Dim]) -> tuple[str, ...]:
    """The symbols of the size of the first axis."""
    return tuple(shape[0].symbols) if isinstance(shape[0], Dim) else ()


def _is_of_norm(variable: Variable) -> bool:
    """Whether a Variable is a running statistic of batch norm, moved by the rows of any task."""
    return variable.held is not None and variable.held.is_of_batch_norm()


def _is_safe(node: Node) -> bool:
    """A plain op that goes number by number, and fails for no values."""
    facts = facts_of(node.op)
    may_fail = facts.may_fail or (facts.may_fail_on_integers and not node.outputs[0].dtype.is_floating_point)
    return _is_plain(node) and facts.is_pointwise and not may_fail


def _is_plain(node: Node) -> bool:
    """A deterministic op whose arguments are known without a feed's sizes."""
    is_op = node.op == "tfnb.constant" or node.op not in STRUCTURAL
    return is_op and node.stream is None and not node.symbols
