"""Calls that are recorded as other calls: those that write into buffers, and those that a device would choose.

Each row is called under the recorder with the arguments of the op, and returns what the op would (or NotImplemented).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfnb.recording.writes import rebind

aten = torch.ops.aten


def _batch_norm(
    rec: Any,
    x: Any,
    w: Any,
    b: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: Any = None,
) -> Any:
    """Batch norm as a pure op; the running statistics are written back as recorded assignments."""
    if not training:
        return aten._native_batch_norm_legit_no_training(x, w, b, mean, var, momentum, eps)[0]
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, w, b, True, momentum, eps)[0]
    out, _, _, new_mean, new_var = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, momentum, eps)
    rebind(rec, mean, new_mean)
    rebind(rec, var, new_var)
    return out


def _native_batch_norm(
    rec: Any, x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    if not training:
        return aten._native_batch_norm_legit_no_training(x, w, b, mean, var, momentum, eps)
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, w, b, True, momentum, eps)
    *outs, new_mean, new_var = aten._native_batch_norm_legit_functional(x, w, b, mean, var, True, momentum, eps)
    rebind(rec, mean, new_mean)
    rebind(rec, var, new_var)
    return tuple(outs)


def _linear(rec: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """One matrix product over all leading axes: with symbolic sizes torch would expand the weight over the batch."""
    if x.dim() < 2:
        return NotImplemented
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def _matmul(rec: Any, a: Any, b: Any) -> Any:
    if a.dim() < 3 or b.dim() != 2:
        return NotImplemented
    return a.reshape(-1, a.shape[-1]).mm(b).view(*a.shape[:-1], b.shape[-1])


def _kron(rec: Any, a: Any, b: Any) -> Any:
    """The product of all pairs: torch's own composite wants numbers for the sizes."""
    rank = max(a.dim(), b.dim())
    left, right = ([1] * (rank - t.dim()) + list(t.shape) for t in (a, b))
    pairs = a.reshape([s for size in left for s in (size, 1)]) * b.reshape([s for size in right for s in (1, size)])
    return pairs.reshape([i * j for i, j in zip(left, right, strict=True)])


def _cdist(rec: Any, x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    """One kernel, which chooses by the number of rows in each run; the composite would choose while recording."""
    return aten._cdist_forward(x1, x2, p, compute_mode)


def _unbind(rec: Any, x: Any, dim: int = 0) -> Any:
    """As many outputs as rows: the size is fixed by this line, whatever the shape rule of unbind concludes."""
    int(x.shape[dim])
    return NotImplemented


def _attention(rec: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention stays whole, but its dropout must be drawn by a node of its own."""
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    if not dropout:
        return NotImplemented
    return aten._scaled_dot_product_attention_math(*args, **kwargs)[0]


def _recurrent(op: Any) -> Callable[..., Any]:
    """Recurrent layers stay whole; those that draw dropout between them are recorded one by one, with the draws.

    torch's own decomposition (2.13) leaves the dropout out.
    """

    def row(
        rec: Any, x: Any, hx: Any, params: Any, biases: bool, layers: int, dropout: float, train: bool, both: bool,
        batch_first: bool,
    ) -> Any:  # fmt: skip
        if not (dropout and train and layers > 1):
            return NotImplemented
        several, ways, each = isinstance(hx, (list, tuple)), 1 + both, len(params) // layers
        finals = []
        for i in range(layers):
            start = [h[i * ways : (i + 1) * ways] for h in (hx if several else [hx])]
            own = params[i * each : (i + 1) * each]
            x = x if i == 0 else torch.dropout(x, dropout, True)
            x, *last = op(x, start if several else start[0], own, biases, 1, 0.0, train, both, batch_first)
            finals.append(last)
        return (x, *map(torch.cat, zip(*finals, strict=True)))

    return row


REPLACED: dict[Any, Callable[..., Any]] = {
    aten.batch_norm.default: _batch_norm,
    aten.native_batch_norm.default: _native_batch_norm,
    aten._native_batch_norm_legit.default: _native_batch_norm,
    aten.scaled_dot_product_attention.default: _attention,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.unbind.int: _unbind,
    aten.kron.default: _kron,
    aten.cdist.default: _cdist,
    aten.lstm.input: _recurrent(aten.lstm.input),
    aten.gru.input: _recurrent(aten.gru.input),
    aten.rnn_tanh.input: _recurrent(aten.rnn_tanh.input),
    aten.rnn_relu.input: _recurrent(aten.rnn_relu.input),
}


def _lstm_shape(x: Any, hx: Any, params: Any, *rest: Any) -> Any:
    return _recurrent_out(x, hx[0], rest), hx[0].clone(), hx[1].clone()


def _rnn_shape(x: Any, hx: Any, params: Any, *rest: Any) -> Any:
    return _recurrent_out(x, hx, rest), hx.clone()


def _recurrent_out(x: Any, hx: Any, rest: Any) -> Any:
    *_, bidirectional, batch_first = rest
    first, second = (1, 0) if batch_first else (0, 1)
    out = x.new_empty((x.shape[first], x.shape[second], hx.shape[-1] * (2 if bidirectional else 1)))
    return out.transpose(0, 1) if batch_first else out  # as the kernels lay it out: time first


# Shapes of ops kept whole whose torch decomposition unrolls the time axis, and so would fix its size.
SHAPES: dict[Any, Callable[..., Any]] = {
    aten.lstm.input: _lstm_shape,
    aten.gru.input: _rnn_shape,
    aten.rnn_tanh.input: _rnn_shape,
    aten.rnn_relu.input: _rnn_shape,
}
