"""The dataflow machine, and its executor.

`templates` and `flow_calls` make what `machine` runs; `executor` carries it out on a `pool`.
"""
