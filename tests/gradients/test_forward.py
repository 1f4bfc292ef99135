"""Forward mode against torch.func.jvp in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tests.gradients.reference import assert_same

CASES = {
    "elementwise": lambda x, y: x.sin() * y.exp(),
    "matrix product": lambda x, y: (x @ y.T).softmax(-1),
    "two outputs": lambda x, y: (x.cumsum(0) * 2, (y * y).sum(0)),
    "reduction": lambda x, y: F.mse_loss(x, y).log(),
    "one of them": lambda x, y: (x.tanh(), x.exp()),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs(name: str) -> None:
    torch.manual_seed(0)
    data = [torch.randn(4, 3, dtype=torch.float64) for _ in range(4)]
    _, want = torch.func.jvp(CASES[name], tuple(data[:2]), tuple(data[2:]))
    with tfnb.record():
        xs = [tfnb.placeholder(d) for d in data[:2]]
        tangents = [tfnb.placeholder(d) for d in data[2:]]
        ys = CASES[name](*xs)
        got = tfnb.jvp(ys, xs, tangents)
    assert_same(got, want if isinstance(want, tuple) else [want])
    other = [torch.randn(6, 3, dtype=torch.float64) for _ in range(4)]
    _, want = torch.func.jvp(CASES[name], tuple(other[:2]), tuple(other[2:]))
    values = tfnb.run(got, dict(zip([*xs, *tangents], other, strict=True)))
    assert_same(values, want if isinstance(want, tuple) else [want])


def test_the_derivative_of_a_jvp() -> None:
    data = torch.randn(3, dtype=torch.float64)
    with tfnb.record():
        x = tfnb.placeholder(data, shape=(3,))
        (dy,) = tfnb.jvp(x**3, x, torch.ones(3, dtype=torch.float64))
        (ddy,) = tfnb.jvp(dy, x, torch.ones(3, dtype=torch.float64))
        (back,) = tfnb.gradients(dy, [x])
    assert_same([dy, ddy, back], [3 * data**2, 6 * data, 6 * data])


def test_integers_and_unconnected_outputs_do_not_move() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(3), shape=(3,))
        w = tfnb.placeholder(torch.randn(3), shape=(3,))
        got = tfnb.jvp([x * 2, x.argmax(), w * 3], x, torch.ones(3))
    assert_same(got, [torch.full((3,), 2.0), torch.tensor(0), torch.zeros(3)])


def test_a_variable_and_a_parameter() -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 2))
        (dy,) = tfnb.jvp(x * w * w, w, torch.tensor([1.0, 10.0]))
    assert_same([dy], [torch.tensor([2.0, 40.0]).expand(4, 2)])


def test_mistakes() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(3), shape=(3,))
        with pytest.raises(tfnb.errors.InvalidArgument, match="2 tangents for 1 xs"):
            tfnb.jvp(x * 2, x, [torch.ones(3), torch.ones(3)])
        with pytest.raises(tfnb.errors.ShapeError, match=r"tangents\[0\] has shape \[2\], its x"):
            tfnb.jvp(x * 2, x, torch.ones(2))
        with pytest.raises(tfnb.errors.InvalidArgument, match=r"tangents\[0\] is torch.float64, its x"):
            tfnb.jvp(x * 2, x, torch.ones(3, dtype=torch.float64))
        with pytest.raises(tfnb.errors.InvalidArgument, match="at least one x"):
            tfnb.jvp(x * 2, [], [])
        with pytest.raises(tfnb.errors.InvalidArgument, match=r"of a function in the cell, torch\.func\.jvp"):
            tfnb.jvp(torch.sin, x, torch.ones(3))
