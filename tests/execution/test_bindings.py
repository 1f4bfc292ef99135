"""Callables that stand for ops give the same to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tfnb.execution.lowering.bindings import QUICK, max_pool2d

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


X, Y = torch.tensor([[1.0, torch.nan, -0.0, 4.0], [7.0, 2.0, -torch.inf, 2.0]]), torch.arange(8.0).reshape(2, 4)
AT, MASK, ROWS = torch.tensor([[3, 0], [-1, 1]]), X > 1, torch.tensor([1, 0])
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.index.Tensor, (X, [ROWS]), {}), (aten.index.Tensor, (X, [AT % 2]), {}), (aten.index.Tensor, (X, [MASK]), {}),
    (aten.index.Tensor, (X, [None, AT]), {}), (aten.index.Tensor, (X, [ROWS, ROWS]), {}),
    (aten.index.Tensor, (X, [torch.tensor(-1)]), {}), (aten.index.Tensor, (X.t(), [AT]), {}),
    (aten._to_copy.default, (X,), {"dtype": torch.float64}),
    (aten._to_copy.default, (X.t(),), {"dtype": torch.float32}),
    (aten._to_copy.default, (MASK,), {"dtype": torch.int64}), (aten._to_copy.default, (X,), {}),
    (aten._to_copy.default, (X.t(),), {"dtype": torch.float32, "memory_format": torch.contiguous_format}),
    (aten.amax.default, (X, [1], True), {}), (aten.amin.default, (X,), {}), (aten.argmax.default, (X,), {}),
    (aten.argmax.default, (X, None, True), {}), (aten.argmin.default, (X, 1), {}), (aten.cat.default, ([X, Y], 1), {}),
    (aten.stack.default, ([X, Y], 1), {}), (aten.clamp.default, (X, None, 3), {}), (aten.clamp.default, (X, 0), {}),
    (aten.detach.default, (X,), {}), (aten.floor_divide.default, (Y, 3), {}), (aten.floor_divide.default, (X, Y), {}),
    (aten.gather.default, (X, 1, AT % 4), {}), (aten.index_select.default, (X, 0, ROWS), {}),
    (aten.index_add.default, (X, 0, ROWS, Y), {"alpha": 2}), (aten.index_copy.default, (X, 0, ROWS, Y), {}),
    (aten.maximum.default, (X, Y), {}), (aten.minimum.default, (X, Y), {}), (aten.unsqueeze.default, (X, -1), {}),
    (aten.scatter_add.default, (X, 1, AT % 4, Y), {}), (aten.scatter.src, (X, 1, AT % 4, Y), {}),
    (aten.scatter.value, (X, 1, AT % 4, 2), {}), (aten.bitwise_and.Tensor, (MASK, ~MASK), {}),
    (aten.bitwise_or.Tensor, (AT, AT % 2), {}), (aten.mean.dim, (X, [1]), {}), (aten.mean.dim, (X, None), {}),
    (aten.mean.dim, (X, [0], True), {"dtype": torch.float64}), (aten.pow.Tensor_Scalar, (X, 2), {}),
    (aten.remainder.Scalar, (X, 3), {}), (aten.rsub.Tensor, (X, Y), {"alpha": 2}), (aten.select.int, (X, 1, -1), {}),
    (aten.squeeze.dim, (X[:1], 0), {}), (aten.where.self, (MASK, X, Y), {}),
    (aten.where.self, (MASK, X, Y.double()), {}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS, ids=[str(row[0]) for row in CALLS])
def test_a_binding_gives_what_its_op_gives(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    got, wanted = QUICK[op](*args, **kwargs), op(*args, **kwargs)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    assert (got.stride(), got.dtype) == (wanted.stride(), wanted.dtype)
    assert got.untyped_storage().data_ptr() != X.untyped_storage().data_ptr() or op._schema.returns[0].alias_info
