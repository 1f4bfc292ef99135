"""After the heap settled, blocks of a step come from it and not from pages that are new each time."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the heap of glibc")
def test_large_blocks_come_from_the_heap_after_the_first_step() -> None:
    # a cluster of an earlier test left MALLOC_TRIM_THRESHOLD_ in this process, which would fix the limits of the next
    free = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    program = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120, env=free)
    assert run.stdout.split() == ["1", "0"]


FAULTS = """
import resource, threading
import torch
from tfnb.execution.heap import set_limits

def step():
    return [torch.ones(100_352) for _ in range(4)]  # 400 kB each, as the weight of a small net

def faults():
    for _ in range(20):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        step()
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

found = []
faults()
is_kept = set_limits()
faults()
thread = threading.Thread(target=faults)
thread.start()
thread.join()
print(is_kept, *found)
"""


def faults(**environ: str) -> list[str]:
    """Of a process with these variables: whether it keeps memory; page faults before that, then, and in a thread."""
    run = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**os.environ, "OMP_NUM_THREADS": "1", **environ}, capture_output=True,
        text=True, timeout=300, check=True,
    )  # fmt: skip
    return run.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the heap of glibc")
def test_freed_blocks_are_taken_again_without_page_faults() -> None:
    is_kept, before, here, in_thread = faults(MALLOC_TRIM_THRESHOLD_="65536")
    assert is_kept == "True"
    assert int(before) > 10_000, "98 pages for each of 200 blocks"
    assert int(here) < 1000 and int(in_thread) < 1000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the heap of glibc")
@pytest.mark.slow
def test_a_limit_of_the_environment_stays() -> None:
    is_kept, _, here, _ = faults(MALLOC_MMAP_THRESHOLD_="131072")
    assert is_kept == "False" and int(here) > 10_000


HUGE = """
import resource
import tfnb.cluster.tasks.task
from tfnb.execution.heap import set_limits
import torch

set_limits()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(16 << 20)  # 64 MB, which the heap does not keep
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


@pytest.mark.slow
def test_blocks_that_are_new_in_each_step_lie_on_huge_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this system has no huge pages")
    counts = []
    for value in ("1", "0"):
        environ = {name: text for name, text in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
        environ |= {} if value == "1" else {"THP_MEM_ALLOC_ENABLE": value}
        run = subprocess.run([sys.executable, "-c", HUGE], env=environ, capture_output=True, text=True, timeout=300)
        counts.append(int(run.stdout))
    assert counts[0] < counts[1] / 2, "and one who says no in the environment has small ones"
