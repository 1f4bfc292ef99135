"""The notebook's side of values on a cluster: steps, Variables, queues, data, and the status display.

`steps_there` takes steps, `divided_rows` looks whether their rows may be divided, `waiting` is how threads wait for
them. `variables_there` moves Variables, `holdings` knows which of them are there, `state_dicts` lets ``state_dict()``
show them as they are there. `pinned_values` is values of one moment that servers write to a checkpoint. `queue_homes`
moves queues, `restoring` lets all of them be what a file holds. `collections` is Dask data. `overview` gathers what the
status shows, `card` draws it.
"""
