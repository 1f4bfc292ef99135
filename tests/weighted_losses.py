"""Losses that are weighted means or sums over rows, and trainings of them here and over several places.

In the first batches all masks are one and nothing is ignored; one microbatch of a later batch counts nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tfnb

ROWS, BATCH = 42, 8  # the last batch is short
CLASSES = torch.tensor([1.0, 5.0, 0.1, 2.0], dtype=torch.float64)
Loss = Callable[..., torch.Tensor]


def data() -> dict[str, torch.Tensor]:
    """Feeds, by the letters of the losses' arguments."""
    torch.manual_seed(1)
    late = torch.arange(ROWS) >= 2 * BATCH
    none = (torch.arange(ROWS) >= 24) & (torch.arange(ROWS) < 28)  # half of a batch
    hidden = (late & (torch.rand(ROWS) < 0.4)) | none
    y, t = torch.randint(0, 4, (ROWS,)), torch.randint(1, 4, (ROWS, 5))
    words = late[:, None] & (torch.arange(5) >= torch.randint(1, 5, (ROWS, 1)))
    return {
        "x": torch.randn(ROWS, 3, dtype=torch.float64), "y": y, "z": torch.where(hidden, -100, y), "k": ~hidden,
        "w": torch.rand(ROWS, dtype=torch.float64), "t": torch.where(words | none[:, None], 0, t),
    }  # fmt: skip


def penalty(m: nn.Module) -> torch.Tensor:
    return 0.1 * sum((p.square().sum() for p in m.parameters()), torch.zeros((), dtype=torch.float64))


def of_words(m: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The loss of each word of a sequence."""
    logits = m(x)[:, None] * torch.arange(1.0, 6, dtype=torch.float64)[:, None]
    return F.cross_entropy(logits.flatten(0, 1), t.flatten(), reduction="none").view(-1, 5)


LOSSES: dict[str, tuple[str, Loss]] = {
    "ignored": ("xz", lambda m, x, z: F.cross_entropy(m(x), z)),
    "ignored and a penalty": ("xz", lambda m, x, z: 2 * F.cross_entropy(m(x), z) + penalty(m)),
    "ignored, by hand": ("xz", lambda m, x, z: F.cross_entropy(m(x), z, reduction="sum") / (z != -100).sum()),
    "smoothed classes": ("xz", lambda m, x, z: F.cross_entropy(m(x), z, weight=CLASSES, label_smoothing=0.1)),
    "images": ("xt", lambda m, x, t: F.cross_entropy(m(x)[:, :, None].expand(-1, 4, 5), t, ignore_index=0)),
    "mask": ("xk", lambda m, x, k: (m(x).square().mean(1) * k).sum() / k.sum()),
    "clamped mask": ("xk", lambda m, x, k: (m(x).square().mean(1) * k.double()).sum() / k.double().sum().clamp(min=1)),
    "shifted mask": ("xk", lambda m, x, k: (m(x).square().mean(1) * k).sum() / (k.double().sum() + 1e-3)),
    "two terms": ("xk", lambda m, x, k: (m(x)[:, 0] * k).sum() / k.sum() + (m(x).cos() * k[:, None]).sum() / k.sum()),
    "means": ("xw", lambda m, x, w: (m(x).square().mean(1) * w).mean() / w.mean()),
    "normed weights": ("xw", lambda m, x, w: (m(x).square().mean(1) * (w / w.sum())).sum()),
    "index": ("xk", lambda m, x, k: m(x).square().mean(1)[k].mean()),
    "padding": ("xt", lambda m, x, t: (of_words(m, x, t) * (t != 0)).sum() / (t != 0).sum()),
    "padding of each": ("xt", lambda m, x, t: ((of_words(m, x, t) * (t != 0)).sum(1) / (1 + (t != 0).sum(1))).mean()),
    "sum": ("xy", lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / 8),
    "rows": ("xw", lambda m, x, w: F.mse_loss(m(x)[:, 0], w) + penalty(m)),
}  # fmt: skip

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: tfnb.train.SGD(0.1, momentum=0.5), "Adam": lambda: tfnb.train.Adam(0.05),
}  # fmt: skip


class Trained:
    """A training of one loss: the parameters after it, the watched losses of its steps, and what was warned of."""

    def __init__(self, letters: str, loss: Loss, optimizer: str = "SGD", stages: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        model, given = nn.Linear(3, 4, dtype=torch.float64), data()
        with tfnb.record("weighted"):
            feeds = [tfnb.placeholder(given[letter][:4], name=letter) for letter in letters]
            watched = loss(model, *feeds)
            train = OPTIMIZERS[optimizer]().minimize(watched)
        about = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "watch": {"loss": watched}, "timeout": 240}
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            told = tfnb.fit(train, dict(zip(feeds, (given[c] for c in letters), strict=True)), **{**about, **options})
        self.notes = [str(each.message) for each in found]
        self.curve = [float(point["loss"]) for point in told.curve]
        self.state = [p.detach().clone() for p in model.parameters()]


def assert_same(one: Trained, other: Trained) -> None:
    """Equal but for rounding."""
    torch.testing.assert_close(one.state, other.state, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.curve, other.curve, rtol=1e-12, atol=1e-12)
    assert one.notes == []
