"""The graph: nodes, specs, variables, contents, text, files, checker."""

from tfnb.graph.contents import Contents, Guard
from tfnb.graph.graph import Graph
from tfnb.graph.node import Node, Owner, Ref, Source, Value
from tfnb.graph.spec import Dim, Spec
from tfnb.graph.subgraph import Recursion, Subgraph
from tfnb.graph.variable import Variable

__all__ = [
    "Contents", "Dim", "Graph", "Guard", "Node", "Owner", "Recursion", "Ref", "Source", "Spec", "Subgraph", "Value",
    "Variable",
]  # fmt: skip
