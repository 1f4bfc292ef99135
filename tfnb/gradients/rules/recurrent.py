"""LSTM, GRU and RNN, kept whole in the graph: forward and backward are one op each, with batch and time symbolic.

Differentiated a second time the net is unrolled by torch's decomposition, which fixes the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

from tfnb.errors import NoGradient
from tfnb.gradients.rule_table import Cotangents, Forward, composite, nograd, rule
from tfnb.gradients.walker import Walk
from tfnb.graph.op_facts import ops_of
from tfnb.graph.ops import overload
from tfnb.recording.subgraphs.own_gradient import open_recorder

tfnb = torch.ops.tfnb
_STEPS = {op.split(".")[1]: decomposition_table[overload(op)] for op in ops_of("net")}

# -- the steps of one direction --------------------------------------------------------------------------------


def _before(first: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The state that each step started from: [T, B, H]."""
    return torch.cat([first.unsqueeze(0), states[:-1]])


def _weight(d: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Sum over steps and rows of d' states."""
    return d.flatten(0, 1).t() @ states.flatten(0, 1)


@rule(tfnb.lstm_layer.default, outputs=2)
def _(n: Forward, dys: Sequence[torch.Tensor | None]) -> Any:
    y, c, act = n.outs
    dgates, dh0, dc0 = tfnb.lstm_layer_backward(dys[0], dys[1], act, c, n["c0"], n["w"])
    return {"gates": dgates, "h0": dh0, "c0": dc0, "w": lambda: _weight(dgates, _before(n["h0"], y))}


@rule(tfnb.gru_layer.default, outputs=1)
def _(n: Forward, dy: torch.Tensor) -> Any:
    y, act = n.outs
    dgates, dhidden, dh0 = tfnb.gru_layer_backward(dy, act, y, n["h0"], n["w"])
    weight, bias = lambda: _weight(dhidden, _before(n["h0"], y)), lambda: dhidden.sum([0, 1])
    return {"gates": dgates, "h0": dh0, "w": weight, "b": bias}


@rule(tfnb.rnn_layer.default)
def _(n: Forward, dy: torch.Tensor) -> Any:
    dgates, dh0 = tfnb.rnn_layer_backward(dy, n.out, n["w"], n["tanh"])
    return {"gates": dgates, "h0": dh0, "w": lambda: _weight(dgates, _before(n["h0"], n.out))}


@rule(tfnb.lstm_layer_backward.default, tfnb.gru_layer_backward.default, tfnb.rnn_layer_backward.default)
def _(n: Forward, dys: Sequence[torch.Tensor | None]) -> Any:
    raise NoGradient(
        "a second derivative of a recurrent net over a packed sequence is not recorded: run the net on the padded "
        "batch, and mask what lies behind the end of each sequence"
    )


# -- whole nets ------------------------------------------------------------------------------------------------


def _of(n: Forward) -> tuple[Any, ...] | None:
    """The arguments of the op that saves values for the gradient; None for a net with projections."""
    hx, params = n["hx"], n["params"]
    hx = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    ways = 2 if n["bidirectional"] else 1
    if len(params) != n["num_layers"] * ways * (4 if n["has_biases"] else 2):
        return None
    options = n["has_biases"], n["num_layers"], n["bidirectional"], n["batch_first"]
    return n.op.split(".")[1], n["input"], hx, list(params), *options


def _net(n: Forward, dys: Cotangents) -> Any:
    """The net computed again with saved values; a pass merges both computations."""
    net = _of(n)
    if net is None:
        return NotImplemented
    given = [dys.given(i) for i in range(len(dys))]
    found = iter(tfnb.recurrent_net_backward(list(n.needed), given, tfnb.recurrent_net(*net), *net))
    return [next(found) if is_needed else None for is_needed in n.needed]


rule(*sorted(ops_of("net")))(_net)


@composite(torch.ops.aten.lstm.input)
def _(*args: object) -> Any:
    """A net with projections, by torch's steps; torch 2.11 leaves an axis of one in its final states."""
    y, *ends = _STEPS["lstm"](*args)
    return y, *(end.flatten(1, -2) if end.dim() > 3 else end for end in ends)


nograd(tfnb.recurrent_net.default)  # feeds recurrent_net_backward alone, whose parts start from the net's arguments


@composite(tfnb.recurrent_net_backward.default)
def _(
    wanted: Sequence[bool], dys: Sequence[torch.Tensor | None], outs: object, kind: str, x: torch.Tensor,
    hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor], biases: bool, layers: int, both: bool,
    batch_first: bool,
) -> list[Any]:  # fmt: skip
    """The net by torch's steps, and their gradient."""
    recorder = open_recorder()
    every: list[Any] = [torch.ops.aten.alias.default(t) for t in (x, *hx, *params)]  # a tensor may be given twice
    start, first = len(recorder.new), 1 + len(hx)
    given = every[1:first] if kind == "lstm" else every[1]
    ends = _STEPS[kind](every[0], given, every[first:], biases, layers, 0.0, False, both, batch_first)
    walk = Walk(recorder, (t.value for t in every))
    pairs = zip(ends, dys, strict=True)
    walk.run(recorder.new[start:], [(end.value, dy) for end, dy in pairs if dy is not None])
    chosen = [t for t, is_wanted in zip(every, wanted, strict=True) if is_wanted]
    return [torch.zeros_like(t) if (dx := walk.total(t.value)) is None else dx for t in chosen]
