"""A task: the Dask actor on a worker.

`task` is the actor, `computing` its threads, `programs` the plans sent to a task and the compiled programs,
`part_programs` the same for the parts of a step over several tasks. `rows_there` asks servers for the rows that a step
needs. In `fit` a task runs `resident`, a loop of its own over `pieces` of the training, on the arrays of `data`, whose
chunks `reading` gets from the workers that hold them. In all-reduce that loop is one of `replicas`, a rank, whose sums
with the other ranks are `collectives`; in `downpour` it has a copy of its own, which it fetches; `task_loops` has all
loops of a task. Parts of one step on several tasks send each other values by `exchange`, with the rendezvous `meeting`,
a pure machine; a step that waits reads its connections itself by `waiting_reads`, and `step_windows` takes several
steps of a part. `step_notes` are a task's notes on a traced step. A server's `shard_writes` are its part of a
checkpoint; `held_copies` are copies of other processes' shards.
"""
