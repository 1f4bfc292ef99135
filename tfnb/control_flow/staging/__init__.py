"""AutoGraph: Python's statements on recorded tensors as branches and loops of the graph.

`autograph` has the decorator and the cell, `conversion` says which function converted code calls.

While it runs: converted code calls `operators`, which leave to Python what no run decides. `statement` is one
statement and its names. `branching` and `phi` stage branches, `looping` and `alias_analysis` loops; `iterables` is
what loops go over, `generators` the user's generators. `unset` has names without a value, `recursion` functions that
call themselves. `lists`, `containers` and `python_numbers` treat Python's objects, and `user_frames` finds the user's
line.
"""

from tfnb.control_flow.staging.autograph import Cell, autograph, no_autograph
from tfnb.control_flow.staging.recursion import function

__all__ = ["Cell", "autograph", "function", "no_autograph"]
