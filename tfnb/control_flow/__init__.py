"""Control flow in the graph: branches and loops over recorded tensors.

`branches` has `cond`, `loops` the loops, `tensor_array` the array that they carry; `structure` says how values nest.
`frontend` turns a user's `if` and `while` into calls of operators, and `staging` has these operators.
"""

from tfnb.control_flow.branches import cond
from tfnb.control_flow.loops import fold, map_fn, scan, while_loop
from tfnb.control_flow.staging import Cell, autograph, function, no_autograph
from tfnb.control_flow.tensor_array import TensorArray

__all__ = [
    "Cell", "TensorArray", "autograph", "cond", "fold", "function", "map_fn", "no_autograph", "scan", "while_loop",
]  # fmt: skip
