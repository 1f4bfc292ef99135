"""A repeated step touches no new pages: what it frees, the next one uses."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch, tfnb
torch.set_num_threads(1)
w = torch.nn.Parameter(torch.randn(256, 256))
with tfnb.record() as g:
    x = tfnb.placeholder(torch.randn(1024, 256), shape=(1024, 256))
    h = x
    for _ in range(20):
        h = torch.tanh(h @ w)

    loss = h.sum()
    (dw,) = tfnb.gradients(loss, [w])
call = tfnb.Session(g, compile="off").make_callable([loss, dw], [x])
fed = torch.randn(1024, 256)
for _ in range(20):
    call(fed)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    call(fed)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the heap of glibc")
def test_steps_reuse_the_memory_of_the_step_before() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert int(run.stdout) < 100  # without it up to a thousand, as the heap happens to lie
