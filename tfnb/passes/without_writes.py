"""A step without its writes: a value behind one is computed of what the Variable holds."""

from __future__ import annotations

from dataclasses import replace

from tfnb.graph import Contents, Node
from tfnb.passes.prune import StepGraph, step_graph


def without_writes(step: StepGraph) -> StepGraph:
    """The step whose assigns are reads; the step itself where it writes nothing.

    Statistics, counts and averages that its values would move stay as they are.
    """
    if not step.writes:
        return step
    nodes = tuple(map(_read, step.whole.nodes))
    return step_graph(step.whole.derive(Contents(nodes, step.whole.contents.guards)), step.fetches, step.feeds)


def _read(node: Node) -> Node:
    if node.op != "tfnb.assign":
        return node
    return replace(node, op="tfnb.read", inputs=(), attrs={"variable": node.attrs["variable"]}, control=(), effects=())
