"""AutoGraph: Python's statements on recorded tensors as branches and loops of the graph.

`source` and `cells` turn source into calls of `operators`, which stage what a run decides and leave the rest to Python.
"""

from tfnb.control_flow.staging.autograph import Cell, autograph, no_autograph

__all__ = ["Cell", "autograph", "no_autograph"]
