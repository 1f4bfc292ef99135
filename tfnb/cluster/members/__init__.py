"""Who takes part: `connection` has what `connect` asks for and gets, `deploy` finds or makes a Dask cluster and its
tasks, `supervisor` makes a task on each worker that comes, `adapting` lets Dask's adaptive scaling keep them,
`farewell` hears that the Dask client is closed. `registry` is a plugin of the scheduler that knows all tfnb clusters
there, and `registered` the entry of one, as a notebook sees it.
"""
