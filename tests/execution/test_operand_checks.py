"""No operand of a compiled step ends the process: the step is computed again and raises with its line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tfnb.execution.tiers import compiled_loops

SCRIPT = """
import torch, tfnb
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(2)
torch.manual_seed(0)
N, ROWS, WIDTH = 4096, 10, 16
table, other = nn.Embedding(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
names = ("emb", "gather", "index", "select", "scatter", "put", "target", "rows", "added", "divisor")
summed = nn.Parameter(torch.randn(ROWS, WIDTH))

@tfnb.custom_gradient
def with_rows(weight, at):
    return weight.sum(), lambda dy: tfnb.IndexedSlices(dy * torch.ones(N, WIDTH), at, (ROWS, WIDTH))

with tfnb.record() as g:
    at = {name: tfnb.placeholder(torch.ones(N, dtype=torch.int64), name=name, shape=(N,)) for name in names}
    x = tfnb.placeholder(torch.randn(N, WIDTH), name="x", shape=(N, WIDTH))
    picked = table(at["emb"])
    loss = F.cross_entropy(picked * x, at["target"], ignore_index=-100)
    train = tfnb.train.SGD(0.1).minimize(loss)
    rows = tfnb.train.Adam(0.1).minimize(with_rows(summed, at["added"]))
    more = [
        x.exp().gather(1, at["gather"][:, None]), (x + 1).tanh()[at["index"]],
        (x + 2).index_select(0, at["select"]), x.exp().scatter(1, at["scatter"][:, None], 1.0),
        torch.index_put(x.sin(), [at["put"]], x, accumulate=True), x.cos().index_add(0, at["rows"], x),
        torch.div(at["emb"] + 7, at["divisor"], rounding_mode="trunc"), 17 % at["divisor"], 100 // at["divisor"],
    ]
good = {at[name]: torch.randint(1, ROWS, (N,)) for name in names} | {x: torch.randn(N, WIDTH)}
good[at["target"]][::3] = -100
session, plain = tfnb.Session(g, compile="now"), tfnb.Session(g, compile="off")
everything, wanted = [train, rows, loss, *more], plain.run([loss, *more], good)
torch.testing.assert_close(session.run(everything, good)[2:], wanted, rtol=1e-4, atol=1e-4)
assert ": compiled; " in session.status()[0], session.status()
whole = tfnb.Session(g, compile="now")
whole.run(rows, {at["added"]: good[at["added"]]})
assert ": compiled; " in whole.status()[0] and "the rest" not in whole.status()[0], whole.status()
before = table.weight.detach().clone()
for name, bad in [
    *((name, 5000) for name in names if name != "divisor"), ("index", -5000), ("divisor", 0),
    *((name, -1) for name in ("emb", "gather", "rows", "target")),
]:
    wrong = good[at[name]].clone()
    wrong[3000] = bad
    added = summed.detach().clone()
    try:
        session.run(everything, good | {at[name]: wrong})
    except tfnb.errors.TfnbError as error:
        assert "line" in str(error), error
    else:
        raise AssertionError(f"{name} took {bad}")
    assert torch.equal(table.weight, before) and torch.equal(summed, added), name
for name in ("index", "put"):
    negative = good | {at[name]: -good[at[name]]}
    wanted = plain.run(more, negative)
    torch.testing.assert_close(session.run(everything, negative)[3:], wanted, rtol=1e-4, atol=1e-4)
assert ": compiled; " in session.status()[0], session.status()
assert not torch.equal(table.weight, before)
print("done")
"""


@pytest.mark.skipif(compiled_loops.obstacle() is not None, reason="there is no C++ compiler")
@pytest.mark.slow
def test_bad_indices_and_divisors_are_errors_and_write_nothing() -> None:
    """In a process of its own, which an exception in a loop of two threads would end."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0 and ended.stdout.strip() == "done", ended.stderr[-2000:]
