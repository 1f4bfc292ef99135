"""Recurrent layers, one direction of one layer at a time: the part that must go step by step, and its backward.

The products with the input are one matrix product for all steps and stay outside; so do the products that give the
weights' gradients. T steps, B rows, H hidden; gates in torch's order (LSTM: i, f, g, o; GRU: r, z, n).
A step writes into slices of what it returns: the fewer and the larger the calls, the less Python costs. What a backward
step multiplies by is computed ahead for as many steps as a cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tfnb.kernels.define import op

AHEAD = 1 << 16  # hidden units of all the steps that are computed ahead


def _blocks(steps: int, units: int) -> Iterator[tuple[int, int]]:
    """The steps in blocks, the last one first; units: of all rows of a step."""
    size = max(AHEAD // max(units, 1), 1)
    return ((max(end - size, 0), end) for end in range(steps, 0, -size))


def _before(first: Tensor, states: Tensor, start: int, end: int) -> Tensor:
    """The state that each of these steps started from."""
    return states[start - 1 : end - 1] if start else torch.cat([first.unsqueeze(0), states[: end - 1]])


def _like(*sources: int) -> Callable[..., tuple[Tensor, ...]]:
    """A fake whose outputs are shaped like these arguments."""

    def fake(*args: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(args[i], memory_format=torch.contiguous_format) for i in sources)

    return fake


def _fake_layer(gates: Tensor, h0: Tensor, *rest: object) -> Tensor:
    return gates.new_empty([gates.shape[0], *h0.shape])


# -- LSTM ------------------------------------------------------------------------------------------------------


def _fake_lstm(gates: Tensor, h0: Tensor, c0: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_layer(gates, h0), _fake_layer(gates, h0), gates.new_empty(gates.shape)


@op("(Tensor gates, Tensor h0, Tensor c0, Tensor w) -> (Tensor y, Tensor c, Tensor act)", _fake_lstm)
def lstm_layer(gates: Tensor, h0: Tensor, c0: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gates: [T, B, 4H], the input's part; w: [4H, H]. Hidden and cell states [T, B, H], activations [T, B, 4H]."""
    act = gates.new_empty(gates.shape)
    y, c = (gates.new_empty([gates.shape[0], *h0.shape]) for _ in range(2))
    i, f, g, o = (part.unbind(0) for part in act.chunk(4, 2))
    both = act[..., : 2 * h0.shape[1]].unbind(0)  # i and f
    h, cell, back, t = h0, c0, w.t(), torch.empty_like(h0)
    for step, (pre, now) in enumerate(zip(gates.unbind(0), act.unbind(0), strict=True)):
        torch.addmm(pre, h, back, out=now)
        both[step].sigmoid_()
        g[step].tanh_()
        o[step].sigmoid_()
        cell = torch.mul(f[step], cell, out=c[step]).addcmul_(i[step], g[step])
        h = torch.mul(o[step], torch.tanh(cell, out=t), out=y[step])
    return y, c, act


@op(
    "(Tensor dy, Tensor dc, Tensor act, Tensor c, Tensor c0, Tensor w) -> (Tensor dgates, Tensor dh0, Tensor dc0)",
    _like(2, 4, 4),
)
def lstm_layer_backward(
    dy: Tensor, dc: Tensor, act: Tensor, c: Tensor, c0: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of the gates and first states, from the cotangents of all hidden and cell states."""
    dgates = act.new_empty(act.shape)
    rows, split = dgates.unbind(0), dgates.view(*act.shape[:2], 4, c0.shape[1])
    first, last = split[:, :, :3].unbind(0), split[:, :, 3].unbind(0)
    dys, dcs, forget = dy.unbind(0), dc.unbind(0), act.chunk(4, 2)[1].unbind(0)
    dh, dcell = dys[-1], dcs[-1]
    for start, end in _blocks(act.shape[0], c0.numel()):
        by_cell, by_h, to_cell = _lstm_slopes(act[start:end], c[start:end], _before(c0, c, start, end))
        for step in range(end - 1, start - 1, -1):
            at = step - start
            dcell = torch.addcmul(dcell, dh, to_cell[at])
            torch.mul(dcell.unsqueeze(1), by_cell[at], out=first[step])
            torch.mul(dh, by_h[at], out=last[step])
            if step:
                dh = torch.addmm(dys[step - 1], rows[step], w)
                dcell = torch.addcmul(dcs[step - 1], dcell, forget[step])
    return dgates, rows[0] @ w, dcell * forget[0]


def _lstm_slopes(act: Tensor, c: Tensor, before: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """By step, the factors of the cell's cotangent for i, f and g [B, 3, H], and of the hidden state's for o and c."""
    i, f, g, o = act.chunk(4, 2)
    t = c.tanh()
    by_cell = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)], 2)
    return by_cell.unbind(0), (t * o * (1 - o)).unbind(0), (o * (1 - t * t)).unbind(0)


# -- GRU -------------------------------------------------------------------------------------------------------


def _fake_gru(gates: Tensor, h0: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_layer(gates, h0), gates.new_empty([*gates.shape[:2], 4 * h0.shape[1]])


@op("(Tensor gates, Tensor h0, Tensor w, Tensor b) -> (Tensor y, Tensor act)", _fake_gru)
def gru_layer(gates: Tensor, h0: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """gates: [T, B, 3H]; w: [3H, H]; b: [3H], inside the reset. Hidden states, and r, z, n, w_n h + b_n by step."""
    size = h0.shape[1]
    y = gates.new_empty([gates.shape[0], *h0.shape])
    act = gates.new_empty([*gates.shape[:2], 4 * size])
    r, z, n, kept = (part.unbind(0) for part in act.chunk(4, 2))
    both = act[..., : 2 * size].unbind(0)  # r and z
    pre_both, pre_n = gates[..., : 2 * size].unbind(0), gates[..., 2 * size :].unbind(0)
    h, back, hidden = h0, w.t(), gates.new_empty(gates.shape[1:])
    hidden_both, hidden_n = hidden[:, : 2 * size], hidden[:, 2 * size :]
    for step in range(gates.shape[0]):
        torch.addmm(b, h, back, out=hidden)
        torch.add(pre_both[step], hidden_both, out=both[step]).sigmoid_()
        kept[step].copy_(hidden_n)
        torch.addcmul(pre_n[step], r[step], hidden_n, out=n[step]).tanh_()
        h = torch.lerp(n[step], h, z[step], out=y[step])
    return y, act


def _fake_gru_backward(dy: Tensor, act: Tensor, y: Tensor, h0: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gates = act.new_empty([*act.shape[:2], 3 * h0.shape[1]])
    return gates, torch.empty_like(gates), h0.new_empty(h0.shape)


@op(
    "(Tensor dy, Tensor act, Tensor y, Tensor h0, Tensor w) -> (Tensor dgates, Tensor dhidden, Tensor dh0)",
    _fake_gru_backward,
)
def gru_layer_backward(dy: Tensor, act: Tensor, y: Tensor, h0: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of the input's part of the gates, of the hidden state's part, and of the first state."""
    dgates, dhidden = (act.new_empty([*act.shape[:2], 3 * h0.shape[1]]) for _ in range(2))
    outs, outs_hidden = (d.view(*act.shape[:2], 3, h0.shape[1]).unbind(0) for d in (dgates, dhidden))
    rows, dys, update = dhidden.unbind(0), dy.unbind(0), act.chunk(4, 2)[1].unbind(0)
    dh = dys[-1]
    for start, end in _blocks(act.shape[0], h0.numel()):
        slopes, slopes_hidden = _gru_slopes(act[start:end], _before(h0, y, start, end))
        for step in range(end - 1, start - 1, -1):
            wide = dh.unsqueeze(1)
            torch.mul(wide, slopes[step - start], out=outs[step])
            torch.mul(wide, slopes_hidden[step - start], out=outs_hidden[step])
            earlier = torch.addmm(dys[step - 1], rows[step], w) if step else rows[0] @ w
            dh = earlier.addcmul_(dh, update[step])
    return dgates, dhidden, dh


def _gru_slopes(act: Tensor, before: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """By step, the factors of the hidden state's cotangent: for the input's part and its own [B, 3, H]."""
    r, z, n, hn = act.chunk(4, 2)
    by_n = (1 - z) * (1 - n * n)
    by_r, by_z = by_n * hn * r * (1 - r), (before - n) * z * (1 - z)
    return torch.stack([by_r, by_z, by_n], 2).unbind(0), torch.stack([by_r, by_z, by_n * r], 2).unbind(0)


# -- plain RNN -------------------------------------------------------------------------------------------------


@op("(Tensor gates, Tensor h0, Tensor w, bool tanh) -> Tensor", _fake_layer)
def rnn_layer(gates: Tensor, h0: Tensor, w: Tensor, tanh: bool) -> Tensor:
    """gates: [T, B, H]; w: [H, H]. Hidden states [T, B, H]; relu instead of tanh where ``tanh`` is false."""
    y = gates.new_empty(gates.shape)
    h, back = h0, w.t()
    for pre, now in zip(gates.unbind(0), y.unbind(0), strict=True):
        torch.addmm(pre, h, back, out=now)
        h = now.tanh_() if tanh else now.relu_()
    return y


@op("(Tensor dy, Tensor y, Tensor w, bool tanh) -> (Tensor dgates, Tensor dh0)",
    lambda dy, y, w, tanh: (y.new_empty(y.shape), y.new_empty(y.shape[1:])))  # fmt: skip
def rnn_layer_backward(dy: Tensor, y: Tensor, w: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Cotangents of the gates and of the first state."""
    slopes = ((1 - y * y) if tanh else (y > 0).to(y.dtype)).unbind(0)
    dgates = y.new_empty(y.shape)
    rows, dys = dgates.unbind(0), dy.unbind(0)
    dh = dys[-1]
    for step in range(y.shape[0] - 1, -1, -1):
        torch.mul(dh, slopes[step], out=rows[step])
        dh = torch.addmm(dys[step - 1], rows[step], w) if step else rows[0] @ w
    return dgates, dh
