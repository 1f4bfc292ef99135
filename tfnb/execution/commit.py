"""The commit of a step: all writes, with nothing that can stop half-way.

A list call (a fused kernel, a foreach copy) has no Python between its writes. Where there are several, SIGINT is
held back until they are done: in generated code with many in-place writes, Ctrl-C leaves a mixed state nearly always.
Steps of several threads write one after the other: kernels that add to the same memory at once lose what one added.
"""

from __future__ import annotations

import _signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

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


class no_interrupt:
    """Context manager: SIGINT is held back, and delivered when the block is done.

    Only the main thread sees interrupts; elsewhere this does nothing. NOTE: the C module behind ``signal`` (tried with
    Python 3.11 and 3.12) takes 1.5 microseconds for what the enums of the public one make 23.
    """

    __slots__ = ("_before", "_held")

    def __enter__(self) -> None:
        self._held: list[tuple[int, FrameType | None]] = []
        in_main = threading.current_thread() is threading.main_thread()
        self._before = _signal.getsignal(_signal.SIGINT) if in_main else None
        if self._before is not None:  # None: also where a handler was not installed from Python
            _signal.signal(_signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))

    def __exit__(self, *exc: object) -> None:
        if self._before is None:
            return
        _signal.signal(_signal.SIGINT, self._before)
        if self._held and callable(self._before):
            self._before(*self._held[0])
