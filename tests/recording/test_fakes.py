"""torch's compiler is loaded by whoever uses it, whole and once, and not by a recording."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RECORDED = """
import sys, threading, torch, tfnb
from torch import nn
with tfnb.record() as graph:
    x = tfnb.placeholder(torch.randn(4, 1, 6, 6))
    y = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))(x)
    loss = y.softmax(1).square().mean()
    step = tfnb.train.Adam(0.1).minimize(loss)
tfnb.Session(graph, compile="off").run([loss, step], {x: torch.ones(5, 1, 6, 6)})
LOADED = "torch._dynamo.eval_frame"
assert LOADED not in sys.modules and "torch._inductor" not in sys.modules
assert "torch.distributed.tensor" not in sys.modules
"""
USES = {
    "an attribute": "assert torch._dynamo.is_compiling() is False",
    "a name of the package": "from torch._dynamo import OptimizedModule, utils; assert utils is torch._dynamo.utils",
    "a module of the package": """
from torch._dynamo.eval_frame import OptimizedModule
assert OptimizedModule is torch._dynamo.OptimizedModule is torch._dynamo.eval_frame.OptimizedModule
import torch._dynamo.test_case
""",
    "a compiled module in a cell": """
with tfnb.record(graph):
    fed = tfnb.placeholder(torch.ones(3, 2))
    z = torch.compile(nn.Linear(2, 2), backend="eager")(fed)
assert tfnb.Session(graph, compile="off").run(z, {fed: torch.ones(2, 2)}).shape == (2, 2)
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
""",
    "many threads at once": """
met, errors = threading.Barrier(8), []
def look():
    met.wait()
    try:
        torch._dynamo.OptimizedModule
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=look) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
assert not errors and not any(map(threading.Thread.is_alive, threads)), errors
""",
    "what torch keeps from being compiled": """
kept = []
@torch._disable_dynamo
def plain(x):
    kept.append(torch.compiler.is_compiling())
    return x + 1
assert plain(1) == 2 and LOADED not in sys.modules
assert torch.compile(lambda x: plain(x) * 2, backend="eager")(torch.ones(1)) == 4 and kept == [False, False]
assert torch._dynamo.disable(lambda: 1)._torchdynamo_disable
""",
}
AFTER = """
import types
assert LOADED in sys.modules and type(torch._dynamo) is types.ModuleType
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert torch._dynamo.__loader__ is torch._dynamo.__spec__.loader and torch._dynamo.__loader__.path
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("use", USES)
def test_the_compiler_is_loaded_when_it_is_used_and_not_before(use: str) -> None:
    run(RECORDED + USES[use] + AFTER)
