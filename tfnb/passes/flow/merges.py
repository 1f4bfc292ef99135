"""How the values that replicas of a step, or its microbatches, have of one thing become that of the whole batch.

Each way is a row of MERGES: servers take it for what tasks send, the notebook for what they fetch, and a loop over
microbatches carries it. A fetched value that depends on rows has its way by `way_of`. Pure; imports the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from tfnb.errors import ShapeError
from tfnb.graph import Contents, Dim, Spec, Value
from tfnb.graph.spec import flows

Way = Literal["first", "mean", "sum", "max", "min", "none"] | int  # an int: the axis that rows lie on
Merge = Callable[[Sequence[torch.Tensor], Sequence[float]], torch.Tensor]


def mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Weighted mean in the order given; one value is returned as it is, so that one replica is exact.

    >>> mean([torch.tensor([1.0]), torch.tensor([4.0])], [2, 1])
    tensor([2.])
    """
    if len(values) == 1:
        return values[0]
    for value in values:
        if value.shape != values[0].shape or value.dtype != values[0].dtype:
            raise ShapeError(f"workers pushed {Spec.of(values[0])} and {Spec.of(value)} for one gradient")
    whole = sum(weights)
    wide = torch.float32 if values[0].dtype in (torch.float16, torch.bfloat16) else values[0].dtype
    total = values[0].to(wide) * (weights[0] / whole)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total.add_(value.to(wide), alpha=weight / whole)
    return total.to(values[0].dtype)


def weighted(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Entries of row-sparse gradients behind each other, which sum to their weighted mean.

    >>> weighted([torch.tensor([[3.0]]), torch.tensor([[3.0], [6.0]])], [2, 1]).flatten()
    tensor([2., 1., 2.])
    """
    if len(values) == 1:
        return values[0]
    whole = sum(weights)
    return torch.cat([value * (weight / whole) for value, weight in zip(values, weights, strict=True)])


def _first(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return values[0]


def _joined(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return values[0] if len(values) == 1 else torch.cat(list(values))


def _nan(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return values[0] if len(values) == 1 else torch.full_like(values[0], torch.nan, dtype=torch.float32)


def _of(reduce: Callable[[torch.Tensor, int], torch.Tensor]) -> Merge:
    """A reduction over the replicas, in their dtype."""
    return lambda values, weights: reduce(torch.stack(list(values)), 0).to(values[0].dtype)


class ValueMerge(NamedTuple):
    """A way: what makes one value of several, by the weights of their rows.

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
    "rows": ValueMerge(weighted),  # of a row-sparse derivative
    "entries": ValueMerge(_joined),  # what goes with these, such as their row numbers
    "value": ValueMerge(_first),  # sent to a server along no derivative
    "first": ValueMerge(_first),
    "none": ValueMerge(_nan),
}

EXTREMES: Mapping[str, Way] = {"max": "max", "amax": "max", "min": "min", "amin": "min"}
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
        least, greatest = (
            (-torch.inf, torch.inf) if dtype.is_floating_point else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        )
        return least if way == "max" else greatest
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
