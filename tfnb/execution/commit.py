"""The commit of a step: all writes, with nothing that can stop half-way.

A list call (a fused kernel, a foreach copy) has no Python between its writes. Where there are several, SIGINT is
held back until they are done: in generated code with many in-place writes, Ctrl-C leaves a mixed state nearly always.
Steps of several threads write one after the other: kernels that add to the same memory at once lose what one added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tfnb.interrupts import no_interrupt

_WRITING = threading.Lock()  # of the process: sessions and graphs share Variables


@dataclass(slots=True)
class Update:
    """One fused kernel over the rows of many variables."""

    kernel: Callable[..., None]
    rows: list[tuple[torch.Tensor, ...]]
    settings: dict[str, Any]


@dataclass(slots=True)
class Pending:
    """What a computed step will write."""

    targets: list[torch.Tensor]
    values: list[torch.Tensor]
    updates: list[Update]


def commit(pending: Pending) -> None:
    """Write everything."""
    if not pending.updates and not pending.targets:
        return
    with no_interrupt(), _WRITING:
        for update in pending.updates:
            update.kernel(update.rows, **update.settings)
        if pending.targets:
            torch._foreach_copy_(pending.targets, pending.values)
