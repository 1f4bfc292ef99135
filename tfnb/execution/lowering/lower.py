"""From a graph to one generated torch.fx function, split into compute and commit.

The generated function computes the fetches and every new variable value and writes nothing. Committing is then a few
calls over lists (the fused optimizer kernels, one foreach copy), so an interrupt or an error leaves variables at a
whole number of steps. Values are freed at their last use by torch.fx's generated code.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tfnb.errors import InvalidArgument, ShapeError, Unimplemented
from tfnb.execution import heap
from tfnb.execution.lowering.bindings import QUICK, writing
from tfnb.execution.lowering.checked_calls import Branch, RandomCall, Relation
from tfnb.execution.lowering.control_flow_code import REGIONS, RecursiveCall
from tfnb.execution.lowering.loop_in_place import NOTHING, in_place, writer_of, writes_last
from tfnb.execution.lowering.program import Donation, Program, unwritten
from tfnb.graph import Graph, Guard, Node, Recursion, Ref, Subgraph, Value, Variable, ops
from tfnb.graph.collector import uncollected
from tfnb.graph.node import map_leaves
from tfnb.graph.op_facts import facts, kernel, unbind
from tfnb.graph.ops import overload
from tfnb.graph.spec import Dim, Spec
from tfnb.kernels.row_writes import WRITES as ROWS
from tfnb.memory import LAST, step_passes
from tfnb.passes import LAID_OUT, ONCE, StepGraph, feed_symbols, numbers, optimize, optimized, overwriting, step_graph
from tfnb.passes.in_place_commit import in_place_updates, settings, written
from tfnb.passes.region_merging import counted_in_runs, kept_rows
from tfnb.passes.rewrite import Pass
from tfnb.recording.values.workspace import unburden

aten = torch.ops.aten


def lower(graph: Graph, fetches: Iterable[Value], feeds: Iterable[Value], last: Sequence[Pass] = LAST) -> Program:
    """Generate the program that computes ``fetches`` from ``feeds``; ``last`` are the passes that choose its memory.

    A fetch of a node without outputs gives None. Raises InvalidArgument naming a placeholder that would have to be fed.
    """
    return lower_step(step_graph(graph, fetches, feeds), last)


def lower_step(step: StepGraph, last: Sequence[Pass] = LAST) -> Program:
    """Lower a pruned step."""
    heap.settle()
    unburden(step.whole)
    with uncollected():
        return lower_optimized(step.whole, optimized(step, last), step.fetches, step.feeds)


def lower_optimized(whole: Graph, graph: Graph, fetches: tuple[Value, ...], feeds: tuple[Value, ...]) -> Program:
    """Lower a fully optimized graph. whole: the graph with the nodes of fetches and feeds."""
    return _Lowering(whole, graph, fetches, feeds).program()


def subprogram(
    subgraph: Subgraph, outputs: Iterable[Value], seed: int, calls: dict[Recursion, RecursiveCall] | None = None,
    owned: int = 0,
    once: Sequence[Pass] = ONCE,
) -> Program:  # fmt: skip
    """The program of a subgraph, from its inputs. calls: of functions that call themselves, lowered already.

    owned: so many inputs are nobody else's after the call, whose first outputs take their place. once: passes that
    choose kernels.
    """
    outputs = tuple(outputs)
    whole = Graph("subgraph", subgraph.contents, seed=seed)
    last = step_passes((numbers, *once), writes_last)
    pruned = optimize(whole, (*outputs, *subgraph.guards), subgraph.inputs, last)
    lowering = _Lowering(whole, pruned, outputs, subgraph.inputs)
    lowering.calls = {} if calls is None else calls
    lowering.in_place = in_place(lowering.graph.contents, subgraph.inputs[:owned], outputs)
    lowering.needed_symbols.update(s for guard in subgraph.contents.guards for s in guard.symbols)
    return lowering.program(subgraph.contents.guards)


class _Lowering:
    """One lowering: an fx graph under construction, and the fx node of each value."""

    def __init__(
        self, graph: Graph, pruned: Graph, fetches: tuple[Value, ...], feeds: tuple[Value, ...]
    ) -> None:  # fmt: skip
        self.whole, self.graph, self.fetches, self.feeds = graph, pruned, fetches, feeds
        self.fx = fx.Graph()
        self.tracer = fx.proxy.GraphAppendingTracer(self.fx)
        self.root = torch.nn.Module()
        self.values: dict[Value, fx.Node] = {}
        self.borrowed: set[Value] = set()  # values in memory that is not the step's own
        self.same: dict[Value, tuple[Value, ...]] = {}  # which of those a result of branches may be, as it is
        self.state: dict[Variable, fx.Node] = {}  # a variable's value at this place of the program
        self.written: dict[Variable, Value] = {}  # last assign of each variable
        self.symbols: dict[str, fx.Proxy] = {}
        self.needed_symbols = {s for node in pruned.nodes for s in node.symbols}
        self.node_of: dict[str, Node] = {}
        self.donated: dict[fx.Node, Donation] = {}
        self.kept_rows = kept_rows(pruned.contents, fetches)
        self.counted = counted_in_runs(pruned.contents, self.kept_rows, feed_symbols(graph.contents, feeds))
        self.inner: list[Any] = []
        self.in_place = NOTHING
        self.calls: dict[Recursion, RecursiveCall] = {}
        self.late: set[Value] = set()  # what stands for what is stored after the updates

    def program(self, checks: Iterable[Guard] = ()) -> Program:
        """Build the program; ``checks`` are relations between sizes, checked by the program itself."""
        contents = self.graph.contents
        inputs = [self.fx.placeholder(f"feed{i}") for i in range(len(self.feeds))]
        variables = tuple(contents.variables.values())
        self.storages = {var: self.fx.placeholder(f"var{i}") for i, var in enumerate(variables)}
        self.state.update(self.storages)
        self.run = self.fx.placeholder("run")
        for value, given in zip(self.feeds, inputs, strict=True):
            self.values[value] = given
        self._bind_feed_symbols()
        for guard in checks:  # what is asked of sizes that only data tell is a node
            if self.symbols.keys() >= set(guard.symbols):
                self.fx.call_function(Relation(guard), tuple(self.symbols[s].node for s in guard.symbols))
        fused = in_place_updates(self.graph, self.fetches, self.feeds)
        for node in contents.nodes:
            if node.id not in fused:
                self._emit(node)
            elif ops.HOISTED in node.tags:
                self._hoisted(node)
        return self._finish(variables, fused)

    def _bind_feed_symbols(self) -> None:
        for symbol, (value, axis) in feed_symbols(self.whole.contents, self.feeds).items():
            if symbol in self.needed_symbols:
                self._bind(symbol, self.values[value], axis)

    def _bind(self, symbol: str, of: fx.Node, axis: int) -> None:
        self.symbols[symbol] = fx.Proxy(self.fx.call_method("size", (of, axis)), self.tracer)

    # -- nodes ----------------------------------------------------------------------------------------------

    def _emit(self, node: Node) -> None:
        match node.op:
            case "tfnb.placeholder":
                if Value(node.id) not in self.values:
                    raise unfed(node, self.whole.contents.shown(node))
            case "tfnb.constant":
                self._constant(node)
            case "tfnb.read":
                self._read(node)
            case "tfnb.assign":
                self._assign(node)
            case "tfnb.group":
                pass
            case ops.WITH_GRADIENT:
                self._same(node)
            case ops.COND | ops.WHILE:
                self._region(node)
            case ops.CALL:
                self._recursive(node)
            case op if op in ops.QUEUES:
                raise Unimplemented(
                    f"node {node.name} uses a queue in a function that calls itself, which is not there: take the "
                    "element before the call", node=node.name, op=node.op,
                )  # fmt: skip
            case "tfnb.guard":
                self._note(self.fx.call_function(Branch(node), (self.values[node.inputs[0]],)), node)
            case _:
                self._call(node)
        self._bind_node_symbols(node)

    def _set(self, value: Value, at: fx.Node, node: Node) -> None:
        self.values.setdefault(value, at)
        self._note(at, node)

    def _note(self, at: fx.Node, node: Node) -> None:
        self.node_of.setdefault(at.name, node)

    def _constant(self, node: Node) -> None:
        name, value = f"constant{node.id}", node.attrs["value"]
        if not node.outputs[0].is_on(value.device):  # it was read from a file
            value = value.to(node.outputs[0].device)
        self.root.register_buffer(name, value, persistent=False)
        self._set(Value(node.id), self.fx.get_attr(name), node)
        self.borrowed.add(Value(node.id))

    def _read(self, node: Node) -> None:
        variable, value = node.attrs["variable"], Value(node.id)
        self._set(value, self.state[variable], node)
        self._alias(value, self.written.get(variable))

    def _alias(self, value: Value, of: Value | None) -> None:
        """A value lies where another one does; without one, in memory that is not the step's own."""
        if of is None or of in self.borrowed:
            self.borrowed.add(value)
        if of in self.same:
            self.same[value] = self.same[of]

    def _assign(self, node: Node) -> None:
        variable, new = node.attrs["variable"], node.inputs[0]
        at = self.values[new]
        stays = new in self.same and all(
            self.values[v] is self.storages[variable] or v in self.late for v in self.same[new]
        )
        if new in self.borrowed and not stays:
            at = self.fx.call_function(aten.clone.default, (at,))
        else:  # new memory, or where a branch did not write, what is stored
            self._alias(Value(node.id), new)
        self.state[variable] = at
        self.written[variable] = Value(node.id)
        self._set(Value(node.id), at, node)

    def _hoisted(self, node: Node) -> None:
        """Let the outputs of an update in a branch stand for the stored values, which may be passed on to other
        Variables.
        """
        for index, place in enumerate(written(node)):
            value = node.value(index)
            self.values[value] = self.values[node.inputs[place]]
            self.late.add(value)
            self.borrowed.add(value)

    def _same(self, node: Node) -> None:
        """Values that have a gradient of their own are the values."""
        for index, ref in enumerate(node.attrs["values"]):
            value = node.inputs[ref.input]
            self._set(Value(node.id, index), self.values[value], node)
            if value in self.borrowed:
                self.borrowed.add(Value(node.id, index))

    def _call(self, node: Node) -> None:
        op = overload(node.op)
        args, kwargs = unbind(op, map_leaves(lambda leaf: self._argument(node, leaf), node.attrs))
        target = QUICK.get(kernel(op), kernel(op)) if node.stream is None else RandomCall(node, self.graph.seed)
        if node.id in self.in_place.nodes:
            target, _ = writer_of(node.op) or (target, 0)
        if node.stream is not None:
            args = [self.run, *args]
        out = self.fx.call_function(target, tuple(args), kwargs)
        if ops.IN_PLACE in node.tags:
            self._donate(out, node)
        self._note(out, node)
        aliased = bool(node.inputs) and node.inputs[0] in self.borrowed and facts(op).shares_memory
        several = len(op._schema.returns) > 1 or str(op._schema.returns[0].type).startswith("List")
        for index in range(len(node.outputs)):
            value = Value(node.id, index)
            self.values.setdefault(value, self.fx.call_function(operator.getitem, (out, index)) if several else out)
            if aliased:
                self.borrowed.add(value)

    def _donate(self, at: fx.Node, node: Node) -> None:
        """The call writes into its first argument, whose value nobody takes later."""
        found = overwriting(node.op)
        assert found is not None, node  # the tag was given for it
        op, out = found
        self.donated[at] = Donation(at.target, out)  # type: ignore[arg-type]
        at.target = writing(op)
        if out is not None:
            at.kwargs = {**at.kwargs, out: at.args[0]}

    def _region(self, node: Node) -> None:
        """A loop or branches: one call, for the outputs that somebody takes."""
        kind, names = REGIONS[node.op]
        values = [node.value(index) for index in range(len(node.outputs))]
        taken = {v.index for v in values if v in self.graph.contents.consumers or v in self.fetches}
        taken.update(self._tellers(node, taken))
        more = (self.kept_rows, self.counted, self._is_zero) if node.op == ops.WHILE else ()
        call = kind(node, self._subprogram, taken, *more)
        self.inner += call.inner
        attrs = [map_leaves(lambda leaf: self._argument(node, leaf), node.attrs[name]) for name in names]
        self._results(node, self.fx.call_function(call, (self.run, *attrs)), call.places, call.same)

    def _tellers(self, node: Node, taken: Collection[int]) -> Iterator[int]:
        """Outputs without consumers whose shape alone binds a needed size."""
        told = {*self.symbols, *(s for index in taken for s in map(str, node.outputs[index].shape))}
        for index, spec in enumerate(node.outputs):
            own = self.needed_symbols.intersection(map(str, spec.shape)) - told
            told |= own
            yield from (index for _ in list(own)[:1])

    def _is_zero(self, value: Value) -> bool:
        node = self.graph.contents.by_id.get(value.node)
        if node is None or value in self.feeds or node.op != "tfnb.constant":
            return node is not None and node.op == "aten.zeros.default"
        return not node.attrs["value"].any()

    def _recursive(self, node: Node) -> None:
        """A call of a function that calls itself: its calls inside are calls of the same object."""
        function = node.attrs["function"]
        if function not in self.calls:
            call = self.calls[function] = RecursiveCall(node)
            call.program = self._subprogram(function.body, function.body.outputs)
            self.inner.append(call.program)
        args = [self.values[v] for v in node.inputs]
        out = self.fx.call_function(self.calls[function], (self.run, node.stream or 0, *args))
        self._results(node, out, range(len(node.outputs)))

    def _results(
        self, node: Node, out: fx.Node, places: Iterable[int], same: Mapping[int, Iterable[Value]] | None = None
    ) -> None:  # fmt: skip
        """Bind the outputs at ``places`` of a node to a call's results; ``same``: inputs that an output may alias."""
        self._note(out, node)
        for place, index in enumerate(places):
            value, known = node.value(index), None if same is None else same.get(index)
            self.values.setdefault(value, self.fx.call_function(operator.getitem, (out, place)))
            if not self.borrowed.isdisjoint(node.inputs if known is None else known):
                self.borrowed.add(value)
            if known is not None:
                sources = (one for v in known if v in self.borrowed for one in self.same.get(v, (v,)))
                self.same[value] = tuple(dict.fromkeys(sources))

    def _subprogram(self, inside: Subgraph, outputs: Iterable[Value], owned: int = 0) -> Program:
        return subprogram(inside, outputs, self.whole.seed, self.calls, owned)

    def _argument(self, node: Node, leaf: object) -> Any:
        if isinstance(leaf, Ref):
            return self.values[node.inputs[leaf.input]]
        return self._size(leaf) if isinstance(leaf, Dim) else leaf

    def _size(self, dim: Dim) -> Any:
        """The size as arithmetic in the generated code; as one call for rounding expressions, which proxies lack."""
        try:
            result = dim.evaluate(self.symbols)
        except ShapeError:
            if not self.symbols.keys() >= set(dim.symbols):
                raise
            at = [self.symbols[symbol].node for symbol in dim.symbols]
            return self.fx.call_function(_evaluated, (dim.expr, dim.symbols, *at))
        return result.node if isinstance(result, fx.Proxy) else result

    def _bind_node_symbols(self, node: Node) -> None:
        """Sizes that only this node knows (a data-dependent output)."""
        if node.op in ("tfnb.read", "tfnb.constant", "tfnb.assign"):
            return
        for index, spec in enumerate(node.outputs):
            for axis, size in enumerate(spec.shape):
                value = Value(node.id, index)
                symbol = size.expr if isinstance(size, Dim) and size.is_symbol else ""
                if symbol in self.needed_symbols and symbol not in self.symbols and value in self.values:
                    self._bind(symbol, self.values[value], axis)

    # -- the commit -------------------------------------------------------------------------------------------

    def _finish(self, variables: tuple[Variable, ...], fused: dict[int, Node]) -> Program:
        out: list[Any] = [self._fetched(value) for value in self.fetches]
        place = {variable: i for i, variable in enumerate(variables)}
        out += [self.state[variable] for variable in self.written]
        groups: dict[tuple[str, str], tuple[str, dict[str, Any], list[int]]] = {}
        rows: dict[tuple[str, str], list[tuple[Node, list[Any]]]] = {}
        for node in dict.fromkeys(fused.values()):
            key = (node.op, repr(sorted(settings(node).items())))
            groups.setdefault(key, (node.op, settings(node), []))[2].append(len(node.inputs))
            state = written(node)  # the rest is read after other writes
            inputs = [self.values[v] if i in state else self._own(v) for i, v in enumerate(node.inputs)]
            rows.setdefault(key, []).append((node, inputs))
        within = []
        for key in groups:
            for node, inputs in rows[key]:
                if node.op in ROWS:
                    within.append((len(out) - len(self.fetches) + 1, node))
                out += inputs
        self.fx.output(tuple(out))
        assigned = [n.attrs["variable"] for n in self.graph.nodes if n.op == "tfnb.assign"]
        return Program(
            graph=self.graph, whole=self.whole, fetches=self.fetches, feeds=self.feeds, variables=variables,
            writes=tuple(dict.fromkeys(assigned)), module=unwritten(self.root, self.fx), node_of=self.node_of,
            n_fetches=len(self.fetches), copies=tuple(place[v] for v in self.written),
            updates=tuple((op, kwargs, tuple(lengths)) for op, kwargs, lengths in groups.values()),
            within=tuple(within),
            inner=tuple(self.inner), written=self.in_place.places, donated=self.donated,
            specs=self._specs(), names={value: at.name for value, at in self.values.items()},
        )  # fmt: skip

    def _specs(self) -> dict[str, Spec]:
        """Specs of the values in the generated code, by fx name."""
        found: dict[str, Spec] = {}
        for value, at in self.values.items():
            node = self.graph.contents.by_id.get(value.node) or self.whole.contents.by_id[value.node]
            if value.index < len(node.outputs):
                found.setdefault(at.name, node.outputs[value.index])
        return found

    def _fetched(self, value: Value) -> Any:
        node = self.whole.contents.by_id[value.node]
        if not node.outputs:
            return None
        at, run = self._own(value), self.graph.contents.by_id.get(value.node)
        laid_out = run is not None and LAID_OUT in run.tags
        return self.fx.call_function(aten.contiguous.default, (at,)) if laid_out else at

    def _own(self, value: Value) -> fx.Node:
        """The value in memory of the step's own."""
        at = self.values[value]
        if value not in self.borrowed:
            return at
        maker = self.graph.contents.by_id.get(value.node)
        maybe = maker is not None and value.index in maker.attrs.get(ops.OPTIONAL, ())
        return self.fx.call_function(_cloned if maybe else aten.clone.default, (at,))


def _cloned(value: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of a branch's output; None if the branch was not taken."""
    return None if value is None else value.clone()


def _evaluated(expr: str, symbols: tuple[str, ...], *sizes: int) -> Any:
    return Dim(expr).evaluate(dict(zip(symbols, sizes, strict=True)))


def unfed(node: Node, name: str) -> InvalidArgument:
    """The error of a placeholder, called by this name, that no run can do without."""
    where = f", recorded at {node.source}" if node.source else ""
    return InvalidArgument(
        f"placeholder {name} ({node.outputs[0]}) must be fed{where}; add it to the feed_dict",
        **node.where,
    )
