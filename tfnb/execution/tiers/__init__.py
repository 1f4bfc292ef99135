"""Which code a step runs: generated, compiled, captured. Each kind is a tier behind one `interface`.

`tiered` chooses. `scalarize` (table: `scalar_ops`) writes code with Python's numbers, `inductor` compiles steps
(`node_groups`, `graph_split`, `operand_checks`, `decompositions`), `compiled_loops` loops (`cpp`, `cpp_ops`),
`captured_steps` launches whole steps (`cuda_graphs`). `native` makes a whole step one call.
"""
