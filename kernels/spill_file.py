"""Spill files: memory for rows that do not fit where they are computed. Knows no graph.

That of the CPU is in files that are mapped into memory and have no name, so nothing is left of them however the run
ends; that of an accelerator is pinned memory. A piece of a file is free as soon as no tensor is left that lies in it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref

import torch

_ALIGN = 64
_FIRST, _LARGEST = 32 << 20, 1 << 30  # bytes of the first file, and of later ones at most


class SpillFile:
    """A pool of memory in files: freed memory is reused by later runs. Shared between threads.

    A file is as large as all before it, but at least 32 MiB and at most 1 GiB, so that a process does not run out of
    open files. lag: seconds by which copies were late; who copies decides.
    """

    def __init__(self) -> None:
        self.lag = 0.0
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._begin()

    def _begin(self) -> None:
        self._free: dict[int, list[memoryview]] = {}  # by size
        self._rest = memoryview(b"")  # of the last file
        self._bytes = 0  # of all files

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of so many elements, for rows of a device. Raises OSError where there is none."""
        if device.type != "cpu":
            return torch.empty(count, dtype=dtype, pin_memory=True)
        if not count:
            return torch.empty(0, dtype=dtype)
        if self._process != os.getpid():  # after a fork the files are the parent's
            self._process = os.getpid()
            self._begin()
        bytes = -(-count * dtype.itemsize // _ALIGN) * _ALIGN
        free = self._free.setdefault(bytes, [])
        try:
            piece = free.pop()
        except IndexError:
            piece = self._piece(bytes)
        held = piece[:]  # lives as long as the storage of what is made of it
        weakref.finalize(held, free.append, piece).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=count)

    def _piece(self, bytes: int) -> memoryview:
        with self._lock:
            if len(self._rest) < bytes:
                self._rest = self._file(bytes)
            found, self._rest = self._rest[:bytes], self._rest[bytes:]
            return found

    def _file(self, bytes: int) -> memoryview:
        """One more file, of so many bytes at least."""
        wanted = max(bytes, min(max(_FIRST, self._bytes), _LARGEST))
        try:
            found = _mapped(wanted)
        except OSError:  # is there room for these bytes only?
            found = _mapped(bytes)
        self._bytes += len(found)
        return found


def _mapped(bytes: int) -> memoryview:
    with tempfile.TemporaryFile(prefix="tfnb-swap-") as file:  # gone from the disk when nothing is mapped any more
        os.posix_fallocate(file.fileno(), 0, bytes)  # a full disk is an error here, and a dead process later
        return memoryview(mmap.mmap(file.fileno(), bytes))
