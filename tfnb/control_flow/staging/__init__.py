"""AutoGraph: Python's statements on recorded tensors as branches and loops of the graph.

`source` and `cells` turn source into calls of `operators`, which stage what a run decides and leave the rest to Python.
"""

from tfnb.control_flow.staging.autograph import Cell, autograph, no_autograph
from tfnb.control_flow.staging.recursion import function

__all__ = ["Cell", "autograph", "function", "no_autograph"]
