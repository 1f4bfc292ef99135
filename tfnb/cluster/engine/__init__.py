"""The notebook's side, in Dask's event loop: carries out the instructions of the machines of `modes`.

`engine` knows what goes on, `members` is what it works with, `peers` calls tasks and servers and knows who is alive,
`restarts` how often stuck processes may be ended. `single_steps` is steps of `run`, of which `step_record` makes a
trace, `training` trainings, whose pieces `sources` makes.
"""
