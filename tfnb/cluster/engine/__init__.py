"""The notebook's side, in Dask's event loop: carries out the instructions of the machines of `modes`.

`engine` holds the state of the cluster, `members` its data classes, `pace` the speed of a task, `peers` calls tasks and
servers and detects failures, `restarts` is the budget of restarts, `holders` chooses who holds copies of shards.
`single_steps` runs steps of `run`, `step_record` makes a trace of one, `training` runs trainings, whose pieces
`sources` makes; `lent_windows` lends steps to the stages of a pipeline.
"""
