"""LSTM, GRU and RNN, kept whole in the graph: forward and backward are one op each, with batch and time symbolic.

Differentiated a second time the backward is taken apart into matrix products and an op per direction that goes step by
step (`tfnb.kernels`), and that is unrolled, which fixes the number of steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import decomposition_table

from tfnb.gradients.rule_table import Cotangents, Forward, composite, nograd, rule
from tfnb.graph.op_facts import ops_of
from tfnb.kernels import nets

tfnb = torch.ops.tfnb

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


# -- whole nets ------------------------------------------------------------------------------------------------


def _of(n: Forward) -> tuple[Any, ...] | None:
    """The arguments of the op that keeps what a gradient needs; None for a net with projections."""
    hx, params = n["hx"], n["params"]
    hx = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    ways = 2 if n["bidirectional"] else 1
    if len(params) != n["num_layers"] * ways * (4 if n["has_biases"] else 2):
        return None
    options = n["has_biases"], n["num_layers"], n["bidirectional"], n["batch_first"]
    return n.op.split(".")[1], n["input"], hx, list(params), *options


def _net(n: Forward, dys: Cotangents) -> Any:
    """The net is computed once more, for what it keeps; passes make one of both."""
    net = _of(n)
    if net is None:
        return NotImplemented
    given = [dys.given(i) for i in range(len(dys))]
    found = iter(tfnb.recurrent_net_backward(list(n.needed), given, tfnb.recurrent_net(*net), *net))
    return [next(found) if is_needed else None for is_needed in n.needed]


rule(*sorted(ops_of("net")))(_net)


@composite(torch.ops.aten.lstm.input)
def _(*args: Any) -> Any:
    """A net with projections, by torch's steps; 2.11 leaves an axis of one in the states that it ends with."""
    y, *ends = decomposition_table[torch.ops.aten.lstm.input](*args)
    return y, *(end.flatten(1, -2) if end.dim() > 3 else end for end in ends)


composite(tfnb.recurrent_net.default)(nets.plain)
composite(tfnb.recurrent_net_backward.default)(nets.plain_backward)
nograd(tfnb.recurrent_net.default)  # feeds recurrent_net_backward alone, whose parts start from the net's arguments
