"""Messages between processes, and their transport.

`messages` has identities, requests and outcomes, `envelope` their bytes, `lending` the tensors that lie in shared
memory instead. `transport` makes calls over Dask's connections, `streams` over sockets of their own, `encryption`
lets these be TLS, and `asking` makes calls to several shards of one process one message. `posting` has the one-way
messages between tasks of one step. `sparse_values` writes large tables of which few rows are not zero, `lossy` has
numbers of 16 or 8 bits in place of wider ones.
"""
