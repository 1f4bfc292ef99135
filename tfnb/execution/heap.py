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
from functools import cache

import torch

LARGEST = (32 << 20) - (64 << 10)  # bytes; glibc adapts to nothing above 32 MiB
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt, of malloc.h


@cache
def settle() -> None:
    """Let the heap keep memory between steps; once in a process."""
    torch.empty(LARGEST, dtype=torch.uint8)


def set_limits() -> bool:
    """Let this process keep freed blocks of up to 32 MiB, and 64 MiB at the end of a heap; returns whether it does.

    Larger ones lie on huge pages. What the environment says (``MALLOC_MMAP_THRESHOLD_``, ``THP_MEM_ALLOC_ENABLE``)
    stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if sys.platform != "linux" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and all([mallopt(_MMAP_THRESHOLD, 32 << 20), mallopt(_TRIM_THRESHOLD, 64 << 20)])
