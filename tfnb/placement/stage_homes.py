"""The shard of each Variable of a pipeline whose tasks are parameter servers: that of its stage. Pure.

A Variable that a step writes belongs to the stage that computes its new value; one that the step only reads, to the
first stage that reads it. Optimizer slots lie beside their weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tfnb.graph import Variable
from tfnb.passes import StepGraph
from tfnb.passes.flow.cut import ELSEWHERE
from tfnb.passes.flow.step_flow import CutOptions, StepFlow, in_parts
from tfnb.placement.shards import nbytes


def stage_shards(
    step: StepGraph, groups: Sequence[Sequence[Variable]], tasks: Collection[int] | None = None
) -> dict[Variable, int]:
    """The shard of each Variable of a step in stages; shard k is at task k.

    groups: Variables that lie together, at the stage of the largest one. tasks: the numbers of those there are.
    """
    stage = dict(_stages(in_parts(step, CutOptions(tasks))))
    found: dict[Variable, int] = {}
    for group in groups:
        placed = [variable for variable in group if variable in stage]
        if placed:
            found |= dict.fromkeys(group, stage[max(placed, key=nbytes)])
    return found


def _stages(step: StepFlow) -> Iterator[tuple[Variable, int]]:
    """The stage of each Variable; what is yielded later counts."""
    for part in sorted(step.parts, key=lambda part: part.place, reverse=True):
        for op in part.flow.ops:
            if op.kind != ELSEWHERE and op.node is not None and op.node.op == "tfnb.read":
                yield op.node.attrs["variable"], part.place.number
    written = dict(enumerate(step.written, len(step.ends) - len(step.written)))
    for part in step.parts:
        yield from ((written[end], part.place.number) for end in part.ends if end in written)


def moves(wanted: Mapping[Variable, int], lies: Mapping[str, Collection[int]]) -> list[Variable]:
    """The Variables that do not lie whole at their stage. lies: the shards of the pieces of each, by its key.

    >>> moves({}, {"w": [0]})
    []
    """
    return [variable for variable, shard in wanted.items() if lies.get(variable.key, [shard]) != [shard]]
