"""Schedules of a loop over microbatches that is cut into stages, one for each place (GPipe, PipeDream). Pure.

A stage begins at most ``window`` microbatches before the first of them is over there, and so holds the activations of
no more. Of the regions that are ready it runs the one with the least key (`Step.phase`, then the microbatch) first:
``"1f1b"`` takes the least microbatch, ``"gpipe"`` forward before backward. A microbatch needs nothing of later ones, so
what a window holds back never holds back the oldest one: no schedule deadlocks, however uneven the stages are.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfnb.graph import Node
from tfnb.passes.flow import frames
from tfnb.passes.flow.frames import Flow
from tfnb.passes.flow.places import Home, Place

SCHEDULES = ("1f1b", "gpipe")


def window(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """How many microbatches a stage works on at once.

    >>> [window("1f1b", stage, 3, 8) for stage in range(3)], window("gpipe", 1, 3, 8)
    ([3, 2, 1], 8)
    """
    return microbatches if schedule == "gpipe" else min(microbatches, stages - stage)


def phase(schedule: str, *, is_backward: bool) -> int:
    """The priority of a ready step: lower numbers come first, then the lower number of the microbatch.

    >>> phase("gpipe", is_backward=True), phase("1f1b", is_backward=True)
    (1, 0)
    """
    return int(schedule == "gpipe" and is_backward)


def is_backward(node: Node) -> bool:
    """Whether a node is of the gradients of a step."""
    return "gradient" in node.tags


def stages(flow: Flow, homes: Sequence[Home], frame: int) -> tuple[Place, ...]:
    """The places of a loop's forward nodes, in the order of the values that pass through the places.

    A place comes behind the places that its values have crossed; among equals the place that is used first is first.
    """
    crossed: dict[int, int] = {}  # by op, how often the values that lead to it went to another place
    depth: dict[Place, int] = {}
    for number, op in enumerate(flow.ops):
        place, node = homes[number].place, op.node
        if op.frame != frame or op.kind != frames.NODE or place is None or node is None or is_backward(node):
            continue
        before = [(crossed[port.op], homes[port.op].place) for port in op.inputs if port.op in crossed]
        crossed[number] = max((count + (other != place) for count, other in before), default=0)
        depth[place] = max(depth.get(place, 0), crossed[number])
    return tuple(sorted(depth, key=lambda place: depth[place]))
