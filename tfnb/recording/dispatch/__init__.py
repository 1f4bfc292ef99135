"""The recorder: one call becomes one node.

`recorder` sees every op, `recorded_call` makes the node, `module_hooks` follows modules.
"""
