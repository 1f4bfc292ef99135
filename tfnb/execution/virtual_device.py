"""A device of so many bytes, tried on the CPU: tensors are copied to it and back, and what it holds is enforced."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from contextlib import contextmanager

import torch


class VirtualDevice:
    """The tensors on a device of ``budget`` bytes, by key; going over it is a MemoryError.

    host: the tensors outside, which `load` copies in and `store` copies out, as new tensors. most: bytes held at once.
    loaded, stored: bytes copied.

    >>> device = VirtualDevice(16, {"w": torch.zeros(3)})
    >>> device.load("w")
    >>> device.held, device.loaded
    (12, 12)
    >>> device.put("x", torch.zeros(2))
    Traceback (most recent call last):
    MemoryError: 8 bytes do not fit beside 12 of 16
    """

    def __init__(self, budget: int, host: MutableMapping[Hashable, torch.Tensor]) -> None:
        self.budget, self.host = budget, host
        self.here: dict[Hashable, torch.Tensor] = {}
        self._leaving: dict[Hashable, int] = {}
        self.held = self.most = self.loaded = self.stored = 0

    def load(self, key: Hashable) -> None:
        """Copy a tensor in."""
        tensor = self.host[key]
        self.put(
            key, tensor.clone(memory_format=torch.contiguous_format) if not tensor.is_contiguous() else tensor.clone()
        )
        self.loaded += tensor.nbytes

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Hold a tensor that was made here."""
        self._hold(tensor.nbytes)
        self.here[key] = tensor

    def store(self, key: Hashable) -> None:
        """Copy a tensor out; its bytes are held until `settle`."""
        tensor = self.here.pop(key)
        self.host[key] = tensor
        self._leaving[key] = tensor.nbytes
        self.stored += tensor.nbytes

    def settle(self, key: Hashable) -> None:
        """Give back the bytes of a tensor whose copy out is over."""
        self.held -= self._leaving.pop(key)

    def drop(self, key: Hashable) -> None:
        """Let go of a tensor."""
        self.held -= self.here.pop(key).nbytes

    @contextmanager
    def working(self, size: int) -> Iterator[None]:
        """A block in which a kernel holds so many bytes more."""
        self._hold(size)
        try:
            yield
        finally:
            self.held -= size

    def close(self) -> None:
        """Wait for all copies out."""
        for key in list(self._leaving):
            self.settle(key)

    def _hold(self, size: int) -> None:
        if self.held + size > self.budget:
            raise MemoryError(f"{size:,} bytes do not fit beside {self.held:,} of {self.budget:,}")
        self.held += size
        self.most = max(self.most, self.held)
