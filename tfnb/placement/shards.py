"""Which server holds which variable: pure functions over graphs and sizes.

Variables that one update writes together (a weight and its optimizer slots, an average of it) stay on one shard;
groups go to the emptiest shard in order of creation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from tfnb.graph import Graph, Variable
from tfnb.passes.resolve import resolve


def nbytes(variable: Variable) -> int:
    """Bytes of a variable's value."""
    return math.prod(variable.shape) * variable.dtype.itemsize


def together(graph: Graph) -> list[tuple[Variable, ...]]:
    """The variables of a pruned graph in groups that must share a shard, in order of first use."""
    state = resolve(graph, ())
    group: dict[Variable, list[Variable]] = {variable: [variable] for variable in graph.variables}
    owner: dict[int, Variable] = {}  # node that depends on an update -> a variable that it helps to write
    for variable, value in state.final.items():
        for node_id in state.updated_ancestors(value):
            other = owner.setdefault(node_id, variable)
            if group[other] is not group[variable]:
                group[other].extend(group[variable])
                for moved in group[variable]:
                    group[moved] = group[other]
    order = {variable: place for place, variable in enumerate(graph.variables)}
    return [tuple(sorted(found, key=order.__getitem__)) for found in {id(g): g for g in group.values()}.values()]


def pack(groups: Iterable[Sequence[Variable]], placed: Mapping[str, int], loads: Sequence[int]) -> dict[str, int]:
    """Shard of each variable key that is not yet ``placed``; ``loads``: bytes on each shard so far."""
    loads, found = list(loads), {}
    for group in groups:
        new = [variable for variable in group if variable.key not in placed]
        held = [placed[variable.key] for variable in group if variable.key in placed]
        size = sum(map(nbytes, new))
        shard = held[0] if held else min(range(len(loads)), key=loads.__getitem__)
        loads[shard] += size
        found.update({variable.key: shard for variable in new})
    return found
