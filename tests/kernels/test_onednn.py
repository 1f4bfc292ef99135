"""oneDNN's product is torch's, however the matrices lie."""

from __future__ import annotations

import pytest
import torch

from tfnb.kernels.onednn import is_available, onednn_product

pytestmark = pytest.mark.skipif(not is_available(), reason="torch was built without oneDNN")


def laid(rows: int, columns: int, how: str) -> torch.Tensor:
    if how == "turned":
        return torch.randn(columns, rows).t()
    whole = torch.randn(rows, 2 * columns)
    return whole[:, :columns] if how == "part" else whole[:, :columns].contiguous()


@pytest.mark.parametrize("first", ["plain", "turned", "part"])
@pytest.mark.parametrize("second", ["plain", "turned", "part"])
@pytest.mark.parametrize("sizes", [(5, 7, 3), (32, 64, 16), (1, 8, 9)])
def test_it_is_the_product(first: str, second: str, sizes: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    m, k, n = sizes
    a, b = laid(m, k, first), laid(k, n, second)
    found = onednn_product(a, b)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    fake = torch.ops.tfnb.onednn_product(a.to("meta"), b.to("meta"))
    assert (fake.shape, fake.stride(), fake.dtype) == (found.shape, found.stride(), found.dtype)
