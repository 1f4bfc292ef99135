"""Recurrent nets of `torch.nn`: all layers and directions in one call that saves values for its gradient.

A direction of a layer goes by oneDNN where torch itself would have that do it, and else by the steps of `recurrent`.
A net is called by its kind, and gives its states at all steps, the last of each kind of state [L * D, B, H], the
states of each layer but the last, and then what each direction keeps. T steps, B rows, H hidden, L layers, D
directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfnb.kernels import recurrent  # noqa: F401  defines torch.ops.tfnb
from tfnb.kernels.define import op

aten, ops = torch.ops.aten, torch.ops.tfnb
_LSTM = 2  # oneDNN's mode
_KEPT = {"lstm": 2, "gru": 1, "rnn_tanh": 0, "rnn_relu": 0}  # tensors that a direction keeps


class Net(NamedTuple):
    """Common arguments of the calls of one net."""

    kind: str
    x: Tensor
    hx: Sequence[Tensor]
    params: Sequence[Tensor]
    biases: bool
    layers: int
    both: bool
    batch_first: bool

    @property
    def ways(self) -> int:
        """Directions of a layer."""
        return 1 + self.both

    def directions(self, layer: int, x: Tensor) -> list[Way]:
        """The directions of a layer over its input."""
        per, first = (4 if self.biases else 2), layer * self.ways
        return [
            Way(self.kind, x, [h[k] for h in self.hx], self.params[k * per : (k + 1) * per], k > first)
            for k in range(first, first + self.ways)
        ]

    def turned(self, x: Tensor) -> Tensor:
        """Transpose between batch first and time first."""
        return x.transpose(0, 1) if self.batch_first else x


class Way(NamedTuple):
    """One direction of one layer, from the first to the last step."""

    kind: str
    x: Tensor
    first: Sequence[Tensor]  # states
    own: Sequence[Tensor]  # w_ih, w_hh, and with biases b_ih, b_hh
    back: bool

    def ordered(self, x: Tensor) -> Tensor:
        """Reverse the steps for a backward direction."""
        return x.flip(0) if self.back else x


# -- a direction by the steps of `recurrent` -------------------------------------------------------------------------


def _steps(way: Way) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """States at all steps, the last state of each kind, and saved values."""
    own = way.own
    biased = len(own) == 4
    inside = way.kind == "gru"  # the second bias, within the reset
    bias = None if not biased else own[2] if inside else own[2] + own[3]
    gates = torch.nn.functional.linear(way.ordered(way.x), own[0], bias)
    if way.kind == "lstm":
        y, c, act = ops.lstm_layer(gates, *way.first, own[1])
        return way.ordered(y), [y[-1], c[-1]], [c.reshape(-1), act.reshape(-1)]
    if inside:
        y, act = ops.gru_layer(gates, way.first[0], own[1], own[3] if biased else own[1].new_zeros(own[1].shape[:1]))
        return way.ordered(y), [y[-1]], [act]
    y = ops.rnn_layer(gates, way.first[0], own[1], way.kind == "rnn_tanh")
    return way.ordered(y), [y[-1]], []


def _steps_backward(
    way: Way, y: Tensor, ends: Sequence[Tensor], kept: Sequence[Tensor], dy: Tensor | None,
    lasts: Sequence[Tensor | None], wants_x: bool,
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:  # fmt: skip
    """Cotangents of the input, the first states and the weights."""
    y = way.ordered(y)
    dy = _with_last(None if dy is None else way.ordered(dy), lasts[0], y)
    own, h0 = way.own, way.first[0]
    if way.kind == "lstm":
        c, act = kept[0].view(y.shape), kept[1].view([*y.shape[:2], own[1].shape[0]])
        dgates, *dfirst = ops.lstm_layer_backward(dy, _with_last(None, lasts[1], c), act, c, way.first[1], own[1])
        dhidden = dgates
    elif way.kind == "gru":
        dgates, dhidden, dh0 = ops.gru_layer_backward(dy, kept[0], y, h0, own[1])
        dfirst = [dh0]
    else:
        dgates, dh0 = ops.rnn_layer_backward(dy, y, own[1], way.kind == "rnn_tanh")
        dhidden, dfirst = dgates, [dh0]
    before = torch.cat([h0.unsqueeze(0), y[:-1]])
    down = [_weight(dgates, way.ordered(way.x)), _weight(dhidden, before)]
    if len(own) == 4:
        bias = dgates.sum([0, 1])
        down += [bias, bias.clone() if dhidden is dgates else dhidden.sum([0, 1])]
    return way.ordered(dgates @ own[0]) if wants_x else None, dfirst, down


def _with_last(dy: Tensor | None, last: Tensor | None, like: Tensor) -> Tensor:
    """The cotangent of all steps, where that of the last one is added."""
    dy = torch.zeros_like(like) if dy is None else dy
    return dy if last is None else torch.cat([dy[:-1], (dy[-1] + last).unsqueeze(0)])


def _weight(d: Tensor, states: Tensor) -> Tensor:
    """Sum over steps and rows of d' states."""
    return d.flatten(0, 1).t() @ states.flatten(0, 1)


# -- a direction by oneDNN -------------------------------------------------------------------------------------------


def _is_fused(kind: str, x: Tensor) -> bool:
    """Whether oneDNN runs the layer: only the library knows the size of its saved memory."""
    fits = kind == "lstm" and x.device.type == "cpu" and x.dtype is torch.float32
    return fits and torch.backends.mkldnn.is_available()


def _onednn(way: Way) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    with torch.enable_grad():  # otherwise it keeps nothing
        y, h, c, space = aten.mkldnn_rnn_layer(
            *_given(way), way.back, [], _LSTM, way.first[0].shape[-1], 1, True, False, False, True,
        )  # fmt: skip
    return y, [h, c], [space.view(torch.float32), space.new_empty(0, dtype=torch.float32)]


def _onednn_backward(
    way: Way, y: Tensor, ends: Sequence[Tensor], kept: Sequence[Tensor], dy: Tensor | None,
    lasts: Sequence[Tensor | None], wants_x: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    outs = [out.contiguous() for out in (y, *ends)]
    pairs = zip(outs, (dy, *lasts), strict=True)
    cotangents = [torch.zeros_like(out) if given is None else given.contiguous() for out, given in pairs]
    dx, dw, dv, db, _, dh, dc = aten.mkldnn_rnn_layer_backward(
        *_given(way), *outs, *cotangents, way.back, _LSTM, way.first[0].shape[-1], 1, True, True, False, [], False,
        kept[0].view(torch.uint8),
    )  # fmt: skip
    return dx, [dh, dc], [dw, dv, db, db.clone()][: len(way.own)]


def _given(way: Way) -> list[Tensor]:
    """Input, weights, biases and first states as oneDNN reads them."""
    own = [w.detach().contiguous() for w in way.own]
    biases = [] if len(own) == 4 else [own[0].new_zeros(own[0].shape[0]) for _ in range(2)]
    return [way.x.detach().contiguous(), *own, *biases, *(state.detach().contiguous() for state in way.first)]


# -- layers and directions -------------------------------------------------------------------------------------------


def _best(way: Way) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return _onednn(way) if _is_fused(way.kind, way.x) and way.x.numel() else _steps(way)


def _best_backward(
    way: Way, y: Tensor, ends: Sequence[Tensor], kept: Sequence[Tensor], dy: Tensor | None,
    lasts: Sequence[Tensor | None], wants_x: bool,
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:  # fmt: skip
    fused = _is_fused(way.kind, way.x) and way.x.numel()
    return (_onednn_backward if fused else _steps_backward)(way, y, ends, kept, dy, lasts, wants_x)


def _forward(net: Net) -> list[Tensor]:
    x = net.turned(net.x)
    inner: list[Tensor] = []
    kept: list[Tensor] = []
    lasts: list[list[Tensor]] = [[] for _ in net.hx]
    for layer in range(net.layers):
        ys = []
        for way in net.directions(layer, x):
            y, ends, own = _best(way)
            ys.append(y)
            kept += own
            for found, end in zip(lasts, ends, strict=True):
                found.append(end)
        x = torch.cat(ys, -1) if net.both else ys[0]
        inner.append(x)
    return [net.turned(x), *map(torch.stack, lasts), *inner[:-1], *kept]


def _backward(net: Net, wanted: Sequence[bool], dys: Sequence[Tensor | None], outs: Sequence[Tensor]) -> list[Tensor]:
    count, per = 1 + len(net.hx), _KEPT[net.kind]
    inner, kept = outs[count : count + net.layers - 1], outs[count + net.layers - 1 :]
    xs, ys = [net.turned(net.x), *inner], [*inner, net.turned(outs[0])]
    dx = None if dys[0] is None else net.turned(dys[0])
    firsts: list[list[Tensor]] = []
    down: list[list[Tensor]] = []
    outputs: Any
    ends: Any
    for layer in reversed(range(net.layers)):
        ways = net.directions(layer, xs[layer])
        outputs, cotangents = ([t] if t is None or not net.both else t.chunk(2, -1) for t in (ys[layer], dx))
        parts: list[Any] = []
        for k, way in enumerate(ways):
            place = layer * len(ways) + k
            ends, lasts = ([None if t is None else t[place] for t in each[1:count]] for each in (outs, dys))
            own = kept[place * per : (place + 1) * per]
            dy = None if dx is None else cotangents[k]
            parts.append(_best_backward(way, outputs[k], ends, own, dy, lasts, layer > 0 or wanted[0]))
        dx = parts[0][0] if len(parts) == 1 or parts[0][0] is None else parts[0][0] + parts[1][0]
        firsts, down = [*(part[1] for part in parts), *firsts], [*(part[2] for part in parts), *down]
    states = map(torch.stack, zip(*firsts, strict=True))
    every: list[Any] = [None if dx is None else net.turned(dx), *states, *chain.from_iterable(down)]
    return [found for found, is_wanted in zip(every, wanted, strict=True) if is_wanted]


def lstm(*args: object) -> tuple[Tensor, Tensor, Tensor]:
    """`aten.lstm.input` under no_grad: in grad mode oneDNN would save values for autograd, many times the output."""
    with torch.no_grad():
        return aten.lstm.input(*args)


# -- the ops ---------------------------------------------------------------------------------------------------------

_NET = "str kind, Tensor x, Tensor[] hx, Tensor[] params, bool biases, int layers, bool both, bool batch_first"


def _fake(*args: Any) -> list[Tensor]:
    net = Net(*args)
    x = net.turned(net.x)
    steps, rows, size = x.shape[0], x.shape[1], net.hx[0].shape[-1]
    wide = x.new_empty([steps, rows, net.ways * size])
    kept = {"lstm": [[steps * rows * size], [4 * steps * rows * size]], "gru": [[steps, rows, 4 * size]]}

    def lengths() -> list[Any]:
        if not _is_fused(net.kind, x):
            return kept.get(net.kind, [])
        return [[torch.library.get_ctx().new_dynamic_size()] for _ in range(2)]

    inner = [torch.empty_like(wide) for _ in range(net.layers - 1)]
    own = [x.new_empty(shape) for _ in range(net.layers * net.ways) for shape in lengths()]
    return [net.turned(wide), *(h.new_empty(h.shape) for h in net.hx), *inner, *own]


@op(f"({_NET}) -> Tensor[]", _fake)
def recurrent_net(*args: Any) -> list[Tensor]:
    """The net's outputs, and its saved values."""
    return _forward(Net(*args))


def _fake_backward(
    wanted: Sequence[Any], dys: Sequence[torch.Tensor | None], outs: Sequence[torch.Tensor], *args: Any
) -> list[Tensor]:
    net = Net(*args)
    every = [net.x, *net.hx, *net.params]
    return [t.new_empty(t.shape) for t, is_wanted in zip(every, wanted, strict=True) if is_wanted]


@op(f"(bool[] wanted, Tensor?[] dys, Tensor[] outs, {_NET}) -> Tensor[]", _fake_backward)
def recurrent_net_backward(
    wanted: Sequence[bool], dys: Sequence[Tensor | None], outs: Sequence[Tensor], *args: Any
) -> list[Tensor]:
    """The requested cotangents of the input, first states and weights, from those of the outputs."""
    return _backward(Net(*args), wanted, dys, outs)
