"""The graph: data that every room above works on.

`graph` is a named handle to `contents`: a tuple of `node`s, with `subgraph`s inside. `spec` says what a value is,
`variable` and `queue` name state. `variable_locks`, `held`, `lazy_memory` and `mapped_files` belong to Variables;
`mapped_memory` makes modules in such a file. `ops`, `op_facts`
and `pure` say what torch's operators are. `forms` has the readable form and the JSON form; `files` writes whole
files, `tensor_files` those of tensors, and `strict_json` reads what strangers wrote. `check` and `difference` look at
contents; `current` is the stack of open recordings; `collector` is Python's own.
"""

from tfnb.graph.contents import Contents, Guard
from tfnb.graph.graph import Graph
from tfnb.graph.node import Node, Owner, Ref, SourceLine, Value
from tfnb.graph.spec import Dim, Spec
from tfnb.graph.subgraph import Recursion, Subgraph
from tfnb.graph.variable import Variable

__all__ = [
    "Contents", "Dim", "Graph", "Guard", "Node", "Owner", "Recursion", "Ref", "SourceLine", "Spec", "Subgraph", "Value",
    "Variable",
]  # fmt: skip
