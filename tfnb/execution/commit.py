"""The commit of a step: all writes, with nothing that can stop half-way.

A list call (a fused kernel, a foreach copy) has no Python between its writes. Where there are several, SIGINT is
held back until they are done: in generated code with many in-place writes, Ctrl-C leaves a mixed state nearly always.
Whoever commits holds the locks of the Variables (`tfnb.graph.variable_locks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tfnb.graph import Variable
from tfnb.interrupts import no_interrupt
from tfnb.state.queue_machine import StepQueues


@dataclass(slots=True)
class Update:
    """One fused kernel over the rows of many variables."""

    kernel: Callable[..., None]
    rows: list[Sequence[torch.Tensor]]
    settings: dict[str, Any]


@dataclass(slots=True)
class Pending:
    """The writes of a computed step, not yet committed.

    values: tensors, and numbers for tensors of one element. variables: all that are written, also by updates.
    done: is called at the end. queued: what it did to queues, which counts with the writes.
    """

    targets: list[torch.Tensor]
    values: list[Any]
    updates: list[Update]
    variables: tuple[Variable, ...] = ()
    done: Callable[[], object] | None = None
    queued: StepQueues | None = None


def commit(pending: Pending) -> None:
    """Write everything."""
    if pending.updates or pending.targets:
        _write(pending)
    if pending.done is not None:
        pending.done()


def _write(pending: Pending) -> None:
    with no_interrupt():
        try:
            for update in pending.updates:
                update.kernel(update.rows, **update.settings)
            targets, values, numbers = _changed(pending.targets, pending.values)
            for written, new in _alike(targets, values):
                torch._foreach_copy_(written, new)
            for target, number in numbers:
                target.fill_(number)
            if pending.queued is not None:
                pending.queued.end()
        finally:
            for variable in pending.variables:
                variable.writes.value += 1


def _alike(
    targets: list[torch.Tensor], values: list[torch.Tensor]
) -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Group the writes: all together on the CPU, by dtype on a device, where torch makes one kernel of each group."""
    if not targets or targets[0].is_cpu:
        return [(targets, values)] if targets else []
    kinds: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, value in zip(targets, values, strict=True):
        written, new = kinds.setdefault((target.dtype, value.dtype, target.device), ([], []))
        written.append(target)
        new.append(value)
    return kinds.values()


def _changed(
    targets: list[torch.Tensor], values: list[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[torch.Tensor, Any]]]:
    """Separate the writes: tensors that changed (no untaken branch), their values, and numbers with their targets."""
    written, new, numbers = [], [], []
    for target, value in zip(targets, values, strict=True):
        if type(value) in _NUMBERS:
            numbers.append((target, value))
        elif value is not target:
            written.append(target)
            new.append(value)
    return written, new, numbers


_NUMBERS = frozenset({bool, int, float})
