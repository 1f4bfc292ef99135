"""How the workers' values of one fetch become the value of the whole batch. Pure; imports the graph.

Rows are put together, along the first axis that varies; what does not depend on the feeds is the first worker's; a
floating value is averaged weighted by rows, which is exact for a mean over rows; an integer is summed, as a count over
rows is. The greatest and the least of all rows are those of the workers' ones; of integers that are no counts, such as
a median's or the place of a maximum, NaN says that there is no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from tfnb.cluster.server.parts import mean
from tfnb.graph import Contents, Dim, Node, Value
from tfnb.graph.spec import flows
from tfnb.passes import StepGraph
from tfnb.passes.microbatches import NO_COUNTS

Way = Literal["first", "mean", "sum", "max", "min", "none"] | int  # an int: the axis that rows lie on
EXTREMES: dict[str, Way] = {"max": "max", "amax": "max", "min": "min", "amin": "min"}


def joins(step: StepGraph) -> list[Way]:
    """The way of each fetch of a step."""
    fed = set(step.feeds)
    varying: set[int] = set()
    for node in step.graph.nodes:
        if any(value in fed or value.node in varying for value in node.inputs):
            varying.add(node.id)
    contents = step.whole.contents

    def way(value: Value) -> Way:
        node = contents.by_id[value.node]
        if not node.outputs or (value not in fed and value.node not in varying):
            return "first"
        return _way(contents, node, value, is_fed=value in fed)

    return [way(value) for value in step.fetches]


def _way(contents: Contents, node: Node, value: Value, *, is_fed: bool) -> Way:
    spec, op = node.outputs[value.index], "" if is_fed else node.op.split(".")[1]
    axis = _axis(contents, value)
    if axis is not None:
        return axis
    if op in EXTREMES and value.index == 0 and _axis(contents, node.inputs[0]) is not None:  # of the rows themselves
        return EXTREMES[op]
    if flows(spec.dtype):
        return "mean"
    if spec.dtype is torch.bool:
        return "first"
    return "none" if op in NO_COUNTS else "sum"


def _axis(contents: Contents, value: Value) -> int | None:
    """The first axis whose size varies."""
    shape = contents.by_id[value.node].outputs[value.index].shape
    return next((axis for axis, size in enumerate(shape) if isinstance(size, Dim)), None)


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
    if way == "none":
        return torch.full_like(values[0], torch.nan, dtype=torch.float32)
    axis = way + steps if isinstance(way, int) else None
    if len({tuple(size for at, size in enumerate(value.shape) if at != axis) for value in values}) > 1:
        return None
    if axis is not None:
        return torch.cat(list(values), axis)
    if way == "mean":
        return mean(values, rows)
    return getattr(torch.stack(list(values)), {"max": "amax", "min": "amin"}.get(str(way), "sum"))(0).to(
        values[0].dtype
    )
