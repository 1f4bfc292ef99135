"""Large, mostly zero tables: zeros that take memory only for written pages, and copies of such tables.

A page of anonymous memory that nobody wrote is zero, and takes none. So a table of zeros may be larger than the
memory of the machine. To copy it whole would take all of that: here only rows that are not zero are read, copied and
sent. The system tells which pages were written (Linux); elsewhere all rows are looked at, which is slow but equal.
"""

from __future__ import annotations

import math
import mmap
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from tfnb.errors import ResourceExhausted
from tfnb.graph import mapped_files
from tfnb.graph.mapped_files import region_of, span_of

if sys.platform != "win32":
    import resource

LARGE = 64 << 20  # bytes: a smaller value is copied whole
CHUNK = 16 << 20  # bytes that are looked at together
_PAGE = mmap.PAGESIZE
_THERE = np.uint64(62)  # in a word of the page map: the first bit of "in memory", and of "swapped out"
_made: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # of `zeros`, by address
_MAPS, _PAGES, _STATUS = Path("/proc/self/maps"), Path("/proc/self/pagemap"), Path("/proc/self/status")


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros whose pages take memory only after a write.

    >>> zeros((2, 3), torch.int64).sum()
    tensor(0)
    """
    nbytes = max(1, math.prod(shape) * dtype.itemsize)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000 if _MAPS.exists() else 0)
    memory = mmap.mmap(-1, nbytes, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # else one row that is written takes two megabytes
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    _made[whole.data_ptr()] = memory  # its end leaves a later one alone that has got the address by then
    flat = whole[: math.prod(shape) * dtype.itemsize]
    return flat.view(dtype).view(*shape)


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros beside a value: beside a table as lazy as this, beside a mapped tensor in the same file."""
    if (region := region_of(tensor)) is not None:
        return mapped_files.zeros(tensor.shape, tensor.dtype, region.file)
    return zeros(tensor.shape, tensor.dtype) if is_table(tensor) else torch.zeros_like(tensor)


def beside(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value that lies where a tensor does: a large one beside a mapped tensor in the same file."""
    region = region_of(tensor)
    is_here = region is None or value.nbytes < mapped_files.LEAST or span_of(value) is not None
    return value if region is None or is_here else mapped_files.copied(value, region.file)


def is_table(tensor: torch.Tensor) -> bool:
    """Whether `clone` and `packed` treat the tensor as a sparse table: large, and made by `zeros` or at most half
    written.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes < LARGE or not _has_rows(tensor):
        return False
    return _made.get(tensor.untyped_storage().data_ptr()) is not None or committed(tensor) <= nbytes // 2


def committed(tensor: torch.Tensor) -> int:
    """Bytes of memory that a contiguous tensor takes, at most: pages that were only read are counted, too."""
    nbytes = tensor.numel() * tensor.element_size()
    pages = _written_pages(tensor.data_ptr(), nbytes)
    return nbytes if pages is None else min(nbytes, int(pages.sum()) * _PAGE)


def packed(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the rows of a contiguous table that are not zero, bit by bit, and these rows.

    >>> packed(torch.tensor([[0.0], [2.0], [0.0]]))
    (tensor([1]), tensor([[2.]]))
    """
    found = _filled(table)
    return found, table.index_select(0, found)


def sums(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a contiguous table of integers: rows whose sum is not zero, these sums, and that of all rows; all wrap around.

    >>> sums(torch.tensor([[0, 0], [2, 3], [0, 0]]))
    (tensor([1]), tensor([5]), tensor([2, 3]))
    """
    numbers, found, total = [], [], torch.zeros(table.shape[1:], dtype=table.dtype)
    candidates = _candidates(table)
    is_run = len(candidates) > 0 and int(candidates[-1] - candidates[0]) == len(candidates) - 1  # takes no copies
    for at in [candidates] if is_run else _chunks(candidates, table):
        rows = table[int(at[0]) : int(at[-1]) + 1] if is_run else table.index_select(0, at)
        each = rows.sum(1)
        there = each != 0
        numbers.append(at[there])
        found.append(each[there])
        total += rows.sum(0)
    none = torch.zeros(0, dtype=torch.int64)
    return torch.cat([none, *numbers]), torch.cat([none, *found]), total


def taken(table: torch.Tensor) -> int:
    """Bytes of the pages of a contiguous table with nonzero elements; pages that were only read count nothing.

    >>> taken(torch.ones(1, 2)) == mmap.PAGESIZE, taken(torch.zeros(1, 2))
    (True, 0)
    """
    return spread(_filled(table), table.numel() * table.element_size() // max(1, len(table)), table.data_ptr())


def spread(numbers: torch.Tensor, row: int, address: int = 0) -> int:
    """Bytes of the pages that rows with these numbers lie in: of each so many bytes, and the first at an address.

    Numbers that do not rise may make it more.

    >>> spread(torch.tensor([0, 1, 64]), 64) == 2 * mmap.PAGESIZE
    True
    """
    if not row:
        return 0
    start = address + numbers.numpy() * row
    first, last = start // _PAGE, (start + row - 1) // _PAGE
    return int((last - first + 1).sum() - (first[1:] == last[:-1]).sum()) * _PAGE


def _filled(table: torch.Tensor) -> torch.Tensor:
    """The numbers of the rows that are not zero."""
    numbers = [at[_words(table.index_select(0, at)).any(1).bool()] for at in _chunks(_candidates(table), table)]
    return torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.int64)


def unpacked(numbers: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    """The table of `packed`.

    >>> unpacked(torch.tensor([1]), torch.tensor([[2.0]]), 3).tolist()
    [[0.0], [2.0], [0.0]]
    """
    return zeros((length, *rows.shape[1:]), rows.dtype).index_copy_(0, numbers, rows)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows behind each other, in new memory unless there is one part."""
    if len(parts) == 1:
        return parts[0]
    shape, region = (sum(map(len, parts)), *parts[0].shape[1:]), region_of(parts[0])
    if region is not None:
        whole = mapped_files.zeros(shape, parts[0].dtype, region.file)
    elif any(map(is_table, parts)):
        whole = zeros(shape, parts[0].dtype)
    else:
        return torch.cat([*parts])
    start = 0
    for part in parts:
        assign(whole[start : start + len(part)], part)
        start += len(part)
    return whole


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that takes no more memory than the tensor does, and lies in its file if it is mapped.

    Raises ResourceExhausted if less is free.
    """
    if (span := span_of(tensor)) is not None:
        return mapped_files.copied(tensor, span[0].file)
    if tensor.numel() * tensor.element_size() < LARGE or tensor.device.type != "cpu":
        return tensor.clone()
    ensure_room(committed(tensor) if tensor.is_contiguous() else tensor.numel() * tensor.element_size(), "a copy")
    return copied(tensor) if is_table(tensor) else tensor.clone()


def copied(table: torch.Tensor) -> torch.Tensor:
    """A copy of a table, without the check for free memory.

    >>> copied(torch.tensor([[0.0], [2.0]]))
    tensor([[0.],
            [2.]])
    """
    return unpacked(*packed(table), len(table))


def assign(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write a whole value into a tensor of its shape; rows of a table that are zero in both are not touched."""
    if span_of(target) is not None:
        mapped_files.assign(target, value)
        return
    if not (is_table(value) and _has_rows(target)):
        target.copy_(value)
        return
    for at in _chunks(_candidates(target), target):
        target.index_copy_(0, at, value.index_select(0, at))
    target.index_copy_(0, *packed(value))


def ensure_room(nbytes: int, what: str) -> None:
    """Raise ResourceExhausted if fewer than ``nbytes`` are free here: the system would kill a process otherwise."""
    there = free()
    if there is not None and nbytes > there:
        raise ResourceExhausted(
            f"{what} takes {nbytes} bytes, and {there} are free on this machine: make it smaller, or start a table of "
            "rows from zeros, tfnb.Variable(0.0, shape=...), which takes memory only where rows are written"
        )


def free() -> int | None:
    """Bytes that can be had without swapping, as Linux says, within the limit of this process (RLIMIT_DATA)."""
    try:
        free = _kibibytes(Path("/proc/meminfo"), "MemAvailable:")
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        data = 0 if limit == resource.RLIM_INFINITY else _kibibytes(_STATUS, "VmData:")
        return free if limit == resource.RLIM_INFINITY else max(0, min(free, limit - data))
    except (OSError, StopIteration):
        return None


def _kibibytes(file: Path, name: str) -> int:
    """A line of a file of the system's, in bytes."""
    return next(int(line.split()[1]) << 10 for line in file.read_text().splitlines() if line.startswith(name))


def _has_rows(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and tensor.is_contiguous() and tensor.device.type == "cpu" and len(tensor) > 0


def _words(rows: torch.Tensor) -> torch.Tensor:
    """The bits of rows, in the largest words that fit."""
    flat = rows.reshape(len(rows), -1).view(torch.uint8)
    return next((flat.view(word) for word in (torch.int64, torch.int32) if flat.shape[1] % word.itemsize == 0), flat)


def _chunks(numbers: torch.Tensor, table: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split row numbers into chunks, so that each chunk of rows takes little memory."""
    row = max(1, table.numel() * table.element_size() // max(1, len(table)))
    yield from numbers.split(max(1, CHUNK // row)) if len(numbers) else ()


def _candidates(table: torch.Tensor) -> torch.Tensor:
    """Numbers of the rows that may be other than zero."""
    nbytes = table.numel() * table.element_size()
    pages = _written_pages(table.data_ptr(), nbytes)
    if pages is None or not nbytes or pages.all():
        return torch.arange(len(table))
    row, skew = nbytes // len(table), table.data_ptr() % _PAGE
    edges = np.flatnonzero(np.diff(np.concatenate(([False], pages, [False])).astype(np.int8)))
    first = np.maximum(edges[::2] * _PAGE - skew, 0) // row
    last = np.minimum(-(-(edges[1::2] * _PAGE - skew) // row), len(table))
    first[1:] = np.maximum(first[1:], last[:-1])  # a row that lies in two runs of pages counts once
    counts = np.maximum(last - first, 0)
    starts = np.repeat(first - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
    return torch.from_numpy(starts + np.arange(counts.sum()))


def _written_pages(address: int, nbytes: int) -> np.ndarray | None:
    """A mask of the written pages in a range of anonymous memory; None if the system does not tell."""
    first, last = address // _PAGE, -(-(address + nbytes) // _PAGE)
    found: list[np.ndarray] = []
    try:
        if not _is_anonymous(first * _PAGE, last * _PAGE):
            return None
        with _PAGES.open("rb", buffering=0) as file:
            file.seek(first * 8)
            while left := last * 8 - file.tell():
                raw = file.read(min(left, CHUNK))
                if not raw:
                    return None
                found.append(np.frombuffer(raw, np.uint64) >> _THERE > 0)
    except (OSError, ValueError):
        return None
    return np.concatenate(found) if found else None


def _is_anonymous(start: int, stop: int) -> bool:
    """Whether all of a range is private memory of no file."""
    with _MAPS.open() as lines:
        for line in lines:
            span, access, _, _, inode, *_ = line.split(maxsplit=5)
            begin, end = (int(part, 16) for part in span.split("-"))
            if begin <= start < end:
                if inode != "0" or "p" not in access:
                    return False
                start = end
            if start >= stop:
                return True
    return False
