"""Real data without a download, from packages that bring it along. May import errors only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tfnb.errors import FailedPrecondition


class Digits(NamedTuple):
    """Handwritten digits: images float32 [N, 1, 8, 8] in 0..1, labels int64 [N]; no image is in both parts."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def digits(*, test: int = 360, seed: int = 0) -> Digits:
    """The 1797 digits of scikit-learn (the test part of UCI's "Optical Recognition of Handwritten Digits").

    test: how many images are held out, drawn with ``seed``. Raises FailedPrecondition without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise FailedPrecondition("digits() needs scikit-learn: pip install 'tfnb[data]'") from missing
    data = load_digits()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(data.target)))
    images = torch.from_numpy(data.images).to(torch.float32).unsqueeze(1)[order] / 16
    labels = torch.from_numpy(data.target).to(torch.int64)[order]
    return Digits(images[test:], labels[test:], images[:test], labels[:test])
