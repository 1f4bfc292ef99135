"""From a graph to one generated torch.fx function.

`lower` makes a `program`: the generated function, with `bindings` and `checked_calls` in it. Loops and branches are
`control_flow_code`, with `pass_through`, `loop_in_place` and `loop_products`.
"""
