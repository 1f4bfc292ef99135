"""The options of a minimization by Sandblaster L-BFGS (Dean et al., NIPS 2012, section 4.2). Imports errors only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from tfnb.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Sandblaster:
    """A mode of `tfnb.fit` that minimizes a loss over all rows of the data by L-BFGS: ``fit(loss, data, mode=...)``.

    A step is an iteration of L-BFGS. The rows are divided into portions of ``batch_size`` rows; compute tasks take
    portions as fast as each can, and their gradients are summed on the parameter servers. There lie all vectors, too:
    the direction and the last ``history`` pairs of steps and changes of the gradient. The notebook is the coordinator:
    it sends the servers commands (scale, add, inner products), gets scalars, and holds no Parameters meanwhile, so that
    its messages do not grow with the model. Without a cluster the same commands run in this process.

    The loss is a mean or a sum over rows, the same function in each evaluation: without dropout, and without batch norm
    in training mode. The iterates are those of `torch.optim.LBFGS` with the same options, but for rounding.

    history: pairs that are kept. line_search: ``"strong_wolfe"``, or None: each step is ``lr`` times the direction.
    tolerance_grad: largest gradient at which a minimization is over; tolerance_change: least change of the loss, or of
    a Parameter, with which it goes on.

    >>> import tfnb, torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> x, y = torch.randn(64, 2), torch.randn(64, 1)
    >>> with tfnb.record():
    ...     fed, wanted = tfnb.placeholder(x), tfnb.placeholder(y)
    ...     loss = (layer(fed) - wanted).square().mean()
    >>> result = tfnb.fit(loss, {fed: x, wanted: y}, mode=Sandblaster(history=5), steps=3, batch_size=16)
    >>> result.steps <= 3, result.history[-1]["loss"] <= result.history[0]["loss"]
    (True, True)
    """

    history: int = 10
    line_search: str | None = "strong_wolfe"
    lr: float = 1.0
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9

    def __post_init__(self) -> None:
        if isinstance(self.history, bool) or not isinstance(self.history, int) or self.history < 1:
            raise InvalidArgument(
                f"Sandblaster: history is the number of pairs that are kept, an int of at least 1, not {self.history!r}"
            )
        if self.line_search not in (None, "strong_wolfe"):
            raise InvalidArgument(f"Sandblaster: line_search is 'strong_wolfe' or None, not {self.line_search!r}")
        if not _is_finite(self.lr) or self.lr <= 0:
            raise InvalidArgument(f"Sandblaster: lr is a finite number above 0, not {self.lr!r}")
        for name in ("tolerance_grad", "tolerance_change"):
            if not _is_finite(value := getattr(self, name)) or value < 0:
                raise InvalidArgument(f"Sandblaster: {name} is a finite number of at least 0, not {value!r}")


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
