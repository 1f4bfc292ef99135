"""Memory of a step, predicted from specs: pieces of memory, with their sizes, lifetimes and the values that share them.

Semantics S-141. What the step does not make (feeds, constants, Variables) costs nothing. Values are freed at their last
use; what is fetched or written lives to the end, and so do gradients of optimizer updates, which are done at commit.
Scratch of kernels counts where the caller says what it is. Imports graph, and kernels for which updates there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from math import prod

from tfnb.errors import ShapeError
from tfnb.graph import Graph, Node, Ref, Spec, Value
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import IN_PLACE, WITH_GRADIENT, overload
from tfnb.kernels.optim import FUSED

NOMINAL = 32  # taken for a size that only a run knows
_BORROWED = frozenset({"tfnb.placeholder", "tfnb.constant", "tfnb.read"})


class Memory:
    """Pieces of memory, each named by its ``owner``, the first value stored there.

    size: bytes of each piece that the step makes. touched: the pieces that each node (by place) takes or makes, in an
    order that no id decides. made: those that it makes. kept: pieces that live to the end. aside: values
    that do not count. scratch: bytes that the kernel of each node (by place) holds beside its results.
    """

    def __init__(
        self, graph: Graph, fetches: Collection[Value], feeds: Collection[Value],
        sizes: Mapping[str, int] | None = None, aside: Collection[Value] = (),
        scratch: Callable[[Node], int] | None = None,
    ) -> None:  # fmt: skip
        self._aside = aside
        self.scratch = [0 if scratch is None else scratch(node) for node in graph.nodes]
        self.owner: dict[Value, Value] = {value: value for value in feeds}
        self.size: dict[Value, int] = {}
        self.touched: list[tuple[Value, ...]] = []
        self.made: list[list[Value]] = []
        self.kept: set[Value] = set()
        self._sizes = sizes or {}
        self._known: dict[Spec, int] = {}
        for node in graph.nodes:
            self._meet(node)
        self.kept.update(self.owner[value] for value in fetches if value in self.owner)

    def _meet(self, node: Node) -> None:
        made = []
        for index, spec in enumerate(node.outputs):
            value = Value(node.id, index)
            source = _shared(node, index)
            if source is not None:
                self.owner[value] = self.owner.get(source, source)
            elif value not in self.owner:  # a fed value is the caller's
                self.owner[value] = value
                if node.op not in _BORROWED:
                    self.size[value] = 0 if value in self._aside else self._bytes(spec)
                    made.append(value)
        taken = [self.owner.get(value, value) for value in node.inputs]
        self.touched.append(tuple(owner for owner in dict.fromkeys((*taken, *made)) if owner in self.size))
        self.made.append(made)
        if node.op == "tfnb.assign" or node.op in FUSED:
            self.kept.update(taken)

    def _bytes(self, spec: Spec) -> int:
        found = self._known.get(spec)
        if found is None:
            found = self._known[spec] = _bytes(spec, self._sizes)
        return found

    def last(self, order: Sequence[int] | None = None) -> dict[Value, int]:
        """The place of the node that touches each piece last, if the nodes run in this order of their places."""
        order = range(len(self.touched)) if order is None else order
        return {owner: place for place in order for owner in self.touched[place]}

    def curve(self, order: Sequence[int] | None = None) -> list[int]:
        """The bytes held while each node runs."""
        order = range(len(self.touched)) if order is None else order
        last = self.last(order)
        held, found = 0, []
        for place in order:
            for owner in self.made[place]:
                held += self.size[owner]
            found.append(held + self.scratch[place])
            for owner in self.touched[place]:
                if last[owner] == place and owner not in self.kept:
                    held -= self.size[owner]
        return found

    def peak(self, order: Sequence[int] | None = None) -> int:
        """The most bytes held at once."""
        return max(self.curve(order), default=0)


def peak(
    graph: Graph, fetches: Collection[Value], feeds: Collection[Value], sizes: Mapping[str, int] | None = None,
    aside: Collection[Value] = (),
) -> int:  # fmt: skip
    """The most bytes that the step holds at once, as predicted; ``sizes`` of symbols, 32 where one is missing."""
    return Memory(graph, fetches, feeds, sizes, aside).peak()


def nominal(spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape with these sizes of symbols, `NOMINAL` for others; no element where such sizes make no shape."""
    try:
        shape = spec.sizes({symbol: NOMINAL for symbol in spec.symbols} | dict(sizes))
    except ShapeError:  # divides by what the nominal sizes make a zero
        return (0,)
    return tuple(max(int(size), 0) for size in shape)


def _bytes(spec: Spec, sizes: Mapping[str, int]) -> int:
    return prod(nominal(spec, sizes)) * spec.dtype.itemsize


def _shared(node: Node, index: int) -> Value | None:
    """The input that output ``index`` lies in the memory of; None for memory of its own."""
    if not node.inputs:
        return None
    if node.op == "tfnb.assign":
        return node.inputs[0]
    if node.op == WITH_GRADIENT:
        return node.inputs[node.attrs["values"][index].input]
    if node.op in FUSED:  # done in place at commit; w and the slots are state
        return node.inputs[0]
    if IN_PLACE in node.tags:
        return first_operand(node)
    if node.op.count(".") < 2:
        return None
    name = _aliased(node.op)
    ref = node.attrs.get(name) if name else None
    return node.inputs[ref.input] if ref is not None else None


@cache
def _aliased(op: str) -> str | None:
    """The argument that an op returns a view of, or writes and returns."""
    schema = overload(op)._schema
    if facts_of(op).unsaid_alias:
        return schema.arguments[0].name
    sets = {name for r in schema.returns if r.alias_info is not None for name in r.alias_info.after_set}
    for argument in schema.arguments:
        alias = argument.alias_info
        if alias is not None and (sets & set(alias.before_set) or "*" in alias.after_set):  # "*": a list of views
            return argument.name
    return None


def first_operand(node: Node) -> Value | None:
    """The value of the op's first tensor argument, if that is one tensor."""
    name = _first_argument(node.op) if node.op.count(".") > 1 else None
    ref = node.attrs.get(name) if name else None
    return node.inputs[ref.input] if isinstance(ref, Ref) else None


@cache
def _first_argument(op: str) -> str | None:
    return next((argument.name for argument in overload(op)._schema.arguments), None)
