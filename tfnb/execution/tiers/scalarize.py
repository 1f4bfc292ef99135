"""Generated code with Python's numbers in the place of tensors that hold one integer or truth value.

A call of torch on such a tensor takes some fifty times as long as its arithmetic. What decides branches, counts steps
or says where something is written is computed in numbers (`scalar_ops`), which are taken from tensors and
made tensors again only where something else takes them. The same values; a program's own code stays as it is, for
compilers and clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tfnb.execution.lowering.checked_calls import Branch
from tfnb.execution.lowering.control_flow_code import Cond
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.interface import Forward, TierRequest
from tfnb.execution.tiers.scalar_ops import BESIDE, Number, expression, literal
from tfnb.graph import Node, Spec
from tfnb.kernels.row_writes import NUMBERS


@dataclass(frozen=True, slots=True)
class Quick:
    """Code equivalent to a program's, with single numbers as Python numbers; ``inner``: code of its branches."""

    module: fx.GraphModule
    node_of: Mapping[str, Node]
    inner: tuple[Quick, ...]

    @property
    def code(self) -> str:
        """The generated Python."""
        return self.module.code

    @property
    def forward(self) -> Forward:
        """The function."""
        found: Forward = self.module.forward
        return found


def quick(program: Program) -> Quick | None:
    """The code of a whole step, if it has single numbers; written values may be numbers."""
    graph = program.module.graph
    returned: Any = graph.output_node().args[0]
    at = len(program.fetches) + len(program.copies)
    tensors = set(range(len(program.fetches)))
    for op, _, lengths in program.updates:
        taking = op in NUMBERS
        for length in lengths:
            tensors.update([at] if taking else range(at, at + length))
            at += length
    return _NumberWriter(program, (), (), {*range(len(returned))} - tensors, {}).written()


class ScalarTier:
    """The tier: generated code with numbers inside."""

    name = "generated code"

    def made(self, request: TierRequest) -> Forward | str:
        """The code, stored in the program for the lines of errors."""
        program = request.program
        if program.quick is None:
            program.quick = quick(program)
        return "nothing in it is one number" if program.quick is None else program.quick.forward


class QuickCond:
    """A branch: called as `control_flow_code.Cond` is; some operands and results are numbers."""

    def __init__(self, cond: Cond, sides: Mapping[bool, Forward]) -> None:
        self.then, self.otherwise = sides[True], sides[False]
        self.missing = {way: lacks for way, (_, lacks) in cond.branches.items() if any(lacks)}
        self.cond = cond
        self.__name__ = "cond"  # for the generated code

    def __call__(self, run: int, pred: object, operands: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
        way = bool(pred)
        given = (self.then if way else self.otherwise)(*operands, run)
        lacks = self.missing.get(way)
        return given if lacks is None else self.cond.complete(lacks, given, shapes)


def tensor(number: float, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A number as a tensor of this dtype and shape."""
    return torch.full(shape, number, dtype=dtype, device="cpu")


class _NumberWriter:
    """One program's code under construction.

    given: places of the inputs that are numbers; wanted: of the results that shall be; free: of those that may be.
    constants: of inputs that are the same in each run.
    """

    def __init__(
        self, program: Program, given: Collection[int], wanted: Collection[int], free: Collection[int],
        constants: Mapping[int, torch.Tensor],
    ) -> None:  # fmt: skip
        self.constants = constants
        self.program, self.given, self.wanted, self.free = program, given, wanted, free
        self.old = program.module.graph
        self.returned: Any = self.old.output_node().args[0]
        self.place = {node: place for place, node in enumerate(self.old.find_nodes(op="placeholder"))}
        self.numbers: dict[fx.Node, Number] = {}  # what could be one
        self.sources: set[fx.Node] = set()  # of those the ones that are not computed here
        self.known: set[fx.Node] = set()  # of those the constants
        self.results: dict[fx.Node, tuple[fx.Node, int]] = {}  # of branches: whose, and which
        self._look()
        self.chosen = self._chosen()
        self.graph = fx.Graph()
        self.made: dict[fx.Node, Any] = {}  # numbers in the new code
        self.tensors: dict[fx.Node, fx.Node] = {}
        self.inner: list[Quick] = []
        self.changed = False

    # -- what is a number -----------------------------------------------------------------------------------

    def _look(self) -> None:
        written = {n for place, n in enumerate(self.returned) if place in self.free and isinstance(n, fx.Node)}
        for node in self.old.nodes:
            spec = self._spec(node)
            if (held := self._held(node)) is not None:
                self._constant(node, held)
            elif spec is not None and node.op in ("placeholder", "call_function"):
                found = self._computed(node, spec) if node.op == "call_function" else None
                if found is not None:
                    self.numbers[node] = found
                elif self._is_given(node) or (spec.shape == () and spec.dtype in (torch.int64, torch.bool)):
                    self._source(node, spec, written)

    def _is_given(self, node: fx.Node) -> bool:
        """Whether a node is an input given as a number."""
        return self.place.get(node) in self.given

    def _constant(self, node: fx.Node, value: torch.Tensor) -> None:
        if value.shape == () and value.is_cpu and value.dtype in (torch.int64, torch.bool, torch.float32):
            found = literal(value.item(), value.dtype)
            if found is not None:
                self.numbers[node] = found
                self.known.add(node)

    def _source(self, node: fx.Node, spec: Spec, written: Collection[fx.Node]) -> None:
        """Note a tensor made by other nodes. A branch's unchanged output must not be written as a new value."""
        result = _result(node)
        if result is not None:
            if node in written or any(any(lacks) for _, lacks in _cond(result[0]).branches.values()):
                return
            self.results[node] = result
        self.sources.add(node)
        self.numbers[node] = Number(node, spec.dtype)

    def _spec(self, node: fx.Node) -> Spec | None:
        spec = self.program.specs.get(node.name)
        if spec is None and _is_copy(node):
            spec = self.program.specs.get(node.all_input_nodes[0].name)
        fits = spec is not None and spec.device == "cpu" and spec.shape in ((), (1,))
        return spec if fits else None

    def _computed(self, node: fx.Node, spec: Spec) -> Number | None:
        owner = self.program.node_of.get(node.name)
        op = "aten.clone.default" if _is_copy(node) else "" if owner is None else owner.op
        if node in self.program.donated:
            return None
        args = [self._operand(arg) for arg in node.args]
        if any(arg is _NOT for arg in args):
            return None
        found = expression(op, args, node.kwargs, spec.dtype)
        return None if found is None or found.dtype is not spec.dtype else found

    def _operand(self, arg: object) -> Any:
        if isinstance(arg, fx.Node):
            found = self.numbers.get(arg)
            return _NOT if found is None else found if arg in self.known else Number(arg, found.dtype)
        return literal(arg) if isinstance(arg, (bool, int, float)) else arg

    def _chosen(self) -> set[fx.Node]:
        """The nodes computed as numbers, and their source tensors."""
        computed = {n for n in self.numbers if n.op == "call_function" and n not in self.sources}
        return computed.union(n for node in computed for n in node.all_input_nodes if n in self.sources)

    def _is_beside(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether torch takes the node as a number beside a tensor of the same type, to the same effect."""
        owner = self.program.node_of.get(user.name)
        if owner is None or owner.op not in BESIDE or user in self.program.donated or user.kwargs:
            return False
        dtype, tensors = self.numbers[node].dtype, [arg for arg in user.args if isinstance(arg, fx.Node)]
        found = [self.program.specs.get(arg.name) for arg in tensors[BESIDE[owner.op] :] if arg not in self.numbers]
        return node in tensors[BESIDE[owner.op] :] and any(
            spec is not None and spec.dtype is dtype and spec.shape and spec.device == "cpu" for spec in found
        )

    # -- the code -------------------------------------------------------------------------------------------

    def written(self) -> Quick | None:
        """Write the code; None if it would be unchanged."""
        if not (self._differs() or self.given or self.wanted):
            return None
        for node in self.old.nodes:
            if node.op == "placeholder":
                self._input(node)
            elif node.op == "output":
                self.graph.output(tuple(self._result(place, node) for place, node in enumerate(self.returned)))
            elif node in self.chosen and node not in self.sources:
                self.made[node] = self._expression(self.numbers[node].made)
                self.changed = True
            elif isinstance(node.target, Cond):
                self.tensors[node] = self._branches(node)
            elif node.op != "get_attr" and not (node in self.chosen and node in self.results):
                self.tensors[node] = self._copied(node)
            elif node in self.results:
                self.made[node] = self.graph.node_copy(node, self.tensors.__getitem__)
        if not (self.changed or self.given or self.wanted):
            return None
        module = fx.GraphModule(self.program.module, self.graph)
        module.__dict__.update(module.named_buffers())  # constants, found without a call of __getattr__
        return Quick(module, self.program.node_of, tuple(self.inner))

    def _differs(self) -> bool:
        """Whether anything is computed in numbers here, or may be in a branch: to write the code takes long."""
        return not self.chosen <= self.sources or any(isinstance(node.target, Cond) for node in self.old.nodes)

    def _input(self, node: fx.Node) -> None:
        made = self.graph.node_copy(node)
        if self._is_given(node):
            self.made[node] = made
        else:
            self.tensors[node] = made

    def _copied(self, node: fx.Node) -> fx.Node:
        if isinstance(node.target, Branch) and (value := self.made.get(node.args[0])) is not None:  # type: ignore[arg-type]
            return self.graph.create_node("call_function", node.target, (value,), name=node.name)
        return self.graph.node_copy(node, lambda arg: self._taken(node, arg))

    def _taken(self, user: fx.Node, arg: fx.Node) -> Any:
        """The argument of a torch call: the number if already computed and equivalent, else the tensor."""
        if arg in self.made and arg not in self.tensors and self._is_beside(user, arg):
            return self.made[arg]
        return self._tensor(arg)

    def _result(self, place: int, value: object) -> Any:
        if not isinstance(value, fx.Node):
            return value
        computed = value in self.chosen and value not in self.sources
        return self._number(value) if place in self.wanted or (place in self.free and computed) else self._tensor(value)

    def _expression(self, made: object) -> Any:
        if isinstance(made, fx.Node):
            return self._number(made)
        if isinstance(made, tuple):
            function, args = made
            return self.graph.call_function(function, tuple(map(self._expression, args)))
        return made

    def _number(self, node: fx.Node) -> Any:
        """The node as a number."""
        if node in self.known:
            return self.numbers[node].made
        if node not in self.made:
            self.made[node] = self.graph.call_method("item", (self._tensor(node),))
        return self.made[node]

    def _tensor(self, node: fx.Node) -> fx.Node:
        """The node as a tensor."""
        if node not in self.tensors:
            spec = self._spec(node)
            if node.op == "get_attr":
                self.tensors[node] = self.graph.node_copy(node)
            else:
                assert spec is not None, node
                self.tensors[node] = self.graph.call_function(tensor, (self.made[node], spec.dtype, spec.sizes({})))
        return self.tensors[node]

    # -- branches -------------------------------------------------------------------------------------------

    def _branches(self, node: fx.Node) -> fx.Node:
        """The call of a branch: numbers go in where they are no tensors, and come out where they are taken as such."""
        cond, (run, pred, operands, shapes) = _cond(node), node.args
        given = {place for place, value in enumerate(operands) if self._is_number(value)}  # type: ignore[arg-type]
        wanted = {k for value, (call, k) in self.results.items() if call is node and value in self.chosen}
        constants = {place: value for place, x in enumerate(operands) if (value := self._held(x)) is not None}  # type: ignore[arg-type]
        sides: dict[bool, Forward] = {}
        for way, (program, lacks) in cond.branches.items():
            places = [place for place, missing in enumerate(lacks) if not missing]
            inside = {at for at, place in enumerate(places) if place in wanted}
            found = _NumberWriter(program, given, inside, (), constants).written()  # type: ignore[arg-type]
            sides[way] = program.forward if found is None else found.forward
            self.inner += [] if found is None else [found]
            self.changed |= found is not None
        taken = [self.made[x] if place in given else self._tensor(x) for place, x in enumerate(operands)]  # type: ignore[arg-type, index]
        which = self._number(pred) if self._is_number(pred) else self._tensor(pred)  # type: ignore[arg-type]
        args = (self._tensor(run), which, tuple(taken), fx.node.map_arg(shapes, self._tensor))  # type: ignore[arg-type]
        return self.graph.create_node("call_function", QuickCond(cond, sides), args, name=node.name)

    def _held(self, value: fx.Node) -> torch.Tensor | None:
        """The tensor that a constant is."""
        if value.op == "get_attr":
            return getattr(self.program.module, str(value.target))  # type: ignore[no-any-return]
        return self.constants.get(self.place[value]) if value in self.place else None

    def _is_number(self, value: fx.Node) -> bool:
        """Whether a value exists as a number only."""
        return value in self.made and value not in self.tensors


_NOT = object()  # in the place of an operand that is no number


def _is_copy(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.clone.default and isinstance(node.args[0], fx.Node)


def _cond(node: fx.Node) -> Cond:
    assert isinstance(node.target, Cond)
    return node.target


def _result(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The branch that gives this, and the place among its results."""
    source = node.args[0] if len(node.args) == 2 else None
    is_result = isinstance(source, fx.Node) and isinstance(source.target, Cond) and isinstance(node.args[1], int)
    return (source, node.args[1]) if is_result else None  # type: ignore[return-value]


def parts(found: Quick | None) -> Iterable[Quick]:
    """The code and that of its branches."""
    if found is not None:
        yield found
        for inner in found.inner:
            yield from parts(inner)
