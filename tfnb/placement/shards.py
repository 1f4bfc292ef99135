"""The assignment of Variables to servers: pure functions over graphs and sizes.

Variables that one update writes together (a weight and its optimizer slots, an average of it) stay on one shard; groups
go to the emptiest shard in order of first use. Large ones are divided by rows over several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from tfnb.graph import Graph, Variable
from tfnb.graph.colocation_groups import DisjointSets
from tfnb.graph.device_request import parse
from tfnb.passes.resolve import resolve
from tfnb.placement.placement import Homes, Piece, Rows

LARGE = 64 << 20  # bytes of a variable that lies on one shard, at most, where it can be divided
SMALL = 256 << 10  # bytes of a piece, at least, where the number of pieces is "auto"
NONE: Mapping[Variable, int] = MappingProxyType({})
BY_ROWS = frozenset(f"tfnb.{name}.default" for name in ("adagrad", "adam", "rmsprop", "sgd"))
"""Updates whose every row needs the same row of the gradient and of each slot only, and numbers."""


def nbytes(variable: Variable, rows: Rows | None = None) -> int:
    """Bytes of a variable's value, or of some of its rows."""
    whole = math.prod(variable.shape) * variable.dtype.itemsize
    return whole if rows is None else whole // len(variable) * (rows[1] - rows[0])


def together(graph: Graph) -> list[tuple[Variable, ...]]:
    """The variables of a pruned graph in groups that must share a shard, in order of first use.

    Those that one update writes, and those of which one was made in `tfnb.colocate_with` of another.
    """
    state = resolve(graph, ())
    sets = DisjointSets(graph.variables)
    owner: dict[int, Variable] = {}  # node that depends on an update -> a variable that it helps to write
    for variable, value in state.final.items():
        for node_id in state.updated_ancestors(value):
            sets.unite(owner.setdefault(node_id, variable), variable)
    by_key = {variable.key: variable for variable in graph.variables}
    for variable in graph.variables:
        for key in () if variable.request is None else parse(variable.request).keys:
            sets.unite(by_key.get(key, variable), variable)
    groups: dict[Variable, list[Variable]] = {}
    for variable in graph.variables:
        groups.setdefault(sets.root(variable), []).append(variable)
    return [tuple(group) for group in groups.values()]


def pack(
    groups: Iterable[Sequence[Variable]], placed: Homes, loads: Sequence[int], whole: Graph,
    asked: Mapping[Variable, int] = NONE,
) -> Homes:  # fmt: skip
    """Pieces of each variable that is not yet ``placed``; ``loads``: bytes on each shard so far.

    asked: shards on which variables are to lie, whole, the same for all of a group.

    A variable of more than `LARGE` bytes, or one that says so, is divided by rows over several shards, and its slots
    with it, if all updates in ``whole``, the graph that the groups are of, go row by row.
    """
    found: dict[str, tuple[Piece, ...]] = {}
    loads, divisible = list(loads), by_rows(whole)
    for group in groups:
        beside = [placed[variable.key] for variable in group if variable.key in placed]
        held = max(beside, key=lambda pieces: pieces[0].rows is not None, default=None)
        if held is None and group[0] in asked:
            held = (Piece(asked[group[0]], group[0].key),)
        elif held is None:
            held = _chosen(group, loads, divisible.issuperset(group))
        largest = max(group, key=nbytes)
        for variable in group:
            if variable.key not in placed:
                found[variable.key] = _pieces(variable, held, largest.shape)
                for piece in found[variable.key]:
                    loads[piece.shard] += nbytes(variable, piece.rows)
    return found


def _chosen(group: Sequence[Variable], loads: Sequence[int], is_divisible: bool) -> tuple[Piece, ...]:
    """The pieces of a new group's largest Variable: on the emptiest shard, or divided over the emptiest ones."""
    largest = max(group, key=nbytes)
    count, order = 1, sorted(range(len(loads)), key=loads.__getitem__)
    if is_divisible and all(variable.shape in ((), largest.shape) for variable in group):
        declared = (v for v in group if v.shape and (v.partitions is not None or v.partition_bytes is not None))
        count = pieces(next(declared, largest), len(loads))
    if count == 1:
        return (Piece(order[0], largest.key),)
    ends = [len(largest) * i // count for i in range(count + 1)]
    rows = pairwise(ends)
    return tuple(Piece(s, largest.key, r) for s, r in zip(sorted(order[:count]), rows, strict=True))


def pieces(variable: Variable, shards: int) -> int:
    """In how many pieces of rows a variable lies, at most one on each shard."""
    if not variable.shape or not len(variable):
        return 1
    if variable.partitions == "auto":
        wanted = nbytes(variable) // SMALL
    else:
        wanted = int(variable.partitions or -(-nbytes(variable) // (variable.partition_bytes or LARGE)))
    return max(1, min(wanted, shards, len(variable)))


def _pieces(variable: Variable, held: tuple[Piece, ...], shape: Sequence[int]) -> tuple[Piece, ...]:
    """Pieces beside a held Variable: rows beside its rows, a scalar beside each piece, others beside the first."""
    if held[0].rows is None and len(held) == 1:
        return (Piece(held[0].shard, variable.key),)
    if variable.shape == ():
        return tuple(Piece(piece.shard, f"{variable.key}@{piece.shard}") for piece in held)
    if variable.shape == shape and held[-1].rows is not None and held[-1].rows[1] == len(variable):
        return tuple(Piece(piece.shard, f"{variable.key}@{piece.shard}", piece.rows) for piece in held)
    return (Piece(held[0].shard, variable.key),)


def by_rows(graph: Graph) -> set[Variable]:
    """Variables all of whose updates go row by row and take the gradient as it was derived, without clipping or the
    like in between.
    """
    derived: set[int] = set()
    processed: set[int] = set()  # computed from gradients, which the servers do
    undivided: set[Variable] = set()
    for node in graph.nodes:
        if "gradient" in node.tags or any(value.node in derived for value in node.inputs):
            derived.add(node.id)
            if not node.tags & {"gradient", "update"}:
                processed.add(node.id)
        if node.op == "tfnb.assign":
            update = graph.contents.by_id[node.inputs[0].node]
            if update.op not in BY_ROWS or any(value.node in processed for value in update.inputs):
                undivided.add(node.attrs["variable"])
    return set(graph.variables) - undivided
