"""Learning-rate schedules: functions of the number of steps that were taken, in torch code.

A schedule is the ``lr`` of an optimizer, which counts its steps; ``schedule(20)`` is the rate of the 21st step. Any
function of a 0-d float64 tensor is one. Names and formulas are those of TensorFlow's ``train``, but for `warmup`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from numbers import Real
from typing import Any

import torch

from tfnb.errors import InvalidArgument

Schedule = Callable[[Any], torch.Tensor]


def _schedule(rule: Callable[..., Callable[[torch.Tensor], torch.Tensor]]) -> Callable[..., Schedule]:
    """Let a schedule accept numbers, too."""

    @wraps(rule)
    def make(*args: object, **kwargs: object) -> Schedule:
        made = rule(*args, **kwargs)

        def schedule(step: torch.Tensor | int) -> torch.Tensor:
            return made(step if isinstance(step, torch.Tensor) else torch.tensor(float(step), dtype=torch.float64))

        return schedule

    return make


def _positive(name: str, **given: object) -> None:
    for what, value in given.items():
        if not isinstance(value, Real) or not 0 < float(value) < math.inf:
            raise InvalidArgument(f"{name}: {what} must be a number above 0, not {value!r}")


def _periods(step: torch.Tensor, length: float, staircase: bool) -> torch.Tensor:
    return torch.floor(step / length) if staircase else step / length


@_schedule
def exponential_decay(lr: float, decay_steps: float, decay_rate: float, *, staircase: bool = False) -> Any:
    """``lr * decay_rate**(step / decay_steps)``; ``staircase``: by whole periods, as `torch.optim.lr_scheduler.StepLR`.

    >>> float(exponential_decay(1.0, 10, 0.5)(20))
    0.25
    """
    _positive("exponential_decay", lr=lr, decay_steps=decay_steps, decay_rate=decay_rate)
    return lambda step: lr * decay_rate ** _periods(step, decay_steps, staircase)


@_schedule
def natural_exp_decay(lr: float, decay_steps: float, decay_rate: float, *, staircase: bool = False) -> Any:
    """``lr * exp(-decay_rate * step / decay_steps)``.

    >>> round(float(natural_exp_decay(1.0, 10, 1.0)(10)), 4)
    0.3679
    """
    _positive("natural_exp_decay", lr=lr, decay_steps=decay_steps, decay_rate=decay_rate)
    return lambda step: lr * torch.exp(-decay_rate * _periods(step, decay_steps, staircase))


@_schedule
def inverse_time_decay(lr: float, decay_steps: float, decay_rate: float, *, staircase: bool = False) -> Any:
    """``lr / (1 + decay_rate * step / decay_steps)``.

    >>> float(inverse_time_decay(1.0, 10, 3.0)(10))
    0.25
    """
    _positive("inverse_time_decay", lr=lr, decay_steps=decay_steps, decay_rate=decay_rate)
    return lambda step: lr / (1 + decay_rate * _periods(step, decay_steps, staircase))


@_schedule
def polynomial_decay(lr: float, decay_steps: float, end: float = 1e-4, power: float = 1.0) -> Any:
    """From ``lr`` to ``end`` in ``decay_steps``: ``(lr - end) * (1 - step/decay_steps)**power + end``, then ``end``.

    >>> float(polynomial_decay(1.0, 10, end=0.5)(5)), float(polynomial_decay(1.0, 10, end=0.5)(99))
    (0.75, 0.5)
    """
    _positive("polynomial_decay", lr=lr, decay_steps=decay_steps, power=power)
    return lambda step: (lr - end) * (1 - torch.clamp(step / decay_steps, max=1.0)) ** power + end


@_schedule
def cosine_decay(lr: float, decay_steps: float, alpha: float = 0.0) -> Any:
    """Half a cosine from ``lr`` to ``alpha * lr`` in ``decay_steps``, then that (Loshchilov and Hutter 2017).

    >>> float(cosine_decay(1.0, 10)(5))
    0.5
    """
    _positive("cosine_decay", lr=lr, decay_steps=decay_steps)

    def at(step: torch.Tensor) -> torch.Tensor:
        height = 0.5 * (1 + torch.cos(math.pi * torch.clamp(step / decay_steps, max=1.0)))
        return lr * ((1 - alpha) * height + alpha)

    return at


@_schedule
def piecewise_constant(boundaries: Sequence[float], values: Sequence[float]) -> Any:
    """``values[i]`` up to and with step ``boundaries[i]``, then the next; the last has no boundary.

    >>> [float(piecewise_constant([2, 4], [1.0, 0.5, 0.25])(step)) for step in range(6)]
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    """
    edges, rates = [float(b) for b in boundaries], [float(v) for v in values]
    if len(rates) != len(edges) + 1 or edges != sorted(set(edges)):
        raise InvalidArgument(
            "piecewise_constant: boundaries rise, and there is one value more than boundaries; "
            f"got boundaries={edges}, values={rates}"
        )

    def at(step: torch.Tensor) -> torch.Tensor:
        rate = torch.full_like(step, rates[0])
        for edge, value in zip(edges, rates[1:], strict=True):
            rate = torch.where(step > edge, value, rate)
        return rate

    return at


@_schedule
def warmup(steps: float, then: float | Schedule) -> Any:
    """Rise in a straight line over ``steps``, from ``1/steps`` of the rate that follows: a number or a schedule.

    ``then`` counts from the first step on (Goyal et al. 2017).

    >>> [float(warmup(4, 1.0)(step)) for step in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    _positive("warmup", steps=steps)
    return lambda step: torch.clamp((step + 1) / steps, max=1.0) * (then(step) if callable(then) else then)
