"""Programs of one signature within a memory budget: one plan for each choice of feed sizes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tfnb.errors import ResourceExhausted
from tfnb.execution.lowering.lower import lower
from tfnb.execution.lowering.program import Program
from tfnb.kernels import memory_budget
from tfnb.kernels.memory_budget import OffloadCounts
from tfnb.kernels.spill_file import SpillFile
from tfnb.memory import MemoryPlan, memory_plan, step_passes, within, working
from tfnb.passes import ONCE, feed_symbols
from tfnb.passes.rewrite import Pass

Sizes = tuple[torch.Size, ...]


@dataclass(slots=True, eq=False)
class SizedPlan:
    """A plan for one choice of feed sizes: the program, its memory plan, and the row statistics of the last run."""

    shapes: Sizes
    program: Program
    plan: MemoryPlan
    spill: SpillFile
    offloaded: OffloadCounts | None = None

    def __str__(self) -> str:
        state = f", {self.plan.state:,} of them Variables" if self.plan.state else ""
        text = f"at most {self.plan.peak:,} bytes{state}, {len(self.plan.values)} nodes again"
        kept = self.offloaded
        if kept is not None and kept.saved:
            text += (
                f"; beside that loops kept {kept.saved:,} bytes, at most {kept.most:,} here, {kept.out:,} moved out, "
                f"{kept.again:,} computed again"
            )
        return "; ".join([text, *map(str, self.plan.loops)])

    def forward(self, *args: object) -> tuple[Any, ...]:
        """Run the program's code; its loops share the memory left by the plan."""
        again = {found.node.id: found.held for found in self.plan.loops if found.fate == "is computed again"}
        with memory_budget.within(self.plan.left, self.spill, again) as found:
            try:
                return self.program.forward(*args)
            finally:
                self.offloaded = found.counts


class Budget:
    """The programs of one signature that hold at most ``budget`` bytes beside feeds and constants."""

    def __init__(self, program: Program, budget: int, once: Sequence[Pass] = ONCE) -> None:
        self.first, self.budget, self.once = program, budget, once
        self._found: dict[Sizes, SizedPlan] = {}
        self._refused: dict[Sizes, ResourceExhausted] = {}
        self.last: SizedPlan | None = None  # of the step that ran last
        self._spill = SpillFile()
        self._lock = threading.Lock()

    def planned(self, shapes: Sizes) -> SizedPlan:
        """The program for feeds of these shapes; raises ResourceExhausted with the smallest budget that is feasible."""
        found = self._found.get(shapes)
        if found is None:
            with self._lock:
                found = self._found[shapes] = self._planned(shapes)
        self.last = found
        return found

    def refusal(self, shapes: Sizes) -> ResourceExhausted | None:
        """The error of feeds of these shapes; None if a step on them keeps the budget."""
        if shapes not in self._found and shapes not in self._refused:
            try:
                self.planned(shapes)
            except ResourceExhausted as error:
                self._refused[shapes] = error.with_traceback(None)
        return self._refused.get(shapes)

    def plans(self) -> Iterator[tuple[str, SizedPlan]]:
        """The plans made so far, with names and shapes of the feeds."""
        names = [self.first.whole.contents.by_id[value.node].name for value in self.first.feeds]
        for shapes, found in tuple(self._found.items()):
            yield ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True)), found

    def _planned(self, shapes: Sizes) -> SizedPlan:
        """Reuse a program that fits the budget at these sizes, or lower another one."""
        first = self.first
        bound = feed_symbols(first.whole.contents, first.feeds)
        sizes = {name: shapes[first.feeds.index(value)][axis] for name, (value, axis) in bound.items()}
        for program in dict.fromkeys((first, *(found.program for found in self._found.values()))):
            found = self._measured(program, shapes, sizes)
            if found.plan.left >= working(program.graph, program.fetches, sizes):
                return found
        last = step_passes(self.once, within(self.budget, sizes))
        return self._measured(lower(first.whole, first.fetches, first.feeds, last), shapes, sizes)

    def _measured(self, program: Program, shapes: Sizes, sizes: Mapping[str, int]) -> SizedPlan:
        plan = memory_plan(program.graph, program.fetches, program.feeds, sizes, self.budget, program.whole)
        return SizedPlan(shapes, program, plan, self._spill)
