"""Optimizers over symbolic gradients."""

from tfnb.train.from_torch import from_torch
from tfnb.train.optimizer import Optimizer
from tfnb.train.rules import SGD, Adagrad, Adam, AdamW, LazyAdam, Momentum, RMSProp

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "LazyAdam", "Momentum", "Optimizer", "RMSProp", "from_torch"]
