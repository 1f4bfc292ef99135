"""Statements of which sizes decide: a run takes the way of its own sizes, or is refused with the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.written import blocks, compared
from tests.recording.test_sizes import ASKED, RECORDED, ROWS
from tfnb.errors import ShapeError

STAGED = """
# ifsz
if x.shape[0] > 4:
    y = x.sum() * 2
else:
    y = x.sum() - 1
return y

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

# ifint
k = 4
if x.shape[0] < 4:
    k = x.shape[0]
return x[:k].sum(0), x.new_zeros(k)

# ifexp
k = 4 if len(x) > 4 else len(x) - 1
return x[:k].sum(0), x.new_zeros(k), x * k

# index5
if x.shape[0] >= 5:
    return x[4] * 2
return x[0]

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

# andor
n = x.shape[0]
if n > 2 and n % 2 == 1:
    return x.sum()
if n == 8 or not n > 1:
    return x.mean()
return x.max()

# andt
n = x.shape[0]
if n > 4 and x[4].sum() > 0:
    return x.sum()
return -x.sum()

# flag
big = x.shape[0] > 4
odd = x.shape[0] % 2 == 1
y = x * 2 if big else x
z = y + 1 if big and odd else y
w = big or odd
return z.sum(), 1.0 if w else 2.0

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

# eqdims
y = x[1:]
if x.shape[0] == 5:
    z = x.reshape(5, 3).sum() * 5
else:
    z = y.sum()
return z, x.sum()

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

# empty
if len(x) == 0:
    return x.new_zeros(3)
return x.sum(0)

# mean
n = x.shape[0]
r = x.sum() / n if n > 2 else 0.5
q = n / 2 if n > 2 else 0.25
return r, q * x.sum(), torch.tensor(1.) * q

# forbreak
s = x.new_zeros(())
for i in range(10):
    if i >= x.shape[0]:
        break
    s = s + x[i].sum()
return s

# whiletrue
i = 0
s = x.new_zeros(())
while True:
    if i >= x.shape[0]:
        break
    s = s + x[i].sum()
    i += 1
return s

# condfn
return tfnb.cond(x.shape[0] > 4 if x.shape[0] != 0 else False, lambda: x.sum(), lambda: -x.sum()) 

# wl
n, s = tfnb.while_loop(lambda n, s: n > 0, lambda n, s: (n - 1, s + x[n-1].sum()), (x.shape[0], x.sum()*0))
return s

# walrus
if (n := x.shape[0]) > 4:
    return x.sum() * n
return x.sum() - n

# min and max
k = min(x.shape[0], 4)
return x[:k].sum(0), x.new_zeros(k), x * max(2, len(x), 3)
"""

# Shapes, words and calls of one's own function are not what a run can choose.
PYTHON = """
# recur
def half(v):
    if v.shape[0] <= 2:
        return v.sum()
    return half(v[: v.shape[0] // 2]) + half(v[v.shape[0] // 2:])
return half(x)

# shapes2
y = x
if x.shape[0] > 4:
    y = x[:4]
z = y * 2
return z, z.shape[0] * z.sum(), z.new_ones(z.shape[0])

# pad
if x.shape[0] % 2 == 1:
    x = torch.cat([x, x.new_zeros(1, 3)])
return x.reshape(-1, 2, 3).sum(1)

# one
if x.shape[0] == 1:
    return x.squeeze(0) * 7
return x.mean(0)

# strs
mode = "a" if x.shape[0] > 4 else "b"
return x.sum() if mode == "a" else x.mean()

# shapes
y = x
if x.shape[0] > 4:
    y = x[:4]
return y.sum(0)
"""

ROWS_FED = ((3, 1.0), (1, 2.0), (2, 0.3), (5, 1.5), (8, 0.5), (0, 1.0))
FED = [torch.linspace(-1, 2, 3 * rows).reshape(rows, 3) * scale for rows, scale in ROWS_FED]
FAIL_EMPTY = ("raiser", "andor", "elifs", "index5", "ifexp")  # in plain Python


@pytest.mark.parametrize(("name", "body"), blocks(STAGED), ids=[name for name, _ in blocks(STAGED)])
def test_a_run_goes_where_its_sizes_lead(name: str, body: str) -> None:
    some = [fed for fed in FED if len(fed) or name not in FAIL_EMPTY]
    notes, refused = compared(body, FED[0], some, (ShapeError,) if name == "raiser" else ())
    assert not any("stays Python" in note for note in notes), notes
    assert refused == (1 if name == "raiser" else 0)


@pytest.mark.parametrize(("name", "body"), blocks(PYTHON), ids=[name for name, _ in blocks(PYTHON)])
def test_what_a_run_cannot_choose_is_guarded_and_the_margin_says_why(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED, (ShapeError,))
    assert any("stays Python" in note for note in notes), notes
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


def test_gradients_go_through_branches_that_sizes_decide() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.exp() if x.shape[0] > 3 else x.sin()
        if x.shape[0] % 2 == 0:
            y = y * x[1].sum()
        return y.sum()

    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 2, dtype=torch.float64), name="x")
        (dx,) = tfnb.gradients(tfnb.autograph(f)(x), [x])
    for rows in (2, 3, 4, 5):
        fed = torch.randn(rows, 2, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(tfnb.run(dx, {x: fed.detach()}), torch.autograd.grad(f(fed), fed)[0])


def unrolled_below_three_rows(x: torch.Tensor) -> torch.Tensor:
    if len(x) > 2:
        return x.sum(0)
    u = x[0] * 0
    for _ in x.unbind(0):
        u = u * u + x.mean()
    return u


def unrolled_from_three_rows(x: torch.Tensor) -> torch.Tensor:
    y = x.sum(0)
    if len(x) > 2:
        for row in x.unbind(0):
            y = y + row * row
    return y


@pytest.mark.filterwarnings("ignore:.*became the constant")
@pytest.mark.parametrize("executor", ["auto", "dataflow"])
@pytest.mark.parametrize("program", [unrolled_below_three_rows, unrolled_from_three_rows])
def test_a_loop_that_python_runs_in_a_branch_is_for_its_sizes_alone(program: Any, executor: str) -> None:
    data = torch.linspace(-1, 2, 15, dtype=torch.float64).reshape(5, 3)
    with tfnb.record() as graph:
        x = tfnb.placeholder(data[:2], name="x")
        y = tfnb.autograph(program)(x)
        (slope,) = tfnb.gradients(y.sum(), [x])
    session = tfnb.Session(graph, executor=executor)
    refused = set()
    for rows in range(1, 6):
        leaf = data[:rows].clone().requires_grad_()
        want = program(leaf)
        wanted = [want.detach(), *torch.autograd.grad(want.sum(), leaf)]
        for fetches, values in (([y], wanted[:1]), ([slope], wanted[1:]), ([y, slope], wanted)):
            try:
                torch.testing.assert_close(session.run(fetches, {x: data[:rows]}), values)
            except ShapeError:
                refused.add(rows)
    assert refused == ({1} if program is unrolled_below_three_rows else {3, 4, 5})


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_a_branch_looks_at_sizes_that_it_computes_itself(executor: str) -> None:
    """What its sizes are, only data tell, and nobody outside of the branch."""

    @tfnb.autograph
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            parts = tfnb.TensorArray(2, shape=(None,), dtype=torch.float64)
            for i in range(2):
                parts = parts.write(i, x[x > 0.1 * i])
            return parts.concat().sum() + parts.read(1).sum()
        return x.sum()

    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor([0.5, -0.25], dtype=torch.float64))
        y = program(x)
        (slope,) = tfnb.gradients(y, [x])
    for data in ([0.5, 1.0, -2.0], [0.2, -1.0], [-1.0, -1.0, -1.0], [3.0, 0.05, 0.05]):
        leaf = torch.tensor(data, dtype=torch.float64, requires_grad=True)
        want = leaf.sum() if len(data) < 3 else leaf[leaf > 0].sum() + 2 * leaf[leaf > 0.1].sum()
        with tfnb.Session(graph, compile="off", executor=executor) as session:
            got = session.run([y, slope], {x: leaf.detach()})
        torch.testing.assert_close(got, [want.detach(), *torch.autograd.grad(want, leaf)])


@pytest.mark.filterwarnings("ignore:.*became the constant")
def test_a_size_that_is_fixed_below_a_branch_that_asks_for_it() -> None:
    @tfnb.autograph
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sum(0)
        if len(x) > 2:
            y = y + x[0]
        with tfnb.no_autograph():
            return y if len(x) == 3 else -y

    data = torch.arange(6.0).reshape(3, 2)
    with tfnb.record():
        x = tfnb.placeholder(data, name="x")
        y = program(x)
    torch.testing.assert_close(tfnb.run(y, {x: data * 2}), program(data * 2))
    with pytest.raises(ShapeError):
        tfnb.run(y, {x: data[:2]})
