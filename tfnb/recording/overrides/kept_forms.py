"""Calls whose form a device or a lazy bit of torch would choose, in one form that every run can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Tensor

aten = torch.ops.aten


@override(Stage.OP, aten.scaled_dot_product_attention.default)
def _attention(rec: Recording, *args: object, **kwargs: object) -> Any:
    """Attention stays whole, but its dropout must be drawn by a node of its own."""
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    if not dropout:
        return NotImplemented
    return aten._scaled_dot_product_attention_math(*args, **kwargs)[0]


@override(Stage.OP, aten.dropout.default)
def _dropout(rec: Recording, x: torch.Tensor, p: float, train: bool) -> Any:
    """Without dropping, torch returns the input itself, whatever a device's kernel does."""
    return NotImplemented if train and p else x


@override(Stage.OP, aten._efficientzerotensor.default)
def _zeros(rec: Recording, size: Sequence[int], **options: Any) -> Any:
    """Zeros of forward mode as real zeros: torch's memoryless zeros would be read by kernels behind its handling."""
    return torch.zeros(size, **options)


@override(Stage.OP, aten.lift_fresh.default, aten.lift.default)
def _lift(rec: Recording, x: Any) -> Any:
    """A tensor that torch.tensor made: a constant."""
    return x if isinstance(x, Tensor) else rec._wrap(rec._entry(x))


@override(Stage.OP, aten._conj.default)
def _conj(rec: Recording, x: torch.Tensor) -> Any:
    """torch conjugates lazily, by a bit on the view; a recorded view holds the numbers themselves."""
    return rec.record_view(aten._conj.default, aten._conj_physical.default, x)


@override(Stage.OP, aten._neg_view.default)
def _neg(rec: Recording, x: torch.Tensor) -> Any:
    """Lazily negated, in the same way."""
    return rec.record_view(aten._neg_view.default, aten.neg.default, x)
