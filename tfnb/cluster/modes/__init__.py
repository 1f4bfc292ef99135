"""Steps and trainings as pure machines: events in, instructions out.

`plan` is one step of `run`, `rounds` a synchronous training, with or without backup tasks, `ranks` a training by
all-reduce, `leases` an asynchronous or bounded-staleness training, `windows` some steps of a pipeline at a time.
`events` has the shared events, `joins` makes the
value of the whole batch from the workers' values of a fetch.
"""
