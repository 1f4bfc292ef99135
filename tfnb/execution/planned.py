"""Programs of one signature within a memory budget, planned for the sizes of the feeds, which decide what fits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tfnb.execution.lowering.lower import lower
from tfnb.execution.lowering.program import Program
from tfnb.kernels import room
from tfnb.kernels.room import Swapped
from tfnb.kernels.tier import Tier
from tfnb.passes import LAST, Memory, donate, feed_symbols
from tfnb.passes.budget import AGAIN, counted, within
from tfnb.passes.leaving import Choice, choices
from tfnb.passes.rewrite import Pass
from tfnb.passes.saved import working

Sizes = tuple[torch.Size, ...]


@dataclass(slots=True, eq=False)
class Planned:
    """One choice of feed sizes: what runs, the most bytes that it holds as predicted, nodes that run a second time.

    The peak is without rows that loops keep and whose bytes the run counts: ``room`` is what is left for those,
    ``choices`` what happens to rows that do not fit, and ``swapped`` what the last run did with them.
    """

    program: Program
    peak: int
    again: int
    room: int
    tier: Tier
    choices: tuple[Choice, ...] = ()
    swapped: Swapped | None = None

    def __str__(self) -> str:
        text, kept = f"at most {self.peak:,} bytes, {self.again} nodes again", self.swapped
        if kept is not None and kept.saved:
            text += (
                f"; beside that loops kept {kept.saved:,} bytes, at most {kept.most:,} here, {kept.out:,} moved out, "
                f"{kept.again:,} computed again"
            )
        return "; ".join([text, *map(str, self.choices)])

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """The program's code, within the room."""
        again = {choice.saved.node.id: choice.held for choice in self.choices if choice.again}
        with room.within(self.room, self.tier, again) as found:
            try:
                return self.program.forward(*args)
            finally:
                self.swapped = found.counts


class Budget:
    """The programs of one signature that hold at most ``budget`` bytes beside feeds, constants and Variables."""

    def __init__(self, program: Program, budget: int, last: Sequence[Pass] = LAST) -> None:
        self.first, self.budget, self.last = program, budget, last
        self._found: dict[Sizes, Planned] = {}
        self._tier = Tier()
        self._lock = threading.Lock()

    def planned(self, shapes: Sizes) -> Planned:
        """The program for feeds of these shapes; raises ResourceExhausted with the smallest budget that is feasible."""
        found = self._found.get(shapes)
        if found is None:
            with self._lock:
                found = self._found[shapes] = self._planned(shapes)
        return found

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
            found = self._measured(program, sizes)
            if found.room >= working(program.graph, program.fetches, sizes):
                return found
        last = (*(run for run in self.last if run is not donate), within(self.budget, sizes), donate)
        return self._measured(lower(first.whole, first.fetches, first.feeds, last), sizes)

    def _measured(self, program: Program, sizes: Mapping[str, int]) -> Planned:
        fetches = (*program.fetches, *(() if program.stale is None else program.stale.operands))
        aside = counted(program.graph, fetches, sizes)
        memory = Memory(program.graph, program.fetches, program.feeds, sizes, aside)
        recorded, most = program.whole.contents.by_id, memory.peak()
        again = sum(AGAIN in node.tags and node.id not in recorded for node in program.graph.nodes)
        chosen = tuple(choices(program.graph, fetches, memory, sizes))
        return Planned(program, most, again, self.budget - most, self._tier, chosen)
