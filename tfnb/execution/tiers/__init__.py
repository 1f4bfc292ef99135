"""The kinds of code for a step: generated, compiled, captured. Each kind is a tier behind one `interface`.

`tiered` chooses: before compiling by the `gain` of the calls that `step_profile` timed, afterwards by `agreement`.
`scalarize` (table: `scalar_ops`) writes code with Python's numbers, `native` makes a whole step one call, or each
straight segment of it (`graph_split`), `compiled_loops` loops (`cpp`, `cpp_ops`).
`fused` is a step for other devices, whose kernels inductor fused (`fusing`); `captured_steps` launches generated code,
or that, whole (`cuda_graphs`). `operand_checks` and `decompositions` say what compilers get to see.
"""
