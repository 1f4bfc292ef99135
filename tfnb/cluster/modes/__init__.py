"""Steps and trainings as pure machines: events in, instructions out.

`plan` is one step of `run`, `rounds` a synchronous training, with or without backup tasks, `ranks` a training by
all-reduce, `leases` an asynchronous or bounded-staleness training, `windows` some steps of a pipeline at a time.
`events` has the shared events, `joins` makes the value of the whole batch from the workers' values of a fetch.

Words. A piece: a run of consecutive steps that is lent to a task. A round: one synchronous step. A place: the number of
a part, a range of rows, of a round. A generation: the tasks that share rounds until one comes or goes. A cut ends all
rounds that are undecided, and a hold delays commits. A loop: a task's run of a training. A shard: the part of all
Variables that one core of a server, or of a task, serves.
"""
