"""A device of a limited number of bytes on the CPU: tensors are copied in and out, and more bytes are an error.

Outside of the device a tensor lies in a `HostCopy`: in the memory of the process, where the device is virtual and saves
none, or in a mapped file, so that the process holds no more than the device does. Plans and counters are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Protocol

import torch

from tfnb.graph.mapped_files import MappedFile, MappedRegion, region_of


class HostCopy(Protocol):
    """The memory or file range of a tensor outside of a device.

    A written value lies beside the value that the step began with.
    """

    def read(self) -> torch.Tensor:
        """A new tensor with the value written last, else with the value of the beginning."""
        ...

    def write(self, tensor: torch.Tensor) -> None:
        """Keep a value of the device; the device may reuse its memory afterwards."""
        ...


class ProcessCopy:
    """A tensor in the memory of the process; of a value that is written the tensor itself is kept."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self.tensor = tensor

    def read(self) -> torch.Tensor:
        assert self.tensor is not None
        return self.tensor.clone(memory_format=torch.contiguous_format)

    def write(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class RegionCopy:
    """A mapped tensor, read from its file; values are written to the next generation of its region."""

    def __init__(self, tensor: torch.Tensor, region: MappedRegion) -> None:
        self.like, self.region, self.is_written = tensor, region, False

    def read(self) -> torch.Tensor:
        made = torch.empty(self.like.shape, dtype=self.like.dtype)
        region = self.region
        region.file.read(region.next if self.is_written else region.offset, _bytes(made))
        return made

    def write(self, tensor: torch.Tensor) -> None:
        self.region.file.write(self.region.next, _bytes(tensor.contiguous()))
        self.is_written = True


class RangeCopy:
    """A value of one step, such as a gradient, in a range of a file; its strides are kept."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.range, self.size = file, -1, 0

    def read(self) -> torch.Tensor:
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        self.file.read(self.range, _bytes(made))
        return made

    def write(self, tensor: torch.Tensor) -> None:
        tensor = tensor.resolve_conj().resolve_neg()
        self.shape, self.strides, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        if self.range < 0:
            self.size = tensor.nbytes
            self.range = self.file.take(self.size)
            weakref.finalize(self, self.file.give, self.range, self.size).atexit = False
        self.file.write(self.range, _bytes(tensor))


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor that has all of its storage."""
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return flat.numpy().data  # type: ignore[no-any-return]


def host_copy(tensor: torch.Tensor, is_written: bool) -> ProcessCopy | RegionCopy:
    """The copy of a tensor outside of a device; a mapped tensor that is written gets room for its next generation.

    >>> host_copy(torch.ones(2), False).read()
    tensor([1., 1.])
    """
    region = region_of(tensor)
    if region is None:
        return ProcessCopy(tensor)
    if is_written:
        region.reserve()
    return RegionCopy(tensor, region)


class VirtualDevice:
    """The tensors on a device of ``budget`` bytes, by key; one byte more raises MemoryError.

    host: the tensors outside, which `load` copies in and `store` copies out. spare: makes the host's copy of a tensor
    that had none. most: bytes held at once. loaded, stored: bytes copied.

    >>> device = VirtualDevice(16, {"w": ProcessCopy(torch.zeros(3))})
    >>> device.load("w")
    >>> device.held, device.loaded
    (12, 12)
    >>> device.put("x", torch.zeros(2))
    Traceback (most recent call last):
    MemoryError: 8 bytes do not fit beside 12 of 16
    """

    def __init__(
        self, budget: int, host: MutableMapping[Hashable, HostCopy], spare: Callable[[], HostCopy] = ProcessCopy
    ) -> None:  # fmt: skip
        self.budget, self.host, self.spare = budget, host, spare
        self.here: dict[Hashable, torch.Tensor] = {}
        self._leaving: dict[Hashable, int] = {}
        self.held = self.most = self.loaded = self.stored = 0

    def load(self, key: Hashable) -> None:
        """Copy a tensor in."""
        tensor = self.host[key].read()
        self.put(key, tensor)
        self.loaded += tensor.nbytes

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Hold a tensor that was made here."""
        self._hold(tensor.nbytes)
        self.here[key] = tensor

    def store(self, key: Hashable) -> None:
        """Copy a tensor out; its bytes are held until `settle`."""
        tensor = self.here.pop(key)
        if key not in self.host:
            self.host[key] = self.spare()
        self.host[key].write(tensor)
        self._leaving[key] = tensor.nbytes
        self.stored += tensor.nbytes

    def settle(self, key: Hashable) -> None:
        """Give back the bytes of a tensor that was copied out."""
        self.held -= self._leaving.pop(key)

    def drop(self, key: Hashable) -> None:
        """Let go of a tensor."""
        self.held -= self.here.pop(key).nbytes

    @contextmanager
    def working(self, size: int) -> Iterator[None]:
        """A block for a kernel that holds ``size`` bytes more."""
        self._hold(size)
        try:
            yield
        finally:
            self.held -= size

    def close(self) -> None:
        """Give back the bytes of all tensors that were copied out."""
        for key in list(self._leaving):
            self.settle(key)

    def _hold(self, size: int) -> None:
        if self.held + size > self.budget:
            raise MemoryError(f"{size:,} bytes do not fit beside {self.held:,} of {self.budget:,}")
        self.held += size
        self.most = max(self.most, self.held)
