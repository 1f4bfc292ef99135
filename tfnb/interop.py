"""A graph as a module of plain torch, for torch.export, torch.compile, ONNX and torch's own training.

Takes the code that lowering generates and puts torch's own operators where it has objects of ours: random ops of
torch's generator for seeded draws, ``cond``, ``while_loop`` and ``scan`` for branches and loops. May import execution.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfnb.errors import FeedError, InvalidArgument, Unimplemented
from tfnb.execution.lowering.checked_calls import Branch, RandomCall
from tfnb.execution.lowering.control_flow_code import Cond, Loop, RecursiveCall
from tfnb.execution.lowering.lower import lower_optimized
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.native.exportable import FORMS
from tfnb.graph import Graph, Guard, Node, Subgraph, Value, Variable, ops
from tfnb.graph.op_facts import kernel
from tfnb.graph.ops import overload
from tfnb.graph.spec import Dim
from tfnb.passes import feed_symbols, optimized, step_graph
from tfnb.session.structures import structure, value_of, variable_of

aten, higher_order = torch.ops.aten, torch.ops.higher_order

_CURES: Mapping[type, str] = {
    Branch: "its outcome was decided by a value while recording: use torch.where or tfnb.cond",
    RecursiveCall: "it calls itself, and torch has no form for that: write a loop",
}
"""Calls that torch has no form for, and what to write instead."""


def to_module(graph: Graph, fetches: object, feeds: Iterable[Any]) -> fx.GraphModule:
    """The torch module of `tfnb.Graph.to_module`."""
    leaves: list[Any] = []
    rebuild = structure(fetches, leaves)
    values = tuple(_fetched(graph, leaf) for leaf in leaves)
    given = tuple(value_of(graph, key, "feed") for key in feeds)
    if len(set(given)) != len(given):
        raise FeedError("to_module: a tensor stands twice among the feeds")
    step = step_graph(graph, values, given)
    _ensure_plain(step.graph.nodes)
    program = lower_optimized(step.whole, optimized(step, ()), step.fetches, step.feeds)
    _ensure_no_training(program)
    return _Translation(program, [_word(graph.contents.by_id[value.node].name) for value in given]).module(rebuild)


def _fetched(graph: Graph, leaf: object) -> Value:
    if variable_of(graph, leaf) is not None:
        raise InvalidArgument(f"to_module: {leaf!r} is a parameter of the module: take it from state_dict()")
    value = value_of(graph, leaf)
    node = graph.contents.by_id[value.node]
    if not node.outputs:
        raise InvalidArgument(
            f"to_module: {node.name} is an operation without a value{_at(node)}: fetch a tensor, for a training step "
            "its loss; a module is trained by torch", **node.where,
        )  # fmt: skip
    return value


def _ensure_plain(nodes: Iterable[Node]) -> None:
    for node in nodes:
        if node.op in ops.QUEUES:
            raise _refused(node, "it uses a queue: feed its element, and give that tensor among the feeds")


def _ensure_no_training(program: Program) -> None:
    trained = [v.name for v in program.writes if v.trainable or program.updates]
    if trained:
        raise Unimplemented(
            f"to_module: the fetches write {', '.join(trained[:3])}{' ...' if len(trained) > 3 else ''}, and a module "
            "is trained by torch: fetch the loss, call backward() on what the module gives, and use torch.optim"
        )


def _refused(node: Node, why: str) -> Unimplemented:
    return Unimplemented(f"to_module: {node.name} ({node.op}){_at(node)}: {why}", **node.where)


def _at(node: Node) -> str:
    return f", recorded at {node.source}" if node.source else ""


def _word(name: str) -> str:
    """A name of an argument."""
    found = re.sub(r"\W", "_", name)
    return found if found.isidentifier() else f"_{found}"


@dataclass
class _Part:
    """A subgraph as a function of tensors: a module whose last inputs are constants of the graph."""

    module: fx.GraphModule
    constants: list[fx.Node]


class _Translation:
    """Translates generated code into a torch module. outer: the enclosing program of a subgraph."""

    def __init__(self, program: Program, names: Sequence[str], outer: _Translation | None = None) -> None:
        self.program, self.names, self.outer = program, names, outer
        self.home = nn.Module()  # holds what the code takes: Variables, constants, parts
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.constants: dict[str, fx.Node] = {}
        self.lifted: list[fx.Node] = []  # nodes of the program around this one
        self.tracer = fx.proxy.GraphAppendingTracer(self.graph)

    def module(self, rebuild: Callable[[Sequence[Any]], Any]) -> fx.GraphModule:
        """The whole as a module of its own."""
        results = self._translated()
        self._written(results)
        self.graph.output(rebuild(results[: self.program.n_fetches]))
        self.graph.eliminate_dead_code()
        self.graph.lint()
        made = fx.GraphModule(self.home, self.graph, class_name=_word(self.program.graph.name))
        return made.eval()  # the mode was read while recording: torch's exporters warn of the other one

    def part(self) -> _Part:
        """A subgraph as a function. Its results are in memory of their own, as torch asks of branches and bodies."""
        results = [self.graph.call_function(aten.clone.default, (at,)) for at in self._translated()]
        self.graph.output(tuple(results))
        self.graph.lint()
        return _Part(fx.GraphModule(self.home, self.graph), self.lifted)

    def _translated(self) -> list[Any]:
        """Translate the program; returns the nodes of its results."""
        program = self.program
        *inputs, _ = program.module.graph.find_nodes(op="placeholder")
        feeds, storages = inputs[: len(program.feeds)], inputs[len(program.feeds) :]
        for at, name in zip(feeds, self.names, strict=True):
            self.new[at] = self.graph.placeholder(name)
        labels = {variable: label for label, variable in program.whole.contents.variables.items()}
        for at, variable in zip(storages, program.variables, strict=True):
            self.new[at] = self.graph.get_attr(self._registered(labels[variable], variable))
        self._check_sizes()
        for node in program.module.graph.nodes:
            if node.op == "get_attr":
                self.new[node] = self._constant(str(node.target), getattr(program.module, str(node.target)))
            elif node.op in ("call_function", "call_method"):
                self.new[node] = self._call(node)
        returned: Any = program.module.graph.output_node().args[0]
        return [self.new[node] for node in returned]

    def _written(self, results: Sequence[Any]) -> None:
        """Plain writes, of buffers such as running means."""
        program = self.program
        storages = program.module.graph.find_nodes(op="placeholder")[len(program.feeds) : -1]
        for place, value in zip(program.copies, results[program.n_fetches :], strict=True):
            fixed = self.graph.call_function(aten.detach.default, (value,))
            self.graph.call_method("copy_", (self.new[storages[place]], fixed))

    # -- what it holds --------------------------------------------------------------------------------------------

    def _registered(self, label: str, variable: Variable) -> str:
        """The Variable as a parameter, or as a buffer if not trainable, under its label."""
        *path, name = label.split(".")
        home = self.home
        for part in path:
            if part not in home._modules:
                self._ensure_free(home, part, label)
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        self._ensure_free(home, name, label)
        value = variable.value()
        if variable.trainable and (value.is_floating_point() or value.is_complex()):
            home.register_parameter(name, nn.Parameter(value))
        else:
            home.register_buffer(name, value)
        return label

    @staticmethod
    def _ensure_free(home: nn.Module, name: str, label: str) -> None:
        if not name or hasattr(home, name):
            raise InvalidArgument(
                f"to_module: a module cannot hold a Variable under the name {label!r}: give it another, "
                "tfnb.Variable(..., name=...)"
            )

    def _constant(self, name: str, value: torch.Tensor) -> fx.Node:
        """A constant: a non-persistent buffer; in a subgraph, an additional input."""
        if name not in self.constants:
            if self.outer is None:
                place = f"_constant{len(self.constants)}"
                self.home.register_buffer(place, value.clone(), persistent=False)
                self.constants[name] = self.graph.get_attr(place)
            else:
                self.lifted.append(self.outer._constant(name, value))
                with self.graph.inserting_before(self._first_call()):
                    self.constants[name] = self.graph.placeholder(f"constant{len(self.constants)}")
        return self.constants[name]

    def _first_call(self) -> fx.Node:
        return next((n for n in self.graph.nodes if n.op != "placeholder"), self.graph._root)

    def _check_sizes(self) -> None:
        """Relations between sizes that the recording relied on, as `tfnb.run` checks them."""
        program = self.program
        places = feed_symbols(program.whole.contents, program.feeds)
        fed = dict(zip(program.feeds, program.module.graph.find_nodes(op="placeholder"), strict=False))
        sizes: dict[str, Any] = {}
        for guard in program.whole.contents.guards:
            if set(guard.symbols) <= places.keys() and guard.concerns(program.graph.nodes):
                for symbol in set(guard.symbols) - sizes.keys():
                    value, axis = places[symbol]
                    size = self.graph.call_function(aten.sym_size.int, (self.new[fed[value]], axis))
                    sizes[symbol] = fx.Proxy(size, self.tracer)
                self._check(guard, sizes)

    def _check(self, guard: Guard, sizes: Mapping[str, Any]) -> None:
        try:
            holds = Dim(guard.expr).evaluate(sizes)
        except TypeError:  # it rounds, which is no arithmetic of proxies: torch's own operators complain
            return
        if isinstance(holds, fx.Proxy):
            self.graph.call_function(size_check, (holds.node, f"the graph was recorded for {guard}"))

    # -- calls ----------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Any:
        target, owner = node.target, self.program.node_of.get(node.name)
        args = fx.map_arg(node.args, self._argument)
        if owner is None or not callable(target):  # sizes, parts of results, clones
            return self.graph.create_node(node.op, target, args, fx.map_arg(node.kwargs, self._argument))
        if cure := _CURES.get(type(target)):
            raise _refused(owner, cure)
        if isinstance(target, Cond):
            return self._branches(owner, target, *args[1:])
        if isinstance(target, Loop):
            return self._loop(owner, target, *args[1:])
        if isinstance(target, RandomCall):
            if self.outer is not None:
                raise _refused(owner, "it draws inside of a branch or loop: draw before it")
            target, args = overload(owner.op), args[1:]
        elif owner.op not in ops.STRUCTURAL:
            target = FORMS.get(overload(owner.op)) or kernel(overload(owner.op))
        return self.graph.call_function(target, args, fx.map_arg(node.kwargs, self._argument))  # type: ignore[arg-type]

    def _argument(self, node: fx.Node) -> Any:
        return self.new.get(node)  # None: the number of the run

    def _branches(self, node: Node, cond: Cond, pred: Any, operands: Any, _: object) -> fx.Node:
        """The branches as functions of the operands and of the constants of both."""
        wanted = [[node.attrs[side].outputs[place] for place in cond.places] for side in ("then", "else")]
        if cond.optional or any(None in outputs for outputs in wanted):
            raise _refused(node, "a value is there in one branch only: give it in both, and write nothing inside")
        sides = [self._part(node.attrs[side], outs) for side, outs in zip(("then", "else"), wanted, strict=True)]
        graphs, constants = self._together(sides)
        return self.graph.call_function(higher_order.cond, (pred, *graphs, (*operands, *constants)))

    def _loop(self, node: Node, loop: Loop, init: Any, xs: Any, captures: Any, limit: Any, rows: Any) -> fx.Node:
        """A scan if rows or sizes determine the number of iterations, else torch's while loop."""
        attrs, carried = node.attrs, len(init)
        outputs = attrs["body"].outputs
        wanted = [*outputs[:carried], *(outputs[carried + row] for row in loop.rows)]
        parts = [self._part(attrs["body"], wanted)]
        if any(isinstance(x, tuple) for x in xs) or any(isinstance(rows[row], int) for row in loop.rows):
            raise _refused(node, "its rows have different shapes, and torch has no form for that: pad them")
        if attrs["cond"] is None and (xs or isinstance(limit, int)):
            (body,), constants = self._together(parts, unused=None if xs else carried)
            return self.graph.call_function(
                scanned, (body, tuple(init), tuple(xs), (*captures, *constants), limit, attrs["reverse"])
            )
        if xs or loop.rows:
            raise _refused(
                node, "it stacks or takes rows, and data decide how many, which torch has no form for: loop over a "
                "tensor, or a fixed number of times, without break"
            )  # fmt: skip
        parts += [] if attrs["cond"] is None else [self._part(attrs["cond"], attrs["cond"].outputs)]
        (body, *cond), constants = self._together(parts)
        return self.graph.call_function(
            looped, (body, cond[0] if cond else None, tuple(init), (*captures, *constants), limit)
        )

    def _part(self, inside: Subgraph, outputs: Sequence[Any]) -> _Part:
        whole = Graph("subgraph", inside.contents)
        step = step_graph(whole, (*outputs, *inside.guards), inside.inputs)
        _ensure_plain(step.graph.nodes)
        program = lower_optimized(whole, optimized(step, ()), tuple(outputs), inside.inputs)
        return _Translation(program, [f"input{i}" for i, _ in enumerate(inside.inputs)], self).part()

    def _together(self, parts: Sequence[_Part], unused: int | None = None) -> tuple[list[fx.Node], list[fx.Node]]:
        """Parts that all take the constants of all, behind their inputs; and these constants.

        unused: before which input they take one more, that they do not look at.
        """
        constants = list(dict.fromkeys(at for part in parts for at in part.constants))
        return [self._submodule(_taking(part, constants, unused)) for part in parts], constants

    def _submodule(self, module: fx.GraphModule) -> fx.Node:
        name = f"_part{sum(name.startswith('_part') for name in self.home._modules)}"
        self.home.add_module(name, module)
        return self.graph.get_attr(name)


def _taking(part: _Part, constants: Sequence[fx.Node], unused: int | None) -> fx.GraphModule:
    """A part that accepts all these constants, and uses its own among them."""
    graph, old = fx.Graph(), part.module.graph.find_nodes(op="placeholder")
    count = len(old) - len(part.constants)
    copies = {}
    for place, at in enumerate([*old[:count], None]):
        if place == unused:
            graph.placeholder("unused")
        if at is not None:
            copies[at] = graph.placeholder(f"input{place}")
    given = {at: graph.placeholder(f"constant{i}") for i, at in enumerate(constants)}
    copies |= {at: given[constant] for at, constant in zip(old[count:], part.constants, strict=True)}
    graph.output(graph.graph_copy(part.module.graph, copies))
    return fx.GraphModule(part.module, graph)


# -- what the code of a module calls ---------------------------------------------------------------------------------


def scanned(
    body: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], given: Sequence[Tensor], limit: int | None,
    reverse: bool,
) -> list[Tensor]:  # fmt: skip
    """A loop over the rows of ``xs``, at most ``limit``: carried values, the number of iterations, stacked rows."""
    count: Any = limit
    rows = xs
    if xs:
        length = xs[0].shape[0]
        count = length if limit is None else torch.sym_min(length, limit)
        if count is not length:
            rows = [x[length - count :] if reverse else x[:count] for x in xs]
        rows = [x.flip(0) for x in rows] if reverse else rows
    first = len(init)
    found = higher_order.scan(body, list(init), list(rows) or [torch.arange(count)], tuple(given))
    made = [column.flip(0) if reverse else column for column in found[first:]]
    return [*found[:first], torch.full((), count, dtype=torch.int64), *made]


def looped(
    body: Callable[..., Any], cond: Callable[..., Any] | None, init: Sequence[Tensor], given: Sequence[Tensor],
    limit: Tensor | int | None,
) -> list[Tensor]:  # fmt: skip
    """A loop that runs as long as ``cond`` holds, at most ``limit`` times: carried values, number of iterations."""
    ends = [limit] if isinstance(limit, Tensor) else []

    def more(count: Tensor, *rest: Tensor) -> Tensor:
        most = rest[-1] if ends else limit
        taken = rest[: len(rest) - len(ends)]
        holds = [] if cond is None else [cond(*taken)[0]]
        holds += [] if most is None else [count < most]
        return torch.logical_and(*holds) if len(holds) == 2 else holds[0]

    def iteration(count: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return (count + 1, *body(*rest[: len(rest) - len(ends)]))

    zero = torch.zeros((), dtype=torch.int64)
    count, *state = higher_order.while_loop(more, iteration, (zero, *init), (*given, *ends))
    return [*state, count]


def size_check(holds: bool, text: str) -> None:
    """Raise RuntimeError unless a relation between sizes holds; torch.export makes a constraint from the call."""
    torch._check(holds, lambda: text)
