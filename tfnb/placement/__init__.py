"""Placement: the task that computes each node, and the server that holds each Variable.

`placement` is the result, for the cluster: node -> places, variable -> pieces, edge -> transfer. `partition` cuts a
pruned step into a part for the compute tasks and one for each server; `shards` assigns Variables to servers; `lookups`
finds the large Variables of which a task needs only rows; `requests` checks requests of nodes for devices;
`row_means` checks that the gradients of parts of a batch average to the gradient of the whole batch; `row_guards`
says into how many parts the sizes that a recording relies on let a batch be divided. `stages` cuts the modules of a
step, as `module_calls` finds them, in consecutive groups of even weight; `stage_homes` says at which of them a Variable
lies. A placement by a search: `groups` makes groups of nodes with the places where each may be, `costs` the seconds of
ops and messages, `simulation` the time of a step from these, and `placement_search` finds the places.
"""
