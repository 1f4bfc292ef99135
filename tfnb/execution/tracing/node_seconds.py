"""Seconds of each node of a step, measured here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tfnb.errors import InvalidArgument
from tfnb.execution.lowering.lower import lower_step
from tfnb.execution.tracing.everything import Everything
from tfnb.passes import StepGraph

TURNS = 3


def node_seconds(step: StepGraph, feeds: Sequence[torch.Tensor]) -> dict[int, float]:
    """The least seconds of several turns of each node, by its id, computed one by one in this process by one thread.

    A step that writes is refused with InvalidArgument: it is to be measured, and to leave all as it was.
    """
    if step.writes:
        raise InvalidArgument(f"a step is measured without what it writes, and this one writes {step.writes[0].name}")
    program = lower_step(step, last=())
    found: dict[int, float] = {}
    for _ in range(TURNS):
        tracer = Everything(program)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a task has one, and several that share busy cores wait for each other
        try:
            program.compute(feeds, [variable.storage for variable in program.variables], 0, tracer.forward)
        finally:
            torch.set_num_threads(threads)
        turn: dict[int, float] = {}
        for event in tracer.events:
            if event.node is not None:
                turn[event.node.id] = turn.get(event.node.id, 0.0) + event.seconds
        found = {node: min(seconds, found.get(node, seconds)) for node, seconds in turn.items()}
    return found
