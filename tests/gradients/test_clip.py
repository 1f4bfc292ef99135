"""Clipping (semantics S-123)."""

from __future__ import annotations

import pytest
import torch

import tfnb
from tfnb.errors import InvalidArgument


def test_by_value() -> None:
    assert tfnb.clip_by_value(torch.tensor([-3.0, 0.5, 3.0]), -1, 1).tolist() == [-1.0, 0.5, 1.0]


def test_by_norm_scales_only_what_exceeds() -> None:
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    torch.testing.assert_close(tfnb.clip_by_norm(x, 1.0, dim=1), torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
    torch.testing.assert_close(tfnb.clip_by_norm(x[0], 10.0), x[0])


def test_by_global_norm() -> None:
    clipped, norm = tfnb.clip_by_global_norm([torch.tensor([3.0]), None, torch.tensor([4.0])], 1.0)
    assert clipped[1] is None
    torch.testing.assert_close(
        [clipped[0], clipped[2], norm], [torch.tensor([0.6]), torch.tensor([0.8]), torch.tensor(5.0)]
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_that_is_not_finite_gives_nan(bad: float) -> None:
    clipped, _ = tfnb.clip_by_global_norm([torch.tensor([bad]), torch.tensor([1.0])], 1.0)
    assert all(torch.isnan(x).all() for x in clipped)


def test_zeros_stay_zeros() -> None:
    assert tfnb.clip_by_norm(torch.zeros(3), 1.0).tolist() == [0.0, 0.0, 0.0]


def test_nothing_to_clip_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one"):
        tfnb.clip_by_global_norm([None], 1.0)


def test_recorded_gradients_are_clipped_in_the_graph() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([3.0, 4.0]), shape=(2,))
        grads = tfnb.gradients((x * x).sum() / 2, [x])
        clipped, norm = tfnb.clip_by_global_norm(grads, 1.0)
    torch.testing.assert_close(
        tfnb.run([*clipped, norm], {x: torch.tensor([6.0, 8.0])}), [torch.tensor([0.6, 0.8]), torch.tensor(10.0)]
    )
