"""In-place writes in a loop's body: carried values used by the body alone, and not read after the write.

A body that puts one row into a carried tensor would copy it in every iteration. Where all that follows from the carried
value is its next one, through ops of `writer_of`, the loop makes a copy once, before the first iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tfnb.graph import Contents, Graph, Node, Value
from tfnb.graph.op_facts import facts_of, written_in_place
from tfnb.kernels.arrays import write_into
from tfnb.passes.rewrite import with_nodes

aten = torch.ops.aten


def writer_of(op: str) -> tuple[Callable[..., Any], int] | None:
    """Of an op that returns its first inputs with something written into them: its twin that writes, and how many."""
    if op == "tfnb.array_write.default":
        return write_into, 2
    return (written_in_place(op), 1) if facts_of(op).writes_rows else None


def _count(node: Node) -> int:
    found = writer_of(node.op)
    return found[1] if found else 0


@dataclass(frozen=True, slots=True)
class InPlace:
    """Nodes that write in place, and places among the carried values that are written."""

    nodes: frozenset[int]
    places: tuple[int, ...]


NOTHING = InPlace(frozenset(), ())


def writes_last(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Move each in-place candidate behind the readers of its target, if its own users allow the move.

    A pass that comes before `donate`, for which the order is final.
    """
    contents, nodes = graph.contents, list(graph.nodes)
    for writer in [node for node in nodes if _count(node)]:
        own = {user for i in range(len(writer.outputs)) for user in contents.consumers.get(writer.value(i), ())}
        values = writer.inputs[: _count(writer)]
        readers = {user for value in values for user in contents.consumers.get(value, ())} - {writer.id}
        here = nodes.index(writer)
        last = max((i for i, node in enumerate(nodes) if node.id in readers), default=here)
        if here < last and not any(node.id in own or writer.id in node.control for node in nodes[here : last + 1]):
            nodes.insert(last, nodes.pop(here))
    return with_nodes(graph, nodes)


def in_place(body: Contents, inputs: Sequence[Value], outputs: Sequence[Value | None]) -> InPlace:
    """The writes that may go in place; inputs: the carried values, outputs: of the body, the next carried
    values first.
    """
    chains = {place: _chain(body, value, outputs, place) for place, value in enumerate(inputs)}
    found = {place: chain for place, chain in chains.items() if chain}
    while True:  # a write changes all of its first inputs, or none
        writes = {(node.id, index) for chain in found.values() for node, index in chain}
        whole = {
            place: chain
            for place, chain in found.items()
            if all((node.id, index) in writes for node, _ in chain for index in range(_count(node)))
        }
        if len(whole) == len(found):
            return InPlace(frozenset(node for node, _ in writes), tuple(found))
        found = whole


def _chain(
    body: Contents, value: Value, outputs: Sequence[Value | None], place: int
) -> list[tuple[Node, int]]:  # fmt: skip
    """The writes from a carried value to the next one, each with its output index; none if other ops intervene."""
    found: list[tuple[Node, int]] = []
    while value != outputs[place]:
        users = [body.by_id[i] for i in body.consumers.get(value, ())]
        writers = [(node, index) for node in users if (index := _written(node, value)) is not None]
        if len(writers) != 1 or value in outputs:
            return []
        ((node, index),) = writers
        if any(other is not node and not _reads(other, body, before=node) for other in users):
            return []
        if node.inputs.count(value) > 1:
            return []
        found.append((node, index))
        value = node.value(index)
    left = [body.by_id[i] for i in body.consumers.get(value, ())]
    is_last = outputs.count(value) == 1 and all(_reads(node, body) for node in left)
    return found if is_last else []


def _written(node: Node, value: Value) -> int | None:
    """Index of a value among the inputs that the node writes; None if absent."""
    return next((i for i in range(_count(node)) if node.inputs[i] == value), None)


def _reads(node: Node, body: Contents, before: Node | None = None) -> bool:
    """Whether the node takes nothing but numbers from its inputs, and that in time."""
    if node.op.count(".") < 2 or facts_of(node.op).shares_memory:
        return False
    return before is None or body.position[node.id] < body.position[before.id]
