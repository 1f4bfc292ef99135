"""Tensors whose memory is a range of a file: weights and optimizer state that are larger than the RAM.

A tensor's region is mapped, so that any code may read and write the tensor as usual: its pages are those of the file,
and the system writes them out and takes them back where memory is short. What moves whole tensors (packs of a step,
copies, checkpoints) reads and writes the file itself, and touches no page of the mapping. A file has no name: nothing
is left of it however the process ends. Its ranges are reserved on the disk when they are taken, so that a full disk is
an error there, and not a dead process at a write.

A region has a range of its own and, once a step in packs writes it, a second one: the next generation. `flip` maps that
one at the address of the first, so that a commit moves no bytes, and all views of the tensor follow.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch

from tfnb.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted, Unimplemented, ensure_type

LEAST = 64 << 10  # bytes: a smaller tensor stays in the memory of the process
_PIECE = 4 << 20  # bytes that are read, or written, together
_MEMORY_FILES = frozenset({"tmpfs", "ramfs"})  # file systems whose files lie in RAM


class MappedFile:
    """A file without a name, in a folder (by default the system's temp folder), whose ranges are tensors' memory.

    Shared between threads. touched: bytes written through the mapping since `drop_pages`, as far as somebody counts.
    """

    def __init__(self, folder: str | PathLike[str] | None = None) -> None:
        ensure_type(folder, (str, PathLike, type(None)), "the folder of mapped memory")
        if sys.platform != "linux":
            raise Unimplemented("mapped memory replaces mappings in place, which is written for Linux only")
        self.folder = Path(tempfile.gettempdir() if folder is None else folder)
        try:
            with tempfile.TemporaryFile(prefix="tfnb-state-", dir=self.folder) as file:
                self.descriptor = os.dup(file.fileno())
        except OSError as error:
            raise InvalidArgument(
                f"no file can be made in {self.folder}, the folder of mapped memory: {error.strerror}; name a folder "
                "on a disk that this process may write, tfnb.mapped_memory(FOLDER)"
            ) from error
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self._lock, self._process, self._size = threading.Lock(), os.getpid(), 0
        self._free: dict[int, list[int]] = {}  # offsets, by length
        self.regions: weakref.WeakSet[MappedRegion] = weakref.WeakSet()
        self.touched = 0

    @property
    def is_in_memory(self) -> bool:
        """Whether files of the folder lie in RAM, as those of a tmpfs."""
        return _file_system(self.folder.resolve()) in _MEMORY_FILES

    def take(self, nbytes: int, *, zero: bool = False) -> int:
        """The offset of a range of so many bytes in whole pages, reserved on the disk; raises ResourceExhausted.

        zero: it reads as zeros, and takes no writing unless it had another owner. Else it holds anything.
        """
        if self._process != os.getpid():
            raise FailedPrecondition(
                "mapped memory of the process that this one was forked from has no more tensors: two processes would "
                "give away the same range. Build the model in the process that trains it"
            )
        length = _pages(nbytes)
        free = self._free.setdefault(length, [])
        try:
            offset = free.pop()
        except IndexError:
            return self._grown(length)
        for start, stop in self.extents(offset, offset + length) if zero else ():
            for at in range(start, stop, _PIECE):
                self.write(at, memoryview(bytes(min(_PIECE, stop - at))))
        return offset

    def _grown(self, length: int) -> int:
        with self._lock:
            offset = self._size
            try:
                os.posix_fallocate(self.descriptor, offset, length)
            except OSError as error:
                raise ResourceExhausted(
                    f"no room for {length:,} bytes of mapped memory in {self.folder}, beside {offset:,}: "
                    f"{error.strerror}, {shutil.disk_usage(self.folder).free:,} bytes are free on its disk. Name "
                    "another folder, tfnb.mapped_memory(FOLDER); a step in packs takes what it writes twice"
                ) from error
            self._size += length
            return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take a range back. Without the lock: a collection may call this anywhere."""
        self._free.setdefault(_pages(nbytes), []).append(offset)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill a buffer with the bytes from an offset on."""
        at = 0
        while at < len(target):
            try:
                count = os.preadv(self.descriptor, [target[at:]], offset + at)
            except OSError as error:
                self._fail("read", error)
            if not count:
                self._fail("read", OSError(errno.EIO, "it ends there"))
            at += count

    def write(self, offset: int, data: memoryview) -> None:
        """Write a buffer at an offset."""
        at = 0
        while at < len(data):
            try:
                at += os.pwrite(self.descriptor, data[at:], offset + at)
            except OSError as error:
                self._fail("write", error)

    def _fail(self, what: str, error: OSError) -> NoReturn:
        kind = DataLoss if what == "read" else ResourceExhausted
        raise kind(
            f"cannot {what} mapped memory in {self.folder}: {error.strerror}. What was not written is as before; "
            "restore the last checkpoint if values cannot be read"
        ) from error

    def extents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of a range that were ever written; others are zeros, and take no reading."""
        while start < stop:
            try:
                begin = os.lseek(self.descriptor, start, os.SEEK_DATA)
                end = os.lseek(self.descriptor, begin, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing behind
                    return
                begin, end = start, stop  # the file system does not tell
            if begin >= stop:
                return
            yield begin, min(end, stop)
            start = end

    def drop_pages(self) -> None:
        """Let go of all pages of the mappings: they stay in the file, and the process holds none of them."""
        self.touched = 0
        for region in tuple(self.regions):
            region.drop_pages()


class MappedRegion:
    """The memory of one tensor: a range of a file, at one address as long as the tensor lives.

    offset: of the range that is mapped. next: of the one that the next `flip` maps, if there is one.
    """

    def __init__(self, file: MappedFile, nbytes: int, *, zero: bool = True) -> None:
        self.file, self.nbytes = file, nbytes
        self.length = _pages(nbytes)
        self.offset, self.next = file.take(self.length, zero=zero), -1
        try:
            self.address = _map(0, self.length, file.descriptor, self.offset)
        except OSError as error:
            file.give(self.offset, self.length)
            raise ResourceExhausted(f"no room for {nbytes:,} bytes in the address space: {error.strerror}") from error

    def bytes(self) -> torch.Tensor:
        """The memory as a tensor, once: the region ends with the last tensor that lies there."""
        buffer = (ctypes.c_char * self.nbytes).from_address(self.address)
        _REGIONS[self.address] = self
        self.file.regions.add(self)
        weakref.finalize(buffer, self._end).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def _end(self) -> None:
        _REGIONS.pop(self.address, None)
        self.file.regions.discard(self)
        _libc().munmap(self.address, self.length)
        for offset in (self.offset, self.next):
            if offset >= 0:
                self.file.give(offset, self.length)

    def reserve(self) -> None:
        """Have room for a next generation; raises ResourceExhausted."""
        if self.next < 0:
            self.next = self.file.take(self.length)

    def flip(self) -> None:
        """Map the next generation at the address, and keep the range of this one for the generation after it."""
        _map(self.address, self.length, self.file.descriptor, self.next)
        self.offset, self.next = self.next, self.offset

    def pieces(self, start: int, nbytes: int) -> Iterator[memoryview]:
        """The bytes from ``start`` on, piece by piece in one buffer."""
        piece = memoryview(bytearray(min(_PIECE, nbytes)))
        for at in range(start, start + nbytes, _PIECE):
            part = piece[: min(_PIECE, start + nbytes - at)]
            self.file.read(self.offset + at, part)
            yield part

    def drop_pages(self) -> None:
        """Let the process hold no page of the region."""
        _libc().madvise(self.address, self.length, mmap.MADV_DONTNEED)


_REGIONS: dict[int, MappedRegion] = {}  # by address


def _pages(nbytes: int) -> int:
    """Bytes of the pages that so many bytes take."""
    return -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE


@cache
def _libc() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    found.mmap.argtypes, found.mmap.restype = (ctypes.c_void_p, size, number, number, number, ctypes.c_long), size
    found.munmap.argtypes, found.madvise.argtypes = (size, size), (size, size, number)
    return found


def _map(address: int, length: int, descriptor: int, offset: int) -> int:
    """Map a range of a file, at an address if there is one; the mapping there stays if that fails."""
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | (0x10 if address else 0)  # MAP_FIXED
    found: int = _libc().mmap(address, length, access, flags, descriptor, offset)
    if found == ctypes.c_size_t(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder lies on; empty where the system does not tell."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    above = {str(path) for path in (folder, *folder.parents)}
    return max(([len(at), kind] for at, kind in mounts if at in above), default=[0, ""])[1]  # type: ignore[return-value]


# -- tensors ------------------------------------------------------------------------------------------------------


def zeros(shape: Sequence[int], dtype: torch.dtype, file: MappedFile, *, zero: bool = True) -> torch.Tensor:
    """A tensor of zeros, or of anything, in a file."""
    return MappedRegion(file, max(1, prod(shape) * dtype.itemsize), zero=zero).bytes().view(dtype).view(*shape)


def span_of(tensor: torch.Tensor) -> tuple[MappedRegion, int] | None:
    """The region in which the bytes of a contiguous tensor lie, and where they begin; None elsewhere."""
    if not _REGIONS or tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    found = _REGIONS.get(tensor.untyped_storage().data_ptr())
    is_plain = found is not None and not tensor.is_conj() and not tensor.is_neg()
    return (found, int(tensor.storage_offset()) * tensor.element_size()) if found is not None and is_plain else None


def region_of(tensor: torch.Tensor) -> MappedRegion | None:
    """The region that a contiguous tensor is the whole of."""
    found = span_of(tensor)
    return found[0] if found is not None and found[1] == 0 and found[0].nbytes == tensor.nbytes else None


def copied(tensor: torch.Tensor, file: MappedFile) -> torch.Tensor:
    """A copy in a file, which leaves out what was never written of a mapped tensor."""
    made = zeros(tensor.shape, tensor.dtype, file)
    target, span = _REGIONS[made.data_ptr()], span_of(tensor)
    if span is None:
        assign(made, tensor)
        return made
    source, start = span
    begin = source.offset + start
    written = tuple(source.file.extents(begin, begin + tensor.nbytes))  # reading ahead makes more of it look written
    for first, last in written:
        at = first - begin
        for part in source.pieces(start + at, last - first):
            target.file.write(target.offset + at, part)
            at += len(part)
    return made


def assign(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value of its shape and dtype into a tensor that lies in a file."""
    span = span_of(target)
    assert span is not None
    region, at = span[0], span[0].offset + span[1]
    for part in pieces(value):
        region.file.write(at, part)
        at += len(part)


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a dense tensor in the order of its elements: of a mapped one read from the file, piece by piece."""
    span = span_of(tensor)
    if span is not None:
        yield from span[0].pieces(span[1], tensor.nbytes)
        return
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    yield plain.view(torch.uint8).numpy().data


def flip(rows: Sequence[Sequence[torch.Tensor]]) -> None:
    """Publish the next generation of mapped tensors, of all or none."""
    done: list[MappedRegion] = []
    try:
        for region in (_REGIONS[tensor.data_ptr()] for row in rows for tensor in row):
            region.flip()
            done.append(region)
    except OSError as error:
        for region in done:
            region.flip()
        raise ResourceExhausted(f"the commit of a step cannot map its new values: {error.strerror}") from error
