"""A graph as plain dataflow, and its parts for several places.

`frames` lowers loops and branches to Switch, Merge, Enter, Exit and NextIteration. `places` says where each op is done,
`cut` makes a part for each place, with what they send each other; `step_flow` does all of that for a step.
`reasons` says why each node is done where it is, and shows the parts of a step; `merges` how the values of replicas or
microbatches become one, and `row_weights` by which weights, also of the sizes that counters add up (`row_counts`);
`microbatch_schedules` how many microbatches each stage of a pipeline works on at once, and in which order, and
`pipeline_replicas` makes several loops of one over microbatches.
`exact_rows` divides the rows of a step over tasks that sum in mid-step, by `row_rules` and, of ops that become several
nodes, `exact_ops`; random ops draw in the order of the axes in memory, `axis_orders`.
"""
