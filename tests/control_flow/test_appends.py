"""Lists to which branches of a turn append more than once, or beside what the turn appends in any case."""

from __future__ import annotations

import pytest
import torch

import tfnb
from tests.control_flow.test_lists import CHANGED, FED
from tests.control_flow.written import blocks, compared, function

SEVERAL = """
# by one branch after another
a = []
for row in x:
    if row.sum() > 0:
        a.append(row)
    if row[0] > 0:
        a.append(-row)
return len(a) * x.sum(), torch.stack(a).sum(0) if a else x[0]

# twice in one branch, once in the other
a, s = [], x.sum() * 0
for row in x:
    if row.sum() > 0:
        a.append(row)
        a.append(-2 * row)
    else:
        a.append(row * 3)
for i, row in enumerate(a):
    s = s * 0.5 + row.prod() * i
return s, len(a)

# beside a branch, before and after it
a, s = [], x.sum() * 0
for row in x:
    a.append(row)
    if row.sum() > 0:
        a.append(-row)
    a.append(row * 2)
for i, row in enumerate(a):
    s = s * 0.5 + row.sum() * i
return s, len(a)

# before and after a break
a, s = [], x.sum() * 0
for row in x:
    a.append((row, 1))
    if row.sum() > 1:
        break
    a.append((-row, 2))
for row, k in a:
    s = s * 0.5 + row.sum() * k
return s, len(a)

# branch in branch, one after the other
a, s = [], x.sum() * 0
for i, row in enumerate(x):
    if row[0] > -1:
        if row[1] < 1.5:
            a.append(row * i)
        a.append(row + 1)
    if row[2] > 0:
        a.append(row - 1)
for i, row in enumerate(a):
    s = s * 0.5 + row.sum() * i
return s, len(a)
"""


@pytest.mark.parametrize(("name", "body"), blocks(SEVERAL), ids=[name for name, _ in blocks(SEVERAL)])
def test_a_turn_appends_what_its_way_leads_to_in_that_order(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED)
    assert not any("stays Python" in note for note in notes), notes
    assert refused == 0


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_gradients_reach_what_branches_appended(executor: str) -> None:
    body = """
a = []
for row in x:
    a.append(row.sin())
    if row.sum() > 0:
        a.append(row * row)
    if row[0] > 0:
        a.append(row.exp())
return torch.stack(a).cumsum(0).square().sum()
"""
    program = function(body)
    with tfnb.record() as graph:
        x = tfnb.placeholder(FED[0].double(), name="x")
        y = tfnb.autograph(program)(x)
        fetched = [y, *tfnb.gradients(y, [x])]
    session = tfnb.Session(graph, executor=executor)
    for fed in FED:
        leaf = fed.double().requires_grad_()
        want = program(leaf)
        (slope,) = torch.autograd.grad(want, leaf)
        torch.testing.assert_close(session.run(fetched, {x: leaf.detach()}), [want.detach(), slope])


@pytest.mark.filterwarnings("ignore:.*became the constant", "ignore:.*Python took the")
def test_more_than_eight_are_pythons() -> None:
    branch = "    if row.sum() > 0:\n        a.append(row)\n"
    body = "a = []\nfor row in x:\n" + branch * 9 + "return len(a) * x.sum()"
    notes, refused = compared(body, FED[0], FED, CHANGED)
    assert refused > 0
    assert any("line 3 of f: `for` stays Python" in note for note in notes)
