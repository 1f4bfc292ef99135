"""Large Variables of which a task needs only rows: the task asks servers for the rows, never for the whole. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tfnb.graph import Graph, Node, Value, Variable
from tfnb.graph.subgraph import uses_queues
from tfnb.passes import prune
from tfnb.placement.shards import LARGE, nbytes

LEAST = 1 << 20  # bytes of a Variable of which rows are asked for: a smaller one is sent whole, with other values.
# One that the step does not write is sent once, and whole up to `LARGE`.
EMBEDDING, SELECT = "aten.embedding.default", "aten.index_select.default"  # of a table, and row numbers


class LookUp(NamedTuple):
    """``value``: rows of ``variable`` in a graph; ``at``: their row numbers, which follow from feeds and draws."""

    value: Value
    at: Value
    variable: Variable


def lookups(
    graph: Graph, outputs: Sequence[Value], feeds: Sequence[Value], *, written: Collection[str] = ()
) -> tuple[LookUp, ...]:
    """The look-ups of a graph whose rows can be fed, so that ``outputs`` need no other part of the looked-up Variables.

    written: keys of the Variables that the step writes.
    """
    found = []
    for node in prune(graph, outputs, feeds).nodes:
        if not _is_gather(graph, node) or Value(node.id) in feeds:
            continue
        table = graph.contents.by_id[node.inputs[0].node]
        if (
            table.op == "tfnb.read"
            and nbytes(variable := table.attrs["variable"]) >= (LEAST if variable.key in written else LARGE)
            and _is_known(graph, node.inputs[1], feeds)
        ):
            found.append(LookUp(Value(node.id), node.inputs[1], variable))
    left = prune(graph, outputs, (*feeds, *(each.value for each in found)))
    whole = {node.attrs["variable"] for node in left.nodes if node.op == "tfnb.read"}
    return tuple(each for each in found if each.variable not in whole)


def _is_gather(graph: Graph, node: Node) -> bool:
    """Whether a node gives rows of its first operand, one for each number in the second."""
    if node.op == SELECT:
        index = node.inputs[1]
        numbers = graph.contents.by_id[index.node].outputs[index.index]
        return node.attrs["dim"] == 0 and len(numbers.shape) == 1
    return node.op == EMBEDDING


def _is_known(graph: Graph, index: Value, feeds: Sequence[Value]) -> bool:
    """Whether a value follows from the feeds and the number of the run, which random numbers depend on."""
    return not any(node.op == "tfnb.read" or uses_queues(node) for node in prune(graph, [index], feeds).nodes)
