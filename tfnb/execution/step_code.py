"""The code of one step in this process, a notebook or a task: lowered, compiled and planned at the first run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from tfnb.execution.budgeted import Budget, SizedPlan
from tfnb.execution.dataflow.executor import lowered, needs_dataflow
from tfnb.execution.tiers.gain import ExpectedSteps
from tfnb.execution.tiers.tiered import Mode, Tiers
from tfnb.memory import step_passes
from tfnb.memory.scratch import state_bytes
from tfnb.passes import ONCE, StepGraph
from tfnb.passes.flow.step_flow import CutOptions
from tfnb.passes.rewrite import Pass


class StepCode:
    """The code of one pruned step.

    once: passes that choose kernels. memory_budget: bytes, or None for no limit. parts: of a step in parts those that
    are wanted. ``expected``: the further steps, within which compiling has to pay.
    """

    def __init__(
        self, step: StepGraph, *, executor: str = "auto", compile: Mode = "off", once: Sequence[Pass] = ONCE,
        memory_budget: int | None = None, parts: CutOptions | None = None,
    ) -> None:  # fmt: skip
        self.step, self.is_dataflow, self._parts = step, needs_dataflow(step, executor), parts
        self.expected = ExpectedSteps()
        self._executor, self._compile, self._once, self._memory_budget = executor, compile, once, memory_budget

    @property
    def is_cut(self) -> bool:
        """Whether the step runs in parts, one for each place requested by its nodes."""
        return self._executor == "parts"

    @cached_property
    def whole(self) -> StepCode:
        """The step as generated code, for tracers and checks: values are the same bits. Itself, if it uses queues."""
        if not self.is_dataflow or needs_dataflow(self.step, "auto"):
            return self
        return StepCode(self.step, once=self._once)

    @cached_property
    def program(self) -> Any:
        """The step, lowered: a `Program`, or a `Dataflow`."""
        return lowered(self.step, self._executor, step_passes(self._once), self._parts)

    @cached_property
    def tiers(self) -> Tiers:
        """The tiers of code that may run the step."""
        return Tiers(self.program, "off" if self.is_dataflow else self._compile, self.expected)

    @cached_property
    def budget(self) -> Budget | None:
        """Its programs within the memory budget."""
        if self._memory_budget is None or self.is_dataflow:
            return None
        return Budget(self.program, self._memory_budget, self._once)

    def at(self, shapes: tuple[torch.Size, ...]) -> tuple[Any, Callable[..., Any]]:
        """The program for feeds of these shapes, and its function."""
        if self.budget is None:
            return self.program, self.tiers.forward(shapes)
        found = self.budget.planned(shapes)
        return found.program, self.tiers.forward(shapes) if self._fits(found) else found.forward

    def fits(self, shapes: tuple[torch.Size, ...]) -> bool:
        """Whether a step on feeds of these shapes keeps the memory budget, if need be by computing values again."""
        if self.budget is None:
            return True
        return state_bytes(self.program.graph) < self.budget.budget and self.budget.refusal(shapes) is None

    def _fits(self, found: SizedPlan) -> bool:
        """Whether the step fits its memory budget unchanged, whatever the number of iterations of its loops."""
        return found.program is self.program and not found.plan.decisions and not found.plan.counts_rows

    def code(self, shapes: tuple[torch.Size, ...] | None = None) -> str:
        """The kind of code that runs the step, and why, for feeds of these shapes or of the first run."""
        plans = [] if self.budget is None else [found for _, found in self.budget.plans()]
        is_planned = any(not self._fits(found) for found in plans if shapes in (None, found.shapes))
        return "generated code" if is_planned else self.tiers.code(shapes)

    def status(self) -> list[str]:
        """`code` for each choice of feed sizes, with the memory plan where there is a budget."""
        if self.budget is None:
            return self.tiers.status()
        return [f"{at}: {self.code(found.shapes)}; {found}" for at, found in self.budget.plans()]

    def close(self) -> None:
        """Release the compiler: no caller waits for the code any more."""
        if "tiers" in self.__dict__:
            self.tiers.close()

    @property
    def is_lowered(self) -> bool:
        """Whether the step has run here."""
        return "program" in self.__dict__
