"""Shared memory of one host: segments made by one process and mapped by others. No other module maps shared memory.

A segment is a file in memory that has no name: when the last process that has it ends, killed or not, nothing is left.
Another process of the same user opens it among its maker's open files, and a random token in the first bytes proves
that it is this very memory. On another host, or in another container, the process finds another file or none. The size
is sealed, so that nobody who has mapped it can lose it.

One number of the header, ``word``, is seen and written by all who map the segment. What it says is up to them. Its
maker sets it to `GONE` when it gives the segment up.

``TFNB_SHARED=off`` in the environment: no process makes a segment, and none maps one.
"""

from __future__ import annotations

import bisect
import mmap
import os
import secrets
import stat
import struct
import sys
import weakref
from pathlib import Path

import numpy as np
import torch

if sys.platform == "linux":
    import fcntl

is_on = sys.platform == "linux" and os.environ.get("TFNB_SHARED", "on") != "off"

MOST = 1 << 30  # bytes: larger ones are tables, most of all, and stay in private memory, which is committed lazily
HEADER = 64  # bytes
GONE = -1  # the word of a segment that its maker gave up
MAPS = 64  # segments of others that are kept mapped
_MAGIC = b"TFNM\x01\x00\x00\x00"
_HEAD = struct.Struct("<8s16sq")  # magic, token, word
_WORD = 3  # place of the word among the header's numbers
_NAME = "tfnb"


class _Memory:
    """A process's mapping of a segment: its ``name``, the bytes behind its header, and its word."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self._words = np.frombuffer(memory, np.int64, HEADER // 8)
        self.flat = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER)  # as the words, it keeps the memory

    @property
    def word(self) -> int:
        """The number that all see."""
        return int(self._words[_WORD])

    @word.setter
    def word(self, number: int) -> None:
        self._words[_WORD] = number


class Segment(_Memory):
    """Shared memory that this process made. Raises OSError where there can be none.

    >>> one = Segment(8)
    >>> other = MappedSegment(one.name)
    >>> one.flat[0] = 7
    >>> other.flat.tolist(), other.word
    ([7, 0, 0, 0, 0, 0, 0, 0], 0)
    """

    def __init__(self, nbytes: int) -> None:
        if not is_on or nbytes > MOST:
            raise OSError(f"no shared memory of {nbytes} bytes: it is off, or the limit of {MOST} is passed")
        token = secrets.token_bytes(16)
        file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(file, 0o600)
            os.posix_fallocate(file, 0, HEADER + nbytes)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = _map(file, HEADER + nbytes)
        except BaseException:
            os.close(file)
            raise
        _HEAD.pack_into(memory, 0, _MAGIC, token, 0)
        super().__init__(f"{os.getpid()}.{file}.{token.hex()}", memory)
        address = self.flat.data_ptr()
        bisect.insort(_addresses, address)
        _made[address] = weakref.ref(self)
        weakref.finalize(self, _end, os.getpid(), file, address, self._words).atexit = False


class MappedSegment(_Memory):
    """The segment of another process. Raises OSError where this is not the same memory."""

    def __init__(self, name: str) -> None:
        pid, file, token = _read_name(name)
        if not is_on:
            raise OSError("shared memory is off here")
        path = f"/proc/{pid}/fd/{file}"
        if not str(Path(path).readlink()).startswith(f"/memfd:{_NAME} "):
            raise OSError(f"{path} is no shared memory of tfnb")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            facts = os.fstat(opened)
            is_sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if facts.st_size < HEADER:
                raise OSError(f"{path} has {facts.st_size} bytes, which no shared memory of tfnb has")
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or not is_sealed:
                raise OSError(f"{path} belongs to somebody else, or its size is not sealed")
            memory = _map(opened, facts.st_size)
        finally:
            os.close(opened)
        magic, found, _ = _HEAD.unpack_from(memory)
        if magic != _MAGIC or found != token:
            raise OSError(f"{path} is not the memory that was meant")
        super().__init__(name, memory)


class Maps:
    """Segments of other processes, each mapped once, as long as their makers have them."""

    def __init__(self) -> None:
        self._of: dict[str, MappedSegment] = {}

    def get(self, name: str) -> MappedSegment:
        """The segment of this name. Raises OSError."""
        found = self._of.get(name)
        if found is None:
            self._of = {key: one for key, one in list(self._of.items())[1 - MAPS :] if one.word != GONE}
            found = self._of[name] = MappedSegment(name)
        return found


def located(tensor: torch.Tensor) -> tuple[Segment, int] | None:
    """The segment of this process that holds a contiguous tensor, and the byte offset there.

    >>> one = Segment(100)
    >>> located(one.flat[64:])[1], located(torch.zeros(4))
    (64, None)
    """
    address = tensor.data_ptr()
    place = bisect.bisect_right(_addresses, address) - 1
    segment = _made[_addresses[place]]() if place >= 0 else None
    if segment is None:
        return None
    offset = address - segment.flat.data_ptr()
    return (segment, offset) if offset + tensor.numel() * tensor.itemsize <= segment.flat.numel() else None


_addresses: list[int] = []  # where segments of this process begin
_made: dict[int, weakref.ref[Segment]] = {}


def _map(file: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _end(pid: int, file: int, address: int, words: np.ndarray) -> None:
    if os.getpid() == pid:  # a forked child gives up nothing that its parent has
        words[_WORD] = GONE
        os.close(file)
    if _made.pop(address, None) is not None:
        _addresses.remove(address)


def _read_name(name: str) -> tuple[int, int, bytes]:
    try:
        pid, file, token = name.split(".")
        return int(pid), int(file), bytes.fromhex(token)
    except ValueError:
        raise OSError(f"{name[:60]!r} names no shared memory") from None
