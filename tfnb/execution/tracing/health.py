"""Health of a tensor: how many numbers are NaN, infinite, negative, zero, positive, and how large the finite ones are.

Memory is read once, a piece that fits a cache at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

PIECE = 1 << 16  # numbers that are looked at at a time
_WORDS = (
    ("nan", "nan"), ("low", "-inf"), ("negative", "negative"), ("zero", "zero"), ("positive", "positive"),
    ("high", "+inf"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Health:
    """Counts of numbers, from ``low`` (-inf) to ``high`` (+inf); the range, mean and deviation are of finite ones.

    >>> health(torch.tensor([1.0, 0.0, -3.0, float("nan"), float("inf")]))
    5 numbers: 1 nan, 1 negative, 1 zero, 1 positive, 1 +inf; finite: -3 to 1, mean -0.6667, std 1.7
    """

    nan: int = 0
    low: int = 0
    negative: int = 0
    zero: int = 0
    positive: int = 0
    high: int = 0
    least: float = math.nan
    greatest: float = math.nan
    mean: float = math.nan
    std: float = math.nan

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """Words and counts, none left out."""
        return tuple((word, getattr(self, name)) for name, word in _WORDS)

    @property
    def finite(self) -> int:
        """How many numbers are finite."""
        return self.negative + self.zero + self.positive

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self.finite + self.bad

    @property
    def bad(self) -> int:
        """How many numbers are NaN or infinite."""
        return self.nan + self.low + self.high

    def __add__(self, other: Health) -> Health:
        """The health of both tensors together."""
        n, m = self.finite, other.finite
        if not n or not m:
            ours = other if m else self
            least, greatest, mean, std = ours.least, ours.greatest, ours.mean, ours.std
        else:
            least, greatest = min(self.least, other.least), max(self.greatest, other.greatest)
            apart, total = other.mean - self.mean, n + m
            mean = self.mean + apart * m / total
            std = math.sqrt((n * self.std**2 + m * other.std**2 + apart**2 * n * m / total) / total)
        return Health(
            self.nan + other.nan, self.low + other.low, self.negative + other.negative, self.zero + other.zero,
            self.positive + other.positive, self.high + other.high, least, greatest, mean, std,
        )  # fmt: skip

    def __repr__(self) -> str:
        words = ", ".join(f"{count:,} {word}" for word, count in self.counts if count) or "none"
        counted = f"{self.size:,} {'number' if self.size == 1 else 'numbers'}: {words}"
        if not self.finite:
            return counted
        return f"{counted}; finite: {self.least:.4g} to {self.greatest:.4g}, mean {self.mean:.4g}, std {self.std:.4g}"


def health(tensor: torch.Tensor) -> Health | None:
    """The health of a tensor; None of one without plain numbers (quantized, meta).

    >>> health(torch.arange(-2, 200_000)).counts
    (('nan', 0), ('-inf', 0), ('negative', 2), ('zero', 1), ('positive', 199999), ('+inf', 0))
    """
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.to_dense()
    if tensor.is_quantized or tensor.device.type == "meta":
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    found = Health()
    for piece in tensor.detach().reshape(-1).split(PIECE):
        if piece.numel():
            found += _of(piece)
    return found


def _of(piece: torch.Tensor) -> Health:
    wide = piece.float() if piece.is_floating_point() and piece.element_size() == 1 else piece  # few kernels
    wide = wide.double() if wide.device.type in ("cpu", "cuda") else wide.float()
    nan = low = high = 0
    if not math.isfinite(wide.sum().item()):
        nan, low, high = (int(bad.sum()) for bad in (wide.isnan(), wide == -math.inf, wide == math.inf))
        wide = wide[wide.isfinite()]
    if not wide.numel():
        return Health(nan, low, high=high)
    positive, some = int((wide > 0).sum()), int(wide.count_nonzero())
    least, greatest = (bound.item() for bound in wide.aminmax())
    std, mean = (each.item() for each in torch.std_mean(wide, correction=0))
    return Health(nan, low, some - positive, wide.numel() - some, positive, high, least, greatest, mean, std)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all entries are finite: one reduction, and a second one where their sum is not.

    >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    wide = torch.float32 if real.element_size() < 4 else None  # a sum of halves is beyond their range soon
    if math.isfinite(real.sum(dtype=wide).item()):
        return True
    low, high = real.to(wide or real.dtype).aminmax()  # NaN if there is one
    return bool(low.isfinite() & high.isfinite())
