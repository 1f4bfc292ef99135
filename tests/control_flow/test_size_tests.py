"""Statements of which sizes decide: loops go by those of a run, and branches by those of the sample, with a guard."""

from __future__ import annotations

import pytest
import torch

import tfnb
from tests.control_flow.written import blocks, compared
from tests.recording.test_sizes import ASKED, RECORDED, ROWS
from tfnb.errors import ShapeError

STAGED = """
# whilesz
i = 0
s = x.new_zeros(())
while i < x.shape[0]:
    s = s + x[i].sum() * i
    i += 1
return s, i

# whilestep
i = 0
s = x.new_zeros(())
while i < len(x) - 1:
    s = s + (x[i] * x[i+1]).sum()
    i += 2
return s

# wl
n, s = tfnb.while_loop(lambda n, s: n > 0, lambda n, s: (n - 1, s + x[n-1].sum()), (x.shape[0], x.sum()*0))
return s

# min and max
k = min(x.shape[0], 4)
return x[:k].sum(0), x.new_zeros(k), x * max(2, len(x), 3)
"""

PYTHON = """
# ifsz
if x.shape[0] > 4:
    y = x.sum() * 2
else:
    y = x.sum() - 1
return y

# ifexp
k = 4 if len(x) > 4 else len(x) - 1
return x[:k].sum(0), x * k

# elifs
n = x.shape[0]
if n > 6:
    y = x.mean()
elif n > 4:
    y = x[4].sum()
elif n > 2:
    y = x[2].sum() * 3
else:
    y = x.sum()
return y

# andt
n = x.shape[0]
if n > 4 and x[4].sum() > 0:
    return x.sum()
return -x.sum()

# truthy
n = x.shape[0] - 3
if n:
    y = x.sum()
else:
    y = x.mean()
return y if not n else y + 1

# raiser
if x.shape[0] > 6:
    raise ValueError("too long")
if x.shape[1] != 3:
    raise ValueError("bad")
return x.sum()

# inloop
s = x.new_zeros(3)
for i, row in enumerate(x):
    if x.shape[0] > 4:
        s = s + row
    else:
        s = s - row * i
return s

# write
y = x * 1
if x.shape[0] > 2:
    y[2] = 0
    y.add_(1)
return y.sum()

# walrus
if (n := x.shape[0]) > 4:
    return x.sum() * n
return x.sum() - n

# recur
def half(v):
    if v.shape[0] <= 2:
        return v.sum()
    return half(v[: v.shape[0] // 2]) + half(v[v.shape[0] // 2:])
return half(x)

# pad
if x.shape[0] % 2 == 1:
    x = torch.cat([x, x.new_zeros(1, 3)])
return x.reshape(-1, 2, 3).sum(1)

# strs
mode = "a" if x.shape[0] > 4 else "b"
return x.sum() if mode == "a" else x.mean()
"""

ROWS_FED = ((3, 1.0), (1, 2.0), (2, 0.3), (5, 1.5), (8, 0.5), (0, 1.0))
FED = [torch.linspace(-1, 2, 3 * rows).reshape(rows, 3) * scale for rows, scale in ROWS_FED]


@pytest.mark.parametrize(("name", "body"), blocks(STAGED), ids=[name for name, _ in blocks(STAGED)])
def test_a_loop_takes_as_many_iterations_as_the_sizes_of_a_run_say(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED)
    assert not any("stays Python" in note for note in notes), notes
    assert refused == 0


@pytest.mark.filterwarnings("ignore:.*became the constant")
@pytest.mark.parametrize(("name", "body"), blocks(PYTHON), ids=[name for name, _ in blocks(PYTHON)])
def test_a_branch_goes_as_the_sizes_of_the_sample_say_and_others_are_refused(name: str, body: str) -> None:
    _, refused = compared(body, FED[0], FED, (ShapeError,))
    assert 0 < refused < len(FED)


@pytest.mark.filterwarnings("ignore:.*became the constant")
@pytest.mark.parametrize("name", sorted(ASKED))
def test_what_python_asks_of_sizes_is_right_where_it_is_staged(name: str) -> None:
    function, refused_eagerly = ASKED[name]
    double = [torch.arange(3.0 * rows, dtype=torch.float64).reshape(rows, 3) for rows in ROWS]
    with tfnb.record():
        x = tfnb.placeholder(double[ROWS.index(RECORDED)], name="x")
        y = tfnb.autograph(function)(x)
    for fed in double:
        try:
            got = tfnb.run(y, {x: fed})
        except ShapeError:
            assert len(fed) in refused_eagerly
            continue
        torch.testing.assert_close(got, function(fed), equal_nan=True)


def test_cond_and_while_loop_take_sizes() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), name="x")
        n = x.shape[0]
        a = tfnb.cond(n > 4, lambda: x.sum(), lambda: -x.sum())
        b, _ = tfnb.while_loop(lambda b, n: n > 0, lambda b, n: (b + n, n - 2), (n, n))
    for rows in (1, 3, 6):
        fed = torch.arange(float(rows))
        assert tfnb.run([a, b], {x: fed}) == [fed.sum() * (1 if rows > 4 else -1), rows + sum(range(rows, 0, -2))]
