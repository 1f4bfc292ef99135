"""Objects that a user holds: recorded tensors, their samples, Variables of parameters, tensors of outside.

`tape` is the state of one recording, and how attempts are undone. `tensor` is what the user holds, `outside_calls` how
torch meets it outside of recordings; `variables` finds parameters, `outside_tensors` constants. `samples` keeps or
computes samples (`interpret`), `workspace` is what recordings of one graph share, `effects` are operations on queues.
`views` and `layout_queries` know about memory, `checks` about Python branches that only raise,
`python_draws` about random numbers of Python. `recording` is the open
recording as the folders below `dispatch` see it.
"""
