"""Training on a cluster: pure machines of each mode, the loops of the tasks, and the notebook's side.

`leases` (asynchronous, bounded staleness) and `rounds` (synchronous, with or without spare tasks) say what a training
does next; `training` carries it out. `resident` is the loop of a task, `courses` what a server keeps of a training: its
rounds or clocks. `sources` is where batches come from.
"""
