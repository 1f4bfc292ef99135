"""The ops of arrays that are written once have the shapes and schemas that they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tfnb.kernels import arrays

ops = torch.ops.tfnb
ROWS, WRITTEN = torch.arange(6.0).reshape(3, 2), torch.tensor([True, False, False])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (ops.array_unwritten, (torch.tensor(4),)),
        (ops.array_write, (ROWS, WRITTEN, torch.tensor(1), torch.ones(2))),
        (ops.array_write, (ROWS, WRITTEN, torch.tensor([2, 1]), torch.ones(2, 2))),
        (ops.array_grown, (ROWS, WRITTEN, torch.tensor(1))),
        (ops.array_grown, (ROWS, WRITTEN, torch.tensor([5, 1]))),
        (ops.array_read, (ROWS, WRITTEN, torch.tensor(0))),
        (ops.array_read, (ROWS, WRITTEN, torch.tensor([0, 0]))),
    ],
)
def test_array_ops_pass_opcheck(op: Any, args: Any) -> None:
    torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


def test_values_that_lie_on_a_device_are_fetched_once_and_written_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_here", torch.clone)  # what a copy on the host is to a device
    empty = torch.zeros(4, 2), torch.zeros(4, dtype=torch.bool)
    rows, written = ops.array_write(*empty, torch.tensor([1, 3]), torch.ones(2, 2))
    assert written.tolist() == [False, True, False, True] and torch.equal(rows[1], torch.ones(2))
    with pytest.raises(IndexError, match=r"element 3 .* written twice"):
        ops.array_write(rows, written, torch.tensor(3), torch.ones(2))
    with pytest.raises(IndexError, match=r"element 0 .* was not written"):
        ops.array_read(rows, written, torch.tensor(0))
