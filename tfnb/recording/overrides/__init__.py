"""Torch calls with a recording of their own: one table, filled by a file for each family.

`override_table` is the table, and says in which order a call looks its rows up.

Functions of torch: `size_arguments` take a number for a size, `dynamic_indexing` for a row; `packed_sequences`,
`plain_tensors` (methods that reach memory). Ops:
`python_answers` for what Python asks, `buffer_updates` for those that write buffers, `linear_algebra`,
`recurrent_cells`, `as_strided`, `varying_sizes` for composites that would fix a size, `kept_forms` for what a device
would choose, `refused_ops`. Shapes: `shape_rules` that torch lacks.

Without rows: `autograd_function` is torch.autograd.Function, `constructors` finds code that makes modules, `rng_state`
keeps torch's random state, `averaged_models` are those of swa_utils, `loader_batches` keeps a DataLoader out of the
recording, `higher_order` meets operators that call functions.
"""
