"""Optimizer updates in plain torch, for compilers: what the kernels of `tfnb.kernels.optim` write, as new values.

One formula each, of one variable; a compiler fuses it with what makes the gradient. The fused kernels are their form
for code that is not compiled; both agree within the rounding of a product. Ops without a formula here are committed by
their kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfnb.kernels.optim import MOVING, SGD, SGD_PRODUCT

Rate = float | Tensor


class Formula(NamedTuple):
    """``new(row, lr=..., **settings)``: new values of ``w`` and of each slot, of a row of the in-place twin."""

    rule: Callable[..., list[Tensor]]
    after: int = 0  # operands behind the slots, beside the rate
    moving: str = ""  # the setting that the second of two rates stands for

    def state(self, count: int, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """Places of ``w`` and the slots in a row of so many."""
        return (0, *range(2, count - self.after - ("lr" not in settings)))

    def new(self, row: Sequence[Tensor], **settings: Any) -> list[Tensor]:
        if "lr" not in settings:
            *row, rate = row
            settings |= {"lr": rate} if not rate.dim() else {"lr": rate[0], self.moving: rate[1]}
        return self.rule(*row, **settings)


def sgd(
    w: Tensor, grad: Tensor, *slots: Tensor, lr: Rate, momentum: Rate = 0.0, dampening: float = 0.0,
    weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False,
) -> list[Tensor]:  # fmt: skip
    """See `tfnb.kernels.optim.sgd`."""
    grad = _decayed(w, grad, weight_decay, maximize)
    if not slots:
        return [w - lr * grad]
    buffer, *steps = slots
    new = momentum * buffer + (1 - dampening) * grad
    if steps:  # the first step takes the gradient undampened
        new = torch.where(steps[0] == 0, grad, new)
    return [w - lr * (grad + momentum * new if nesterov else new), new, *(step + 1 for step in steps)]


def sgd_product(w: Tensor, left: Tensor, *slots: Tensor, lr: float, momentum: float = 0.0) -> list[Tensor]:
    """`sgd` with a gradient that is a product."""
    *slots, right = slots  # type: ignore[assignment]
    return sgd(w, left @ right, *slots, lr=lr, momentum=momentum)


def adam(
    w: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor, *maxima: Tensor, lr: Rate, beta1: Rate = 0.9,
    beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> list[Tensor]:  # fmt: skip
    """See `tfnb.kernels.optim.adam`."""
    step = step + 1
    decay, other = (0.0, weight_decay) if decoupled_weight_decay else (weight_decay, 0.0)
    grad = _decayed(w, grad, decay, maximize)
    w = w * (1 - lr * other) if other else w
    mean = mean + (grad - mean) * (1 - beta1)
    square = square * beta2 + grad * grad * (1 - beta2)
    count = step.double()
    size, root = (_once(x.to(w.dtype)) for x in (lr / (1 - beta1**count), (1 - beta2**count).sqrt()))
    largest = [torch.maximum(maximum, square) for maximum in maxima]
    scale = (largest[0] if amsgrad else square).sqrt() / root + eps
    return [w - size * mean / scale, mean, square, step, *largest]


def _once(number: Tensor) -> Tensor:
    """A number that compiled code computes once, and not for each element: inductor keeps what is seen with strides."""
    return number.as_strided((), ())


def _decayed(w: Tensor, grad: Tensor, weight_decay: float, maximize: bool) -> Tensor:
    grad = -grad if maximize else grad
    return grad + weight_decay * w if weight_decay else grad


FORMULAS: dict[str, Formula] = {
    "tfnb.adam.default": Formula(adam, moving=MOVING["adam"]),
    SGD: Formula(sgd, moving=MOVING["sgd"]),
    SGD_PRODUCT: Formula(sgd_product, after=1),
}
"""By the op's qualified name."""
