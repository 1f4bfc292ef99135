"""A parameter server: a machine that knows no socket, clock or thread, and the thread that runs it.

`core` is one shard: what comes to it and what it lets its host do are `core_events`. It has a `ledger` of what was
applied, `lines` of requests that wait, `objects` (queues, accumulators, barriers, tokens), `staged_rounds` of steps,
and `trainings`, whose `courses` are what it keeps of each. `parts` is what workers bring, and how several become one.
`cores` is all shards of a process, `room` the bytes that they may hold, `serving` their thread.
"""
