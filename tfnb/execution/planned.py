"""Programs of one signature within a memory budget, planned for the sizes of the feeds, which decide what fits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tfnb.execution.lower import Program, lower
from tfnb.passes import LAST, donate, feed_symbols, peak
from tfnb.passes.budget import AGAIN, within
from tfnb.passes.rewrite import Pass

Sizes = tuple[torch.Size, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """One choice of feed sizes: what runs, the most bytes that it holds as predicted, nodes that run a second time."""

    program: Program
    peak: int
    again: int


class Budget:
    """The programs of one signature that hold at most ``budget`` bytes beside feeds, constants and Variables."""

    def __init__(self, program: Program, budget: int, last: Sequence[Pass] = LAST) -> None:
        self.first, self.budget, self.last = program, budget, last
        self._found: dict[Sizes, Planned] = {}
        self._lock = threading.Lock()

    def program(self, feeds: Sequence[torch.Tensor]) -> Program:
        """The program for these feeds; raises ResourceExhausted with the smallest budget that is feasible."""
        key = tuple([feed.shape for feed in feeds])
        found = self._found.get(key)
        if found is None:
            with self._lock:
                found = self._found[key] = self._planned(key)
        return found.program

    def plans(self) -> Iterator[tuple[str, Planned]]:
        """What was planned so far, with names and shapes of the feeds."""
        names = [self.first.whole.contents.by_id[value.node].name for value in self.first.feeds]
        for shapes, found in tuple(self._found.items()):
            yield ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True)), found

    def _planned(self, shapes: Sizes) -> Planned:
        """A program that is there already, if it fits for these sizes too, else one more."""
        first = self.first
        bound = feed_symbols(first.whole.contents, first.feeds)
        sizes = {name: shapes[first.feeds.index(value)][axis] for name, (value, axis) in bound.items()}
        for program in dict.fromkeys((first, *(plan.program for plan in self._found.values()))):
            most = peak(program.graph, first.fetches, first.feeds, sizes)
            if most <= self.budget:
                return Planned(program, most, _again(program))
        last = (*(run for run in self.last if run is not donate), within(self.budget, sizes), donate)
        program = lower(first.whole, first.fetches, first.feeds, last)
        return Planned(program, peak(program.graph, first.fetches, first.feeds, sizes), _again(program))


def _again(program: Program) -> int:
    recorded = program.whole.contents.by_id
    return sum(AGAIN in node.tags and node.id not in recorded for node in program.graph.nodes)
