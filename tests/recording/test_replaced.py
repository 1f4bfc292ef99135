"""Calls that are recorded as other calls: what torch gives for them, errors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument, Unsupported

Function = Callable[[Any], Any]
FACTORIZATIONS: dict[str, Function] = {
    "cholesky": torch.linalg.cholesky,
    "inv": torch.linalg.inv,
    "inverse": torch.inverse,
    "tensorinv": lambda x: torch.linalg.tensorinv(x, 1),
    "solve": lambda x: torch.linalg.solve(x, torch.ones_like(x)),
    "lu_factor": lambda x: torch.linalg.lu_factor(x)[0],
    "ldl_factor": lambda x: torch.linalg.ldl_factor(x)[0],
    "matrix_power": lambda x: torch.linalg.matrix_power(x, -2),
}


@pytest.mark.parametrize("name", FACTORIZATIONS)
def test_a_matrix_that_torch_refuses_fails_the_run(name: str) -> None:
    function, regular = FACTORIZATIONS[name], torch.eye(3, dtype=torch.float64) + 0.25
    singular = torch.zeros_like(regular)
    with pytest.raises(RuntimeError):
        function(singular)
    with tfnb.record():
        x = tfnb.placeholder(regular, shape=(3, 3))
        y = function(x)
    torch.testing.assert_close(tfnb.run(y, {x: 2 * regular}), function(2 * regular))
    with pytest.raises(InvalidArgument, match="failed: "):
        tfnb.run(y, {x: singular})


def test_tensorinv_of_more_axes() -> None:
    start = torch.randn(2, 3, 6, dtype=torch.float64)
    with tfnb.record():
        x = tfnb.placeholder(start, shape=(2, 3, 6))
        y = torch.linalg.tensorinv(x)
    torch.testing.assert_close(tfnb.run(y, {x: start + 1}), torch.linalg.tensorinv(start + 1))


def test_no_difference_takes_nothing_in() -> None:
    """``torch.diff`` of order 0 leaves out what it is given to prepend and append."""
    start, more = torch.rand(4), torch.rand(2)
    with tfnb.record():
        y = torch.diff(tfnb.placeholder(start, shape=(4,)), 0, prepend=more, append=more)
    assert torch.equal(y.sample, torch.diff(start, 0, prepend=more, append=more))


CELLS: dict[str, Callable[[], Any]] = {
    "lstm": lambda: nn.LSTMCell(5, 7),
    "gru": lambda: nn.GRUCell(5, 7),
    "tanh": lambda: nn.RNNCell(5, 7),
    "relu": lambda: nn.RNNCell(5, 7, nonlinearity="relu", bias=False),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells_of_recurrent_layers_take_no_copies(name: str) -> None:
    cell = CELLS[name]().double()
    weights = list(cell.parameters())

    def last(rows: Any) -> Any:
        state = None
        for place in range(3):
            state = cell(rows[:, place], state)
        return state[0] if isinstance(state, tuple) else state

    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(4, 3, 5, dtype=torch.float64))
        y = last(x)
        found = [y, *tfnb.gradients(y.square().sum(), weights)]
    assert not {"aten.copy.default", "aten.clone.default"} & {node.op for node in graph.nodes}
    data = torch.randn(9, 3, 5, dtype=torch.float64)
    want = last(data)
    wanted = [want, *torch.autograd.grad(want.square().sum(), weights)]
    torch.testing.assert_close(tfnb.run(found, {x: data}), wanted, rtol=1e-10, atol=1e-12)


def test_a_cell_given_other_sizes_is_refused_as_in_torch() -> None:
    cell = nn.GRUCell(5, 7)
    with tfnb.record(), pytest.raises(RuntimeError, match="doesn't match hidden0 batch size"):
        cell(tfnb.placeholder(torch.randn(4, 5), shape=(4, 5)), torch.randn(1, 7))


@pytest.mark.parametrize("made_before", [True, False])
def test_points_of_a_sequence_of_its_own_are_refused_with_the_line(made_before: bool) -> None:
    engine = torch.quasirandom.SobolEngine(3, scramble=True, seed=1)
    with tfnb.record(), pytest.raises(Unsupported, match=r"SobolEngine(.|\n)*feed them(.|\n)*test_replaced\.py line"):
        (engine if made_before else torch.quasirandom.SobolEngine(3)).draw(4)
    drawn = engine.draw(4)
    assert torch.equal(drawn, torch.quasirandom.SobolEngine(3, scramble=True, seed=1).draw(4))
