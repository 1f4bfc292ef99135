"""Ops that draw numbers or make tensors from nothing: no gradient flows through them, or zeros."""

from __future__ import annotations

import torch

from tfnb.gradients.rule_table import nograd, overloads, partials
from tfnb.graph.ops import QUEUES

aten = torch.ops.aten


_DRAWN = (
    "bernoulli binomial cauchy exponential geometric log_normal multinomial normal normal_functional poisson rand "
    "rand_like randint randint_like randn randn_like randperm random uniform _sample_dirichlet"
)
_MADE = (
    "arange empty empty_like empty_permuted empty_strided eye fill full full_like linspace logspace new_empty "
    "new_empty_strided new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like zero _foreach_zero "
    "tril_indices triu_indices hann_window hamming_window bartlett_window blackman_window kaiser_window"
)

_ZEROS = (aten.bernoulli.default, aten.poisson.default)  # of their probabilities and rates, as in torch

for _name in (*_DRAWN.split(), *_MADE.split()):
    nograd(*(op for op in overloads(_name) if op not in (aten.fill.Tensor, *_ZEROS)))
for _op in _ZEROS:
    partials(_op, lambda n, dy: torch.zeros_like(dy))

nograd(
    aten.detach.default, aten.detach_copy.default, aten._local_scalar_dense.default, aten.sym_size.int,
    aten._assert_async.default, aten._assert_async.msg, aten._assert_tensor_metadata.default,
    "tfnb.placeholder", "tfnb.constant", "tfnb.read", "tfnb.group", "tfnb.guard", "tfnb.print", *sorted(QUEUES),
)  # fmt: skip
