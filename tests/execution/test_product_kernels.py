"""oneDNN's product is torch's, however the matrices lie; a compiled step takes it where it is quicker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tfnb.execution.tiers.native import product_kernels
from tfnb.execution.tiers.native.product_kernels import is_available, onednn_product

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


def test_each_product_is_of_the_library_that_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown by what is told of each size; which sizes those are is up to the machine."""
    asked: list[Any] = []

    def said(first: Any, second: Any, threads: int) -> bool:
        asked.append((first[0], second[0]))
        return 3 in first[0]

    def step(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = torch.addmm(bias, a, b)
        return wide, wide.t() @ a, a.double() @ b.double(), torch.addmm(bias, a, b, alpha=2)

    given = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    module = make_fx(step, tracing_mode="fake")(*given)
    monkeypatch.setattr(product_kernels, "_is_quicker", said)
    product_kernels.choose_products(module.graph)
    module.recompile()
    torch.testing.assert_close(module(*given), step(*given))
    assert asked == [((5, 3), (3, 4)), ((3, 4), (4, 5))]
    left = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert left.count("tfnb.onednn_product.default") == 2 and left.count("aten.mm.default") == 1
    monkeypatch.undo()
    layouts = ((64, 64), (64, 1)), ((64, 64), (1, 64))
    assert product_kernels._is_quicker(*layouts, torch.get_num_threads()) in (True, False)
