"""Transpositions that undo one another disappear: (x.T).T -> x."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from tfnb.graph import Contents, Graph, Node, Ref, Value

aten = torch.ops.aten


def drop_double_transposes(graph: Graph, feeds: Iterable[Value] = ()) -> Graph:
    """Consumers of a transposition of a transposition use the original value instead. Nothing is removed here.

    A fed value is what was fed, so nothing is looked through it.
    """
    fed = set(feeds)
    by_id = graph.contents.by_id
    same: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if any(v in same for v in node.inputs):
            node = replace(node, inputs=tuple(same.get(v, v) for v in node.inputs))
        nodes.append(node)
        swapped = _swapped(node)
        source = by_id.get(node.inputs[0].node) if swapped is not None else None
        if source is not None and _swapped(source) == swapped and not fed & {Value(node.id), Value(source.id)}:
            inner = source.inputs[0]
            same[Value(node.id)] = same.get(inner, inner)
    return graph.derive(Contents(tuple(nodes), graph.contents.guards)) if same else graph


def _swapped(node: Node) -> tuple[int, int] | None:
    """The two axes that a node exchanges, or None."""
    if node.op not in ("aten.t.default", "aten.transpose.int") or node.attrs.get("self") != Ref(0):
        return None
    rank = len(node.outputs[0].shape)
    if rank < 2:
        return None
    if node.op == "aten.t.default":
        return 0, 1
    first, second = sorted((node.attrs["dim0"] % rank, node.attrs["dim1"] % rank))
    return first, second
