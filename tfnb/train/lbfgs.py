"""L-BFGS (Nocedal 1980; compact form of Byrd, Nocedal and Schnabel 1994, section 7), as user code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tfnb.errors import InvalidArgument
from tfnb.train.optimizer import LearningRate, Optimizer, Rate

Slots = Mapping[str, torch.Tensor]


class LBFGS(Optimizer):
    """One step along the L-BFGS direction of all variables together: `torch.optim.LBFGS` with ``max_iter=1``.

    There is no line search. ``history_size``: how many pairs of steps and changes of the gradient are kept.

    >>> LBFGS(0.5, history_size=5)
    LBFGS(lr=0.5)
    """

    joint = True

    def __init__(self, lr: LearningRate = 1.0, tolerance_grad: float = 1e-7, tolerance_change: float = 1e-9,
                 history_size: int = 100) -> None:  # fmt: skip
        super().__init__(lr)
        self.tolerances, self.history_size = (tolerance_grad, tolerance_change), history_size
        if not isinstance(history_size, int) or history_size < 1 or not min(self.tolerances) >= 0:
            raise InvalidArgument(f"LBFGS: history_size is an int of at least 1, not {history_size!r}; tolerances >= 0")

    def initial(self, w: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = {"steps": self.history_size, "changes": self.history_size, "step": 1, "grad": 1}
        return {name: w.new_zeros(n, w.numel()) for name, n in rows.items()} | {"count": w.new_zeros(())}

    def update_all(
        self, ws: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], slots: Sequence[Slots], lr: Rate
    ) -> list[tuple[torch.Tensor, Slots]]:
        old = {name: torch.cat([s[name] for s in slots], dim=1) for name in ("steps", "changes", "step", "grad")}
        grad, count = torch.cat([g.reshape(1, -1) for g in grads], dim=1), slots[0]["count"]
        last = {"steps": old["step"], "changes": grad - old["grad"]}
        is_kept = (last["changes"] * old["step"]).sum() > 1e-10
        new = {n: torch.where(is_kept, torch.cat([old[n][1:], row]), old[n]) for n, row in last.items()}
        direction = _direction(new["steps"], new["changes"], -grad.squeeze(0)).unsqueeze(0)
        size = torch.where(count == 0, (1 / grad.abs().sum()).clamp(max=1.0), 1.0) * lr
        new |= {"step": size * direction, "grad": grad}
        goes = (grad.abs().max() > self.tolerances[0]) & ((grad * direction).sum() <= -self.tolerances[1])
        move = torch.where(goes, new["step"], 0.0)
        new = {name: torch.where(grad.abs().max() > self.tolerances[0], new[name], old[name]) for name in old}
        widths = [w.numel() for w in ws]
        cuts = zip(*(value.split(widths, dim=1) for value in new.values()), strict=True)
        parts = [dict(zip(new, cut, strict=True)) for cut in cuts]
        moved = [w + m.reshape(w.shape) for w, m in zip(ws, move.split(widths, dim=1), strict=True)]
        return [(w, {**part, "count": s["count"] + 1}) for w, part, s in zip(moved, parts, slots, strict=True)]


def _direction(steps: torch.Tensor, changes: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Both loops of L-BFGS over rows of ``s`` and ``y``, the last one newest: back substitution on ``s_i . y_j``.

    Rows that are not there yet are 0, and take no part.
    """
    products = steps @ changes.mT
    curvature = products.diagonal()
    upper = products.triu() + torch.diag((curvature == 0).to(q.dtype))
    alpha = torch.linalg.solve_triangular(upper, (steps @ q).unsqueeze(1), upper=True)
    size = torch.where(curvature[-1] > 0, curvature[-1] / (changes[-1] @ changes[-1]), 1.0)
    r = size * (q - (changes.mT @ alpha).squeeze(1))
    right = curvature.unsqueeze(1) * alpha - (changes @ r).unsqueeze(1)
    return r + (steps.mT @ torch.linalg.solve_triangular(upper.mT, right, upper=False)).squeeze(1)
