"""Control flow in the graph: branches and loops over recorded tensors."""

from tfnb.control_flow.arrays import TensorArray
from tfnb.control_flow.branches import cond
from tfnb.control_flow.loops import fold, map_fn, scan, while_loop
from tfnb.control_flow.staging import Cell, autograph, function, no_autograph

__all__ = [
    "Cell", "TensorArray", "autograph", "cond", "fold", "function", "map_fn", "no_autograph", "scan", "while_loop",
]  # fmt: skip
