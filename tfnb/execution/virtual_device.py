"""A device of a limited number of bytes on the CPU: tensors are copied in and out, and more bytes are an error.

Outside of the device a tensor lies in a `HostCopy`: in the memory of the process, where the device is virtual and saves
none, or in a mapped file, so that the process holds no more than the device does. Plans and counters are the same.
Copies of a file go on while tasks compute: bytes of a copy in count from its beginning, those of one out to its end.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import torch

from tfnb.execution.copy_lanes import CopyLanes, InlineCopies, finished
from tfnb.graph.mapped_files import MappedFile, MappedRegion, region_of


class HostCopy(Protocol):
    """The memory or file range of a tensor outside of a device.

    A written value lies beside the value that the step began with.
    """

    nbytes: int

    def read(self) -> torch.Tensor:
        """A new tensor with the value written last, else with the value of the beginning."""
        ...

    def write(self, tensor: torch.Tensor) -> None:
        """Keep a value of the device. Afterwards nothing writes into the tensor: a copy may keep the tensor itself."""
        ...


class ProcessCopy:
    """A tensor in the memory of the process; of a value that is written the tensor itself is kept."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.nbytes = tensor, tensor.nbytes

    def read(self) -> torch.Tensor:
        return self.tensor.clone(memory_format=torch.contiguous_format)

    def write(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class RegionCopy:
    """A mapped tensor, read from its file; values are written to the next generation of its region."""

    def __init__(self, tensor: torch.Tensor, region: MappedRegion) -> None:
        self.like, self.region, self.is_written = tensor, region, False
        self.nbytes = tensor.nbytes

    def read(self) -> torch.Tensor:
        made = torch.empty(self.like.shape, dtype=self.like.dtype)
        region = self.region
        region.file.read(region.next if self.is_written else region.offset, _bytes(made))
        return made

    def write(self, tensor: torch.Tensor) -> None:
        self.region.file.write(self.region.next, _bytes(tensor.contiguous()))
        self.is_written = True


class RangeCopy:
    """A value of one step, such as a gradient, in a range of a file. like: a tensor of its size. Strides are kept."""

    def __init__(self, file: MappedFile, like: torch.Tensor) -> None:
        self.file, self.nbytes, self.range = file, like.nbytes, file.take(like.nbytes)
        weakref.finalize(self, file.give, self.range, self.nbytes).atexit = False

    def read(self) -> torch.Tensor:
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        self.file.read(self.range, _bytes(made))
        return made

    def write(self, tensor: torch.Tensor) -> None:
        tensor = tensor.resolve_conj().resolve_neg()
        self.shape, self.strides, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
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


class DeviceCopy(NamedTuple):
    """A copy that is over: "in" or "out", between two moments of the clock."""

    way: str
    key: Hashable
    start: float
    end: float


class VirtualDevice:
    """The tensors on a device of ``budget`` bytes, by key; one byte more raises MemoryError.

    host: the tensors outside, which `load` copies in and `store` copies out. spare: makes the host's copy for a tensor
    that has none. lanes: do the copies. most: bytes held at once. loaded, stored: bytes copied. copies: those over.

    >>> device = VirtualDevice(16, {"w": ProcessCopy(torch.zeros(3))})
    >>> device.load("w")
    >>> device.arrive(["w"])
    >>> device.held, device.loaded
    (12, 12)
    >>> device.put("x", torch.zeros(2))
    Traceback (most recent call last):
    MemoryError: 8 bytes do not fit beside 12 of 16
    """

    def __init__(
        self, budget: int, host: MutableMapping[Hashable, HostCopy],
        spare: Callable[[torch.Tensor], HostCopy] = ProcessCopy, lanes: CopyLanes | None = None,
    ) -> None:  # fmt: skip
        self.budget, self.host, self.spare, self.lanes = budget, host, spare, lanes or InlineCopies()
        self.here: dict[Hashable, torch.Tensor] = {}
        self.copies: list[DeviceCopy] = []
        self.held = self.most = self.loaded = self.stored = 0
        self._coming: dict[Hashable, Future[torch.Tensor]] = {}
        self._leaving: dict[Hashable, Future[None]] = {}
        self._rooms: list[Future[None]] = []  # which the next copy in waits for
        self._lock = threading.Lock()  # of what is held: tasks and both lanes count

    def load(self, key: Hashable) -> None:
        """Begin to copy a tensor in, behind the copies out that `room` named."""
        copy = self.host[key]
        self._coming[key] = self.lanes.load(partial(self._read, key, copy, self._rooms))
        self._rooms = []
        self.loaded += copy.nbytes

    def _read(self, key: Hashable, copy: HostCopy, rooms: Iterable[Future[None]]) -> torch.Tensor:
        for room in rooms:
            room.result()
        self._hold(copy.nbytes)
        began = time.perf_counter()
        tensor = copy.read()
        self.copies.append(DeviceCopy("in", key, began, time.perf_counter()))
        return tensor

    def room(self, key: Hashable) -> None:
        """Let the next copy in wait for the copy out of a tensor."""
        self._rooms.append(self._leaving[key])

    def arrive(self, keys: Iterable[Hashable]) -> None:
        """Wait until these tensors are here; an error of their copy is raised."""
        for key in keys:
            if key in self._coming:
                self.here[key] = finished(self._coming.pop(key))

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Hold a tensor that was made here."""
        self._hold(tensor.nbytes)
        self.here[key] = tensor

    def store(self, key: Hashable) -> None:
        """Begin to copy a tensor out; its bytes are held until that is over."""
        tensor = self.here.pop(key)
        if key not in self.host:
            self.host[key] = self.spare(tensor)
        self._leaving[key] = self.lanes.store(partial(self._write, key, self.host[key]), tensor)
        self.stored += tensor.nbytes

    def _write(self, key: Hashable, copy: HostCopy, tensor: torch.Tensor) -> None:
        began = time.perf_counter()
        copy.write(tensor)
        self.copies.append(DeviceCopy("out", key, began, time.perf_counter()))
        self._release(tensor.nbytes)

    def settle(self, key: Hashable) -> None:
        """Wait for the copy out of a tensor; an error of it is raised."""
        finished(self._leaving[key])

    def drop(self, key: Hashable) -> None:
        """Let go of a tensor."""
        self._release(self.here.pop(key).nbytes)

    @contextmanager
    def working(self, size: int) -> Iterator[None]:
        """A block for a kernel that holds ``size`` bytes more."""
        self._hold(size)
        try:
            yield
        finally:
            self._release(size)

    def close(self) -> None:
        """Wait for all copies out."""
        for key in self._leaving:
            self.settle(key)

    def _hold(self, size: int) -> None:
        with self._lock:
            if self.held + size > self.budget:
                raise MemoryError(f"{size:,} bytes do not fit beside {self.held:,} of {self.budget:,}")
            self.held += size
            self.most = max(self.most, self.held)

    def _release(self, size: int) -> None:
        with self._lock:
            self.held -= size
