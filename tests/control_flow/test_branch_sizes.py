"""Branches that give different sizes: as in Python, with gradients; refused where one row would be broadcast."""

# ruff: noqa: SIM108  statements are what is tested

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import BranchChanged, ShapeError

W = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [0.5, -1.0]]))


def some_or_all(x: Any) -> Any:
    if x.sum() > 0:
        y = (x @ W)[x[:, 0] > 0]
    else:
        y = (x * 2) @ W
    return y.pow(2).sum() / y.shape[0]


def another_axis(x: Any) -> Any:
    if x.sum() > 0:
        y = x @ W
    else:
        y = x[:, :1] * W.sum()
    return y.pow(2).mean()


def fixed_sizes(x: Any) -> Any:
    if x.sum() > 0:
        y = (x @ W).sum(0)
    else:
        y = torch.cat([x.sum(0), W.flatten()])
    return (y * 3).softmax(0).max() + y.sum()


def early_return(x: Any) -> Any:
    if x.sum() > 0:
        kept = x[x[:, 0] > 0]
        if kept.shape[0] > 1:
            return kept @ W
        x = x + 1
    return (x @ W) * 2


def nested(x: Any) -> Any:
    if x.sum() > 0:
        if x[0, 0] > 0:
            y = x[1:]
        else:
            y = x[:1]
    else:
        y = x
    return torch.cat([y, x]) @ W


def rows_and_labels(x: Any) -> Any:
    if x.sum() > 0:
        kept = x[:, 0] > 0
        rows, labels = x[kept] @ W, x[:, 1][kept]
    else:
        rows, labels = (x @ W)[:1], x[:1, 0]
    return (rows * labels[:, None]).sum()


def in_a_loop(x: Any) -> Any:
    s = x.sum() * 0
    for row in x:
        if row.sum() > 0:
            y = x[:2] @ W
        else:
            y = x @ W
        s = s + (y * y).sum()
    return s


def expression(x: Any) -> Any:
    y = x[1:] if x.sum() > 0 else x @ W
    return y.sum(1).sum()


def joined_rows(x: Any) -> Any:
    if x.sum() > 0:
        y = x @ W
    else:
        y = (x @ W)[:1]
    return (y + x).sum()


PROGRAMS = (
    some_or_all, another_axis, fixed_sizes, early_return, nested, rows_and_labels, in_a_loop, expression,
)  # fmt: skip
FED = (
    torch.tensor([[1.5, -0.3], [-1.0, 0.4], [0.7, 0.2], [0.1, -0.6], [-0.2, 0.9]]), -torch.ones(5, 2),
    torch.ones(3, 2), torch.tensor([[2.0, -0.5]]), torch.tensor([[3.0, -1.0], [-1.0, 0.5], [-0.2, 0.1]]),
)  # fmt: skip


def recorded(program: Callable[[Any], Any], sample: torch.Tensor) -> tuple[Any, list[Any]]:
    with tfnb.record():
        x = tfnb.placeholder(sample, name="x")
        out = tfnb.autograph(program)(x)
        return x, [out, *tfnb.gradients(out.sum(), [x, W])]


def eager(program: Callable[[Any], Any], fed: torch.Tensor) -> list[torch.Tensor]:
    x = fed.clone().requires_grad_()
    out = program(x)
    dx, dw = torch.autograd.grad(out.sum(), [x, W], allow_unused=True)
    return [out.detach(), dx, torch.zeros_like(W) if dw is None else dw]


@pytest.mark.parametrize("sample", [FED[0], FED[1]], ids=["then", "else"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_branch_gives_its_size(program: Callable[[Any], Any], sample: torch.Tensor) -> None:
    x, fetches = recorded(program, sample)
    for fed in FED:
        torch.testing.assert_close(tfnb.run(fetches, {x: fed}), eager(program, fed))


def test_cond_gives_the_size_of_the_branch_that_is_taken() -> None:
    with tfnb.record():
        x = tfnb.placeholder(FED[0], name="x")
        kept = x[x[:, 0] > 0]
        rows, ids = tfnb.cond(x.sum() > 0, lambda: (kept, kept[:, 0] * 2), lambda: (x[:1], x[:1, 0]))
        assert rows.spec.shape[0] == ids.spec.shape[0]
    assert [len(v) for v in tfnb.run([rows, ids], {x: FED[2]})] == [3, 3]
    assert [len(v) for v in tfnb.run([rows, ids], {x: FED[1]})] == [1, 1]


def test_one_row_that_torch_would_broadcast_is_refused() -> None:
    """The gradient of a broadcast sums, and no recording that took the sizes for equal does."""
    x, fetches = recorded(joined_rows, torch.ones(4, 2))
    torch.testing.assert_close(tfnb.run(fetches, {x: FED[2]}), eager(joined_rows, FED[2]))
    with pytest.raises(BranchChanged, match=r"aten\.add\.Tensor was recorded for N == B(.*\n)*.*line \d+"):
        tfnb.run(fetches, {x: FED[1]})
    with pytest.raises(ShapeError, match="takes N == B for granted"):
        recorded(joined_rows, FED[1])


def test_rows_that_a_mask_picks_are_not_broadcast_silently() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 2), name="x")
        out = x[x[:, 0] > 0] * 3 + x
        (dx,) = tfnb.gradients(out.sum(), [x])
    assert tfnb.run(dx, {x: torch.ones(5, 2)}).tolist() == [[4.0, 4.0]] * 5
    with pytest.raises(BranchChanged, match="N == B"):
        tfnb.run(dx, {x: FED[4]})
