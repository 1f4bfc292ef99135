"""The commit of a step: all writes, with nothing that can stop half-way.

A list call (a fused kernel, a foreach copy) has no Python between its writes. Where there are several, SIGINT is
held back until they are done: in generated code with many in-place writes, Ctrl-C leaves a mixed state nearly always.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch


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
    with no_interrupt(), torch.no_grad():
        for update in pending.updates:
            update.kernel(update.rows, **update.settings)
        if pending.targets:
            torch._foreach_copy_(pending.targets, pending.values)


@contextmanager
def no_interrupt() -> Iterator[None]:
    """Hold SIGINT back; it is delivered when the block is done. Only the main thread sees interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # not installed from Python: nothing we could put back
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held and callable(before):
            before(*held[0])
