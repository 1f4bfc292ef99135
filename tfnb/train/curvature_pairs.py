"""Directions of L-BFGS from inner products alone (Chen, Wang and Zhou 2014, "Large-scale L-BFGS using MapReduce").

Each vector that L-BFGS computes is a sum of its *basis*: the kept steps and changes of the gradient, the last step and
change, and the gradient. With the table of the inner products of the basis the two-loop recursion works on
coefficients: 2m + 3 numbers, however long the vectors are. Pure; imports torch only.
"""

from __future__ import annotations

import torch

LEAST_CURVATURE = 1e-10  # of a pair that is kept, as in torch: the inner product of step and change


class CurvaturePairs:
    """The table of inner products of a basis: ``history`` steps, as many changes, then step, change and gradient.

    Rows are kept newest last; the last ``count`` of them are filled. ``is_kept``: whether the last pair, of ``step``
    and ``change``, takes part, and so becomes a row at the next one.

    >>> pairs = CurvaturePairs(1)  # the basis: one kept step, one kept change; step, change, gradient
    >>> pairs.add(torch.tensor([[0.0] * 5, [0.0] * 5, [0.0, 0.0, 0.0, 0.0, 9.0]]))
    >>> pairs.is_kept, pairs.direction().tolist() == [0, 0, 0, 0, -1]
    (False, True)
    """

    def __init__(self, history: int) -> None:
        self.history, self.count, self.is_kept = history, 0, False
        self._table = torch.zeros(2 * history + 3, 2 * history + 3, dtype=torch.float64)

    @property
    def size(self) -> int:
        """The number of vectors in the basis."""
        return len(self._table)

    def add(self, products: torch.Tensor) -> None:
        """Take the inner products of the new step, change and gradient, a row for each, with the whole basis.

        In that basis the pair before has become the newest row where it `is_kept`.
        """
        m = self.history
        if self.is_kept:
            moved = [*range(1, m), 2 * m, *range(m + 1, 2 * m), 2 * m + 1]
            self._table[: 2 * m, : 2 * m] = self._table[moved][:, moved]
            self.count = min(m, self.count + 1)
        self._table[2 * m :] = products
        self._table[:, 2 * m :] = products.T
        self.is_kept = bool(self._table[2 * m, 2 * m + 1] > LEAST_CURVATURE)

    def direction(self) -> torch.Tensor:
        """The coefficients of the L-BFGS direction: the two-loop recursion (Nocedal 1980)."""
        table, found = self._table, torch.zeros(self.size, dtype=torch.float64)
        found[-1] = -1.0
        pairs = self._pairs
        shares = []
        for step, change in reversed(pairs):
            share = table[step] @ found / table[step, change]
            found[change] -= share
            shares.append(share)
        if pairs:
            step, change = pairs[-1]
            found *= table[step, change] / table[change, change]
        for (step, change), share in zip(pairs, reversed(shares), strict=True):
            found[step] += share - table[change] @ found / table[step, change]
        return found

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """Places of step and change of each pair that takes part, oldest first."""
        m = self.history
        rows = [(at, m + at) for at in range(m - self.count, m)]
        return [*rows, (2 * m, 2 * m + 1)][-m:] if self.is_kept else rows
