"""The dataflow machine, and what carries out what it says.

`templates` and `flow_calls` make what `machine` runs; `executor` carries it out on a `pool`.
"""
