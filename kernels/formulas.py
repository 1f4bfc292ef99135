"""Optimizer updates in plain torch, for compilers: the new values written by the kernels of `tfnb.kernels.optim`.

One formula each, of one variable; a compiler fuses it with what makes the gradient. The fused kernels are their form
for code that is not compiled; both agree within the rounding of a product. Ops without a formula here are committed by
their kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfnb.kernels.optim import SGD, SGD_PRODUCT, moved

Rate = float | Tensor


class Formula(NamedTuple):
    """``new(row, lr=..., **settings)``: new values of ``w`` and of each slot, of a row of the in-place twin."""

    rule: Callable[..., list[Tensor]]
    after: int = 0  # operands behind the slots, beside the rate

    def state(self, count: int, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """Places of ``w`` and the slots in a row of so many."""
        return (0, *range(2, count - self.after - ("lr" not in settings)))

    def new(self, row: Sequence[Tensor], **settings: object) -> list[Tensor]:
        if "lr" not in settings:
            *row, rate = row
            lr, *numbers = rate.unbind() if rate.dim() else [rate]
            settings |= {"lr": lr} | (moved(self.rule.__name__, settings, numbers) if numbers else {})
        new = self.rule(*row, **settings)
        places = self.state(len(row), settings)
        return [value.to(row[at].dtype) for value, at in zip(new, places, strict=True)]  # a 0-d one takes the rate's


def sgd(
    w: Tensor, grad: Tensor, *slots: Tensor, lr: Rate, momentum: Rate = 0.0, dampening: Rate = 0.0,
    weight_decay: Rate = 0.0, nesterov: bool = False, maximize: bool = False,
) -> list[Tensor]:  # fmt: skip
    """See `tfnb.kernels.optim.sgd`."""
    lr, momentum, undampened = (_once(x, w) for x in (lr, momentum, 1 - dampening))
    grad = _decayed(w, grad, weight_decay, maximize)
    if not slots:
        return [w - lr * grad]
    buffer, *steps = slots
    new = momentum * buffer + undampened * grad
    if steps:  # the first step takes the gradient undampened
        new = torch.where(steps[0] == 0, grad, new)
    return [w - lr * (grad + momentum * new if nesterov else new), new, *(step + 1 for step in steps)]


def sgd_product(w: Tensor, left: Tensor, *slots: Tensor, lr: float, momentum: float = 0.0) -> list[Tensor]:
    """`sgd` with a gradient that is a product."""
    *slots, right = slots  # type: ignore[assignment]
    return sgd(w, left @ right, *slots, lr=lr, momentum=momentum)


def adam(
    w: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor, *maxima: Tensor, lr: Rate, beta1: Rate = 0.9,
    beta2: Rate = 0.999, eps: Rate = 1e-8, weight_decay: Rate = 0.0, amsgrad: bool = False, maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> list[Tensor]:  # fmt: skip
    """See `tfnb.kernels.optim.adam`."""
    step = step + 1
    grad = _decayed(w, grad, 0.0 if decoupled_weight_decay else weight_decay, maximize)
    w = w * _once(1 - lr * weight_decay, w) if decoupled_weight_decay and not _is_zero(weight_decay) else w
    mean = mean + (grad - mean) * _once(1 - beta1, w)
    square = square * _once(beta2, w) + grad * grad * _once(1 - beta2, w)
    count = step.double()
    size, root = (_once(x, w) for x in (lr / (1 - beta1**count), (1 - beta2**count).sqrt()))
    largest = [torch.maximum(maximum, square) for maximum in maxima]
    scale = (largest[0] if amsgrad else square).sqrt() / root + _once(eps, w)
    return [w - size * mean / scale, mean, square, step, *largest]


def _once(number: Rate, w: Tensor) -> Rate:
    """A number beside a variable that compiled code computes once, in float64, and not for each element.

    Inductor keeps what is seen with strides. It is rounded as the fused kernels do, to float32 for shorter variables.
    """
    if isinstance(number, float):
        return number
    return number.to(torch.promote_types(w.dtype, torch.float32)).as_strided((), ())


def _is_zero(number: Rate) -> bool:
    """Whether a rate is 0 in every run."""
    return isinstance(number, float) and number == 0


def _decayed(w: Tensor, grad: Tensor, weight_decay: Rate, maximize: bool) -> Tensor:
    grad = -grad if maximize else grad
    return grad if _is_zero(weight_decay) else grad + _once(weight_decay, w) * w


FORMULAS: dict[str, Formula] = {
    "tfnb.adam.default": Formula(adam),
    SGD: Formula(sgd),
    SGD_PRODUCT: Formula(sgd_product, after=1),
}
"""By the op's qualified name."""
