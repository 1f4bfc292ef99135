"""Names that may share memory, as each run decides: a write is an error, with the line, the name and what to write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.control_flow.written import blocks, compared
from tfnb.errors import Unsupported

# Each block is named for the line that decides, and the name that has memory of another one.
REFUSED = r"""
# 3 b
a, b = x.sum(0), x[0] * 1
if x.sum() > 1:
    b = a
b += 1
return a, b

# 3 b, written from the other side
a, b = x.sum(0), x[0] * 1
if x.sum() > 1:
    b = a
a += 1
return a, b

# 4 part
a, b = x.sum(0), x[0] * 1
part = a[1:]
if x.sum() > 1:
    part = b[:2]
part *= 3
return a, b, part

# 3 a, two names of what a branch makes
a, b = x.sum(0), x[0] * 1
if x.sum() > 1:
    a = b = x.mean(0)
a += 1
return a, b

# 3 a, a branch in a branch
a, b = x.sum(0), x[0] * 1
if x.sum() > 2:
    if x.sum() > 4:
        a = b
    a = a[:]
b += 1
return a, b

# 3 the expression
a, b = x.sum(0), x[0] * 1
c = a if x.sum() > 1 else b
c += 1
return a, b, c

# 3 c, a loop
a, c = x.sum(0), x[0] * 1
for row in x[1:]:
    c = a[:]
c += 1
return a, c

# 3 last, a row of what a loop takes
m, last = x * 1, x[0]
for row in m:
    last = row
m += 1
return m, last

# 3 b, two names of one iteration
a = b = x.sum(0)
for row in x:
    a = b = b * 0.5 + row
a += 1
return a, b

# 4 v, a third name that nobody has any more
u, v = x.sum(0), x[0] * 1
import gc
for row in x:
    u = row * 2
    if row.sum() > 1:
        v = u
gc.collect()
v *= 3
return u, v

# 4 `a`, a second name that each iteration gives and writes
a = x.sum(0)
b = a * 1
for row in x:
    b = a
    b += row
    a = a + 0
return a, b

# 3 prev, names that change places
prev, cur = x.sum(0), x[0] * 1
for row in x:
    prev, cur = cur, cur + row
cur *= 3
return prev, cur

# 3 an element, of which a name holds the last one
a, h = [], x[0] * 0
for row in x:
    h = h + row
    a.append(h)
h += 1
return torch.stack(a), h

# 3 an element
a, h = [], x[0] * 0
for row in x:
    h = h + row
    a.append(h)
a[-1].add_(1)
return torch.stack(a), h

# 3 an element, which iterations write
a, h = [], x[0] * 0
for row in x:
    h += row
    a.append(h)
return torch.stack(a)

# 4 `a`, written and given another value
a = x.sum(0)
b = a
for row in x:
    a += row
    a = a.clamp(-2, 2)
return a, b

# 4 `a`, of which there is a view
a = x.sum(0)
b = a[1:]
for row in x:
    a += row
    a = a.clamp(-2, 2)
return b

# 3 p, of the caller's
def changed(p):
    for row in x:
        p += row
        p = p.clamp(-2, 2)
    return p
a = x.sum(0)
return changed(a), a

# 4 `a`, elements that name elements
parent, links = torch.arange(6), x.abs().round().long()
a = links[0, 0]
while parent[a] != a:
    a = parent[a]
parent[a] = 0
return parent

# 2 the expression, a buffer
total = net.seen if x.sum() > 0 else x.sum() * 2
total += 1
return total
"""

FREE = r"""
# nobody else holds it
a = x.sum(0)
for row in x:
    if row.sum() > 0:
        a = a * 0.5 + row
a += 1
return a

# a name of an iteration before, which nobody holds
a = c = x.sum(0)
for row in x:
    c = a
    a = a * 0.5 + row
del c
a += 1
return a

# written and given another value, of no other name
a = x.sum(0)
for row in x:
    a += row
    a = a.clamp(-2, 2)
return a

# clones
a, b = x.sum(0), x[0] * 1
if x.sum() > 1:
    b = a.clone()
b += 1
last = x[0].clone()
for row in x:
    last = row.clone()
x *= 2
return a, b, last

# of what an iteration made and wrote
a, h = [], x[0] * 0
for row in x:
    h = h * 0.5 + row
    h *= 2
    a.append(h)
    h = h.tanh()
return torch.stack(a), h
"""
FED = [torch.linspace(-1, 2, 3 * n).reshape(n, 3) for n in (3, 1, 2, 5)]


@pytest.mark.filterwarnings("ignore:.*became the constant", "ignore:.*Python took the")
@pytest.mark.parametrize(
    ("name", "body"),
    [
        pytest.param(*block, id=block[0], marks=[pytest.mark.slow] * (n % 3 > 0))
        for n, block in enumerate(blocks(REFUSED))
    ],
)
def test_a_write_that_another_name_may_see_is_an_error(name: str, body: str) -> None:
    net = nn.Module()
    net.register_buffer("seen", torch.tensor(0.5))
    with pytest.raises(Unsupported) as found:
        compared(body, FED[0], FED, net=net, state=SimpleNamespace(kind=None))
    first, *advice = str(found.value).splitlines()
    place, _, about = name.partition(" ")
    assert f"line {place} of" in first and about.partition(",")[0] in first
    assert "clone it" in advice[-1]


@pytest.mark.parametrize(("name", "body"), blocks(FREE), ids=[name for name, _ in blocks(FREE)])
def test_a_write_that_nobody_else_sees_is_staged(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED)
    assert not any("stays Python" in note for note in notes), notes
    assert refused == 0


@pytest.mark.filterwarnings("ignore:.*became the constant", "ignore:.*Python took the")
def test_a_write_below_a_branch_that_python_took_is_an_error() -> None:
    body = """
a, b = x.sum(0), x[0] * 1
if x.sum() > 0:
    state.kind = "taken"
    b = a
b += 1
return a, b
"""
    with pytest.raises(Unsupported, match=r"Python took.*\n.*\n.*clone it"):
        compared(body, FED[0], FED, state=SimpleNamespace(kind=None))
