"""LSTM, GRU and RNN, kept whole in the graph: differentiated layer by layer, with batch and time still symbolic.

The forward is taken apart into matrix products and one op per direction that goes step by step (`tfnb.kernels`). That
op's backward again is one op; differentiated a second time it is unrolled, which fixes the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfnb.gradients.table import Forward, composite, rule
from tfnb.kernels import recurrent  # noqa: F401  defines torch.ops.tfnb

aten, tfnb = torch.ops.aten, torch.ops.tfnb

# -- the steps of one direction --------------------------------------------------------------------------------


def _before(first: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The state that each step started from: [T, B, H]."""
    return torch.cat([first.unsqueeze(0), states[:-1]])


def _weight(d: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Sum over steps and rows of d' states."""
    return d.flatten(0, 1).t() @ states.flatten(0, 1)


@rule(tfnb.lstm_layer.default, outputs=2)
def _(n: Forward, dys: Any) -> Any:
    y, c, act = n.outs
    dgates, dh0, dc0 = tfnb.lstm_layer_backward(dys[0], dys[1], act, c, n["c0"], n["w"])
    return {"gates": dgates, "h0": dh0, "c0": dc0, "w": lambda: _weight(dgates, _before(n["h0"], y))}


@rule(tfnb.gru_layer.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    y, act = n.outs
    dgates, dhidden, dh0 = tfnb.gru_layer_backward(dy, act, y, n["h0"], n["w"])
    weight, bias = lambda: _weight(dhidden, _before(n["h0"], y)), lambda: dhidden.sum([0, 1])
    return {"gates": dgates, "h0": dh0, "w": weight, "b": bias}


@rule(tfnb.rnn_layer.default)
def _(n: Forward, dy: Any) -> Any:
    dgates, dh0 = tfnb.rnn_layer_backward(dy, n.out, n["w"], n["tanh"])
    return {"gates": dgates, "h0": dh0, "w": lambda: _weight(dgates, _before(n["h0"], n.out))}


# -- the same step by step, to be differentiated again ---------------------------------------------------------


@composite(tfnb.lstm_layer.default)
def _(gates: Any, h0: Any, c0: Any, w: Any) -> Any:
    h, c, outs = h0, c0, []
    for pre in gates.unbind(0):
        i, f, g, o = torch.addmm(pre, h, w.t()).chunk(4, 1)
        act = i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = o * c.tanh()
        outs.append((h, c, torch.cat(act, 1)))
    return tuple(torch.stack(out) for out in zip(*outs, strict=True))


@composite(tfnb.lstm_layer_backward.default)
def _(dy: Any, dc: Any, act: Any, c: Any, c0: Any, w: Any) -> Any:
    steps = zip(dy.unbind(0), dc.unbind(0), act.unbind(0), c.unbind(0), [c0, *c.unbind(0)[:-1]], strict=True)
    dh, dcell, dgates = torch.zeros_like(c0), torch.zeros_like(c0), []
    for dy_t, dc_t, act_t, c_t, before in reversed(list(steps)):
        i, f, g, o = act_t.chunk(4, 1)
        t = c_t.tanh()
        dh = dh + dy_t
        dcell = dcell + dc_t + dh * o * (1 - t * t)
        parts = dcell * g * i * (1 - i), dcell * before * f * (1 - f), dcell * i * (1 - g * g), dh * t * o * (1 - o)
        dgates.append(torch.cat(parts, 1))
        dh, dcell = dgates[-1] @ w, dcell * f
    return torch.stack(dgates[::-1]), dh, dcell


@composite(tfnb.gru_layer.default)
def _(gates: Any, h0: Any, w: Any, b: Any) -> Any:
    h, outs = h0, []
    for pre in gates.unbind(0):
        xr, xz, xn = pre.chunk(3, 1)
        hr, hz, hn = torch.addmm(b, h, w.t()).chunk(3, 1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * hn).tanh()
        h = n + z * (h - n)
        outs.append((h, torch.cat([r, z, n, hn], 1)))
    return tuple(torch.stack(out) for out in zip(*outs, strict=True))


@composite(tfnb.gru_layer_backward.default)
def _(dy: Any, act: Any, y: Any, h0: Any, w: Any) -> Any:
    dh, dgates, dhidden = torch.zeros_like(h0), [], []
    for dy_t, act_t, before in reversed(list(zip(dy.unbind(0), act.unbind(0), [h0, *y.unbind(0)[:-1]], strict=True))):
        r, z, n, hn = act_t.chunk(4, 1)
        dh = dh + dy_t
        dn = dh * (1 - z) * (1 - n * n)
        dr, dz = dn * hn * r * (1 - r), dh * (before - n) * z * (1 - z)
        dgates.append(torch.cat([dr, dz, dn], 1))
        dhidden.append(torch.cat([dr, dz, dn * r], 1))
        dh = dh * z + dhidden[-1] @ w
    return torch.stack(dgates[::-1]), torch.stack(dhidden[::-1]), dh


@composite(tfnb.rnn_layer.default)
def _(gates: Any, h0: Any, w: Any, tanh: bool) -> Any:
    h, outs = h0, []
    for pre in gates.unbind(0):
        h = torch.addmm(pre, h, w.t())
        h = h.tanh() if tanh else h.relu()
        outs.append(h)
    return torch.stack(outs)


@composite(tfnb.rnn_layer_backward.default)
def _(dy: Any, y: Any, w: Any, tanh: bool) -> Any:
    dh, dgates = torch.zeros_like(y[0]), []
    for dy_t, y_t in reversed(list(zip(dy.unbind(0), y.unbind(0), strict=True))):
        dgates.append((dh + dy_t) * ((1 - y_t * y_t) if tanh else (y_t > 0)))
        dh = dgates[-1] @ w
    return torch.stack(dgates[::-1]), dh


# -- layers and directions -------------------------------------------------------------------------------------

Cell = Callable[[torch.Tensor, list[Any], list[Any]], tuple[torch.Tensor, list[torch.Tensor]]]


def _layers(
    x: Any, states: list[Any], params: list[Any], has_biases: bool, layers: int, bidirectional: bool,
    batch_first: bool, cell: Cell,
) -> tuple[Any, ...]:  # fmt: skip
    """All layers and directions of a recurrent net around ``cell(x, first states, params) -> (y, last states)``."""
    per, directions = (4 if has_biases else 2), (2 if bidirectional else 1)
    x = x.transpose(0, 1) if batch_first else x
    last: list[list[Any]] = [[] for _ in states]
    for layer in range(layers):
        ys = []
        for direction in range(directions):
            k = layer * directions + direction
            y, ends = cell(x.flip(0) if direction else x, [s[k] for s in states], params[k * per : (k + 1) * per])
            ys.append(y.flip(0) if direction else y)
            for found, end in zip(last, ends, strict=True):
                found.append(end)
        x = torch.cat(ys, -1) if directions == 2 else ys[0]
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(s) for s in last))


def _gates(x: torch.Tensor, params: list[Any], biases: int) -> torch.Tensor:
    """The input's part of the gates for all steps, with one or both biases in it."""
    bias = None if len(params) < 4 else params[2] if biases == 1 else params[2] + params[3]
    return torch.nn.functional.linear(x, params[0], bias)


def _lstm_cell(x: Any, states: list[Any], params: list[Any]) -> tuple[Any, list[Any]]:
    y, c, _ = tfnb.lstm_layer(_gates(x, params, 2), states[0], states[1], params[1])
    return y, [y[-1], c[-1]]


def _gru_cell(x: Any, states: list[Any], params: list[Any]) -> tuple[Any, list[Any]]:
    w = params[1]
    bias = params[3] if len(params) == 4 else w.new_zeros([w.shape[0]])
    y, _ = tfnb.gru_layer(_gates(x, params, 1), states[0], w, bias)
    return y, [y[-1]]


@composite(aten.lstm.input)
def _(input: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
      bidirectional: bool, batch_first: bool) -> Any:  # fmt: skip
    if len(params) != num_layers * (4 if has_biases else 2) * (2 if bidirectional else 1):  # projections: unrolled
        return aten.lstm.input.decompose(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    return _layers(input, list(hx), list(params), has_biases, num_layers, bidirectional, batch_first, _lstm_cell)


@composite(aten.gru.input)
def _(input: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
      bidirectional: bool, batch_first: bool) -> Any:  # fmt: skip
    return _layers(input, [hx], list(params), has_biases, num_layers, bidirectional, batch_first, _gru_cell)


for _op, _tanh in ((aten.rnn_tanh.input, True), (aten.rnn_relu.input, False)):

    @composite(_op)
    def _(input: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
          bidirectional: bool, batch_first: bool, tanh: bool = _tanh) -> Any:  # fmt: skip
        def cell(x: Any, states: list[Any], weights: list[Any]) -> tuple[Any, list[Any]]:
            y = tfnb.rnn_layer(_gates(x, weights, 2), states[0], weights[1], tanh)
            return y, [y[-1]]

        return _layers(input, [hx], list(params), has_biases, num_layers, bidirectional, batch_first, cell)
