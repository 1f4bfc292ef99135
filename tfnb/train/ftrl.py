"""Follow the regularized leader (McMahan et al. 2013, "Ad click prediction", algorithm 1), as user code."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tfnb.errors import InvalidArgument
from tfnb.train.optimizer import LearningRate, Optimizer, Rate


class Ftrl(Optimizer):
    """FTRL-proximal: ``n += g*g``, ``z += g - (new n**p - n**p)/lr * w``, with ``p = -learning_rate_power``, then
    ``w = (sign(z)*l1 - z) / (n**p/lr + 2*l2)``, which is 0 where ``|z| <= l1``. Arguments are TensorFlow's.

    >>> Ftrl(0.1, l1_regularization_strength=0.01)  # doctest: +NORMALIZE_WHITESPACE
    Ftrl(lr=0.1, learning_rate_power=-0.5, initial_accumulator_value=0.1, l1_regularization_strength=0.01,
         l2_regularization_strength=0.0)
    """

    def __init__(
        self, lr: LearningRate = 1e-3, learning_rate_power: float = -0.5, initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0, l2_regularization_strength: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(lr)
        self.power, self.start = -learning_rate_power, initial_accumulator_value
        self.l1, self.l2 = l1_regularization_strength, l2_regularization_strength
        if not min(self.power, self.start, self.l1, self.l2) >= 0 or self.start == 0 == self.l2:
            raise InvalidArgument("Ftrl: the power is at most 0, the strengths at least 0, the accumulator above 0")

    def initial(self, w: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"accumulator": torch.full_like(w, self.start), "linear": torch.zeros_like(w)}

    def update(
        self, w: torch.Tensor, grad: torch.Tensor, slots: Mapping[str, torch.Tensor], lr: Rate
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        old, z = slots["accumulator"], slots["linear"]
        n = old + grad * grad
        z = z + grad - (n**self.power - old**self.power) / lr * w
        pull = torch.clamp(z, -self.l1, self.l1) - z  # 0 where |z| <= l1
        return pull / (n**self.power / lr + 2 * self.l2), {"accumulator": n, "linear": z}

    def __repr__(self) -> str:
        return (
            f"Ftrl(lr={self.lr!r}, learning_rate_power={-self.power}, initial_accumulator_value={self.start}, "
            f"l1_regularization_strength={self.l1}, l2_regularization_strength={self.l2})"
        )
