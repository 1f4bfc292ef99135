"""Records from inside loops and branches: amounts of each node, values of iterations.

A place inside is a path: the ids of the loops and branches around a node, from the outside in, then its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tfnb.graph import Node

Path = tuple[int, ...]

FEW = 4  # numbers of a value that are kept as they are
OUTPUTS = 3  # of one node that are looked at


@dataclass(frozen=True, slots=True)
class ValueSummary:
    """A summary of a value: ``numbers`` are all its elements, or minimum and maximum for more than `FEW`.

    Of NaN and infinite elements there are counts only. Values without an order (complex, sparse) have no numbers.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    numbers: tuple[float, ...] = ()
    nan: int = 0
    infinite: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the numbers are all elements."""
        return torch.Size(self.shape).numel() <= FEW


def seen(value: torch.Tensor) -> ValueSummary:
    """A value in brief.

    >>> seen(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).numbers, seen(torch.tensor(3)).numbers
    ((1.0, 6.0), (3,))
    """
    dtype, shape = value.dtype, tuple(value.shape)
    if value.layout != torch.strided or value.is_complex() or value.is_quantized or value.device.type == "meta":
        return ValueSummary(dtype, shape)
    if value.is_floating_point() and dtype.itemsize == 1:  # these have next to no kernels
        value = value.float()
    if value.numel() <= FEW:
        return ValueSummary(dtype, shape, tuple(value.flatten().tolist()))
    low, high = (bound.item() for bound in torch.aminmax(value))
    if not value.is_floating_point() or float("-inf") < low <= high < float("inf"):
        return ValueSummary(dtype, shape, (low, high))
    return ValueSummary(dtype, shape, (), int(value.isnan().sum()), int(value.isinf().sum()))


@dataclass(frozen=True, slots=True)
class NodeNote:
    """A node in one iteration: start, seconds without inner nodes, bytes, summaries of its first outputs.

    The inputs of an iteration took no time: NaN.
    """

    start: float
    seconds: float
    bytes: int
    values: tuple[ValueSummary, ...]


@dataclass(slots=True, eq=False)
class IterationTrace:
    """One iteration of a loop, counted from 0; ``around``: the enclosing loop's iteration; ``sides`` of branches."""

    number: int
    around: IterationTrace | None
    start: float
    end: float = 0.0
    notes: dict[Path, NodeNote] = field(default_factory=dict)
    sides: dict[Path, bool] = field(default_factory=dict)


@dataclass(slots=True)
class LoopTrace:
    """A loop in one step: the numbers of its iterations and runs, and the kept iterations, every n-th."""

    path: Path
    around: Path | None  # of the loop around it
    kept: list[IterationTrace] = field(default_factory=list)
    every: int = 1
    total: int = 0
    runs: int = 0

    @property
    def depth(self) -> int:
        """How many loops are around the nodes of an iteration."""
        iteration, depth = next(iter(self.kept), None), 0
        while iteration is not None:
            iteration, depth = iteration.around, depth + 1
        return depth

    @property
    def each(self) -> float:
        """LoopTrace kept of a run, about."""
        return len(self.kept) / max(1, len({iteration.around for iteration in self.kept}))


@dataclass(slots=True)
class Amount:
    """Total seconds and bytes of an inner node over all iterations of a step, without nested nodes."""

    node: Node
    seconds: float = 0.0
    bytes: int = 0
    calls: int = 0


class LoopTraces:
    """All loops of a step; where there are too many ``notes``, every n-th iteration is kept."""

    def __init__(self, most: int) -> None:
        self.most, self.notes = most, 0
        self.loops: dict[Path, LoopTrace] = {}

    def add(self, loop: LoopTrace, iteration: IterationTrace, running: Iterable[IterationTrace]) -> None:
        """Keep a finished iteration, if still an n-th one; ``running`` are the enclosing iterations."""
        if iteration.number % loop.every:
            return
        loop.kept.append(iteration)
        self.notes += len(iteration.notes)
        while self.notes > self.most:
            longest = max(self.loops.values(), key=lambda each: (each.each, len(each.path)))
            if longest.each <= 1:
                return
            longest.every *= 2
            self.settle(running)

    def settle(self, running: Iterable[IterationTrace] = ()) -> None:
        """Drop iterations that are no n-th ones, with their nested iterations."""
        stay: set[IterationTrace | None] = {None, *running}
        for loop in self.loops.values():  # a loop comes after the one around it
            loop.kept = [one for one in loop.kept if one.number % loop.every == 0 and one.around in stay]
            stay.update(loop.kept)
        self.notes = sum(len(one.notes) for loop in self.loops.values() for one in loop.kept)
