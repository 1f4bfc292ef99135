"""Cells of recurrent layers, in ops that write nothing, and layers whose dropout is drawn by nodes.

torch's composites of `nn.LSTMCell`, `GRUCell` and `RNNCell` write into the parts of one product, and to keep the
strides of a part each write would take a copy. The same functions of the same numbers, in contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload

from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording

aten = torch.ops.aten


def _fits(x: torch.Tensor, *states: Any) -> bool:
    """Whether torch's own kernel accepts the arguments; others, and refusals, are left to torch."""
    plain = x.device.type == "cpu" and x.dim() == 2 and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    return plain and all(h.dim() == 2 and h.shape[0] == x.shape[0] for h in states)


def _products(
    x: torch.Tensor,
    h: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None,
    b_hh: torch.Tensor | None,
) -> tuple[Any, Any]:
    return F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)


@override(Stage.OP, aten.lstm_cell.default)
def _lstm(
    rec: Recording,
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> Any:
    h, c = hx
    if not _fits(x, h, c):
        return NotImplemented
    of_x, of_h = _products(x, h, w_ih, w_hh, b_ih, b_hh)
    i, f, g, o = (of_h + of_x).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


@override(Stage.OP, aten.gru_cell.default)
def _gru(
    rec: Recording,
    x: torch.Tensor,
    h: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> Any:
    if not _fits(x, h):
        return NotImplemented
    (xr, xz, xn), (hr, hz, hn) = (part.chunk(3, 1) for part in _products(x, h, w_ih, w_hh, b_ih, b_hh))
    r, z = (hr + xr).sigmoid(), (hz + xz).sigmoid()
    n = (xn + hn * r).tanh()
    return (h - n) * z + n


def _rnn(function: Callable[[Any], Any]) -> Callable[..., Any]:
    def row(
        rec: Recording,
        x: torch.Tensor,
        h: torch.Tensor,
        w_ih: torch.Tensor,
        w_hh: torch.Tensor,
        b_ih: torch.Tensor | None = None,
        b_hh: torch.Tensor | None = None,
    ) -> Any:
        if not _fits(x, h):
            return NotImplemented
        of_x, of_h = _products(x, h, w_ih, w_hh, b_ih, b_hh)
        return function(of_h + of_x)

    return row


override(Stage.OP, aten.rnn_tanh_cell.default)(_rnn(torch.tanh))
override(Stage.OP, aten.rnn_relu_cell.default)(_rnn(torch.relu))


def _recurrent(op: OpOverload) -> Callable[..., Any]:
    """Recurrent layers stay whole; layers with dropout between them are recorded one by one, with the draws.

    torch's own decomposition (2.13) leaves the dropout out.
    """

    def row(
        rec: Recording,
        x: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
    ) -> Any:
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


for _op in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
    override(Stage.OP, _op)(_recurrent(_op))
