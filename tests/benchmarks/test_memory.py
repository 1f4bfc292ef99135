"""The predicted peak of a step is within a tenth of what the allocator sees, and a step holds no more than eager's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.bench_memory import measured
from tests.benchmarks.rows import ROWS
from tfnb.execution.tiers.compiled_loops import obstacle


@pytest.mark.parametrize(("name", "most"), [
    ("mlp-32", 1.0), pytest.param("gpt-6", 0.9, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_prediction_is_what_the_allocator_sees(name: str, most: float) -> None:
    found = measured(ROWS[name])
    assert found["error"] == pytest.approx(1, rel=0.1) and found["ratio"] <= most


WIDE = """
import sys, torch, tfnb
from pathlib import Path
from torch import nn
model, data = nn.Sequential(nn.Linear(1 << 12, 1 << 13), nn.ReLU(), nn.Linear(1 << 13, 10)), torch.randn(8, 1 << 12)
with tfnb.record() as graph:
    x = tfnb.placeholder(data)
    loss = model(x).square().mean()
    train = tfnb.train.SGD(0.1).minimize(loss)
session = tfnb.Session(graph, compile=sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")
lines = lambda: dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
before = int(lines()["VmRSS"].split()[0])
for _ in range(6):
    session.run([train, loss], {x: data})
print(int(lines()["VmHWM"].split()[0]) - before, session.status())
"""


@pytest.mark.slow
@pytest.mark.skipif(obstacle() is not None, reason="there is no C++ compiler")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak of a process")
def test_compiling_takes_no_copy_of_the_variables(tmp_path: Path) -> None:
    """They are 128 MiB, and so are their gradients."""

    def grown(mode: str) -> tuple[float, str]:
        ended = subprocess.run(
            [sys.executable, "-c", WIDE, mode], capture_output=True, text=True, timeout=280,
            env={**os.environ, "TFNB_CACHE_DIR": str(tmp_path)},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        kib, _, status = ended.stdout.partition(" ")
        return int(kib) / 1024, status

    compiled, status = grown("now")
    assert "s to compile" in status and compiled < 128 + 64, (compiled, status)
