"""Names that a statement sets first: their last value after a loop, and what is said where a run has none."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tfnb
from tests.control_flow.written import blocks, compared, function
from tfnb.errors import BranchChanged, InvalidArgument, ShapeError

SET = """
# below a break
h = x[0] * 0
for row in x:
    if h.sum() > 1:
        break
    new = h + row
    h = new
return h, new

# in a while
t = 0
while t < x.shape[0]:
    new = x[t]
    t += 1
return new

# in each iteration
for i, row in enumerate(x):
    pair = row, i
return pair[0] * pair[1]

# the number of the last iteration
for i in range(len(x)):
    pass
return i

# in an earlier loop
total = x[0] * 0
for row in x:
    new = row * 2
for row in x:
    total = total + new
    new = row
return total

# of nested loops
h = torch.zeros(3)
for row in x:
    for other in x:
        h = torch.tanh(h + row * other)
        out = h * 2
    h = h + out
return out + h

# in a structure
for row in x:
    out = row, {'a': row * 2}
return out[0] * out[1]['a']

# by continue
h = x.sum(0) * 0
for row in x:
    if row[0] > 0.5:
        continue
    h = h + row
    last = h * row
return last + h
"""

FEEDS = [torch.rand(rows, 3, generator=torch.Generator().manual_seed(rows)) for rows in (1, 4, 7, 0)]


@pytest.mark.parametrize(("name", "body"), blocks(SET), ids=[name for name, _ in blocks(SET)])
def test_a_name_that_a_loop_sets_first_has_its_last_value(name: str, body: str) -> None:
    f = function(body)
    with tfnb.record():
        x = tfnb.placeholder(torch.linspace(0.1, 1.2, 15).reshape(5, 3), shape=["n", 3], name="x")
        out = tree_leaves(tfnb.autograph(f)(x))
        total = sum(each.sum() for each in out)
        (dx,) = tfnb.gradients(total, [x]) if isinstance(total, torch.Tensor) and total.is_floating_point() else (x,)
    for fed in FEEDS:
        leaf = fed.clone().requires_grad_()
        try:
            wanted = [torch.as_tensor(each) for each in tree_leaves(f(leaf))]
        except (UnboundLocalError, IndexError):
            with pytest.raises((BranchChanged, ShapeError, InvalidArgument)):
                tfnb.run(out, {x: fed})
            continue
        found, grad = tfnb.run([out, dx], {x: fed})
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want.detach())
        if dx is not x:
            torch.testing.assert_close(grad, torch.autograd.grad(sum(each.sum() for each in wanted), leaf)[0])


def test_a_run_without_a_turn_names_the_line() -> None:
    f = function("for row in x:\n    out = row * 2\nreturn out")
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3), shape=["n", 3])
        out = tfnb.autograph(f)(x)
        other = x.sum()
    with pytest.raises(BranchChanged, match=r"`out` has no value: it is first set in the loop of line 2 of f"):
        tfnb.run(out, {x: torch.ones(0, 3)})
    assert tfnb.run(other, {x: torch.ones(0, 3)}) == 0  # which reads no such name


READ = """
# in branches of a loop
h = x[0] * 0
for row in x:
    h = h + row
    if h.sum() > 1:
        h = h - 0.1
        if row[0] > 0.5:
            last = h * 2
return h, last

# in a branch and a loop
h = x.sum(0)
if h.sum() > 1:
    value = h * 3
for row in x:
    if row.sum() > 1.5:
        value = row * 2
return h, value

# in a branch of a branch
h = x.sum(0)
if h.sum() > 1:
    h = h + 1
    if h[0] > 2.0:
        value = h * 3
return h, value
"""


@pytest.mark.parametrize(("name", "body"), blocks(READ), ids=[name for name, _ in blocks(READ)])
def test_a_name_that_some_runs_set_cannot_be_read(name: str, body: str) -> None:
    with pytest.raises(InvalidArgument, match=r"`\w+` has no value here: .* line \d+ of f.*; give it one before"):
        compared(body, torch.ones(5, 3), [])


SET_AGAIN = """
t = x[0] * 0
for row in x:
    new = row * 2
    t = t + new
new = x[0] * 1
for row in x:
    new = new + row
return new, t
"""


def test_a_name_that_a_loop_sets_may_be_set_again() -> None:
    _, refused = compared(SET_AGAIN, torch.ones(5, 3), [torch.rand(rows, 3) for rows in (1, 4)])
    assert refused == 0
