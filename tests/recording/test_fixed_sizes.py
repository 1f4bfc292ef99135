"""Sizes that a recording fixed: the run's error repeats the line; functions of torch that need not fix them do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tfnb.errors import ShapeError


def _arange_of_len(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(len(x))[:, None]


def _loop(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.sum() for row in x])


def _equal_rows(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(4, 1)


@pytest.mark.parametrize("shape", [None, (None, 3)])
@pytest.mark.parametrize(
    ("function", "line"), [(_arange_of_len, r"len\(x\)"), (_loop, "for row in x"), (_equal_rows, r"ones\(4, 1\)")]
)
def test_a_feed_of_another_size_is_told_the_line_that_fixed_it(function, line, shape) -> None:
    with pytest.warns(UserWarning, match="became the constant 4"), tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3), shape=shape)
        y = function(x)
    assert torch.equal(tfnb.run(y, {x: torch.ones(4, 3)}), function(torch.ones(4, 3)))
    with pytest.raises(ShapeError, match=rf"axis 0 varied, and became the constant 4 at (.|\n)*{line}") as raised:
        tfnb.run(y, {x: torch.ones(5, 3)})
    assert "shape=(None" not in str(raised.value)


def test_an_axis_that_never_varied_is_advised_to() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        y = x * 2
    with pytest.raises(ShapeError, match=r"axis 1 is fixed by its recording; placeholder\(sample, shape=\(None"):
        tfnb.run(y, {x: torch.ones(4, 5)})


def test_a_saved_graph_keeps_the_line(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="became the constant 4"), tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        y = _arange_of_len(x)
    g.save(tmp_path / "graph.json")
    loaded = tfnb.Graph.load(tmp_path / "graph.json")
    with pytest.raises(ShapeError, match=r"axis 0 varied(.|\n)*len\(x\)"):
        tfnb.Session(loaded).run(y.name, {"x": torch.ones(5, 3)})


@pytest.mark.parametrize("sample", [(2, 3, 8, 8), (3, 3, 8, 8), (2, 2, 8, 8), (5, 1, 8, 8), (2, 3, 4, 6, 5)])
@pytest.mark.parametrize("corners", [True, False])
def test_affine_grid_varies_in_the_batch(sample, corners) -> None:
    space = len(sample) - 2
    layer = torch.nn.Linear(sample[-1], space * (space + 1))

    def warped(x: torch.Tensor) -> torch.Tensor:
        theta = layer(x.flatten(1, -2)[:, 0]).view(-1, space, space + 1)
        return F.grid_sample(x, F.affine_grid(theta, x.size(), align_corners=corners), align_corners=corners)

    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(sample))
        y = warped(x)
    for rows in (1, 2, 7):
        value = torch.randn(rows, *sample[1:])
        torch.testing.assert_close(tfnb.Session(g).run(y, {x: value}), warped(value), rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match="B >= 1"):
        tfnb.run(y, {x: torch.randn(0, *sample[1:])})
