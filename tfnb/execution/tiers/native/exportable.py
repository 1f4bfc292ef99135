"""A lowered step as a module of plain torch, with all inputs explicit, that writes Variables at its end.

Its inputs are feeds, storages, then `ExtraOperands`: constants of the graph, and random draws made before the call
with their own streams. A step *writes* where nothing can fail once the operands are checked; else the module only
computes, and the commit writes as for generated code. What kernels must not take is clamped (`operand_checks`),
and every write then keeps the old value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tfnb.errors import Unimplemented
from tfnb.execution.lowering.checked_calls import Branch, RandomCall
from tfnb.execution.lowering.control_flow_code import Cond, Loop, RecursiveCall
from tfnb.execution.lowering.loop_in_place import writer_of
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.graph_split import sizes
from tfnb.execution.tiers.native.manifest import About
from tfnb.execution.tiers.native.request import Axis, Operand, resized
from tfnb.execution.tiers.native.scans import Body, Scan, is_count, refusal
from tfnb.execution.tiers.operand_checks import OperandChecks
from tfnb.graph import ops
from tfnb.graph.op_facts import kernel
from tfnb.graph.ops import overload
from tfnb.kernels.attention import attention, attention_backward
from tfnb.kernels.formulas import FORMULAS
from tfnb.kernels.sparse_rows import slices
from tfnb.passes import feed_symbols

aten = torch.ops.aten
SMALL = 1  # elements; a constant of so many stands in the code
_DECIDES = (Branch, RecursiveCall, Cond)
_BY_SHAPE = frozenset({
    aten.bernoulli.p, aten.native_dropout.default, aten.rand_like.default, aten.randint_like.default,
    aten.randint_like.low_dtype, aten.randn_like.default,
})  # fmt: skip
"""Random ops that read no value of their operand."""
_ours = torch.ops.tfnb


def _densify(values: torch.Tensor, indices: torch.Tensor, rows: Any) -> torch.Tensor:
    """As `tfnb.kernels.sparse_rows.densify`, by an op whose indices are checked."""
    return torch.index_add(values.new_zeros([rows, *values.shape[1:]]), 0, indices, values)


FORMS: Mapping[Any, Callable[..., Any]] = {
    _ours.attention.default: attention, _ours.attention_backward.default: attention_backward,
    _ours.slices.default: slices, _ours.densify.default: _densify,
}  # fmt: skip
"""Ops of ours that are torch's own ops, one after the other, all of which have a form in C."""


def obstacles(program: Program, formless: Collection[str] = ()) -> dict[fx.Node, str]:
    """The calls that can be no part of a module, and why. formless: ops that turned out to have no form in C."""
    known = feed_symbols(program.whole.contents, program.feeds).keys()
    found = ((node, _unfit(program, node, known, formless)) for node in program.module.graph.nodes)
    return {node: why for node, why in found if why is not None}


def _unfit(program: Program, node: fx.Node, known: Set[str], formless: Collection[str]) -> str | None:
    """Why a call can be no part of a module."""
    owner = program.node_of.get(node.name)
    name = node.name if owner is None else owner.name
    if isinstance(node.target, _DECIDES):
        return f"{name} decides what runs next"
    if isinstance(node.target, Loop) and (why := _unfit_loop(program, node, formless)) is not None:
        return f"{name} {why}"
    if owner is not None and not _has_form(owner.op, formless):
        return f"{name} has no form in C"
    if not _symbols(program, node) <= known:
        return f"data decide the sizes of {name}"
    if isinstance(node.target, RandomCall) and not _draws_before(node):
        return f"{name} draws from values that the step computes"
    return None


def _symbols(program: Program, node: fx.Node) -> set[str]:
    """The symbols in the sizes that a call of ours gives or takes."""
    if node.name not in program.node_of:
        return set()
    return {symbol for each in (node, *node.all_input_nodes) for symbol in sizes(program, each)}


def _has_form(op: str, formless: Collection[str]) -> bool:
    space = op.partition(".")[0]
    ours = op in ops.STRUCTURAL or overload(op) in FORMS if space == "tfnb" else space in ops.TRUSTED
    return ours and op not in formless


def _unfit_loop(program: Program, node: fx.Node, formless: Collection[str]) -> str | None:
    unfit = obstacles(_body(node), formless).values()
    return refusal(program, node) or next((f"runs what cannot be compiled: {why}" for why in unfit), None)


def _body(loop: fx.Node) -> Program:
    target: Any = loop.target
    return target.body  # type: ignore[no-any-return]


def _draws_before(node: fx.Node) -> bool:
    target: Any = node.target
    fixed = all(source.op in ("placeholder", "get_attr") for source in node.all_input_nodes)
    return target.op in _BY_SHAPE or (fixed and len(target.op._schema.returns) == 1)


@dataclass(frozen=True)
class ExtraOperands:
    """Additional operands of a step beside feeds and storages. draws: calls by run number that make random operands."""

    constants: tuple[torch.Tensor, ...]
    draws: tuple[Callable[[int, Sequence[Any]], torch.Tensor], ...]

    @classmethod
    def of(cls, program: Program, operands: Iterable[Operand]) -> ExtraOperands:
        """The additional operands of a program, for operands of these layouts."""
        drawing = [node for node in program.module.graph.nodes if isinstance(node.target, RandomCall)]
        layouts: Mapping[fx.Node, Any] = _Layouts.of(program, operands) if drawing else {}
        return cls(tuple(_constants(program)), tuple(_draw(program, node, layouts[node]) for node in drawing))


def _constants(program: Program) -> Iterator[torch.Tensor]:
    """Constants that are operands, then the constants of loops, contiguous as after reading from a file."""
    yield from (getattr(program.module, name).contiguous() for name in _lifted(program))
    for loop in _loops(program):
        yield from _constants(_body(loop))


def _lifted(program: Program) -> list[str]:
    names = dict.fromkeys(str(node.target) for node in program.module.graph.find_nodes(op="get_attr"))
    return [name for name in names if getattr(program.module, name).numel() > SMALL]


def _loops(program: Program) -> list[fx.Node]:
    return [node for node in program.module.graph.nodes if isinstance(node.target, Loop)]


class _Layouts(fx.Interpreter):
    """Finds the operands of each draw."""

    @classmethod
    def of(cls, program: Program, operands: Iterable[Operand]) -> dict[fx.Node, Any]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = cls(program.module)
            found.operands = {}
            found.run(*[operand.empty() for operand in operands], 0)
        return found.operands

    operands: dict[fx.Node, Any]

    def run_node(self, n: fx.Node) -> Any:
        if isinstance(n.target, RandomCall):
            self.operands[n] = self.fetch_args_kwargs_from_env(n)
            args, kwargs = self.operands[n]
            return n.target.op(*args[1:], **kwargs)
        return super().run_node(n)


def _draw(program: Program, node: fx.Node, given: Sequence[Any]) -> Callable[[int, Sequence[Any]], torch.Tensor]:
    place = {n: at for at, n in enumerate(program.module.graph.find_nodes(op="placeholder"))}
    places = [place.get(arg) if isinstance(arg, fx.Node) else None for arg in node.args]
    drawing: Any = node.target
    args, kwargs = given
    made = [
        _zeros(arg) if isinstance(arg, FakeTensor) and at is None else arg for arg, at in zip(args, places, strict=True)
    ]

    def draw(run: int, operands: Sequence[Any]) -> torch.Tensor:
        taken = [arg if at is None else operands[at] for arg, at in zip(made[1:], places[1:], strict=True)]
        out = drawing(run, *taken, **kwargs)
        return out if isinstance(out, torch.Tensor) else out[1]  # of dropout, the mask

    return draw


def _zeros(fake: FakeTensor) -> torch.Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).zero_()


def exportable(
    program: Program, operands: Sequence[Operand], table: Mapping[Any, Callable[..., Any]], axes: Sequence[Axis] = ()
) -> tuple[fx.GraphModule, list[torch.Tensor], About]:
    """The module, examples of its operands, and its manifest; raises Unimplemented, or an error of torch.

    table: decompositions of the compiler. axes: those that vary.
    """
    for why in obstacles(program).values():
        raise Unimplemented(why)
    checks = OperandChecks()
    graph, places = pure(program, checks)
    given = ExtraOperands.of(program, operands)
    step = fx.GraphModule(program.module, graph)
    examples = [operand.empty().zero_() for operand in operands]
    examples += [*given.constants, *(draw(0, examples) for draw in given.draws)]
    writes = list(_writes(program)) if _may_write(program) else None
    shown = places if writes is None else places[: program.n_fetches]
    results = [place for place in dict.fromkeys(shown) if place is not None and place >= 0]

    def function(*args: torch.Tensor) -> list[torch.Tensor]:
        outs = step(*args)
        new = (
            _new_values(program, [None if at is None else outs[at] if at >= 0 else args[~at] for at in places])
            if writes
            else []
        )
        flag = checks.flag()
        for place, value in zip(writes or (), new, strict=True):
            value = value.to(args[place].dtype).expand(args[place].shape)
            args[place].copy_(value if flag is None else torch.where(flag, args[place], value))
        return [*(outs[place] for place in results), *([] if flag is None else [flag])]

    varying = (*axes, *_drawn_axes(program, operands, axes, len(operands) + len(given.constants)))
    with torch.no_grad(), _sized(examples, varying) as traced:
        forms = checks.over({**table, **FORMS})
        module = make_fx(function, forms, tracing_mode="fake", _allow_non_fake_inputs=True)(*traced)
    fetched = tuple(results.index(place) if place is not None and place >= 0 else place for place in shown)
    about = About(tuple(map(Operand.of, examples)), tuple(writes or ()), fetched, bool(checks.changed), varying)
    return module, examples, about


def _drawn_axes(program: Program, operands: Sequence[Operand], axes: Sequence[Axis], first: int) -> Iterator[Axis]:
    """The varying axes of random operands, found by drawing at other sizes."""
    sizes = {symbol: operands[place].shape[axis] for place, axis, symbol in axes}
    if not sizes:
        return
    others = {symbol: size + 2 * place for place, (symbol, size) in enumerate(sizes.items(), 1)}
    drawn = []
    for chosen in (sizes, others):
        given = resized(operands, axes, chosen)
        drawn.append([draw(0, [x.empty().zero_() for x in given]) for draw in ExtraOperands.of(program, given).draws])
    for place, pair in enumerate(zip(*drawn, strict=True), first):
        for axis, (size, other) in enumerate(zip(*(x.shape for x in pair), strict=True)):
            symbols = [symbol for symbol in sizes if (sizes[symbol], others[symbol]) == (size, other)]
            if size != other and not symbols:
                raise Unimplemented("the size of a draw is computed from sizes that vary")
            yield from (Axis(place, axis, symbol) for symbol in symbols)


@contextmanager
def _sized(examples: Sequence[torch.Tensor], axes: Sequence[Axis]) -> Iterator[Sequence[torch.Tensor]]:
    """The examples with symbolic sizes on varying axes; raises Unimplemented if tracing specialized a size."""
    if not axes:
        yield examples
        return
    places, sizes = {(place, axis) for place, axis, _ in axes}, ShapeEnv()
    kinds = {True: DimDynamic.DUCK, False: DimDynamic.STATIC}  # equal examples are one symbol
    with FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True) as mode:
        contexts: list[Any] = [
            StatelessSymbolicContext(dynamic_sizes=[kinds[(place, axis) in places] for axis in range(x.dim())])
            for place, x in enumerate(examples)
        ]
        yield [mode.from_tensor(x, symbolic_context=how) for x, how in zip(examples, contexts, strict=True)]
    decided = [*(guard.expr for guard in sizes.guards), *sizes.replacements]
    if decided:
        raise Unimplemented(f"its sizes cannot vary: tracing it decided {decided[0]}")


def pure(program: Program, checks: OperandChecks) -> tuple[fx.Graph, list[int | None]]:
    """The program's graph over all operands; for each output its index among computed outputs, or ~operand.

    Operands are feeds, storages and `ExtraOperands`; the run's number, used by draws only, counts after the storages.
    """
    old, graph = program.module.graph, fx.Graph()
    *inputs, run = old.find_nodes(op="placeholder")
    draws = [node for node in old.nodes if isinstance(node.target, RandomCall)]
    new: dict[fx.Node, Any] = {node: graph.placeholder(node.name) for node in inputs}
    given = [graph.placeholder(f"given{place}") for place, _ in enumerate(_constants(program))]
    rest, counts = iter(given), dict[fx.Node, fx.Node]()
    named = {name: next(rest) for name in _lifted(program)}
    drawn = {node: graph.placeholder(f"drawn{place}") for place, node in enumerate(draws)}
    for node in old.nodes:
        if node.op == "get_attr":
            value = getattr(program.module, str(node.target))
            new[node] = named[node.target] if node.target in named else _literal(graph, value)
        elif node in drawn:
            new[node] = _dropped(graph, node, new, drawn[node])
        elif isinstance(node.target, Loop):
            constants = [next(rest) for _ in _constants(_body(node))]
            args = fx.map_arg(node.args[1:], lambda n: counts.get(n) or new[n])
            new[node] = graph.call_function(Scan(node.target, _traced(_body(node), checks), checks), (*args, constants))
        elif is_count(node):
            counts[node] = graph.node_copy(node, new.__getitem__)
            new[node] = graph.call_function(torch.full, ((), counts[node]), {"dtype": torch.int64})
        elif node.op in ("call_function", "call_method"):
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].target = _target(program, node)
    returned: Any = old.output_node().args[0]
    arguments = {node: place for place, node in enumerate((*inputs, run))}
    results: dict[fx.Node, int] = {}
    places = [None if n is None else ~arguments[n] if n in arguments else results.setdefault(new[n], len(results))
              for n in returned]  # fmt: skip
    graph.output(tuple(results))
    return graph, places


def _traced(body: Program, checks: OperandChecks) -> Body:
    """A loop's body, with its constants as last arguments."""
    body = body.undonated()
    graph, places = pure(body, checks)
    step = fx.GraphModule(body.module, graph)

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        outs = step(*args)
        return [outs[at] if at >= 0 else args[~at] for at in places if at is not None]

    return run


def _target(program: Program, node: fx.Node) -> Any:
    """The target of a call, out of place if it writes into a carried value."""
    owner = program.node_of.get(node.name)
    writer = None if owner is None or not program.written else writer_of(owner.op)
    if owner is None or writer is None or node.target is not writer[0]:
        return node.target
    return kernel(overload(owner.op))


def _literal(graph: fx.Graph, value: torch.Tensor) -> fx.Node:
    number = value.item() if value.numel() else 0
    kind: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    return graph.call_function(torch.full, (list(value.shape), number), kind)


def _dropped(graph: fx.Graph, node: fx.Node, new: Mapping[fx.Node, Any], drawn: fx.Node) -> Any:
    target: Any = node.target
    if target.op is not aten.native_dropout.default:
        return drawn
    _, x, p, _ = node.args
    kept = graph.call_function(torch.mul, (new[x], drawn))  # type: ignore[index]
    return (graph.call_function(torch.mul, (kept, 0.0 if p == 1 else 1 / (1 - p))), drawn)  # type: ignore[operator]


# -- writes ---------------------------------------------------------------------------------------------------


def _may_write(program: Program) -> bool:
    """Whether the module writes: no row may turn out missing, and of each update the formula is known."""
    if program.commit_access is not None or program.within:  # locks are taken in between
        return False
    return bool(program.writes) and all(op in FORMULAS for op, _, _ in program.updates)


def _rows(program: Program) -> Iterator[tuple[str, dict[str, Any], range]]:
    """Each update: its op, settings, and the places of its row among the outputs."""
    at = program.n_fetches + len(program.copies)
    for op, settings, lengths in program.updates:
        for length in lengths:
            yield op, settings, range(at, at + length)
            at += length


def _writes(program: Program) -> Iterator[int]:
    """The places of the operands that are written, in the order of `_new_values`."""
    first = len(program.feeds)
    inputs = {node: place for place, node in enumerate(program.module.graph.find_nodes(op="placeholder"))}
    returned: Any = program.module.graph.output_node().args[0]
    yield from (first + place for place in program.copies)
    for op, settings, row in _rows(program):
        yield from (inputs[returned[row[at]]] for at in FORMULAS[op].state(len(row), settings))


def _new_values(program: Program, outs: Sequence[Any]) -> list[torch.Tensor]:
    found = list(outs[program.n_fetches : program.n_fetches + len(program.copies)])
    for op, settings, row in _rows(program):
        found += FORMULAS[op].new([outs[at] for at in row], **settings)
    return found
