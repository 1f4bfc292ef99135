"""Placement: the task that computes each node, and the server that holds each Variable.

`placement` is what the others decide and the cluster reads: node -> devices, variable -> pieces, edge -> transfer.
`partition` cuts a pruned step into a part for the compute tasks and one for each server; `shards` says which servers
hold a Variable; `lookups` of which large ones a task needs rows only; `requests` whether nodes can run where they ask
to; `row_means` whether the gradients of parts of a batch are, on average, those of all its rows.
"""
