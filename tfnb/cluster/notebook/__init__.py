"""The notebook's side of values on a cluster: steps, Variables, queues, data, and the status display.

`steps_there` runs steps and trainings, `divided_rows` checks that replicas may divide a batch, `exact_steps` prepares
steps whose tasks sum in mid-step, `waiting` lets threads wait for the event loop. `variables_there` moves Variables,
`holdings` records the Variables on servers, `module_reads` pulls values before modules are read, `recovery_copies` lets
other processes hold copies for the loss of a server. `pinned_values` writes values of one step to a checkpoint, by the
servers. `queue_homes` moves queues, `restoring` restores Variables and queues from a file. `collections` handles Dask
data as training data. `overview` gathers statistics for the status, `card` renders them.
"""
