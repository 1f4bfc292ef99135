"""Products in a loop's body that can leave the iterations: a plan for lowering, without changes to the graph.

    x_t @ w for each row x_t of a sequence         ->  products of many rows, ahead of their iterations
    total + a_t.t() @ b_t, or total + b_t.sum(0)   ->  one product or sum for many iterations, behind them

The same numbers as what `tfnb.passes.stack` makes of the unrolled loop, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from tfnb.graph import Contents, Graph, Node, Subgraph, Value
from tfnb.passes import optimize
from tfnb.passes.stack import factors, shared, transposed


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the rows of a sequence, by its place: with a capture, turned or not, and a capture that is added."""

    value: Value
    rows: int
    weight: int
    turned: bool
    bias: int | None


@dataclass(frozen=True, slots=True)
class Total:
    """A carried value, by its position, that accumulates ``a.t() @ b``, or ``b.sum(0)``; turned: transposed."""

    place: int
    a: Value | None
    b: Value
    turned: bool


@dataclass(frozen=True, slots=True)
class Apart:
    """A simplified body without the extracted products: their values are fed, and the terms of the sums are outputs."""

    body: Subgraph
    sequences: int
    ahead: tuple[Product, ...]
    totals: tuple[Total, ...]

    @property
    def summed(self) -> tuple[Value, ...]:
        """The terms of the sums, each once."""
        return tuple(dict.fromkeys(v for total in self.totals for v in (total.a, total.b) if v is not None))


def apart(attrs: Mapping[str, Any], outputs: Sequence[Value], plain: Set[int]) -> Apart:
    """Extract products and sums from a loop's body with these ``outputs``, the carried values first.

    plain: places of sequences that are stacked tensors.
    """
    whole: Subgraph = attrs["body"]
    graph = optimize(Graph("body", whole.contents), (*outputs, *whole.guards), whole.inputs, last=())
    known = graph.contents.by_id
    given = tuple(whole.contents.by_id[v.node] for v in whole.inputs if v.node not in known)
    contents = Contents((*given, *graph.nodes), whole.contents.guards)
    finder = _ProductFinder(attrs, contents, whole.inputs, outputs)
    totals = () if attrs["cond"] is not None else tuple(finder.totals())
    ahead = tuple(product for node in contents.nodes if (product := finder.ahead(node, plain)) is not None)
    return Apart(replace(whole, contents=contents), len(attrs["xs"]), ahead, totals)


class _ProductFinder:
    """Searches a body for extractable products and sums."""

    def __init__(
        self, attrs: Mapping[str, Any], contents: Contents, inputs: Sequence[Value], outputs: Sequence[Value]
    ) -> None:
        self.contents, self.inputs, self.outputs = contents, inputs, outputs
        carried, ends = len(attrs["init"]), len(inputs) - len(attrs["captures"])
        self.carried = carried
        self.sequences = {value: i for i, value in enumerate(inputs[carried:ends])}
        self.captures = {value: i for i, value in enumerate(inputs[ends:])}

    def ahead(self, node: Node, plain: Set[int]) -> Product | None:
        if shared(node, self.contents) is None or node.value() in self.outputs:
            return None
        *bias, rows, weight = node.inputs
        turned, weight = self._turned(weight)
        if self.sequences.get(rows) not in plain or not {weight, *bias} <= self.captures.keys():
            return None
        added = self.captures[bias[0]] if bias else None
        return Product(node.value(), self.sequences[rows], self.captures[weight], turned, added)

    def _turned(self, value: Value) -> tuple[bool, Value]:
        """Strip transpositions: whether their number is odd, and the value below."""
        turned = False
        while (source := transposed(self.contents.by_id[value.node])) is not None:
            turned, value = not turned, source
        return turned, value

    def totals(self) -> list[Total]:
        """The carried values that are sums alone."""
        found = []
        for place in range(self.carried):
            total = self._total(place)
            found += [] if total is None else [total]
        return found

    def _total(self, place: int) -> Total | None:
        total, after = self.inputs[place], self.outputs[place]
        node = self.contents.by_id[after.node]
        adds = node.op == "aten.add.Tensor" and len(node.inputs) == 2 and "alpha" not in node.attrs
        before = self.contents.by_id[total.node].outputs
        if not adds or node.outputs != before or not (self._alone(total, 1) and self._alone(after, 0)):
            return None
        if total not in node.inputs or node.inputs[0] == node.inputs[1] or self.outputs.count(after) != 1:
            return None
        value = next(v for v in node.inputs if v != total)
        turned = False
        while self._alone(value, 1) and (source := transposed(self.contents.by_id[value.node])) is not None:
            turned, value = not turned, source
        if not self._alone(value, 1):
            return None
        found = factors(self.contents.by_id[value.node], self.contents)
        if found is None:
            return None
        a, b = (None, found[0]) if len(found) == 1 else found
        return Total(place, a, b, turned)

    def _alone(self, value: Value, users: int) -> bool:
        """Whether a value has exactly so many consumers and, if any, is no output."""
        given = self.outputs.count(value) if users else 0
        return len(self.contents.consumers.get(value, ())) == users and not given
