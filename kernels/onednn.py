"""The product of two matrices by oneDNN, which torch has beside its own; in float32 either may be quicker."""

from __future__ import annotations

import torch
from torch import Tensor

from tfnb.kernels.define import op


def is_available() -> bool:
    """Whether torch was built with oneDNN and this processor has what it needs."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


@op("(Tensor a, Tensor b) -> Tensor", _fake)
def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices in float32 on the CPU; ``b`` may lie in any strides, ``a`` is copied if it is turned.

    >>> onednn_product(torch.ones(2, 3), torch.ones(3, 1)).tolist()
    [[3.0], [3.0]]
    """
    return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], "")  # type: ignore[no-any-return]
