"""Sums of cotangents that a loop's gradient carries from iteration to iteration. Imports recording."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tfnb.graph import Node, Value
from tfnb.recording import Tensor
from tfnb.recording.values.recording import Recording


def plus(recorder: Recording, total: torch.Tensor, dx: Any) -> torch.Tensor:
    """``total + dx``; rows that an iteration read at several places are added one after the other.

    So `tfnb.passes.simplify` can scatter each summand into the running total; adding the summands first would make a
    dense tensor.
    """
    parts = list(_summands(recorder, dx.shown.value)) if isinstance(dx, Tensor) else []
    if len(parts) < 2 or not any(recorder.node(part.node).op == "aten.index_add.default" for part in parts):
        return total + dx
    for part in parts:
        total = total + recorder.tensor(part)
    return total


def _summands(recorder: Recording, value: Value) -> Iterator[Value]:
    """The summands of a value; the value itself if it is no sum."""
    node: Node = recorder.node(value.node)
    if node.op == "aten.add.Tensor" and "alpha" not in node.attrs and len(node.inputs) == 2:
        for each in node.inputs:
            yield from _summands(recorder, each)
    else:
        yield value
