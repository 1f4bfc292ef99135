"""Nodes with effects that may wait: operations on queues. While recording they do nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tfnb.graph import Spec, Value, ops
from tfnb.recording.marks.scopes import clean
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.samples import physical
from tfnb.recording.values.tensor import Entry, Operation, Tensor


def effect(
    recorder: Recording, op: str, queue: Any, *, inputs: Sequence[Value] = (), attrs: Mapping[str, Any] | None = None,
    outputs: Sequence[Spec] = (), samples: Sequence[torch.Tensor | None] = (),
) -> list[Tensor] | Operation:  # fmt: skip
    """Record an operation on ``queue``; returns its outputs, or an Operation if there are none."""
    assert op in ops.QUEUES
    name = f"{clean(queue.name)}/{op.partition('.')[2]}"
    value = recorder.tape.append(
        op, name, tuple(outputs), inputs=tuple(inputs), attrs={"queue": queue, **(attrs or {})},
        scope=recorder.scopes.current(),
    )  # fmt: skip
    if not outputs:
        return recorder.operation(value)
    tensors = []
    for index, (spec, sample) in enumerate(zip(outputs, samples, strict=True)):
        at = Value(value.node, index)
        fake = recorder.space.fakes[at] = recorder.symbols.fake(spec)
        sample = None if recorder.lazy else physical(sample)
        recorder.space.samples.root(at, sample)
        tensors.append(recorder._wrap(Entry(at, fake, sample)))
    return tensors
