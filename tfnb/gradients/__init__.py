"""Symbolic gradients: the walker, the table of rules, clipping.

`walker` walks a graph backwards and calls a rule per node: `rule_table` is the table, `rules` fills it, `derived` has
torch's own formula, `decompose` splits an op without a rule. `paths` says through which inputs of a node a gradient
passes, `presence` in which runs a Parameter has one. `arguments` checks the arguments of a caller. `sums` adds
cotangents of loops, `slices` are row-sparse gradients. `custom` has the user's rules, `forward` jvp, `clip` the norms.
"""

from tfnb.gradients import rules
from tfnb.gradients.clip import clip_by_global_norm, clip_by_norm, clip_by_value
from tfnb.gradients.custom import custom_gradient, gradient_override
from tfnb.gradients.forward import jvp
from tfnb.gradients.rule_table import Forward, register_gradient
from tfnb.gradients.slices import IndexedSlices
from tfnb.gradients.walker import gradients, stop_gradient

__all__ = [
    "Forward", "IndexedSlices", "clip_by_global_norm", "clip_by_norm", "clip_by_value", "custom_gradient",
    "gradient_override", "gradients", "jvp", "register_gradient", "rules", "stop_gradient",
]  # fmt: skip
