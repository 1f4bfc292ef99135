"""The table of gradient rules: the input cotangents of an op, one entry per ATen overload.

A rule is ordinary torch code, run under the recorder, so what it does are nodes and can be differentiated again. It
gets the forward node as `Forward` and the cotangent of its output, and returns one cotangent per tensor input. What
rules never see: broadcasting, dtype promotion, integer inputs, missing cotangents; the walker does those once.
Imports graph, recording and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch._ops import OpOverload

from tfnb.errors import UnknownOp
from tfnb.graph.node import Ref, Value, leaves, map_leaves
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import CALL, REGIONS, WITH_GRADIENT, dispatched, overload

Cotangent = torch.Tensor | Callable[[], torch.Tensor] | None
RuleFunction = Callable[["Forward", Any], Any]


class Rule:
    """A gradient rule, and the number of the op's outputs whose cotangents it handles (None: all).

    saves: the others are saved for the gradient alone, and carry none.
    """

    __slots__ = ("function", "outputs", "saves")

    def __init__(self, function: RuleFunction, outputs: int | None = None, *, saves: bool = False) -> None:
        self.function, self.outputs, self.saves = function, outputs, saves

    def serves(self, dys: Sequence[Any]) -> bool:
        """Whether the rule handles all outputs with cotangents."""
        return self.outputs is None or all(dy is None for dy in dys[self.outputs :])

    def __str__(self) -> str:
        where = getattr(self.function, "where", None)
        if where is not None:
            return str(where)
        code = getattr(self.function, "__code__", None)
        return f"{code.co_filename} line {code.co_firstlineno}" if code else repr(self.function)


RULES: dict[str, Rule] = {}
COMPOSITES: dict[str, Callable[..., Any]] = {}
LOOKUPS: dict[str, Callable[..., Any]] = {}
READS: set[str] = set()  # lookups whose gradient is made of rows also where nobody asked for a row-sparse one
PASSES = {"aten.alias.default", "aten.clone.default", "aten._to_copy.default", "tfnb.assign"}
"""Ops whose output has the rows of their input: a row-sparse cotangent goes through as it is."""
COLUMNS: dict[str, Callable[..., Any]] = {}  # by op: entries of rows of its output as entries of its input's
NOGRAD: set[str] = set()
COMPLEX: set[str] = set()  # ops whose rules hold for complex tensors too; for others autograd's formula serves


class Forward:
    """The forward node as seen by a rule.

    ``inputs`` and ``outs`` are the recorded tensors; ``n["dim"]`` is an argument by its schema name, tensors
    substituted and defaults filled in; ``n.needs("weight")`` tells whether anybody wants that cotangent.
    """

    def __init__(
        self,
        op: str,
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        attrs: Mapping[str, Any],
        needed: Sequence[bool],
    ) -> None:
        self.op, self.inputs, self.outs, self.attrs, self.needed = op, inputs, outs, attrs, needed

    @property
    def out(self) -> torch.Tensor:
        """The first output."""
        return self.outs[0]

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Arguments that have a default."""
        return facts_of(self.op).defaults

    def get(self, name: str) -> Any:
        """The argument, or None if the op has none of that name."""
        return self[name] if name in self.attrs or name in self.defaults else None

    def __getitem__(self, name: str) -> Any:
        if name not in self.attrs:
            return self.defaults[name]
        return map_leaves(lambda leaf: self.inputs[leaf.input] if isinstance(leaf, Ref) else leaf, self.attrs[name])

    def places(self, name: str) -> list[int]:
        """Positions among the inputs of the tensors in argument ``name``."""
        return [leaf.input for leaf in leaves(self.attrs.get(name)) if isinstance(leaf, Ref)]

    def needs(self, name: str) -> bool:
        """Whether the cotangent of a tensor in argument ``name`` is wanted."""
        return any(self.needed[place] for place in self.places(name))


class Tensors(Sequence[torch.Tensor]):
    """The recorded tensors of some values, each made at its first access."""

    def __init__(self, values: Sequence[Value], make: Callable[[Value], torch.Tensor]) -> None:
        self._values, self._make = values, make

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make(v) for v in self._values[index]]
        return self._make(self._values[index])


class Cotangents(Sequence[torch.Tensor]):
    """The cotangents of a node's outputs; a missing one becomes zeros at its first access."""

    def __init__(self, given: Sequence[torch.Tensor | None], outs: Sequence[torch.Tensor]) -> None:
        self._given, self._outs = list(given), outs

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if self._given[index] is None:
            self._given[index] = torch.zeros_like(self._outs[index])
        return self._given[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[i] for i in range(len(self)))

    def given(self, index: int) -> torch.Tensor | None:
        """The cotangent if there is one."""
        return self._given[index]


def rule(*ops: object, outputs: int | None = None, saves: bool = False) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule for op overloads.

    It returns one cotangent per tensor input: a sequence in input order, or a dict by argument name. An entry is a
    tensor, None (no flow) or a function without arguments, called only if the entry is wanted. With ``outputs=k``
    the rule serves nodes of which only the first k outputs have cotangents (for others autograd's formula serves), and
    k=1 means that it gets one cotangent and not a list. ``saves``: see `Rule`.

        @rule(aten.mm.default)
        def _(n, dy):                                # [B, K] @ [K, N] -> [B, N]
            a, b = n.inputs
            return lambda: dy @ b.mT, lambda: a.mT @ dy
    """

    def register(function: RuleFunction) -> RuleFunction:
        RULES.update({str(op): Rule(function, outputs, saves=saves) for op in ops})
        return function

    return register


def partials(op: OpOverload | str, *functions: Callable[[Forward, Any], Any] | None) -> None:
    """Register one function ``(n, dy) -> dx`` per tensor input, each called only if its cotangent is wanted.

    The last function serves all further inputs.
    """

    def apply(n: Forward, dy: object) -> list[Cotangent]:
        def entry(i: int) -> Cotangent:
            function = functions[min(i, len(functions) - 1)]
            return None if function is None else lambda: function(n, dy)

        return [entry(i) for i in range(len(n.inputs))]

    rule(op)(apply)


def composite(*ops: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register torch code that computes the same as the op from ops with rules: differentiated in its place."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        COMPOSITES.update({str(op): function for op in ops})
        return function

    return register


def lookup(*ops: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how the gradient of an op that takes rows of its first input consists of rows.

    ``function(n, dy, at)`` gives (values, indices), or None where the op does not take whole rows of axis 0; it is
    asked in place of the rule where a row-sparse gradient is wanted. ``at`` goes around the op's index: where dy itself
    has only some rows, it picks the index of those.

        @lookup(aten.index_select.default)
        def _(n, dy, at):
            return None if n["dim"] else (dy, at(n["index"]))
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        LOOKUPS.update({str(op): function for op in ops})
        return function

    return register


def columns(op: OpOverload, function: Callable[[Forward, Any], Any]) -> None:
    """Register how row-sparse entries go back through an op that leaves axis 0 alone wherever its ``dim`` is not 0.

    ``function(n, values)`` makes of the values [n, ...] of the output those of the input.
    """
    COLUMNS[str(op)] = function


def nograd(*ops: object) -> None:
    """Declare ops without gradients."""
    NOGRAD.update(map(str, ops))


def overloads(name: str) -> list[Any]:
    """All overloads of an ATen op without ``out=``; none if this torch lacks the op."""
    packet = getattr(torch.ops.aten, name, None)
    return [] if packet is None else [getattr(packet, o) for o in packet.overloads() if "out" not in o]


@lru_cache(maxsize=4096)
def gives_one(op: str) -> bool:
    """Whether the op returns one tensor, and not several or a list of them."""
    if op.count(".") < 2:
        return op not in (WITH_GRADIENT, CALL, *REGIONS)
    returns = overload(op)._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def register_gradient(op: OpOverload | Callable[..., Any] | str) -> Callable[[RuleFunction], RuleFunction]:
    """Register the gradient of an op, say a ``torch.library.custom_op``: ``rule(n, dy)`` as in `rule`.

    op: the custom op, an overload, or a name such as ``"mylib::swish"``. A rule already there is replaced.
    Raises UnknownOp for a name that no library registered.

    >>> @torch.library.custom_op("examples::twice", mutates_args=())
    ... def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return x * 2
    >>> @register_gradient(twice)
    ... def _(n, dy):
    ...     return dy * 2
    >>> "examples.twice.default" in RULES
    True
    """
    names = ops_of(op)
    NOGRAD.difference_update(names)
    COMPLEX.update(names)  # the user's to know
    for name in names:
        LOOKUPS.pop(name, None)
    return rule(*names)


def ops_of(op: object) -> tuple[str, ...]:
    """The qualified names of the overloads meant by an op given in any of torch's ways; raises UnknownOp."""
    if isinstance(op, str):
        return _named(op.replace("::", "."))
    if isinstance(op, BuiltinFunctionType):  # torch.relu: the function of that op
        op = getattr(torch.ops.aten, op.__name__, op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return tuple(map(str, dispatched(op)))
    op = getattr(op, "_opoverload", op)  # a torch.library.custom_op holds its overload
    if not isinstance(op, torch._ops.OpOverload):
        raise UnknownOp(f"{op!r} is not an op: give an op's function (torch.relu), an overload or packet of torch.ops "
                        '(torch.ops.aten.relu), a torch.library.custom_op, or a name ("aten::relu")')  # fmt: skip
    return (str(op),)


def _named(name: str) -> tuple[str, ...]:
    space, _, base = name.partition(".")
    packet = getattr(getattr(torch.ops, space), base, None) if "." not in base else None
    return (str(overload(name if "." in base else f"{name}.default")),) if packet is None else ops_of(packet)
