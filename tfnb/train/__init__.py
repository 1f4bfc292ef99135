"""Optimizers over symbolic gradients.

`optimizer` is what every optimizer does. `update_rules` defines each once. `from_torch` gives a torch optimizer its
rule, over torch's own state. `batches` and `metrics` are for loops.
"""

from tfnb.train.from_torch import from_torch
from tfnb.train.optimizer import Optimizer
from tfnb.train.update_rules import SGD, Adagrad, Adam, AdamW, LazyAdam, Momentum, RMSProp

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "LazyAdam", "Momentum", "Optimizer", "RMSProp", "from_torch"]
