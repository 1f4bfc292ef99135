"""Cells that run again: the change of each in its graph, and later cells that lost nodes.

A recorded cell is kept as a program with its options, so that it can be recorded once more where it lost nodes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tfnb
from tfnb.magics.cell import CellProgram

FEW = 4  # names of one kind that a line tells
_MADE = ("tfnb.read", "tfnb.assign", "tfnb.constant")


@dataclass(frozen=True, slots=True)
class RecordedCell:
    """A cell's compiled body, the options of its magic, and its owner in the graph."""

    program: CellProgram
    options: Namespace
    owner: str


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes that are new, gone and changed since the cell ran before; names that other cells lost, by their owner."""

    added: tuple[Any, ...] = ()
    removed: tuple[Any, ...] = ()
    changed: tuple[Any, ...] = ()
    lost: dict[str, list[Any]] = field(default_factory=dict)
    moved: frozenset[str] = frozenset()  # names of other nodes than before: their nodes are told with the op

    @property
    def badges(self) -> dict[int, str]:
        """The marks of a drawing."""
        return {n.id: mark for mark in ("added", "changed") for n in getattr(self, mark)}

    def lines(self) -> Iterator[str]:
        """The report: a line for the cell, and a line for each cell that lost nodes."""
        parts = {word: getattr(self, word) for word in ("added", "removed", "changed")}
        if any(parts.values()):
            moved = {"added": self.moved, "removed": self.moved, "changed": frozenset[str]()}
            told = (f"{len(n)} {word} ({_names(n, moved[word])})" for word, n in parts.items() if n)
            yield f"since its last run: {', '.join(told)}"
        for nodes in self.lost.values():
            label = nodes[0].source.label if nodes[0].source else "a cell"
            yield f"{label} lost {_names(nodes)}: run it again, or %tfgraph refresh"


def change(before: Any, graph: tfnb.Graph, owner: str) -> Change:
    """Between the contents of a graph before a cell of this owner ran, None where there was none, and now."""
    if before is None:
        return Change()
    lost: dict[str, list[Any]] = {}
    for node in before.nodes:
        if node.id not in graph.contents.by_id and node.owner is not None and node.owner.key != owner:
            lost.setdefault(node.owner.key, []).append(node)
    if not any(node.owner is not None and node.owner.key == owner for node in before.nodes):
        return Change(lost=lost)  # its first run
    found = graph.since(before)

    def own(nodes: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(node for node in nodes if node.owner is not None and node.owner.key == owner)

    moved = frozenset(before.by_name.keys() & graph.contents.by_name.keys())
    return Change(own(found.added), own(found.removed), own(found.changed), lost, moved)


def _names(nodes: Iterable[Any], moved: Collection[str] = ()) -> str:
    """Names given by the user first, then generated ones: slots and updates of optimizers, parts of calls."""
    made = [("/" in node.name or node.op in _MADE, node) for node in nodes]
    ordered = [node for _, node in sorted(made, key=lambda each: each[0])]
    names = [f"{n.name}: {n.op.split('.')[1]}" if n.name in moved else n.name for n in ordered]
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more


class Cells:
    """The recorded cells, by graph and owner, and the cells that lost nodes since."""

    def __init__(self) -> None:
        self._recorded: dict[tuple[str, str], RecordedCell] = {}
        self._stale: dict[tuple[str, str], None] = {}

    def ran(self, graph: tfnb.Graph, cell: RecordedCell, found: Change) -> None:
        """A cell was recorded."""
        key = graph.name, cell.owner
        self._recorded[key] = cell
        self._stale |= dict.fromkeys((graph.name, owner) for owner in found.lost)
        self._stale.pop(key, None)

    def stale(self, graph: tfnb.Graph) -> list[RecordedCell]:
        """The cells of a graph that lost nodes or read changed Python state, in the order of their first runs."""
        order = {owner: place for place, owner in enumerate(graph.owners)}
        changed = {(graph.name, owner) for owner in tfnb.recording.stale_owners(graph.attached)}
        found = changed | {key for key in self._stale if key[0] == graph.name}
        keys = sorted(found, key=lambda key: order.get(key[1], 0))
        return [self._recorded[key] for key in keys if key in self._recorded]
