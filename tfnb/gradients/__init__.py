"""Symbolic gradients: the walker, the table of rules, clipping."""

from tfnb.gradients import rules
from tfnb.gradients.clip import clip_by_global_norm, clip_by_norm, clip_by_value
from tfnb.gradients.table import Forward, register_gradient
from tfnb.gradients.walker import gradients, stop_gradient

__all__ = [
    "Forward", "clip_by_global_norm", "clip_by_norm", "clip_by_value", "gradients", "register_gradient", "rules",
    "stop_gradient",
]  # fmt: skip
