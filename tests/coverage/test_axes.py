"""The check of varying axes can fail: what it says of recordings that hold for one size only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.coverage.axes import REFUSED, WRONG, case_of, varies


class _Entry:
    """As much of an OpInfo as the check looks at."""

    name = "made up"

    def __init__(self, op: Any) -> None:
        self.op = op


class _Sample:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.input, self.args, self.kwargs = tensors[0], tensors[1:], {}


def _said(op: Any, *tensors: torch.Tensor) -> str | None:
    case = case_of(_Entry(op), _Sample(*tensors))
    assert case is not None
    return varies(case)


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_size_or_gradient_is_found() -> None:
    start = torch.rand(5, 3, dtype=torch.float64).requires_grad_()
    rows: list[int] = []

    def frozen(x: torch.Tensor) -> torch.Tensor:
        is_recorded = type(x) is not torch.Tensor
        rows.append(int(x.sample.shape[0]) if is_recorded else x.shape[0])  # type: ignore[attr-defined]
        return x.sum() / rows[-1]

    assert str(_said(frozen, start)).startswith(WRONG)
    assert str(_said(lambda x: x * int(x.shape[0]), start)).startswith(REFUSED)
    assert str(_said(lambda x: x * len(x), start)).startswith(REFUSED)
    assert _said(lambda x: x.sum() / x.shape[0], start) is None


def test_sizes_that_torch_refuses_mean_nothing() -> None:
    assert case_of(_Entry(lambda x: x.reshape(5, 3)), _Sample(torch.rand(5, 3))) is None
