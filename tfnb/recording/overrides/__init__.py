"""Calls of torch that are recorded in another way than op by op.

`table` is the one table. `op_overrides` by op, `function_overrides` by torch function, with `dynamic_indexing`,
`packed_sequences`, `vmap_functions`, `higher_order`, `recurrent_cells`, `autograd_function`, `plain_tensors`;
`python_answers` for what Python asks, `constructors` for code that makes modules, `rng_state` for torch's random state.
"""
