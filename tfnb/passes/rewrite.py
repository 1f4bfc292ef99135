"""Utilities shared by passes: purity of nodes, redirection of consumers.

A pass is a function ``(graph, fetches, feeds) -> Graph``. Fetched values stay what they are (their memory is the
caller's), and nothing is looked through a fed value. Imports graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from tfnb.graph import Contents, Graph, Node, Value

# A pass: the graph, what is fetched, what is fed.
Pass = Callable[[Graph, Collection[Value], Collection[Value]], Graph]


def is_pure(node: Node) -> bool:
    """Whether the node's outputs are a function of its inputs and attributes alone, and no later pass may care."""
    is_torch_op = node.op.count(".") > 1  # "aten.mm.default"; "tfnb.read" and its kin are ours alone
    return is_torch_op and node.stream is None and "update" not in node.tags


def redirected(node: Node, same: Mapping[Value, Value]) -> Node:
    """The node with each input that ``same`` names replaced."""
    if not any(value in same for value in node.inputs):
        return node
    return replace(node, inputs=tuple(same.get(value, value) for value in node.inputs))


def with_nodes(graph: Graph, nodes: list[Node]) -> Graph:
    """The graph with other nodes; the same object where nothing changed."""
    if len(nodes) == len(graph.nodes) and all(a is b for a, b in zip(nodes, graph.nodes, strict=True)):
        return graph
    return graph.derive(Contents(tuple(nodes), graph.contents.guards))
