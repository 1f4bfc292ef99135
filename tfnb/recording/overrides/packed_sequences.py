"""Packed sequences: the lengths are data, so the active steps of a batch are decided in each run.

A recurrent layer goes over all steps of the padded batch, and only the steps that a row has are kept; backwards, each
row starts at its own end. What was packed is remembered by the tensor of its batch sizes, which a ``PackedSequence``
hands on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from tfnb.errors import Unsupported
from tfnb.kernels import recurrent  # noqa: F401  defines torch.ops.tfnb
from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Tensor

aten, tfnb = torch.ops.aten, torch.ops.tfnb


@dataclass(frozen=True)
class Packing:
    """The places of the rows of packed data in the padded batch [T, B], and back."""

    lengths: torch.Tensor  # [B]
    inside: torch.Tensor  # [T, B]: whether the row has that step
    times: torch.Tensor  # of each row of the data
    rows: torch.Tensor
    places: torch.Tensor  # [T, B] of the data's rows; 0 outside

    def pad(self, data: torch.Tensor, value: float = 0.0) -> Any:
        """[T, B, ...] of the data, ``value`` outside."""
        inside = self.inside.view(*self.inside.shape, *[1] * (data.dim() - 1))
        return torch.where(inside, data[self.places], value)

    def long(self, steps: int) -> Packing:
        """The same rows in a batch of so many steps."""
        time = torch.arange(steps)
        at = time.clamp_max(self.inside.shape[0] - 1)
        return replace(self, inside=time.unsqueeze(1) < self.lengths, places=self.places[at])

    def pack(self, padded: torch.Tensor) -> Any:
        """The data's rows of [T, B, ...]."""
        return padded[self.times, self.rows]

    def last(self, padded: torch.Tensor) -> Any:
        """[B, ...]: the value at the last step of each row."""
        return padded[self.lengths - 1, torch.arange(self.lengths.shape[0])]

    def backwards(self, padded: torch.Tensor) -> Any:
        """Each row's own steps in reverse."""
        time = torch.arange(self.inside.shape[0]).unsqueeze(1)
        return padded[torch.where(self.inside, self.lengths - 1 - time, time), torch.arange(self.lengths.shape[0])]


@override(Stage.OP, aten._pack_padded_sequence.default)
def pack(rec: Recording, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """`torch._pack_padded_sequence`: rows of the data by step, and how many rows have each step."""
    x = x.transpose(0, 1) if batch_first else x
    steps = x.shape[0]
    fits = (lengths > 0).all() & (lengths <= steps).all() & (lengths.cummin(0).values == lengths).all()
    rec.guard(fits, True)
    inside = torch.arange(steps).unsqueeze(1) < lengths
    times, rows = inside.nonzero().unbind(1)
    sizes = inside.sum(1)
    places = torch.where(inside, (sizes.cumsum(0) - sizes).unsqueeze(1) + torch.arange(x.shape[1]), 0)
    batch_sizes = sizes[sizes > 0]
    rec.packings[batch_sizes] = Packing(lengths, inside, times, rows, places)
    return x[times, rows], batch_sizes


@override(Stage.FUNCTION, torch._pad_packed_sequence)
def pad(
    rec: Recording, data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, total: Any
) -> Any:
    """`torch._pad_packed_sequence`: as many steps as the longest row has, or ``total``."""
    if not isinstance(batch_sizes, Tensor):
        return NotImplemented
    packing = _packing(rec, batch_sizes)
    if isinstance(total, torch.SymInt):  # the longest row's: in the run
        padded = packing.pad(data, value)[torch.arange(batch_sizes.shape[0])]
    else:
        rec.guard((packing.lengths <= total).all(), True)
        padded = packing.long(total).pad(data, value)
    return padded.transpose(0, 1) if batch_first else padded, packing.lengths


# (gates, first states, weights) -> states at all steps
Cell = Callable[[torch.Tensor, list[torch.Tensor], list[torch.Tensor]], tuple[torch.Tensor, ...]]


def layers(biases: int, cell: Cell, *, several: bool = False) -> Callable[..., Any]:
    """The row of one kind of net; ``biases`` says how many of the two are part of the gates."""

    def row(
        rec: Recording, data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any, params: list[torch.Tensor],
        has_biases: bool, num_layers: int, dropout: float, train: bool, both: bool,
    ) -> Any:  # fmt: skip
        packing, ways, firsts = _packing(rec, batch_sizes), 1 + both, hx if several else [hx]
        per = 4 if has_biases else 2
        if len(params) != per * ways * num_layers:
            raise Unsupported(f"proj_size over packed sequences is not recorded{rec.tape.at()}")
        lasts: list[Any] = []
        for k in range(num_layers * ways):
            back, own = k % ways, params[k * per : (k + 1) * per]
            if not back:
                data = torch.dropout(data, dropout, True) if dropout and train and k else data
                padded, outs = packing.pad(data), []
            bias = None if not has_biases else own[2] if biases == 1 else own[2] + own[3]
            gates = nn.functional.linear(packing.backwards(padded) if back else padded, own[0], bias)
            states = cell(gates, [first[k] for first in firsts], own)
            outs.append(packing.backwards(states[0]) if back else states[0])
            lasts.append([packing.last(state) for state in states])
            if back == ways - 1:
                data = packing.pack(torch.cat(outs, -1) if both else outs[0])
        return (data, *map(torch.stack, zip(*lasts, strict=True)))

    return row


def _lstm(gates: torch.Tensor, first: list[torch.Tensor], own: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(tfnb.lstm_layer(gates, *first, own[1])[:2])


def _gru(gates: torch.Tensor, first: list[torch.Tensor], own: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    bias = own[3] if len(own) == 4 else own[1].new_zeros([own[1].shape[0]])
    return (tfnb.gru_layer(gates, first[0], own[1], bias)[0],)


def _rnn(tanh: bool) -> Cell:
    return lambda gates, first, own: (tfnb.rnn_layer(gates, first[0], own[1], tanh),)


def _packing(rec: Recording, batch_sizes: torch.Tensor) -> Packing:
    if batch_sizes not in rec.packings:
        raise Unsupported(
            "a packed sequence whose batch sizes were not made by pack_padded_sequence in this recording: pack it "
            f"there, from the padded batch and its lengths{rec.tape.at()}"
        )
    return rec.packings[batch_sizes]


_FORWARD = (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)


@override(Stage.MODULE, nn.RNNBase)
def _layer(rec: Recording, module: nn.RNNBase) -> Any:
    """The forward of a recurrent layer, over a recorded packed sequence with its first state.

    torch's forward would make a number of the rows to make and to check that state: it is made here, and the check
    is the ops'.
    """
    original: Any = type(module).forward
    if original not in _FORWARD:
        return NotImplemented

    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        is_packed = isinstance(input, PackedSequence) and isinstance(input.batch_sizes, Tensor)
        if not is_packed or input.batch_sizes not in rec.packings:
            return original(self, input, hx)
        vars(self)["check_forward_args"] = lambda *unused: None
        try:
            return original(self, input, _first_state(self, input, rec) if hx is None else hx)
        finally:
            del vars(self)["check_forward_args"]

    return forward


def _first_state(module: nn.RNNBase, sequence: PackedSequence, rec: Recording) -> Any:
    rows = rec.packings[sequence.batch_sizes].lengths.shape[0]
    count, data = module.num_layers * (1 + module.bidirectional), sequence.data
    hx = data.new_zeros([count, rows, module.proj_size or module.hidden_size])
    return (hx, data.new_zeros([count, rows, module.hidden_size])) if isinstance(module, nn.LSTM) else hx


override(Stage.OP, aten.lstm.data)(layers(2, _lstm, several=True))
override(Stage.OP, aten.gru.data)(layers(1, _gru))
override(Stage.OP, aten.rnn_tanh.data)(layers(2, _rnn(True)))
override(Stage.OP, aten.rnn_relu.data)(layers(2, _rnn(False)))
