"""Who writes Variables, and when: one lock of the process, since sessions and graphs share Variables.

Kernels that write the same memory at once lose what one of them wrote. A step reads while others write (no isolation,
semantics S-57); ``count`` tells it at its commit whether anybody wrote since. The lock is one that its owner may take
again: what Python runs in between (a finalizer) may use a Variable.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Stored(Protocol):
    """A Variable."""

    @property
    def storage(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """Copies of Variables, and the count of writes before them."""

    count: int
    copies: Mapping[Any, torch.Tensor]


class Writing:
    """The lock, and how many writes there were."""

    __slots__ = ("count", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.count = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """One write, which counts when it is done, and also if it failed half-way."""
        with self.lock:
            try:
                yield
            finally:
                self.count += 1

    def cut(self, variables: Iterable[Stored]) -> Cut:
        """Copies of what these Variables hold here, all of one moment."""
        with self.lock:
            return Cut(self.count, {variable: variable.storage.clone() for variable in variables})


WRITERS = Writing()
