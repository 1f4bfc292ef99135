"""Recurrent nets in one call and their backward: as torch.nn and autograd compute them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tfnb.kernels import nets, recurrent

ops = torch.ops.tfnb
T, B, W, H = 4, 2, 5, 3
KINDS: dict[str, Any] = {
    "lstm": lambda **options: nn.LSTM(W, H, **options),
    "gru": lambda **options: nn.GRU(W, H, **options),
    "rnn_tanh": lambda **options: nn.RNN(W, H, **options),
    "rnn_relu": lambda **options: nn.RNN(W, H, nonlinearity="relu", **options),
}
CASES = list(product(KINDS, (torch.float32, torch.float64), (1, 2), (False, True), (False, True), (True, False)))


def _called(kind: str, net: Any, rows: int = B) -> tuple[Any, ...]:
    """Arguments of the op for this module."""
    dtype, count = net.weight_hh_l0.dtype, net.num_layers * (1 + net.bidirectional)
    x = torch.randn(*((rows, T) if net.batch_first else (T, rows)), W, dtype=dtype)
    hx = [torch.randn(count, rows, H, dtype=dtype) for _ in range(2 if kind == "lstm" else 1)]
    params = [p.detach() for p in net._flat_weights]
    return kind, x, hx, params, net.bias, net.num_layers, net.bidirectional, net.batch_first


def _torchs(net: Any, args: tuple[Any, ...], picked: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """torch's outputs, their cotangents (None but for the ``picked``), and autograd's gradients by them."""
    x, hx = args[1].requires_grad_(), [h.requires_grad_() for h in args[2]]
    y, last = net(x, tuple(hx) if len(hx) == 2 else hx[0])
    outs = [y, *(last if len(hx) == 2 else (last,))]
    dys = [torch.randn_like(out) if picked(i) else None for i, out in enumerate(outs)]
    by, given = zip(*((out, dy) for out, dy in zip(outs, dys, strict=True) if dy is not None), strict=True)
    grads = torch.autograd.grad(by, [x, *hx, *net._flat_weights], given)
    for each in (x, *hx):
        each.requires_grad_(False)
    return [out.detach() for out in outs], dys, list(grads)


@pytest.mark.parametrize(("kind", "dtype", "layers", "both", "batch_first", "bias"), CASES)
def test_net_and_its_backward_are_those_of_torch(
    kind: str, dtype: torch.dtype, layers: int, both: bool, batch_first: bool, bias: bool
) -> None:
    net = KINDS[kind](num_layers=layers, bidirectional=both, batch_first=batch_first, bias=bias, dtype=dtype)
    args = _called(kind, net)
    for picked in (lambda _: True, lambda i: i == 0, lambda i: i == 1):
        expected, dys, grads = _torchs(net, args, picked)
        outs = ops.recurrent_net(*args)
        torch.testing.assert_close(outs[: len(expected)], expected)
        found = ops.recurrent_net_backward([True] * len(grads), dys, outs, *args)
        torch.testing.assert_close(found, grads)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_wanted_is_given(kind: str) -> None:
    net = KINDS[kind](num_layers=2)
    args = _called(kind, net)
    _, dys, grads = _torchs(net, args, lambda _: True)
    wanted = [i % 3 == 1 for i in range(len(grads))]
    found = ops.recurrent_net_backward(wanted, dys, ops.recurrent_net(*args), *args)
    torch.testing.assert_close(found, [grad for grad, is_wanted in zip(grads, wanted, strict=True) if is_wanted])


@pytest.mark.parametrize(("kind", "dtype"), list(product(KINDS, (torch.float32, torch.float64))))
def test_outputs_share_no_memory(kind: str, dtype: torch.dtype) -> None:
    args = _called(kind, KINDS[kind](num_layers=2, bidirectional=True, dtype=dtype))
    outs = ops.recurrent_net(*args)
    count = 1 + len(args[2])
    grads = ops.recurrent_net_backward(
        [True] * (count + len(args[3])), [None, torch.ones_like(outs[1]), None][:count], outs, *args
    )
    places = [t.untyped_storage().data_ptr() for t in (*outs, *grads) if t.numel()]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("kind", KINDS)
def test_net_without_rows(kind: str) -> None:
    args = _called(kind, KINDS[kind](), rows=0)
    outs = ops.recurrent_net(*args)
    assert outs[0].shape == (T, 0, H)
    grads = ops.recurrent_net_backward(
        [True] * (1 + len(args[2]) + len(args[3])),
        [torch.ones_like(outs[0]), None, None][: 1 + len(args[2])],
        outs,
        *args,
    )
    assert all(not grad.any() for grad in grads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_relu"])
def test_opcheck(kind: str) -> None:
    args = _called(kind, KINDS[kind](num_layers=2, dtype=torch.float64))
    torch.library.opcheck(ops.recurrent_net.default, args, test_utils=("test_schema", "test_faketensor"))


def test_inference_keeps_nothing_also_with_grad_mode_on() -> None:
    net = nn.LSTM(W, H)
    _, x, hx, _, *_ = _called("lstm", net)
    outs = nets.lstm(x, hx, net._flat_weights, True, 1, 0.0, True, False, False)
    assert not any(out.requires_grad for out in outs)
    torch.testing.assert_close(outs[0], net(x, tuple(h for h in hx))[0].detach())


@pytest.mark.parametrize("units", [1, 2 * B * H, 3 * B * H])
def test_steps_ahead_in_blocks(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    d, act, y, h0 = torch.randn(5, B, H), torch.rand(5, B, 4 * H), torch.randn(5, B, H), torch.randn(B, H)
    calls = {
        recurrent.gru_layer_backward: (d, act, y, h0, torch.randn(3 * H, H)),
        recurrent.lstm_layer_backward: (d, d.sin(), act, y, h0, torch.randn(4 * H, H)),
    }
    expected = [call(*args) for call, args in calls.items()]
    monkeypatch.setattr(recurrent, "AHEAD", units)
    torch.testing.assert_close([call(*args) for call, args in calls.items()], expected)
