"""A parameter server: a machine that knows no socket, clock or thread, and the thread that runs it.

`core` is one shard. It has a `ledger` of what was applied, `lines` of requests that wait, `objects` (queues,
accumulators, barriers, tokens), and `courses`, what it keeps of a training. `cores` is all shards of a process,
`serving` their thread.
"""
