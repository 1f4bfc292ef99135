"""What a traced run saw inside of loops and branches: amounts of each node, and the values of single turns in brief.

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
class Seen:
    """A value in brief: ``numbers`` are all that it has, or its least and its greatest, where it has more than `FEW`.

    Of NaN and infinite elements there are counts only. Values without an order (complex, sparse) have no numbers.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    numbers: tuple[float, ...] = ()
    nan: int = 0
    infinite: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the numbers are all of it."""
        return torch.Size(self.shape).numel() <= FEW


def seen(value: torch.Tensor) -> Seen:
    """A value in brief.

    >>> seen(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).numbers, seen(torch.tensor(3)).numbers
    ((1.0, 6.0), (3,))
    """
    dtype, shape = value.dtype, tuple(value.shape)
    if value.layout != torch.strided or value.is_complex() or value.is_quantized or value.device.type == "meta":
        return Seen(dtype, shape)
    if value.is_floating_point() and dtype.itemsize == 1:  # these have next to no kernels
        value = value.float()
    if value.numel() <= FEW:
        return Seen(dtype, shape, tuple(value.flatten().tolist()))
    low, high = (bound.item() for bound in torch.aminmax(value))
    if not value.is_floating_point() or float("-inf") < low <= high < float("inf"):
        return Seen(dtype, shape, (low, high))
    return Seen(dtype, shape, (), int(value.isnan().sum()), int(value.isinf().sum()))


@dataclass(frozen=True, slots=True)
class Note:
    """A node in one turn: when, how long without what ran inside of it, its bytes, and the first of its outputs.

    What goes into a turn took no time: NaN.
    """

    start: float
    seconds: float
    bytes: int
    values: tuple[Seen, ...]


@dataclass(slots=True, eq=False)
class Turn:
    """One turn of a loop, the first is 0; ``around`` is that of the loop around it. ``sides``: which branches took."""

    number: int
    around: Turn | None
    start: float
    end: float = 0.0
    notes: dict[Path, Note] = field(default_factory=dict)
    sides: dict[Path, bool] = field(default_factory=dict)


@dataclass(slots=True)
class Turns:
    """The turns of a loop in one step: how many, in how many runs of it, and those that were kept: every n-th."""

    path: Path
    around: Path | None  # of the loop around it
    kept: list[Turn] = field(default_factory=list)
    every: int = 1
    total: int = 0
    runs: int = 0

    @property
    def depth(self) -> int:
        """How many loops are around a turn's nodes."""
        turn, depth = next(iter(self.kept), None), 0
        while turn is not None:
            turn, depth = turn.around, depth + 1
        return depth

    @property
    def each(self) -> float:
        """Turns kept of a run, about."""
        return len(self.kept) / max(1, len({turn.around for turn in self.kept}))


@dataclass(slots=True)
class Amount:
    """What a node inside took and made in all turns of a step, without what ran inside of it."""

    node: Node
    seconds: float = 0.0
    bytes: int = 0
    calls: int = 0


class KeptTurns:
    """The turns of all loops of a step, of which every n-th is kept where there are too many ``notes``."""

    def __init__(self, most: int) -> None:
        self.most, self.notes = most, 0
        self.loops: dict[Path, Turns] = {}

    def add(self, turns: Turns, turn: Turn, running: Iterable[Turn]) -> None:
        """Keep one that is done, if it is still one of the n-th; ``running`` are the turns around it."""
        if turn.number % turns.every:
            return
        turns.kept.append(turn)
        self.notes += len(turn.notes)
        while self.notes > self.most:
            longest = max(self.loops.values(), key=lambda loop: (loop.each, len(loop.path)))
            if longest.each <= 1:
                return
            longest.every *= 2
            self.settle(running)

    def settle(self, running: Iterable[Turn] = ()) -> None:
        """Leave out what is no n-th turn, and turns within those."""
        stay: set[Turn | None] = {None, *running}
        for turns in self.loops.values():  # a loop comes after the one around it
            turns.kept = [t for t in turns.kept if t.number % turns.every == 0 and t.around in stay]
            stay.update(turns.kept)
        self.notes = sum(len(turn.notes) for turns in self.loops.values() for turn in turns.kept)
