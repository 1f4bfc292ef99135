"""Joining of the workers' values of one fetch into the value of the whole batch, by `tfnb.passes.flow.merges`. Pure.

Rows are put together, along the first axis that varies; what does not depend on the feeds is the first worker's; a
floating value is averaged by its weight, which is exact for a weighted mean or a sum over rows
(`tfnb.passes.flow.row_weights`); an integer is summed, as a count over rows is. The greatest and the least of all rows,
and whether any or all of them are so, are those of the workers' ones; of integers that are no counts, such as a
median's or the place of a maximum, NaN says that there is no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tfnb.graph import Dim, Value
from tfnb.passes.flow.merges import MERGES, ROWS, Way, Weight, number_of, way_of
from tfnb.passes.flow.row_weights import WeighedStep


class Join(NamedTuple):
    """How a fetch is joined. weight: of a mean, whose total lies at a place among the values."""

    way: Way
    weight: Weight = ROWS

    def at(self, places: Sequence[int | None]) -> Join:
        """The same for values at other places, by those of the fetches."""
        found = {at: place for at, place in enumerate(places) if place is not None}
        return self._replace(weight=self.weight.at(found))


def joins(weighed: WeighedStep) -> list[Join]:
    """The join of each fetch of a step, also of the totals behind its own."""
    step = weighed.step
    fed = set(step.feeds)
    shapes = [step.whole.contents.by_id[value.node].outputs[value.index].shape[:1] for value in step.feeds]
    sizes = {symbol for shape in shapes for size in shape if isinstance(size, Dim) for symbol in size.symbols}
    varying: set[int] = set()
    for node in step.graph.nodes:
        if not sizes.isdisjoint(node.symbols) or any(v in fed or v.node in varying for v in node.inputs):
            varying.add(node.id)
    contents, own = step.whole.contents, len(step.fetches) - len(weighed.totals)

    def way(value: Value) -> Way:
        node = contents.by_id[value.node]
        if not node.outputs or (value not in fed and value.node not in varying):
            return "first"
        return way_of(contents, value, is_fed=value in fed)

    at = {total: place for place, total in enumerate(weighed.totals, own)}
    pairs = zip(step.fetches, weighed.of_fetches, strict=False)
    found = [Join(way(value), weight.at(at)) for value, weight in pairs]
    return [*found, *[Join("first")] * len(at)]


def join(how: Join, parts: Sequence[Sequence[Any]], at: int, rows: Sequence[int], steps: int = 0) -> Any:
    """The value of the whole batch at a place; None where the workers' values are no parts of one, as their shapes say.

    parts: the values of each worker. steps: axes in front of the value's own.

    >>> join(Join("mean"), [[torch.tensor(1.0)], [torch.tensor(4.0)]], 0, [2, 1])
    tensor(2.)
    >>> join(Join(1), [[torch.ones(2, 3)], [torch.ones(2, 4)]], 0, [3, 4]).shape
    torch.Size([2, 7])
    >>> join(Join("mean", Weight(1)), [[torch.tensor([1.0]), torch.tensor([9])]] * 2, 0, [2, 1], steps=1)
    tensor([1.])
    """
    values, way = [part[at] for part in parts], how.way
    if way == "first" or len(values) == 1:
        return values[0]
    if any(value is None for value in values):
        return None
    axis = way + steps if isinstance(way, int) else None
    is_apart = len({tuple(size for i, size in enumerate(value.shape) if i != axis) for value in values}) > 1
    if is_apart and way != "none":
        return None
    if axis is not None:
        return torch.cat(list(values), axis)
    if how.weight.total is not None and steps:
        count = range(len(values[0]))
        each = [[[None if value is None else value[i] for value in part] for part in parts] for i in count]
        return torch.stack([join(how, step, at, rows) for step in each])
    numbers = [number_of(how.weight, part, count) for part, count in zip(parts, rows, strict=True)]
    return MERGES[str(way)].merge(values, how.weight.shares(numbers))
