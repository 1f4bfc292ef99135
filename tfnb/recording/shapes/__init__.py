"""Shape rules: symbolic sizes, fake tensors, and the rules that torch lacks.

`symbols` owns the symbolic sizes and guards, `fakes` the fake tensors. `shape_cache` asks torch's rules and remembers
what they said; `custom_op_shapes` finds those of custom ops; `vmap_rules` keep
a varying size in `torch.vmap`. Rules that torch lacks are in `overrides.shape_rules`.
"""
