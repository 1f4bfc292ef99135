"""Merging of duplicates (common subexpressions): the same pure op on the same inputs is computed once.

White paper §5.1, semantics S-140. Recomputed nodes are meant to be computed again, and stay.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

import torch

from tfnb.graph import Graph, Node, Ref, Value
from tfnb.graph.ops import REGIONS
from tfnb.passes import region_merging
from tfnb.passes.rewrite import is_pure, redirected, with_nodes


def merge(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
    """Consumers of a node that repeats an earlier one use the earlier one. Nothing is removed here.

    A fetched node stays, and may stand for later ones; a fed one is not looked at.
    """
    fetched, fed = {value.node for value in fetches}, {value.node for value in feeds}
    first: dict[Hashable, Node] = {}
    same: dict[Value, Value] = {}
    nodes: list[Node] = []
    places: dict[Hashable, int] = {}  # of the first loop or branch of each kind
    for node in graph.nodes:
        node = redirected(node, same)
        nodes.append(node)
        if node.op in REGIONS and node.id not in fed:
            place = places.setdefault(region_merging.key(node), len(nodes) - 1)
            if place != len(nodes) - 1 and node.id not in fetched:
                nodes[place], moved = region_merging.both(nodes[place], node)
                same.update({node.value(i): nodes[place].value(j) for i, j in moved.items()})
        if node.id in fed or not is_pure(node) or "recomputed" in node.tags:
            continue
        key = (node.op, node.inputs, node.control, node.device, frozen(node.attrs))
        earlier = first.setdefault(key, node)
        if earlier is not node and node.id not in fetched:
            same.update({node.value(i): earlier.value(i) for i in range(len(node.outputs))})
    return with_nodes(graph, nodes)


_PLAIN = frozenset({int, bool, str, Ref})


def frozen(tree: object) -> Hashable:
    """Nested arguments as a key: numbers with their type (1, 1.0 and True differ), tensors by identity."""
    if type(tree) in _PLAIN:
        return (type(tree).__name__, tree)
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, *map(frozen, tree))
    if isinstance(tree, Mapping):
        return tuple([(name, frozen(item)) for name, item in sorted(tree.items())])
    if isinstance(tree, torch.Tensor):
        return id(tree)
    return (type(tree).__name__, repr(tree) if isinstance(tree, float) else tree)
