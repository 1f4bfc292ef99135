"""Structured control flow as plain dataflow: Switch, Merge, Enter, Exit, NextIteration, LoopCond.

"Dynamic Control Flow in Large-Scale Machine Learning" (EuroSys'18) §4, semantics S-126 to S-133. A loop is a cycle,
which program order cannot hold, so the form is a list of ops that name each other's outputs by number. `lower` is a
pure function from nodes to that form. Imports graph only.

A scope is a subgraph at its place in the program. A frame holds the iterations of a loop. What stands in a scope runs
where the scope's ``pivot`` is live: an op that takes nothing which depends on it gets the pivot as a control input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tfnb.graph import Contents, Node, Ref, Spec, Subgraph, Value, Variable, ops
from tfnb.graph.node import leaves
from tfnb.graph.spec import Dim
from tfnb.graph.subgraph import is_guarding, row_places, subgraphs

# Control: Switch gives its value at 0 where the predicate is false, at 1 where it is true, and a dead one at the other.
SWITCH, MERGE, ENTER, EXIT, NEXT, LOOPCOND = "switch", "merge", "enter", "exit", "next", "loopcond"
# Values: a graph node; what is fed; the number of the run; a Python value.
NODE, FEED, RUN, START = "node", "feed", "run", "start"
# What branches decide by, and loops count, take and gather.
TRUTH, COUNT, BELOW, ROWS, ROW, PUSH, STACK, ITERATIONS, MIX, ABSENT, SIZES = (
    "truth", "count", "below", "rows", "row", "push", "stack", "iterations", "mix", "absent", "sizes",
)  # fmt: skip


COUNTER = ("iterations", 0)
"""The part of a loop's Enter, Merge, Switch, NextIteration and Exit that pass on the number of the iteration."""


class Port(NamedTuple):
    """Output number ``index`` of op number ``op``. After a node's outputs come its completion and its order token."""

    op: int
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a Port


@dataclass(frozen=True, slots=True)
class Op:
    """One op of the dataflow form.

    inputs: its values; of a node that uses a queue, then the queue's op before. after: ports that only must be there.
    sizes: values whose axes tell the sizes that it uses. run: the number that its random draws depend on. frame: where
    it runs; scope: where it, or the node that it is a part of, stands. part: which part of ``node``.
    """

    kind: str
    inputs: tuple[Port, ...]
    frame: int
    scope: int
    node: Node | None = None
    part: Any = None
    after: tuple[Port, ...] = ()
    sizes: tuple[tuple[Spec, Port], ...] = ()
    run: Port | None = None

    @property
    def sources(self) -> tuple[Port, ...]:
        """All input ports."""
        run = () if self.run is None else (self.run,)
        return (*self.inputs, *self.after, *(port for _, port in self.sizes), *run)


@dataclass(frozen=True, slots=True)
class Scope:
    """A subgraph of ``node`` in the scope ``parent``; the root is the graph itself."""

    parent: int
    node: Node | None
    placeholders: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class StaticFrame:
    """The iterations of the loop ``node``, inside of the frame ``parent``; the root has one iteration.

    schedule: of a loop over microbatches that is cut into stages, see `tfnb.passes.flow.microbatch_schedules`.
    """

    parent: int
    node: Node | None
    parallel: int
    schedule: str = ""


@dataclass(frozen=True, slots=True)
class Flow:
    """Ops, frames and scopes by number; ``ports``: where the root's values are."""

    ops: tuple[Op, ...]
    frames: tuple[StaticFrame, ...]
    scopes: tuple[Scope, ...]
    ports: Mapping[Value, Port]
    done: Mapping[int, tuple[Port, ...]]  # of the root's nodes, by id

    def value(self, port: Port) -> Value | None:
        """The value of a node's port or of a fed op; None for others."""
        op = self.ops[port.op]
        fed: Value | None = op.part if op.kind == FEED else None
        return Value(op.node.id, port.index) if op.kind == NODE and op.node is not None else fed


@dataclass(slots=True)
class _ScopeLowering:
    """A scope during lowering."""

    number: int
    frame: int
    contents: Contents
    ports: dict[Value, Port]
    pivot: Port | None = None
    run: Port | None = None
    bound: set[Port] = field(default_factory=set)  # live only where the pivot is
    tokens: dict[Any, Port] = field(default_factory=dict)  # of each queue: its last op so far
    done: dict[int, tuple[Port, ...]] = field(default_factory=dict)
    symbols: dict[str, tuple[Value, Spec]] = field(default_factory=dict)
    checked: tuple[Port, ...] = ()  # that the sizes are those for which its nodes were recorded


def lower(
    contents: Contents, feeds: Sequence[Value] = (), symbols: Mapping[str, tuple[Value, Spec]] | None = None, *,
    native: Callable[[Node], bool] = lambda node: False,
) -> Flow:  # fmt: skip
    """The dataflow form of ``contents``.

    feeds: values that are given, instead of being computed. symbols: fed values with an axis of each size. native:
    whether a loop or branch stays a node.
    """
    return _FlowLowering(contents, feeds, symbols or {}, native).flow()


class _FlowLowering:
    def __init__(
        self, contents: Contents, feeds: Sequence[Value], symbols: Mapping[str, tuple[Value, Spec]],
        native: Callable[[Node], bool],
    ) -> None:  # fmt: skip
        self.native = native
        self.ops: list[Op] = []
        self.frames = [StaticFrame(-1, None, 1)]
        self.scopes = [Scope(-1, None, ())]
        self.root = _ScopeLowering(0, 0, contents, {})
        for value in feeds:
            self.root.ports[value] = Port(self.emit(self.root, FEED, part=value))
        self.root.run = Port(self.emit(self.root, RUN))
        self.root.symbols = _bound(contents) | dict(symbols)

    def flow(self) -> Flow:
        """Lower the root."""
        for node in self.root.contents.nodes:
            self.node(self.root, node)
        return Flow(tuple(self.ops), tuple(self.frames), tuple(self.scopes), self.root.ports, self.root.done)

    def emit(
        self, place: _ScopeLowering, kind: str, inputs: Iterable[Port] = (), *, frame: int | None = None, **more: Any
    ) -> int:
        """Add an op of a scope; one that would run where the scope does not waits for the pivot."""
        op = Op(kind, tuple(inputs), place.frame if frame is None else frame, place.number, **more)
        number = len(self.ops)
        if place.pivot is not None and frame is None:  # in the root all is live
            if kind != MERGE and not any(port in place.bound for port in op.sources):
                op = replace(op, after=(*op.after, place.pivot))
            count = 0 if op.node is None else len(op.node.outputs)
            place.bound.update(Port(number, index) for index in range(count + 2))
        self.ops.append(op)
        return number

    def node(self, place: _ScopeLowering, node: Node) -> None:
        """One node of a scope."""
        if node.op in ops.REGIONS and not self.native(node):
            outs = (self.loop if node.op == ops.WHILE else self.branches)(place, node)
            place.done[node.id] = (*place.done.get(node.id, ()), *outs)
        else:
            at = self.plain(place, node)
            outs = [Port(at, index) for index in range(len(node.outputs) or 1)]  # without outputs: it is done
            place.done[node.id] = (Port(at, len(node.outputs)),)
        for index, port in enumerate(outs):
            place.ports.setdefault(node.value(index), port)

    def plain(self, place: _ScopeLowering, node: Node) -> int:
        """A node that is an op."""
        draws = node.stream is not None or any(part.draws for part in subgraphs(node))
        inputs = [place.ports[value] for value in node.inputs]
        queue = node.attrs.get("queue")
        if queue is not None:
            inputs.append(self.token(place, queue))
        at = self.emit(
            place, NODE, inputs, node=node, after=(*self.after(place, node), *place.checked),
            sizes=self.sizes(place, node.symbols), run=place.run if draws else None,
        )  # fmt: skip
        if queue is not None:
            place.tokens[queue] = Port(at, len(node.outputs) + 1)
        return at

    def after(self, place: _ScopeLowering, node: Node) -> tuple[Port, ...]:
        return tuple(port for i in node.control for port in place.done.get(i, ()))

    def sizes(self, place: _ScopeLowering, symbols: Iterable[str]) -> tuple[tuple[Spec, Port], ...]:
        """Values whose axes tell these sizes, and their specs."""
        found = dict.fromkeys(place.symbols[s] for s in symbols if s in place.symbols)
        return tuple((spec, place.ports[value]) for value, spec in found if value in place.ports)

    def enclosed(
        self, outer: _ScopeLowering, node: Node, part: str, given: Sequence[Port], *, frame: int, pivot: Port,
        free: Iterable[Port] = (), run: Port | None = None, tokens: Mapping[Any, Port] | None = None,
    ) -> _ScopeLowering:  # fmt: skip
        """Lower the scope of a subgraph. given: ports of its inputs; free: ports alive without the scope."""
        subgraph: Subgraph = node.attrs[part]
        contents = subgraph.contents
        ports = dict(zip(subgraph.inputs, given, strict=True))
        bound = {pivot, *given, *(tokens or {}).values()} - set(free)
        place = _ScopeLowering(len(self.scopes), frame, contents, ports, pivot, run, bound, dict(tokens or {}))
        place.symbols = _bound(contents)
        self.scopes.append(Scope(outer.number, node, contents.placeholders))
        known = {symbol for symbol, (value, _) in place.symbols.items() if value in ports}
        checks = tuple(guard for guard in contents.guards if known.issuperset(guard.symbols))
        if checks:  # what is asked of sizes that only data tell is a node
            wanted = {s for guard in checks for s in guard.symbols}
            place.checked = (Port(self.emit(place, SIZES, part=checks, sizes=self.sizes(place, wanted))),)
        for inner in contents.nodes:
            if inner.op != "tfnb.placeholder":
                self.node(place, inner)
        return place

    # -- branches ---------------------------------------------------------------------------------------------

    def branches(self, place: _ScopeLowering, node: Node) -> list[Port]:
        """Both sides of a cond: operands are switched, outputs merged."""
        attrs, after = node.attrs, self.after(place, node)
        pred = Port(self.emit(place, TRUTH, (place.ports[node.inputs[attrs["pred"].input]],), node=node))
        place.done[node.id] = (pred,)  # of branches without outputs there is no more to wait for

        def switch(port: Port, part: object) -> int:
            return self.emit(place, SWITCH, (port, pred), node=node, part=part, after=after)

        gate = switch(pred, "pred")
        switched = [switch(place.ports[node.inputs[ref.input]], i) for i, ref in enumerate(attrs["operands"])]
        queues = _queues(node)
        tokens = {q: switch(self.token(place, q), q) for q in queues}
        shapes = [_symbols(shape) for shape in attrs["shapes"]]
        told = dict.fromkeys(port for symbols in shapes for _, port in self.sizes(place, symbols))
        sizes = {port: switch(port, "size") for port in told}
        sides = []
        for part, side in (("else", 0), ("then", 1)):
            inner = self.enclosed(
                place, node, part, [Port(at, side) for at in switched], frame=place.frame, pivot=Port(gate, side),
                run=place.run, tokens={q: Port(at, side) for q, at in tokens.items()},
            )  # fmt: skip
            outs = []
            for at, value in enumerate(node.attrs[part].outputs):
                told_here = tuple((spec, Port(sizes[port], side)) for spec, port in self.sizes(place, shapes[at]))
                absent = None if value is not None else self.emit(inner, ABSENT, node=node, part=at, sizes=told_here)
                outs.append(inner.ports[value] if absent is None else Port(absent))
            sides.append((outs, inner))
        (no, else_place), (yes, then_place) = sides
        for q in queues:
            pair = else_place.tokens[q], then_place.tokens[q]
            place.tokens[q] = Port(self.emit(place, MERGE, pair, node=node, part=q))
        return [
            Port(self.emit(place, MERGE, pair, node=node, part=i)) for i, pair in enumerate(zip(no, yes, strict=True))
        ]

    def token(self, place: _ScopeLowering, queue: object) -> Port:
        """The last op on a queue so far."""
        return place.tokens.get(queue) or Port(self.emit(place, START))

    # -- loops ------------------------------------------------------------------------------------------------

    def loop(self, place: _ScopeLowering, node: Node) -> list[Port]:
        """A while: carried values, the number of iterations, gathered rows and tokens go round."""
        return _LoopLowering(self, place, node).outputs()


class _LoopLowering:
    """A loop during lowering."""

    def __init__(self, lowering: _FlowLowering, place: _ScopeLowering, node: Node) -> None:
        self.to, self.place, self.node, self.attrs = lowering, place, node, node.attrs
        self.frame = len(lowering.frames)
        parallel, schedule = node.attrs.get("parallel_iterations", 10), node.attrs.get("schedule", "")
        lowering.frames.append(StaticFrame(place.frame, node, parallel, schedule))
        self.after = lowering.after(place, node)
        self.limits: list[Port] = []

    def emit(self, kind: str, inputs: Iterable[Port], **more: object) -> Port:
        """An op inside of the frame that belongs to no scope there."""
        return Port(self.to.emit(self.place, kind, inputs, frame=self.frame, node=self.node, **more))

    def enter(self, port: Port, part: object, *, constant: bool = True) -> Port:
        """Into the frame; a constant is there in every iteration."""
        bound = self.place.pivot is None or port in self.place.bound
        after = self.after if bound else (*self.after, self.place.pivot)
        return self.emit(ENTER, (port,), part=(part, constant), after=after)

    def start(self, value: object) -> Port:
        return Port(self.to.emit(self.place, START, part=value))

    def at(self, ref: Ref) -> Port:
        return self.place.ports[self.node.inputs[ref.input]]

    def outputs(self) -> list[Port]:
        attrs, place = self.attrs, self.place
        carried = [(("init", k), self.at(ref)) for k, ref in enumerate(attrs["init"])]
        rows = [(("rows", k), self.start(None)) for k in range(len(attrs["rows"]))]
        queues = _queues(self.node)
        tokens = [(("token", q), self.to.token(place, q)) for q in queues]
        going = [(COUNTER, self.start(0)), *carried, *rows, *tokens]
        enters = [self.enter(port, part, constant=False) for part, port in going]
        merges = [self.emit(MERGE, (port,), part=part) for port, (part, _) in zip(enters, going, strict=True)]
        self.captures = [self.enter(self.at(ref), ("captures", k)) for k, ref in enumerate(attrs["captures"])]
        rows_of = [
            self.to.emit(place, ROWS, map(self.at, x if _is_pair(x) else (x,)), node=self.node, part=k)
            for k, x in enumerate(attrs["xs"])
        ]
        self.xs = [self.enter(Port(op, 0), ("row", k)) for k, op in enumerate(rows_of)]
        self.limits = [self.enter(Port(op, 1), ("length", 0)) for op in rows_of[:1]]
        if isinstance(attrs["limit"], Ref):
            self.limits.append(self.enter(self.at(attrs["limit"]), ("limit", 0)))
        parts = [attrs["body"], *filter(None, [attrs["cond"]])]
        draws = any(part.draws for part in parts) and place.run is not None
        self.run = self.enter(place.run, ("run", 0)) if draws and place.run is not None else None
        test = self.test(merges[: 1 + len(carried)])
        pred = self.emit(LOOPCOND, (test,))
        switches = [self.emit(SWITCH, (port, pred), part=part) for port, (part, _) in zip(merges, going, strict=True)]
        inner = self.body([Port(port.op, 1) for port in switches], len(carried), queues)
        for merge, port, (part, _) in zip(
            merges, self.turned(inner, switches, len(carried), queues), going, strict=True
        ):
            back = Port(self.to.emit(inner, NEXT, (port,), node=self.node, part=part))
            self.to.ops[merge.op] = replace(self.to.ops[merge.op], inputs=(*self.to.ops[merge.op].inputs, back))
        exits = [self.emit(EXIT, (port,), part=part) for port, (part, _) in zip(switches, going, strict=True)]
        place.bound.update(exits)
        return self.left(exits, len(carried), queues)

    def test(self, merges: Sequence[Port]) -> Port:
        """Whether there is another iteration: the limits first, and only below them the condition."""
        attrs, carried = self.attrs, len(self.attrs["init"])
        number = None if isinstance(attrs["limit"], Ref) else attrs["limit"]
        below = None
        if self.limits or number is not None or attrs["cond"] is None:
            below = self.emit(BELOW, (merges[0], *self.limits), part=number)
        if attrs["cond"] is None and below is not None:
            return below
        given = list(merges)
        if below is not None:
            given = [Port(self.emit(SWITCH, (port, below), part=("below", i)).op, 1) for i, port in enumerate(given)]
        run = self.number(given[0])
        inner = self.to.enclosed(
            self.place, self.node, "cond", [*given[1 : carried + 1], *self.captures], frame=self.frame, pivot=given[0],
            free=self.captures, run=run,
        )  # fmt: skip
        out = inner.ports[attrs["cond"].outputs[0]]
        if below is None:
            return out
        gate = self.emit(SWITCH, (below, below), part=("below", -1))
        if out not in inner.bound:  # a captured value is live where the limit is reached, too
            out = Port(self.emit(SWITCH, (out, below), part=("below", -2)).op, 1)
        return self.emit(MERGE, (Port(gate.op, 0), out), part=("test", 0))

    def number(self, iteration: Port) -> Port | None:
        """The number that the draws of an iteration depend on; in a reversed loop the iterations count down."""
        if self.run is None:
            return None
        if self.attrs.get("replicas"):
            return self.emit(MIX, (self.run, iteration), part=self.attrs["replicas"])
        limits = self.limits if self.attrs["reverse"] else ()
        fixed = self.attrs["limit"] if self.attrs["reverse"] and not isinstance(self.attrs["limit"], Ref) else None
        return self.emit(MIX, (self.run, iteration, *limits), part=fixed)

    def body(self, live: Sequence[Port], carried: int, queues: Sequence[Any]) -> _ScopeLowering:
        iteration = live[0]
        rows = [self.emit(ROW, (iteration, x), part=k) for k, x in enumerate(self.xs)]
        run = self.number(iteration)
        return self.to.enclosed(
            self.place, self.node, "body", [*live[1 : carried + 1], *rows, *self.captures], frame=self.frame,
            pivot=iteration, free=self.captures, run=run,
            tokens=dict(zip(queues, live[len(live) - len(queues) :], strict=True)),
        )  # fmt: skip

    def turned(
        self, inner: _ScopeLowering, switches: Sequence[Port], carried: int, queues: Sequence[Any]
    ) -> list[Port]:
        """The values that the next iteration starts with."""
        outs = [inner.ports[value] for value in self.attrs["body"].outputs]
        pushed = [
            self.emit(PUSH, (Port(switches[1 + carried + k].op, 1), port), part=k)
            for k, port in enumerate(outs[carried:])
        ]
        inner.bound.update(pushed)
        count = self.emit(COUNT, (Port(switches[0].op, 1),))
        inner.bound.add(count)
        return [count, *outs[:carried], *pushed, *(inner.tokens[q] for q in queues)]

    def left(self, exits: Sequence[Port], carried: int, queues: Sequence[Any]) -> list[Port]:
        """The node's outputs."""
        to, place, node = self.to, self.place, self.node
        iterations = Port(to.emit(place, ITERATIONS, (exits[0],), node=node))
        stacked = []
        for k, at in enumerate(row_places(self.attrs)):
            sizes = to.sizes(place, _symbols(self.attrs["rows"][k]))
            op = to.emit(place, STACK, (exits[1 + carried + k],), node=node, part=k, sizes=sizes)
            stacked += [Port(op, index) for index in range(len(at))]
        place.tokens.update(zip(queues, exits[len(exits) - len(queues) :], strict=True))
        return [*exits[1 : carried + 1], iterations, *stacked]


def checks(op: Op) -> bool:
    """Whether an op checks an assumption of its scope, or belongs to a loop or branch with such checks."""
    if op.kind in (EXIT, TRUTH):
        return op.node is not None and is_guarding(op.node)
    return op.kind == SIZES or (op.kind == NODE and op.node is not None and op.node.op == "tfnb.guard")


def uses_queue(op: Op) -> bool:
    """Whether an op is a node that uses a queue."""
    return op.kind == NODE and op.node is not None and "queue" in op.node.attrs


def resolved(flow: Flow) -> tuple[Flow, dict[Variable, Port]]:
    """The flow with values in place of writes and of reads behind them, and the value that each Variable gets.

    What is stored is read in the root only, and written there.
    """
    same: dict[Port, Port] = {}
    written: dict[Variable, Port] = {}
    made: list[Op] = []
    for number, op in enumerate(flow.ops):
        op = moved(op, same)
        made.append(op)
        name = op.node.op if op.kind == NODE and op.node is not None else ""
        if name == "tfnb.assign":
            same[Port(number)] = same[Port(number, 1)] = written[_variable(op)] = op.inputs[0]
        elif name == "tfnb.read" and _variable(op) in written:
            same[Port(number)] = same[Port(number, 1)] = written[_variable(op)]
    if not same:
        return flow, written
    return replace(
        flow, ops=tuple(moved(op, same) for op in made),
        ports={value: same.get(port, port) for value, port in flow.ports.items()},
        done={node: tuple(same.get(port, port) for port in ports) for node, ports in flow.done.items()},
    ), written  # fmt: skip


def moved(op: Op, to: Mapping[Port, Port]) -> Op:
    """The op with each port that ``to`` names replaced.

    >>> moved(Op(SWITCH, (Port(0), Port(1)), 0, 0), {Port(0): Port(7)}).inputs
    (Port(op=7, index=0), Port(op=1, index=0))
    """
    if not any(port in to for port in op.sources):
        return op

    def of(port: Port) -> Port:
        return to.get(port, port)

    return replace(
        op, inputs=tuple(map(of, op.inputs)), after=tuple(map(of, op.after)),
        sizes=tuple((spec, of(port)) for spec, port in op.sizes), run=None if op.run is None else of(op.run),
    )  # fmt: skip


def _variable(op: Op) -> Variable:
    assert op.node is not None
    found: Variable = op.node.attrs["variable"]
    return found


def _is_pair(x: object) -> bool:
    return isinstance(x, tuple) and not isinstance(x, Ref)


def _bound(contents: Contents) -> dict[str, tuple[Value, Spec]]:
    """For each symbol a value with an axis of that size."""
    return {s: (v, contents.by_id[v.node].outputs[v.index]) for s, (v, _) in contents.symbols.items()}


def _symbols(shape: Sequence[int]) -> list[str]:
    return [s for leaf in leaves(shape) if isinstance(leaf, Dim) for s in leaf.symbols]


def _queues(node: Node) -> list[Any]:
    """The queues that something inside of a node uses, in order of first use."""

    def found(inside: Node) -> Iterator[Any]:
        for part in subgraphs(inside):
            for inner in part.contents.nodes:
                if "queue" in inner.attrs:
                    yield inner.attrs["queue"]
                yield from found(inner)

    return list(dict.fromkeys(found(node)))
