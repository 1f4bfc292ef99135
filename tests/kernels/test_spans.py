"""What slices and ranges of numbers pick is what Python picks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tfnb.kernels import spans

ops = torch.ops.tfnb
ONE, FOUR = torch.tensor(1), torch.tensor(4, dtype=torch.int32)
places = st.integers(-7, 7)


@pytest.mark.parametrize(
    ("op", "args"),
    [(ops.index_span, (ONE, FOUR, 2, 5)), (ops.index_single, (FOUR, 5)), (ops.index_range, (ONE, FOUR, ONE))],
)
def test_ops_of_spans_pass_opcheck(op: Any, args: Any) -> None:
    torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


@given(places, places, st.integers(1, 3), st.integers(0, 5))
def test_a_span_is_a_slice_of_python(start: int, stop: int, step: int, size: int) -> None:
    found = spans.index_span(torch.tensor(start), torch.tensor(stop), step, size)
    assert found.dtype is torch.int64 and found.tolist() == [*range(size)][start:stop:step]


@given(places, st.integers(0, 5))
def test_one_row_is_that_of_python_or_an_error(start: int, size: int) -> None:
    want = [*range(size)][start : start + 1]
    if want:
        assert spans.index_single(torch.tensor(start), size).tolist() == want
    else:
        with pytest.raises(IndexError, match=f"of {size} elements has none"):
            spans.index_single(torch.tensor(start), size)
