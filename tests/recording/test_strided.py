"""Views by stride see the elements of their tensor, wherever a run has them in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tfnb
from tests.gradients.reference import compare
from tfnb.errors import Unsupported


def windows(x: torch.Tensor) -> torch.Tensor:
    """Windows of two rows that overlap by one, of whatever lies where in x."""
    return x.as_strided((x.shape[0] - 1, 2, x.shape[1]), (x.stride(0), x.stride(0), x.stride(1)))


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": windows,
    "transposed": lambda x: windows((x * 2).t()),
    "by columns": lambda x: windows(x.t() * 2),
    "a part": lambda x: windows((x * 2)[1:, 1:]),
    "from the start of all": lambda x: (x * 2)[1:].as_strided((2, 2), (1, 3), 0),
    "permuted": lambda x: windows((x * 2).view(5, 2, 2).permute(2, 0, 1).flatten(1)),
    "a copy": lambda x: torch.as_strided_copy((x * 2).t(), (2, 3), (1, 2), 1),
    "written": lambda x: _written(x.t() * 2),
    "scattered": lambda x: torch.as_strided_scatter((x * 2).t(), x[0, :2], (2,), (3,), 1),
}


# where torch differentiates another program: its own leaves out what lies before x[1:], and refuses the scatter
ORACLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "from the start of all": lambda x: (x * 2).as_strided((2, 2), (1, 3), 0),
    "scattered": lambda x: _replaced((x * 2).t().clone(), x[0, :2]),
}


def _replaced(y: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    y.as_strided((2,), (3,), 1).copy_(new)
    return y


def _written(y: torch.Tensor) -> torch.Tensor:
    y.as_strided((2, 2), (5, 1), 1).mul_(3)
    return y


@pytest.mark.parametrize("name", sorted(CASES))
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    compare(CASES[name], (torch.randn(5, 4, dtype=torch.float64, requires_grad=True),), oracle=ORACLES.get(name))


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("lies", ["in a bigger tensor", "by columns"])
def test_a_fed_tensor_may_lie_anywhere(name: str, lies: str) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(5, 4), shape=(5, 4))
        y = CASES[name](x)
    fed = torch.randn(40)[7:27].view(5, 4) if lies == "in a bigger tensor" else torch.randn(4, 5).t()
    torch.testing.assert_close(tfnb.run(y, {x: fed}), CASES[name](fed.clone(memory_format=torch.contiguous_format)))


def test_every_batch_of_a_transposed_tensor() -> None:
    def chunks(x: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(0, 1).flatten(0, 1)  # a view where the batch lies inside
        size, step = list(rows.shape), list(rows.stride())
        return rows.as_strided((size[0], size[1] - 1, 2), (step[0], step[1], step[1]))

    with tfnb.record():
        x = tfnb.placeholder(torch.randn(6, 4, 3), shape=(6, None, 3))
        y = chunks(x.transpose(1, 2))
        (dx,) = tfnb.gradients((y * y).sum(), [x])
    fed = torch.randn(6, 7, 3, requires_grad=True)
    expected = chunks(fed.transpose(1, 2))
    (want,) = torch.autograd.grad((expected * expected).sum(), fed)
    torch.testing.assert_close(tfnb.run([y, dx], {x: fed.detach()}), [expected.detach(), want])


def test_memory_with_overlaps_is_refused() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(5, 4), shape=(5, 4))
        with pytest.raises(Unsupported, match=r"use a copy\n.*at test_strided.py line"):
            x.new_empty_strided((5, 4), (1, 1)).as_strided((2,), (1,))
        with pytest.raises(Unsupported, match="before the first element"):
            torch.as_strided_scatter(x.t()[1:], x[0, :2], (2,), (1,), 0)
