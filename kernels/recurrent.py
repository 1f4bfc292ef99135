"""Recurrent layers, one direction of one layer at a time: the part that must go step by step, and its backward.

The products with the input are one matrix product for all steps and stay outside; so do the products that give the
weights' gradients. T steps, B rows, H hidden; gates in torch's order (LSTM: i, f, g, o; GRU: r, z, n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def op(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define ``tfnb::NAME`` from a function of the same name."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"tfnb::{function.__name__}"
        torch.library.define(name, schema)
        torch.library.impl(name, "CompositeExplicitAutograd", function)
        torch.library.register_fake(name, fake)
        return function

    return define


def _like(*sources: int) -> Callable[..., tuple[Tensor, ...]]:
    """A fake whose outputs are shaped like these arguments."""

    def fake(*args: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(args[i], memory_format=torch.contiguous_format) for i in sources)

    return fake


def _fake_layer(gates: Tensor, h0: Tensor, *rest: Any) -> Tensor:
    return gates.new_empty([gates.shape[0], *h0.shape])


# -- LSTM ------------------------------------------------------------------------------------------------------


def _fake_lstm(gates: Tensor, h0: Tensor, c0: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_layer(gates, h0), _fake_layer(gates, h0), torch.empty_like(gates)


@op("(Tensor gates, Tensor h0, Tensor c0, Tensor w) -> (Tensor y, Tensor c, Tensor act)", _fake_lstm)
def lstm_layer(gates: Tensor, h0: Tensor, c0: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gates: [T, B, 4H], the input's part; w: [4H, H]. Hidden and cell states [T, B, H], activations [T, B, 4H]."""
    h, c, back = h0, c0, w.t()
    ys, cs, acts = [], [], []
    for pre in gates.unbind(0):
        i, f, g, o = torch.addmm(pre, h, back).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = o * c.tanh()
        ys.append(h)
        cs.append(c)
        acts.append(torch.cat([i, f, g, o], 1))
    return torch.stack(ys), torch.stack(cs), torch.stack(acts)


@op(
    "(Tensor dy, Tensor dc, Tensor act, Tensor c, Tensor c0, Tensor w) -> (Tensor dgates, Tensor dh0, Tensor dc0)",
    _like(2, 4, 4),
)
def lstm_layer_backward(
    dy: Tensor, dc: Tensor, act: Tensor, c: Tensor, c0: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of the gates and of the first states, from those of all hidden and cell states."""
    dh, dcell = torch.zeros_like(c0), torch.zeros_like(c0)
    before = [c0, *c.unbind(0)[:-1]]
    steps = zip(dy.unbind(0), dc.unbind(0), act.unbind(0), c.unbind(0), before, strict=True)
    dgates = []
    for dy_t, dc_t, act_t, c_t, c_prev in reversed(list(steps)):
        i, f, g, o = act_t.chunk(4, 1)
        t = c_t.tanh()
        dh = dh + dy_t
        dcell = dcell + dc_t + dh * o * (1 - t * t)
        parts = [dcell * g * i * (1 - i), dcell * c_prev * f * (1 - f), dcell * i * (1 - g * g), dh * t * o * (1 - o)]
        d = torch.cat(parts, 1)
        dgates.append(d)
        dh, dcell = d @ w, dcell * f
    return torch.stack(dgates[::-1]), dh, dcell


# -- GRU -------------------------------------------------------------------------------------------------------


def _fake_gru(gates: Tensor, h0: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _fake_layer(gates, h0), gates.new_empty([*gates.shape[:2], 4 * h0.shape[1]])


@op("(Tensor gates, Tensor h0, Tensor w, Tensor b) -> (Tensor y, Tensor act)", _fake_gru)
def gru_layer(gates: Tensor, h0: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """gates: [T, B, 3H]; w: [3H, H]; b: [3H], inside the reset. Hidden states, and r, z, n, w_n h + b_n by step."""
    h, back = h0, w.t()
    ys, acts = [], []
    for pre in gates.unbind(0):
        xr, xz, xn = pre.chunk(3, 1)
        hr, hz, hn = torch.addmm(b, h, back).chunk(3, 1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * hn).tanh()
        h = n + z * (h - n)
        ys.append(h)
        acts.append(torch.cat([r, z, n, hn], 1))
    return torch.stack(ys), torch.stack(acts)


def _fake_gru_backward(dy: Tensor, act: Tensor, y: Tensor, h0: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gates = act.new_empty([*act.shape[:2], 3 * h0.shape[1]])
    return gates, torch.empty_like(gates), torch.empty_like(h0)


@op(
    "(Tensor dy, Tensor act, Tensor y, Tensor h0, Tensor w) -> (Tensor dgates, Tensor dhidden, Tensor dh0)",
    _fake_gru_backward,
)
def gru_layer_backward(dy: Tensor, act: Tensor, y: Tensor, h0: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of the input's part of the gates, of the hidden state's part, and of the first state."""
    dh = torch.zeros_like(h0)
    before = [h0, *y.unbind(0)[:-1]]
    dgates, dhidden = [], []
    for dy_t, act_t, h_prev in reversed(list(zip(dy.unbind(0), act.unbind(0), before, strict=True))):
        r, z, n, hn = act_t.chunk(4, 1)
        dh = dh + dy_t
        dn = dh * (1 - z) * (1 - n * n)
        dr, dz = dn * hn * r * (1 - r), dh * (h_prev - n) * z * (1 - z)
        d = torch.cat([dr, dz, dn * r], 1)
        dgates.append(torch.cat([dr, dz, dn], 1))
        dhidden.append(d)
        dh = dh * z + d @ w
    return torch.stack(dgates[::-1]), torch.stack(dhidden[::-1]), dh


# -- plain RNN -------------------------------------------------------------------------------------------------


@op("(Tensor gates, Tensor h0, Tensor w, bool tanh) -> Tensor", _fake_layer)
def rnn_layer(gates: Tensor, h0: Tensor, w: Tensor, tanh: bool) -> Tensor:
    """gates: [T, B, H]; w: [H, H]. Hidden states [T, B, H]; relu instead of tanh where ``tanh`` is false."""
    h, back, ys = h0, w.t(), []
    for pre in gates.unbind(0):
        h = torch.addmm(pre, h, back)
        h = h.tanh() if tanh else h.relu()
        ys.append(h)
    return torch.stack(ys)


@op("(Tensor dy, Tensor y, Tensor w, bool tanh) -> (Tensor dgates, Tensor dh0)",
    lambda dy, y, w, tanh: (torch.empty_like(y), torch.empty_like(y[0])))  # fmt: skip
def rnn_layer_backward(dy: Tensor, y: Tensor, w: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Cotangents of the gates and of the first state."""
    steps = list(zip(dy.unbind(0), y.unbind(0), strict=True))
    dh, dgates = torch.zeros_like(steps[0][1]), []
    for dy_t, y_t in reversed(steps):
        d = (dh + dy_t) * ((1 - y_t * y_t) if tanh else (y_t > 0))
        dgates.append(d)
        dh = d @ w
    return torch.stack(dgates[::-1]), dh
