"""Subgraphs that a function records: loops, branches, recursive calls, regions computed again.

`capture` cuts what a function records out of the tape, `loop_node` and `recursive_calls` build on it. `own_gradient`
and `recompute` mark nodes.
"""
