"""How the partial results of replicas, or of microbatches, are reduced to the result of the whole batch.

Each way is a row of MERGES: servers take it for what tasks send, the notebook for what they fetch, and a loop over
microbatches carries it. A fetched value that depends on rows has its way by `way_of`. A mean takes the parts' shares,
which follow from a `Weight`. Pure; imports the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from tfnb.errors import ShapeError
from tfnb.graph import Contents, Dim, Node, Spec, Value
from tfnb.graph.spec import flows

Way = Literal["first", "mean", "sum", "max", "min", "none"] | int  # an int: the axis that rows lie on
Merge = Callable[[Sequence[torch.Tensor], Sequence[float]], torch.Tensor]


class Weight(NamedTuple):
    """What parts are weighted by in a mean: a number of each part that adds up over the parts.

    total: the value that is this number, or its place; None for the rows of a part, and in `SUM` for nothing. The
    weight of a part is ``max(its number + shift, least)``, as a loss may clamp or shift its divisor; that of the batch
    is the same of the sum of these numbers.
    """

    total: Value | int | None = None
    shift: float = 0.0
    least: float = -math.inf

    def of(self, number: float) -> float:
        """The weight of a part, or of the batch, by its number."""
        return max(number + self.shift, self.least)

    def at(self, places: Mapping[Any, int] | Sequence[int]) -> Weight:
        """The same with the place of its total, by the values that there are."""
        return self if self.total is None else self._replace(total=places[self.total])  # type: ignore[index]

    def shares(self, numbers: Sequence[float]) -> list[float]:
        """The shares of the parts with these numbers; equal ones where all parts weigh nothing.

        >>> ROWS.shares([3, 1]), SUM.shares([0, 0]), Weight(least=1.0).shares([0, 4]), ROWS.shares([0, 0])
        ([0.75, 0.25], [1.0, 1.0], [0.25, 1.0], [0.5, 0.5])
        """
        own, whole = [self.of(number) for number in numbers], self.of(sum(numbers))
        if not any(own):
            return [1 / len(own)] * len(own)
        return [weight / whole if whole else weight * math.inf for weight in own]


ROWS, SUM = Weight(), Weight(shift=1.0)
"""Of a mean over rows, and of a sum over rows."""


def mean(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Weighted mean in the order given; one value is returned as it is, so that one replica is exact.

    A part without a share adds nothing, even if its value is NaN.

    >>> mean([torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([torch.nan])], [2 / 3, 1 / 3, 0.0])
    tensor([2.])
    """
    if len(values) == 1:
        return values[0]
    for value in values:
        if value.shape != values[0].shape or value.dtype != values[0].dtype:
            raise ShapeError(f"workers pushed {Spec.of(values[0])} and {Spec.of(value)} for one gradient")
    wide = torch.float32 if values[0].dtype in (torch.float16, torch.bfloat16) else values[0].dtype
    pairs = [(value, share) for value, share in zip(values, shares, strict=True) if share]
    first, *others = pairs or [(values[0], 0.0)]
    total = first[0].to(wide) * first[1]
    for value, share in others:
        total.add_(value.to(wide), alpha=share)
    return total.to(values[0].dtype)


def weighted(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    """Entries of row-sparse gradients behind each other, which sum to their weighted mean.

    >>> weighted([torch.tensor([[3.0]]), torch.tensor([[3.0], [6.0]])], [2 / 3, 1 / 3]).flatten()
    tensor([2., 1., 2.])
    """
    pairs = zip(values, shares, strict=True)
    return torch.cat([value * share if share else torch.zeros_like(value) for value, share in pairs])


def _first(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    return values[0]


def _joined(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    return torch.cat(list(values))


def _nan(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    return torch.full_like(values[0], torch.nan, dtype=torch.float32)


def _of(reduce: Callable[[torch.Tensor, int], torch.Tensor]) -> Merge:
    """A reduction over the replicas, in their dtype."""
    return lambda values, shares: reduce(torch.stack(list(values)), 0).to(values[0].dtype)


class ValueMerge(NamedTuple):
    """A way: what makes one value of several, two at least, by the shares of the parts.

    carried: the op by which a loop over microbatches takes one more; empty where it stacks them, or cannot.
    """

    merge: Merge
    carried: str = ""


MERGES: Mapping[str, ValueMerge] = {
    "grad": ValueMerge(mean, "tfnb.add_share.default"),  # a derivative
    "mean": ValueMerge(mean, "tfnb.add_share.default"),
    "sum": ValueMerge(_of(torch.sum), "aten.add.Tensor"),
    "max": ValueMerge(_of(torch.amax), "aten.maximum.default"),
    "min": ValueMerge(_of(torch.amin), "aten.minimum.default"),
    "any": ValueMerge(_of(torch.any), "aten.logical_or.default"),  # whether there is a gradient
    "rows": ValueMerge(weighted),  # of a row-sparse derivative
    "entries": ValueMerge(_joined),  # what goes with these, such as their row numbers
    "weight": ValueMerge(_of(torch.sum)),  # the number by which derivatives are weighted
    "value": ValueMerge(_first),  # sent to a server along no derivative
    "first": ValueMerge(_first),
    "none": ValueMerge(_nan),
}


def number_of(weight: Weight, part: Sequence[torch.Tensor], rows: float) -> float:
    """The number of a part that a weight takes; weight.total: its place among the values of the part.

    >>> number_of(ROWS, [], 3), number_of(SUM, [], 3), number_of(Weight(0), [torch.tensor(2)], 3)
    (3, 0.0, 2.0)
    """
    if weight.total is None:
        return rows if weight == ROWS else 0.0
    assert isinstance(weight.total, int)
    return float(part[weight.total])


def merged(
    kinds: Sequence[str], weights: Sequence[Weight], parts: Sequence[Sequence[torch.Tensor]], rows: Sequence[float]
) -> list[torch.Tensor]:  # fmt: skip
    """The values of the whole batch, of those of its parts; one part's are returned as they are. weights: of each kind.

    >>> merged(["grad", "weight"], [Weight(1), ROWS], [[torch.tensor(1.0), torch.tensor(3)]] * 2, [1, 1])
    [tensor(1.), tensor(6)]
    """
    if len(parts) == 1:
        return list(parts[0][: len(kinds)])
    shares = {
        weight: weight.shares([number_of(weight, part, count) for part, count in zip(parts, rows, strict=True)])
        for weight in set(weights)
    }
    return [
        MERGES[kind].merge([part[at] for part in parts], shares[weight])
        for at, (kind, weight) in enumerate(zip(kinds, weights, strict=True))
    ]


EXTREMES: Mapping[str, Way] = {
    "max": "max", "amax": "max", "any": "max", "min": "min", "amin": "min", "all": "min"
}  # fmt: skip
NO_COUNTS = {
    "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median", "nanmedian", "mode", "kthvalue", "prod",
}  # fmt: skip
"""Ops whose integers over all rows are no sums of those over some rows."""


def begin(way: str, dtype: torch.dtype) -> float | int:
    """What a loop over microbatches begins with: taking a value to it changes no bit of that.

    >>> begin("sum", torch.int64), begin("mean", torch.float32), begin("max", torch.float32)
    (0, -0.0, -inf)
    """
    if way in ("max", "min"):
        bounds: tuple[float | int, float | int] = (-torch.inf, torch.inf)
        if dtype is torch.bool:
            bounds = False, True
        elif not dtype.is_floating_point:
            bounds = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return bounds[way == "min"]
    return -0.0 if flows(dtype) else 0


def way_of(contents: Contents, value: Value, *, is_fed: bool) -> Way:
    """How a fetched value that depends on rows becomes that of all rows."""
    node = contents.by_id[value.node]
    spec, op = node.outputs[value.index], "" if is_fed else node.op.split(".")[1]
    axis = varying_axis(spec)
    if axis is not None:
        return axis
    if op in EXTREMES and value.index == 0 and varying_axis(_spec(contents, node.inputs[0])) is not None:
        return EXTREMES[op]  # of the rows themselves
    if flows(spec.dtype):
        return "mean"
    if spec.dtype is torch.bool:
        return "first"
    return "none" if op in NO_COUNTS else "sum"


def _spec(contents: Contents, value: Value) -> Spec:
    return contents.by_id[value.node].outputs[value.index]


def varying_axis(spec: Spec) -> int | None:
    """The first axis whose size varies.

    >>> varying_axis(Spec(torch.float32, (3, 2))) is None
    True
    """
    return next((axis for axis, size in enumerate(spec.shape) if isinstance(size, Dim)), None)


def is_slope(node: Node, index: int = 0) -> bool:
    """Whether an output is a derivative by rows, such as that of a net by its inputs, which is no sum over rows."""
    is_sparse = node.op == "tfnb.slices.default"  # of a table, with as many rows as were looked up
    return "gradient" in node.tags and not is_sparse and varying_axis(node.outputs[index]) is not None
