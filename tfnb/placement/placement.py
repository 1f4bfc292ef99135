"""The placement of a step: node -> places, variable -> pieces on shards, edge -> transfer. Data only.

It is decided once, in `tfnb.placement.partition` and `tfnb.placement.shards`; plans, holdings and driver read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from tfnb.graph import Value
from tfnb.passes.flow.merges import ROWS, Weight
from tfnb.passes.flow.places import Place

Kind = Literal["grad", "rows", "entries", "mean", "sum", "value", "weight", "any"]
Rows = tuple[int, int]


def server(shard: int) -> Place:
    """The server of a shard, as a place where nodes run.

    >>> str(server(1))
    'ps:1'
    """
    return Place(shard, "ps")


class Piece(NamedTuple):
    """A Variable, or its rows ``start`` to ``stop``, on a shard, stored there under ``key``."""

    shard: int
    key: str
    rows: Rows | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The piece of a value, a view."""
        return whole if self.rows is None else whole[slice(*self.rows)]


Homes = Mapping[str, tuple[Piece, ...]]
"""Pieces of each Variable, by its key: one, or ranges of rows in order. Of a number, each may be a whole copy."""


def read_from(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The pieces that make the value: the first of several copies, else all.

    >>> read_from((Piece(0, "n@0"), Piece(1, "n@1")))
    (Piece(shard=0, key='n@0', rows=None),)
    """
    return pieces[:1] if pieces[0].rows is None else pieces


def joined(pieces: tuple[Piece, ...], values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The value of a Variable from the values of its pieces, by their keys; a single piece is not copied."""
    found = [values[piece.key] for piece in read_from(pieces)]
    return found[0] if len(found) == 1 else torch.cat(found)


class Transfer(NamedTuple):
    """A value sent to a server at the end of a step. ``rows``: the rows of the server's piece; None: the whole value.

    ``kind``: the merge of the values of several tasks. ``variable``: the name of the first Variable that changes by it.
    ``weight``: of a mean; its total is sent to the same server. ``is_gradient``: whether it is one, and no new value of
    a Variable that was made of gradients.
    """

    value: Value
    shard: int
    kind: Kind
    rows: Rows | None = None
    variable: str = ""
    weight: Weight = ROWS
    is_gradient: bool = False


@dataclass(frozen=True)
class Placement:
    """The placement of one step.

    ``places``: by a node's id, the places where the node runs. ``writes``: shards that the step writes,
    ``changed``: keys of the Variables that the step writes. ``tasks``: numbers of the tasks that the graph asks for,
    empty if any will do. ``apart``: names of Variables whose new value is made of what the first task has of its rows;
    ``joined``: of sums or means over rows, of all tasks; ``shown``: of these whose new value a task would have to
    fetch; ``raced``: names of Variables whose new value a task computes from a possibly outdated read. ``free``: keys
    of Variables whose updates, all within `tfnb.unordered`, servers add to the value of the moment.
    """

    places: Mapping[int, tuple[Place, ...]]
    homes: Homes
    transfers: tuple[Transfer, ...]
    writes: tuple[int, ...]
    tasks: tuple[int, ...] = ()
    changed: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    raced: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
