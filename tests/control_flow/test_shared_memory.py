"""Names that share memory in some runs, as branches and loops decide: what is written into one, the others see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.test_in_place import FED, Counting
from tests.control_flow.written import blocks, compared
from tfnb.errors import BranchChanged, Unsupported

SHARED = r"""
# the last row of a loop
m, last = x * 1, x[0]
for row in m:
    last = row
m += 1
last *= 2
return m, last

# the row at which a loop stops, and a part of it
m, last, part = x * 1, x[0], x[0][1:]
for row in m:
    last, part = row, row[1:]
    if row.sum() > 1:
        break
m += 1
last *= 2
part -= 3
return m, last, part

# what a branch in a branch is given
a, b = x.sum(0), x[0] * 1
if x.sum() > 2:
    if x.sum() > 4:
        a = b
    a *= 0.5
b += 1
return a, b

# what one of many branches gives, written from either side
a, b, c = x.sum(0), x[0] * 1, x.mean(0)
if x.sum() < 2:
    c = a
elif x.sum() < 4:
    c = b[:]
elif x.sum() < 5:
    b = c.view(3)
a *= 3
b += 1
c[1:] -= 1
return a, b, c

# parts of a part, by a branch in a branch
a, b = x.sum(0), x[0] * 1
part, other = a[:2], b * 2
if x.sum() > 2:
    whole = x.mean(0)
    if x.sum() > 4:
        whole = b
    part, other = whole[1:], whole
part += 1
other[:2] *= 3
b -= x[0]
return a, b, part, other

# two names of what a branch in a branch makes
a, b = x.sum(0), x[0] * 1
if x.sum() > 2:
    a, b = x.mean(0), x[-1] * 2
    if x.sum() > 4:
        a = b
a += 1
b[1:] *= 2
return a, b

# a loop in a branch
a, b = x.sum(0), x[0] * 1
if x.sum() > 2:
    for row in x[2:]:
        b = a
a += 1
return a, b

# two names of a tensor of numbers
a, b = x.sum(0), x[0] * 1
if x.sum() > 2:
    a = b = torch.zeros(3)
a += 1
b[1:] += x[0, 1:]
return a, b

# a name that the loop gives first, written after it
m = x * 1
for i in range(len(x)):
    a = m[i]
a += 1
m *= 2
a[1:] -= 3
return a, m

# a name that the loop gives, by a place that the turn computes, and a branch writes
m, k = x * 1, torch.zeros((), dtype=torch.int64)
a = m[0]
while k < len(x) - 1:
    k = k + 1
    a = m[len(x) - 1 - k]
if x.sum() > 2:
    a *= 2
    m += 1
return a, m

# a name that a branch gives, by a place that it computes, and its tensor are written
m, c = x * 1, x.sum(0)
if x.sum() > 2:
    c = m[(x[:, 0] > 0).sum() - 1]
c *= 2
m += 1
return m, c

# a part by a place of a branch
m, c = x * 1, x.sum(0)[1:]
if x.sum() > 2:
    k = (x[:, 0] > 0).sum() - 1
    c = m[k][1:]
m += 1
c *= 2
return m, c

# by places of a branch in a branch, and of either branch
m, c, d = x * 1, x.sum(0), x[0] * 1
if x.sum() > 2:
    if x.sum() > 4:
        c = m[(x[:, 0] > 0).sum() - 1]
    d = m[(x[:, 1] > 9).sum()]
else:
    d = m[len(x) - 1 - (x[:, 1] > 9).sum()]
m *= 2
c += 1
d -= 3
return m, c, d

# by a place of a loop in a branch
m, c = x * 1, x.sum(0)
if x.sum() > 2:
    k = torch.zeros((), dtype=torch.int64)
    while k < len(x) - 1:
        c = m[k]
        k = k + 1
m *= 2
c += 1
return m, c

# elements that name elements: a forest of sets
parent, links = torch.arange(6), x.abs().round().long()
for row in links:
    a, b = row[0], row[2]
    while parent[a] != a:
        a = parent[a]
    while parent[b] != b:
        b = parent[b]
    if a != b:
        parent[b] = a
return parent
"""


@pytest.mark.parametrize(("name", "body"), blocks(SHARED), ids=[name for name, _ in blocks(SHARED)])
def test_what_is_written_is_seen_by_all_names_of_the_memory(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED)
    assert not any("stays Python" in note for note in notes), notes
    assert refused == 0


def test_a_buffer_that_a_turn_takes_is_written_where_a_turn_was_taken() -> None:
    net = Counting()

    @tfnb.autograph
    def program(x: Any) -> Any:
        total, turns = x.sum(), 0
        while total > 0 and turns < 2:
            total = net.seen
            turns += 1
        total += 1
        return total

    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y, step = program(x), tfnb.group(net.seen)
    session = tfnb.Session(graph)
    assert session.run([y, step], {x: torch.ones(3)})[0] == 1.5 and net.seen == 1.5
    assert session.run([y, step], {x: -torch.ones(3)})[0] == -2 and net.seen == 1.5


@pytest.mark.filterwarnings("ignore:.*became the constant", "ignore:.*Python took the")
def test_what_python_gives_below_a_guard_is_written_with_what_it_is() -> None:
    body = """
a, b = x.sum(0), x[0] * 1
if x.sum() > 0:
    state.kind = "taken"
    b = a
b += 1
a[1:] *= 2
return a, b
"""
    _, refused = compared(body, FED[0], [*FED, -FED[3]], (BranchChanged,), state=SimpleNamespace(kind=None))
    assert refused == 1


KEPT = r"""
# a name that a turn gives what another name holds as well
u, v = x.sum(0), x[0] * 1
for row in x:
    u = row * 2
    if row.sum() > 1:
        v = u
u += 1
v *= 3
return u, v

# two names of what a third one held
u, v, w = x.sum(0), x[0] * 1, x.mean(0)
for row in x:
    if row.sum() > 1:
        v = u
    if row.sum() < 1:
        w = u
u = u * 1
v *= 2
w += 1
return u, v, w
"""


@pytest.mark.parametrize(("name", "body"), blocks(KEPT), ids=[name for name, _ in blocks(KEPT)])
def test_what_nobody_names_any_more_still_tells_who_shares_memory(name: str, body: str) -> None:
    before, _, after = body.rpartition("return")
    first = next(line for line in before.splitlines() if "+=" in line or "*=" in line)
    text = before.replace(first, f"import gc\ngc.collect()\n{first}") + "return" + after
    with pytest.raises(Unsupported, match=r"shares memory.*that was written"):
        compared(text, FED[0], FED)


def test_names_that_change_places_in_a_loop_are_not_the_same_below_it() -> None:
    body = """
u, v, w = x.sum(0), x[0] * 1, x.mean(0)
prev, cur = u * 1, v * 1
for row in x:
    u, v, w = v, w, u
    prev, cur = cur, cur + row
u += 1
v *= 2
prev -= 1
cur *= 3
return u, v, w, prev, cur
"""
    _, refused = compared(body, FED[0], FED)
    assert refused == 0


@pytest.mark.filterwarnings("ignore:.*became the constant", "ignore:.*Python took the")
def test_a_loop_writes_what_is_shared_by_way_of_a_tensor_that_nobody_names_any_more() -> None:
    body = """
m, v, a, c, t = x * 1, x.sum(0), x.sum(), x.max(), 0
while not x.sum() > 99 and t < 3:
    t += 1
    if x.sum() > -99:
        v = m[0]
    else:
        c = v[0]
        v.fill_(0.5)
    a = c
part = m[0, 1:]
for row in x:
    part *= 0.5
return m, v, a, c
"""
    _, refused = compared(body, FED[0], FED)
    assert refused == 0
