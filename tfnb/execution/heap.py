"""The C library's heap between steps: what a step frees is kept for the next one.

By default glibc gives the end of its heap back to the system when 128 KiB of it are free, and maps larger blocks one by
one; a step that allocates a few megabytes then touches new pages each time: 2200 of them in a step of a small GPT, a
tenth of its time. glibc itself raises both limits to the largest block freed so far, up to 32 MiB: freeing one such
block, never written to, has that effect without setting anything. Where `mallopt` or the environment fixed the limits,
they stay; so does every other C library.
"""

from __future__ import annotations

from functools import cache

import torch

LARGEST = (32 << 20) - (64 << 10)  # bytes; glibc adapts to nothing above 32 MiB


@cache
def settle() -> None:
    """Let the heap keep memory between steps; once in a process."""
    torch.empty(LARGEST, dtype=torch.uint8)
