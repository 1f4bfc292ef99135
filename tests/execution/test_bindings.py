"""Callables that stand for ops give the same to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tfnb.execution.bindings import max_pool2d

aten = torch.ops.aten


@pytest.mark.parametrize("window", [
    ([2, 2], [2, 2]), ([3, 3], [1, 1], [1, 1]), ([3, 2], [2, 1], [1, 0], [2, 1], True), ([2, 2], []),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_pool_is_torchs_pool(window: tuple[Any, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 15, 17, dtype=dtype).mul(3).round()  # many equal numbers
    x[0, 3, 4:9] = torch.nan
    x[1, :, 5] = -torch.inf
    for given in (x, x.contiguous(memory_format=torch.channels_last), x[0], x[:, :2], x.transpose(2, 3), x[..., ::2]):
        got, wanted = max_pool2d(given, *window), aten.max_pool2d_with_indices.default(given, *window)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        assert got[0].stride() == wanted[0].stride()
