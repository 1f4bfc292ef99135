"""Membership of a cluster: finding, starting, watching and replacing its tasks and servers.

`connection` has the requirements and the progress of `connect`, `deploy` finds or makes a Dask cluster and its tasks,
`supervisor` makes a task on each worker that comes, `adapting` lets Dask's adaptive scaling keep them, `farewell` hears
that the Dask client is closed. `registry` is a plugin of the scheduler that knows all tfnb clusters there, and
`registered` the entry of one, as a notebook sees it.
"""
