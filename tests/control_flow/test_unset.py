"""Names that a statement sets in some runs: whoever reads one is told to give it a value before."""

from __future__ import annotations

import pytest
import torch

from tests.control_flow.written import blocks, compared
from tfnb.errors import InvalidArgument

READ = """
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

# in branches of a loop
h = x[0] * 0
for row in x:
    h = h + row
    if h.sum() > 1:
        h = h - 0.1
        if row[0] > 0.5:
            last = h * 2
return h, last

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
