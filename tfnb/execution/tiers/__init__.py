"""Which code a step runs: generated, compiled, captured. Each kind is a tier behind one `interface`.

`tiered` chooses, by `agreement`. `scalarize` (table: `scalar_ops`) writes code with Python's numbers, `native` makes a
whole step one call, `compiled_loops` loops (`cpp`, `cpp_ops`). `inductor` compiles steps for devices, where
`captured_steps` launches them whole (`cuda_graphs`), and what has no form in C. `graph_split`, `operand_checks` and
`decompositions` say what compilers get to see.
"""
