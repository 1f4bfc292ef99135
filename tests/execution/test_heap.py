"""After the heap settled, blocks of a step come from it and not from pages that are new each time."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, torch, tfnb

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

look = ctypes.CDLL(None).mallinfo2
look.restype = Info

def mapped():
    before = look().hblks
    block = torch.empty(24 << 20, dtype=torch.uint8)
    return look().hblks - before, block

count, block = mapped()  # still held: freeing it would raise the limit too
with tfnb.record():
    x = tfnb.placeholder(torch.ones(3))
    y = x + 1
tfnb.run(y, {x: torch.ones(2)})
print(count, mapped()[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the heap of glibc")
def test_large_blocks_come_from_the_heap_after_the_first_step() -> None:
    # a cluster of an earlier test left MALLOC_TRIM_THRESHOLD_ in this process, which would fix the limits of the next
    free = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    program = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120, env=free)
    assert run.stdout.split() == ["1", "0"]
