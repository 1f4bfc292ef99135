"""The recorder: one call becomes one node.

`recorder` sees every op, `function_mode` every torch function, `recorded_call` makes the node, `module_hooks` follows
modules.
"""
