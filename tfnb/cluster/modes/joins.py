"""Joining of the workers' values of one fetch into the value of the whole batch, by `tfnb.passes.flow.merges`. Pure.

Rows are put together, along the first axis that varies; what does not depend on the feeds is the first worker's; a
floating value is averaged weighted by rows, which is exact for a mean over rows; an integer is summed, as a count over
rows is. The greatest and the least of all rows are those of the workers' ones; of integers that are no counts, such as
a median's or the place of a maximum, NaN says that there is no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfnb.graph import Value
from tfnb.passes import StepGraph
from tfnb.passes.flow.merges import MERGES, Way, way_of


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
        return way_of(contents, value, is_fed=value in fed)

    return [way(value) for value in step.fetches]


def join(way: Way, values: Sequence[Any], rows: Sequence[int], steps: int = 0) -> Any:
    """The value of the whole batch; None where the workers' values are no parts of one, as their shapes say.

    steps: axes in front of the value's own.

    >>> join("mean", [torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
    tensor(2.)
    >>> join(1, [torch.ones(2, 3), torch.ones(2, 4)], [3, 4]).shape
    torch.Size([2, 7])
    """
    if len(values) == 1 or values[0] is None:
        return values[0]
    axis = way + steps if isinstance(way, int) else None
    is_apart = len({tuple(size for at, size in enumerate(value.shape) if at != axis) for value in values}) > 1
    if is_apart and way not in ("first", "none"):
        return None
    return torch.cat(list(values), axis) if axis is not None else MERGES[str(way)].merge(values, rows)
