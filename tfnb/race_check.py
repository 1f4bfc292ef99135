"""races: accesses to Variables that nothing orders, in one step or between steps that run at the same time."""

from __future__ import annotations

from typing import Any

from tfnb.graph import Graph
from tfnb.passes import prune
from tfnb.passes.unordered import Race
from tfnb.passes.unordered import races as found_in
from tfnb.session.structures import graph_of, structure, value_of, variable_of


def races(*steps: object) -> list[Race]:
    """Pairs of accesses to one Variable, at least one a write, that may happen in any order; each names both lines.

    steps: what is fetched by each of the steps that run at the same time, as often as it does; a Graph stands for one
    step of all its nodes. Without `tfnb.unordered` there are none: a step keeps the order of the program, and steps
    take turns on what they write.

    >>> import torch, tfnb
    >>> w = tfnb.Variable(torch.zeros(2), name="w")
    >>> with tfnb.record():
    ...     with tfnb.unordered():
    ...         more = w.assign_add(torch.ones(2))
    ...     free, kept = more.sum(), w.read() * 2
    >>> [(race.variable.name, race.first.op, race.second.op) for race in tfnb.races(free, kept)]
    [('w', 'tfnb.assign', 'tfnb.read')]
    >>> tfnb.races(kept, kept)
    []
    """
    return found_in([_pruned(step) for step in steps])


def _pruned(step: object) -> Graph:
    if isinstance(step, Graph):
        return step
    graph, leaves = graph_of(step), list[Any]()
    structure(step, leaves)
    values = [value_of(graph, leaf) for leaf in leaves if variable_of(graph, leaf) is None]
    return prune(graph, values, ())
