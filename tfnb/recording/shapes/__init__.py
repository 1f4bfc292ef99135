"""Shape rules: symbolic sizes, fake tensors, and the rules that torch lacks.

`symbols` owns the symbolic sizes and guards, `fakes` the fake tensors. `shape_cache` asks torch's rules,
`shape_examples` by example; `shape_rules` and `custom_op_shapes` hold the rules that torch lacks.
"""
