"""A parameter server: a pure machine without socket, clock or thread, and the thread that runs the machine.

`core` is one shard: its events and effects are `core_events`. A shard has a `ledger` of applied mutations, `lines` of
waiting requests, `objects` (queues, accumulators, barriers, tokens), `staged_rounds` of steps, and `trainings`, with a
record of each in `courses`. `parts` are workers' contributions and the merged write of several. `cores` is all shards
of a process, `room` their memory budget, `serving` their thread.
"""
