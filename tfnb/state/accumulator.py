"""Accumulators of gradients: what several workers give becomes one mean, and gradients that are too old are dropped.

After the conditional accumulators of TensorFlow. Nobody waits in here: `Accumulator.take` gives None where too few
were given. Pure torch; the owner calls from one thread.
"""

from __future__ import annotations

import torch

from tfnb.errors import InvalidArgument, ShapeError
from tfnb.graph import Spec


class Accumulator:
    """The weighted mean of gradients of one spec. ``step``: gradients computed at an earlier one are dropped.

    >>> sums = Accumulator(Spec(torch.float32, (1,)))
    >>> sums.apply(torch.tensor([1.0]), step=0), sums.take(2)
    (True, None)
    >>> sums.apply(torch.tensor([4.0]), step=0, rows=2.0), sums.take(2), sums.step
    (True, tensor([3.]), 1)
    >>> sums.apply(torch.tensor([9.0]), step=0)
    False
    """

    def __init__(self, spec: Spec, step: int = 0) -> None:
        self.spec, self.step = spec, step
        self.count = 0
        self.dropped = 0
        self._rows = 0.0
        self._sum: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._sum is None else self._sum.numel() * self._sum.element_size()

    def apply(self, grad: torch.Tensor, step: int, rows: float = 1.0) -> bool:
        """Add a gradient that was computed at ``step`` from so many rows; False where that is too old."""
        if tuple(grad.shape) != tuple(self.spec.shape) or grad.dtype != self.spec.dtype:
            raise ShapeError(f"an accumulator of {self.spec} was given {Spec.of(grad)}")
        if rows <= 0:
            raise InvalidArgument(f"a gradient is of more than 0 rows, not {rows}")
        if step < self.step:
            self.dropped += 1
            return False
        self._sum = grad * rows if self._sum is None else self._sum.add_(grad, alpha=rows)
        self._rows += rows
        self.count += 1
        return True

    def take(self, required: int) -> torch.Tensor | None:
        """The mean of at least ``required`` gradients, which begins the next step; None where there are fewer."""
        if required < 1:
            raise InvalidArgument(f"a mean is of at least 1 gradient, not {required}")
        if self.count < required or self._sum is None:
            return None
        mean = self._sum / self._rows
        self.step, self.count, self._rows, self._sum = self.step + 1, 0, 0.0, None
        return mean

    def set_step(self, step: int) -> None:
        """Gradients of earlier steps are dropped from here on; raises InvalidArgument for a step that was."""
        if step < self.step:
            raise InvalidArgument(f"the accumulator is at step {self.step}, it cannot go back to {step}")
        self.step = step
