"""Steps and trainings as pure machines: events in, instructions out.

`plan` is one step of `run`, `rounds` a synchronous training, with or without spare tasks, `ranks` one by all-reduce,
`leases` an asynchronous or bounded one. `events` is what they share, `joins` how the workers' values of a fetch become
the value of the whole batch.
"""
