"""A step over several tasks, shown before a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfnb.passes import step_graph
from tfnb.passes.flow.reasons import StepParts
from tfnb.passes.flow.step_flow import in_parts
from tfnb.session.structures import FeedKey, Fetches, fed_by, graph_of, structure, value_of, variable_of


def place(fetches: Fetches, feeds: Iterable[FeedKey] | None = None) -> StepParts:
    """The parts of a run of ``fetches``, by the tasks that its nodes request; runs nothing, and needs no cluster.

    fetches: as those of `run`. feeds: what would be fed, placeholders or other tensors (of a dict, its keys); None for
    all placeholders. The result prints a table with a line for each task; a notebook draws it, and each of its
    ``parts`` alone; ``why(node)`` says why a node is done where it is.

    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(2, 3), name="x")
    ...     with tfnb.device("task:0"):
    ...         h = x.exp()
    ...     with tfnb.device("task:1"):
    ...         y = h.sum()
    >>> tfnb.place(y)
    task    nodes  sends  receives  feeds  bytes sent
    task:0      1      1         0      x        12*B
    task:1      1      0         1      -           0
    >>> tfnb.place(y).parts[0]
    task:0: 1 nodes, feeds x
    send h: task:0 -> task:1 (value, 12*B bytes)
    """
    graph = graph_of(fetches)
    leaves: list[Any] = []
    structure(fetches, leaves)
    values = [value_of(graph, leaf) for leaf in leaves if variable_of(graph, leaf) is None]
    keys = graph.placeholders if feeds is None else tuple(feeds)
    fed = dict.fromkeys(value for key in keys for value in fed_by(graph, key))
    return StepParts(graph, in_parts(step_graph(graph, values, tuple(fed))))
