"""Updates that torch.optim has as functions over lists of tensors: taken from there, one row of a table each.

Those functions write one state after the other and take memory in between. Here they run on copies, which are copied
back at the end, so that a step that fails has written nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import _adafactor, _muon, adamax, asgd, nadam, radam, rprop

from tfnb.kernels.optim import Column, Rate, update


class TorchFunction(NamedTuple):
    """A function of torch: ``call(ws, grads, *slots, lr=..., **settings)`` writes in place; with the settings'
    defaults.
    """

    call: Callable[..., None]
    settings: dict[str, Any]


def _listed(function: Callable[..., None], foreach: bool | None = True) -> Callable[..., None]:
    """A function that knows foreach kernels, and does not wait for a device where all state lies there.

    foreach: None is torch's choice by device, for a rule whose foreach and plain versions round differently.
    """

    def call(ws: Column, grads: Column, *slots: Column, **settings: Any) -> None:
        on_device = all(x.is_cuda for column in slots for x in column)
        function(ws, grads, *slots, foreach=foreach, capturable=on_device, **settings)

    return call


def _asgd(
    ws: Column, grads: Column, averages: Column, mus: Column, etas: Column, steps: Column, *, lr: Rate, lambd: float,
    alpha: float, t0: float, **settings: Any,
) -> None:  # fmt: skip
    given = {"lr": lr, "lambd": lambd, "alpha": alpha, "t0": t0}
    _listed(asgd.asgd, foreach=None)(ws, grads, averages, mus, etas, steps, **given, **settings)
    if all(x.is_cuda for column in (mus, etas, steps) for x in column):
        return
    for mu, eta, step in zip(mus, etas, steps, strict=True):  # torch rounds both to the default dtype of the process
        count = float(step)
        eta.fill_(float(lr) / (1 + lambd * float(lr) * count) ** alpha)
        mu.fill_(1 / max(1.0, count - t0))


def _rprop(ws: Column, grads: Column, *slots: Column, lr: Rate, **settings: object) -> None:
    _listed(rprop.rprop)(ws, grads, *slots, **settings)  # the rate is where the sizes of steps start


def _adafactor_matrix(ws: Column, grads: Column, rows: Column, cols: Column, steps: Column, **settings: Any) -> None:
    _adafactor.adafactor(ws, grads, [*rows], [*cols], [None] * len(ws), steps, foreach=True, **settings)


def _adafactor_vector(ws: Column, grads: Column, variances: Column, steps: Column, **settings: Any) -> None:
    none = [None] * len(ws)
    _adafactor.adafactor(ws, grads, [*none], [*none], [*variances], steps, foreach=True, **settings)


def _muon_matrix(ws: Column, grads: Column, buffers: Column, **settings: Any) -> None:
    _muon.muon(ws, grads, buffers, has_complex=False, **settings)


def _sparse_adam(
    ws: Column, grads: Column, means: Column, squares: Column, steps: Column, *, lr: Rate, beta1: float, beta2: float,
    eps: float, maximize: bool,
) -> None:  # fmt: skip
    """Adam with eps added before the bias is taken out; torch's own wants tensors of its sparse layout."""
    if maximize:
        grads = list(torch._foreach_neg(grads))
    torch._foreach_add_(steps, 1)
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    scales = torch._foreach_sqrt(squares)
    torch._foreach_add_(scales, eps)
    counts = torch.stack(steps).tolist()
    sizes = [-float(lr) * math.sqrt(1 - beta2**count) / (1 - beta1**count) for count in counts]
    torch._foreach_addcdiv_(ws, means, scales, sizes)


_BETAS = {"beta1": 0.9, "beta2": 0.999}
_DECAY = {"weight_decay": 0.0, "maximize": False}
_ADAFACTOR = {"beta2_decay": -0.8, "eps1": 0.0, "eps2": 1e-3, "d": 1.0, **_DECAY}

BORROWED: dict[str, TorchFunction] = {
    "adafactor": TorchFunction(_adafactor_matrix, _ADAFACTOR),
    "adafactor_vector": TorchFunction(_adafactor_vector, _ADAFACTOR),
    "adamax": TorchFunction(_listed(adamax.adamax), {**_BETAS, "eps": 1e-8, **_DECAY}),
    "asgd": TorchFunction(_asgd, {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6, **_DECAY}),
    "muon": TorchFunction(_muon_matrix, {
        "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315),
        "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None,
    }),
    "nadam": TorchFunction(_listed(nadam.nadam), {
        **_BETAS, "eps": 1e-8, "momentum_decay": 4e-3, "decoupled_weight_decay": False, **_DECAY,
    }),
    "radam": TorchFunction(_listed(radam.radam), {**_BETAS, "eps": 1e-8, "decoupled_weight_decay": False, **_DECAY}),
    "rprop": TorchFunction(_rprop, {
        "etaminus": 0.5, "etaplus": 1.2, "step_size_min": 1e-6, "step_size_max": 50.0, "maximize": False,
    }),
    "sparse_adam": TorchFunction(_sparse_adam, {**_BETAS, "eps": 1e-8, "maximize": False}),
}  # fmt: skip


# ----- the ops -------------------------------------------------------------------------------------------


def _on_copies(call: Callable[..., None], state: list[Column], grads: Column) -> None:
    ws, *slots = [[x.clone() for x in column] for column in state]
    call(ws, grads, *slots)
    for column, values in zip(state, (ws, *slots), strict=True):
        torch._foreach_copy_(column, values)


def _define(name: str, function: TorchFunction) -> None:
    def kernel(ws: Column, grads: Column, slots: list[Column], rate: Rate, **settings: object) -> None:
        _on_copies(partial(function.call, lr=rate, **function.settings | settings), [ws, *slots], grads)

    only = inspect.Parameter.KEYWORD_ONLY
    settings = [inspect.Parameter(key, only, default=value) for key, value in function.settings.items()]
    kernel.__name__, kernel.__signature__ = name, inspect.Signature(settings)  # type: ignore[attr-defined]
    update(kernel)


for _name, _function in BORROWED.items():
    _define(_name, _function)
