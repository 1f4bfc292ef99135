"""How the workers' values of one fetch become the value of the whole batch. Pure; imports the graph.

Rows are put together, along the first axis that varies; what does not depend on the feeds is the first worker's; a
floating value is averaged weighted by rows, which is exact for a mean over rows; an integer is summed, as a count over
rows is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from tfnb.cluster.server.parts import mean
from tfnb.graph import Dim, Spec, Value
from tfnb.graph.spec import flows
from tfnb.passes import StepGraph

Way = Literal["first", "mean", "sum"] | int  # an int: the axis that rows lie on


def joins(step: StepGraph) -> list[Way]:
    """The way of each fetch of a step."""
    fed = set(step.feeds)
    varying: set[int] = set()
    for node in step.graph.nodes:
        if any(value in fed or value.node in varying for value in node.inputs):
            varying.add(node.id)
    by_id = step.whole.contents.by_id

    def way(value: Value) -> Way:
        outputs = by_id[value.node].outputs
        if not outputs or (value not in fed and value.node not in varying):
            return "first"
        return _way(outputs[value.index])

    return [way(value) for value in step.fetches]


def _way(spec: Spec) -> Way:
    axis = next((axis for axis, size in enumerate(spec.shape) if isinstance(size, Dim)), None)
    if axis is not None:
        return axis
    if flows(spec.dtype):
        return "mean"
    return "first" if spec.dtype is torch.bool else "sum"


def join(way: Way, values: Sequence[Any], rows: Sequence[int], steps: int = 0) -> Any:
    """The value of the whole batch; None where the workers' values are no parts of one, as their shapes say.

    steps: axes in front of the value's own.

    >>> join("mean", [torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
    tensor(2.)
    >>> join(1, [torch.ones(2, 3), torch.ones(2, 4)], [3, 4]).shape
    torch.Size([2, 7])
    """
    if len(values) == 1 or values[0] is None or way == "first":
        return values[0]
    axis = way + steps if isinstance(way, int) else None
    if len({tuple(size for at, size in enumerate(value.shape) if at != axis) for value in values}) > 1:
        return None
    if axis is not None:
        return torch.cat(list(values), axis)
    return mean(values, rows) if way == "mean" else torch.stack(list(values)).sum(0).to(values[0].dtype)
