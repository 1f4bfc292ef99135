"""The steps of recurrent layers: as torch.nn computes them, and well-behaved custom ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tfnb.kernels import recurrent  # noqa: F401  defines torch.ops.tfnb

ops = torch.ops.tfnb
T, B, H = 4, 2, 3


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


CALLS: dict[str, Any] = {
    "gru_layer": lambda: (r(T, B, 3 * H), r(B, H), r(3 * H, H), r(3 * H)),
    "gru_layer_backward": lambda: (r(T, B, H), r(T, B, 4 * H), r(T, B, H), r(B, H), r(3 * H, H)),
    "lstm_layer": lambda: (r(T, B, 4 * H), r(B, H), r(B, H), r(4 * H, H)),
    "lstm_layer_backward": lambda: (r(T, B, H), r(T, B, H), r(T, B, 4 * H), r(T, B, H), r(B, H), r(4 * H, H)),
    "rnn_layer": lambda: (r(T, B, H), r(B, H), r(H, H), True),
    "rnn_layer_backward": lambda: (r(T, B, H), r(T, B, H), r(H, H), False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(
        getattr(ops, name).default, CALLS[name](), test_utils=("test_schema", "test_faketensor")
    )  # fmt: skip


def _gates(x: torch.Tensor, net: nn.Module, biases: int) -> torch.Tensor:
    bias = net.bias_ih_l0 + net.bias_hh_l0 if biases == 2 else net.bias_ih_l0
    return nn.functional.linear(x, net.weight_ih_l0, bias)


def test_lstm_steps_are_those_of_torch() -> None:
    net, x = nn.LSTM(5, H, dtype=torch.float64), r(T, B, 5)
    y, c, _ = ops.lstm_layer(
        _gates(x, net, 2), torch.zeros(B, H).double(), torch.zeros(B, H).double(), net.weight_hh_l0
    )
    expected, (_, cell) = net(x)
    torch.testing.assert_close((y, c[-1]), (expected, cell[0]))


def test_gru_steps_are_those_of_torch() -> None:
    net, x = nn.GRU(5, H, dtype=torch.float64), r(T, B, 5)
    y, _ = ops.gru_layer(_gates(x, net, 1), torch.zeros(B, H).double(), net.weight_hh_l0, net.bias_hh_l0)
    torch.testing.assert_close(y, net(x)[0])


@pytest.mark.parametrize("kind", ["tanh", "relu"])
def test_rnn_steps_are_those_of_torch(kind: str) -> None:
    net, x = nn.RNN(5, H, nonlinearity=kind, dtype=torch.float64), r(T, B, 5)
    y = ops.rnn_layer(_gates(x, net, 2), torch.zeros(B, H).double(), net.weight_hh_l0, kind == "tanh")
    torch.testing.assert_close(y, net(x)[0])
