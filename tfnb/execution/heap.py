"""The C library's heap between steps: memory freed by a step is kept for the next one.

By default glibc gives the end of its heap back to the system when 128 KiB of it are free, and maps larger blocks one by
one; a step that allocates a few megabytes then touches new pages each time: 2200 of them in a step of a small GPT, a
tenth of its time. glibc itself raises both limits to the largest block freed so far, up to 32 MiB: freeing one such
block, never written to, has that effect without setting anything. Where `mallopt` or the environment fixed the limits,
they stay; so does every other C library. Dask's nannies fix them (``MALLOC_TRIM_THRESHOLD_``): in the process of a
worker, which a task shares with nobody's notebook, they are set.

Blocks above that limit are new in each step. On huge pages that costs a 500th of the page faults: 100 MB written once
took 54 ms, and take 13. torch asks for them if its environment says so before its first tensor is made.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

LARGEST = (32 << 20) - (64 << 10)  # bytes; glibc adapts to nothing above 32 MiB
SMALL = 1 << 20  # bytes; of smaller blocks the heap keeps little
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt, of malloc.h
_returning: list[None] = []  # blocks of `returned` that are open
_LOCK = threading.Lock()


@cache
def settle() -> None:
    """Let the heap keep memory between steps; once in a process."""
    torch.empty(LARGEST, dtype=torch.uint8)


def set_limits() -> bool:
    """Let this process keep freed blocks of up to 32 MiB, and 64 MiB at the end of a heap; returns success.

    Larger ones lie on huge pages. What the environment says (``MALLOC_MMAP_THRESHOLD_``, ``THP_MEM_ALLOC_ENABLE``)
    stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = _mallopt()
    return mallopt is not None and all([mallopt(_MMAP_THRESHOLD, 32 << 20), mallopt(_TRIM_THRESHOLD, 64 << 20)])


@contextmanager
def returned() -> Iterator[None]:
    """Give the memory of freed tensors back to the system at once, inside of the block.

    Otherwise blocks of up to 32 MiB leave holes in the heap: a step in packs of 60 MB held 172 MB. New pages take time:
    a gigabyte in blocks that are written once 0.3 s. All threads; afterwards the heap keeps memory as `settle` says.
    """
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    with _LOCK:
        _returning.append(None)
        mallopt(_MMAP_THRESHOLD, SMALL)
    try:
        yield
    finally:
        with _LOCK:
            _returning.pop()
            if not _returning:
                mallopt(_MMAP_THRESHOLD, LARGEST)


def _mallopt() -> Any:
    """The function of glibc that sets limits, unless the environment fixed them; other C libraries have none."""
    if sys.platform != "linux" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)
