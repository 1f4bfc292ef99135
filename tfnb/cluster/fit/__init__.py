"""Training on a cluster: pure machines of each mode, the loops of the tasks, and the notebook's side.

`leases` (asynchronous) and `rounds` (synchronous) say what a training does next; `training` carries it out. `resident`
is the loop of a task, `courses` what a server keeps of a synchronous training, `sources` where batches come from.
"""
