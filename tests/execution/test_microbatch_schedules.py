"""Stages of a pipeline on a virtual clock: the parts of a real step, each with a machine and a lane of its own.

Only time is made up: what a region takes. The machines, their windows and the order of what is ready are the real ones,
and so are the values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tfnb
from tfnb.execution.dataflow.executor import Dataflow, Here
from tfnb.execution.dataflow.machine import Machine, Task
from tfnb.execution.dataflow.pool import Lanes
from tfnb.execution.dataflow.templates import MachinePlan, Planner
from tfnb.execution.lowering.program import Program
from tfnb.passes import step_graph
from tfnb.passes.flow.microbatch_schedules import SCHEDULES, window
from tfnb.passes.flow.step_flow import StepFlow, in_parts
from tfnb.passes.microbatches import in_microbatches
from tfnb.placement.row_guards import NO_GUARDS
from tfnb.session.divided_feeds import DividedFeeder
from tfnb.session.feeding import Feeder

MOST = 8


class Region:
    """A region of a stage, and which pass it is of: "forward", "backward", or "" for what takes no time."""

    def __init__(self, program: Program) -> None:
        ops = {node.op for node in program.graph.nodes}
        self.call = program.forward
        self.kind = {"aten.tanh.default": "forward", "aten.tanh_backward.default": "backward"}.get(
            next((op for op in sorted(ops) if "tanh" in op), ""), ""
        )

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


@lru_cache
def planned(stages: int, schedule: str) -> tuple[StepFlow, list[MachinePlan], DividedFeeder, Dataflow]:
    """A chain of so many stages: a layer each, and plans of its parts for at most MOST microbatches."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(stages)]
    with tfnb.record() as graph:
        x = h = tfnb.placeholder(torch.ones(2, 3, dtype=torch.float64), name="x")
        for stage, weight in enumerate(weights):
            with tfnb.device(f"task:{stage}"):
                h = torch.tanh(h * weight)
        train = tfnb.train.SGD(0.1).minimize(h.square().mean())
    made = in_microbatches(step_graph(graph, [train.value], [x.value]), MOST, schedule)
    found, by_id = in_parts(made.step), made.step.whole.contents.by_id
    plans = [
        Planner(part, lambda v: by_id[v.node].outputs[v.index], 0, found.updates, Region).plan(found.feeds)
        for part in found.parts
    ]
    feeder = Feeder(graph, [(x, (x.value,))])
    return found, plans, DividedFeeder(feeder, NO_GUARDS, made.divided, MOST), Dataflow(found)


class Stage:
    """A task of a pipeline: its machine, and when it is free again."""

    def __init__(self, pipeline: Pipeline, number: int, plan: MachinePlan) -> None:
        self.inbox: deque[tuple[Any, ...]] = deque()
        self.machine = Machine([plan.root], len(pipeline.found.ends), None, pipeline.peers, self._arrived)
        self.lanes, self.number, self.pipeline = Lanes(SimpleQueue()), number, pipeline
        self.running: Task | None = None
        self.until = Fraction(0)
        self.held = self.most = 0  # microbatches whose activations it holds
        self.order: list[tuple[str, int]] = []

    def _arrived(self, task: Any, value: Any, dead: Any) -> None:
        self.inbox.append((task, value, dead))

    def advance(self, now: Fraction) -> bool:
        """Do what there is to do now; whether there was something."""
        if self.running is not None:
            if self.until > now:
                return False
            task, self.running = self.running, None
            self.machine.finish(task, task.step.call(*task.args))
            self.held -= kind_of(task) == "backward"
        elif not self.inbox and not self.machine.ready and not self.machine.tasks and not self.lanes.waiting:
            return False
        while self.inbox:
            self.machine.came(*self.inbox.popleft())
        self.machine.run()
        for task in self.machine.tasks:
            self.lanes.add(task)
        self.machine.tasks.clear()
        if (task := self.lanes.own()) is not None:
            kind = kind_of(task)
            self.running, self.until = task, now + self.pipeline.seconds(self.number, kind)
            self.held += kind == "forward"
            self.most = max(self.most, self.held)
            if kind:
                self.order.append((kind, task.iteration.number))
        return True


def kind_of(task: Task) -> str:
    call: Any = task.step.call
    while not isinstance(call, Region):  # what tells that nodes are done is around it
        call = call.__closure__[0].cell_contents
    return call.kind


class Pipeline:
    """A step over microbatches, run on a virtual clock. seconds: of a pass of one microbatch at a stage."""

    def __init__(self, stages: int, schedule: str, microbatches: int, seconds: Callable[[int, str], Fraction]) -> None:
        self.found, plans, feeder, code = planned(stages, schedule)
        self.seconds, self.peers = seconds, Here()
        fed = feeder.fed([torch.linspace(-1, 1, microbatches * 3, dtype=torch.float64).reshape(microbatches, 3)])[0]
        stored = {variable: variable.storage for variable in code.variables}
        self.stages = [Stage(self, number, plan) for number, plan in enumerate(plans)]
        for stage, plan in zip(self.stages, plans, strict=True):
            stage.machine.feed(Dataflow._start(plan, fed, stored, 0))
        self.makespan = self._run()
        assert all(stage.machine.is_over for stage in self.stages) and self.peers.is_empty

    def _run(self) -> Fraction:
        now = Fraction(0)
        while True:
            while any([stage.advance(now) for stage in self.stages]):
                pass
            ahead = [stage.until for stage in self.stages if stage.running is not None]
            if not ahead:
                return now
            now = min(ahead)


def equal(stage: int, kind: str) -> Fraction:
    return Fraction({"forward": 1, "backward": 2, "": 0}[kind])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", range(2, 9))
def test_the_bubble_and_the_microbatches_in_flight_are_those_of_the_papers(stages: int, schedule: str) -> None:
    for microbatches in range(1, MOST + 1):
        run = Pipeline(stages, schedule, microbatches, equal)
        bubble = 1 - Fraction(3 * microbatches) / run.makespan
        assert bubble == Fraction(stages - 1, microbatches + stages - 1)
        wanted = [min(microbatches, window(schedule, stage, stages, microbatches)) for stage in range(stages)]
        assert [stage.most for stage in run.stages] == wanted
        if schedule == "gpipe":
            assert all(
                [kind for kind, _ in stage.order] == ["forward"] * microbatches + ["backward"] * microbatches
                for stage in run.stages
            )


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, MOST), st.lists(st.integers(0, 9), min_size=8, max_size=8))
def test_uneven_stages_end_and_hold_no_more_than_their_window(
    schedule: str, microbatches: int, took: list[int]
) -> None:
    """Four stages, each with its own times of both passes; that each machine is over is looked at by the pipeline."""

    def seconds(stage: int, kind: str) -> Fraction:
        return Fraction(took[2 * stage + (kind == "backward")] if kind else 0)

    run = Pipeline(4, schedule, microbatches, seconds)
    for number, stage in enumerate(run.stages):
        assert stage.most <= window(schedule, number, 4, microbatches)
        assert sorted(stage.order) == sorted(
            (kind, at) for kind in ("forward", "backward") for at in range(microbatches)
        )
    slowest = max(took[2 * stage] + took[2 * stage + 1] for stage in range(4))
    assert slowest * microbatches <= run.makespan <= microbatches * sum(took)
