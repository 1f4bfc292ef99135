"""Optimizers over symbolic gradients.

`optimizer` is what every optimizer does. `update_rules` defines each of torch once; `ftrl` and `lbfgs` are user code.
`from_torch` gives a torch optimizer its rule, over torch's own state, and `from_class` a class with a ``step`` of its
own, tried by `rehearsal`: `stand_ins` take the places of Parameters in it, `recorded_numbers` those of Python's, and
`inner_steps` are of torch.
`schedules` are rates that steps change, `averages` follow variables, `saver` keeps checkpoints. `batches`, `metrics`,
`callbacks` and `modes` are for loops.
`sandblaster` has the options of L-BFGS over all rows, with its numbers in `curvature_pairs` and `line_search`.
"""

from tfnb.train.averages import ExponentialMovingAverage
from tfnb.train.callbacks import EarlyStopping, Progress
from tfnb.train.ftrl import Ftrl
from tfnb.train.lbfgs import LBFGS
from tfnb.train.modes import Downpour, LocalSGD, SyncReplicas
from tfnb.train.optimizer import Optimizer
from tfnb.train.sandblaster import Sandblaster
from tfnb.train.saver import Saver
from tfnb.train.schedules import (
    cosine_decay,
    exponential_decay,
    inverse_time_decay,
    natural_exp_decay,
    piecewise_constant,
    polynomial_decay,
    warmup,
)  # fmt: skip
from tfnb.train.twins import from_torch
from tfnb.train.update_rules import SGD, Adadelta, Adagrad, Adam, AdamW, LazyAdam, Momentum, Nesterov, RMSProp

__all__ = [
    "LBFGS", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Downpour", "EarlyStopping", "ExponentialMovingAverage",
    "Ftrl", "LazyAdam", "LocalSGD", "Momentum", "Nesterov", "Optimizer", "Progress", "RMSProp", "Sandblaster", "Saver",
    "SyncReplicas",
    "cosine_decay", "exponential_decay", "from_torch", "inverse_time_decay", "natural_exp_decay",
    "piecewise_constant", "polynomial_decay", "warmup",
]  # fmt: skip
