"""Python's statements, one form after the other: what AutoGraph stages equals Python, what it does not is guarded."""

from __future__ import annotations

import pytest
import torch

from tests.control_flow.definitions import DEFINITIONS
from tests.control_flow.statements import STATEMENTS
from tests.control_flow.written import blocks, compared, function
from tfnb.errors import BranchChanged, ShapeError

STAGED = blocks(STATEMENTS) + blocks(DEFINITIONS)

# What they change is of Python: an object or a name of outside, None, a structure to match.
PYTHON = r"""
# a dict target in a branch
d = {"a": x.sum(), "n": 0}
if x.sum() > 0:
    d["a"] = d["a"] * 2
    d["n"] = 5
return d["a"], d["n"]

# an attribute set by a method without calls
class Box:
    def keep(self, v):
        self.v = v
b = Box()
b.keep(x.sum())
for row in x:
    b.keep(row.sum())
return b.v

# an attribute set by a method in a branch
class Box:
    v = 1.0
    def keep(self, v):
        self.v = v
b = Box()
if x.sum() > 0:
    b.keep(x.sum())
return b.v * x.mean()

# setattr in a loop
class Box: pass
b = Box()
b.v = x.mean() * 0
for row in x:
    setattr(b, "v", b.v + 1)
return b.v

# walrus
if (s := x.sum()) > 0 and (m := x.max()) > 1:
    r = s + m
else:
    r = s
return r

# nonlocal
count = x.sum() * 0
def bump(v):
    nonlocal count
    if v > 0:
        count = count + 1
    return v
for row in x:
    bump(row.sum())
return count

# nonlocal number
count = 0
def bump(v):
    nonlocal count
    if v > 0:
        count += 1
if x.sum() > 0:
    bump(x.sum())
return count

# match
match int(x.sum() > 0):
    case 1:
        r = x.sum() * 2
    case _:
        r = x.sum()
if r > 0:
    r = r + 1
return r

# a loop with else
r = x.sum()
for row in x:
    if row.sum() > 1.5:
        r = row.max()
        break
else:
    r = -r
return r

# any and all
n = 0
while all(each < 6 for each in (x.sum() + n, n)):
    n += 1
return x.mean() + n + (2 if any([x.sum() > 0, x.max() > 2]) else 0)

# a dataclass state, replaced
from dataclasses import dataclass, replace
@dataclass
class S:
    u: object
    n: int = 0
s = S(x.sum())
if x.sum() > 0:
    s = replace(s, u=s.u * 2, n=1)
return s.u

# nonlocal in a staged loop
def run():
    total = x.sum() * 0
    def add(v):
        nonlocal total
        total = total + v
    for row in x:
        add(row.sum())
    return total
return run()

# delattr in a branch
class Box: pass
b = Box()
b.v = x.mean()
if x.sum() > 0:
    delattr(b, "v")
return x.sum() * hasattr(b, "v")

# a property that is set in a branch
class Box:
    def __init__(self): self.kept = x.mean()
    @property
    def v(self): return self.kept
    @v.setter
    def v(self, new): self.kept = new * 2
b = Box()
if x.sum() > 0:
    b.v = b.v + 1
return b.v

# a range of a recorded number, whose loop changes a set
seen, s = set(), x.sum()
for _ in range(x.abs().sum().long()):
    seen.add("a")
    s = s * 2
return s

# functions that change a dict and a list
import heapq, operator
d, h = {"n": 0}, []
for row in x:
    operator.setitem(d, "n", d["n"] + 1)
    dict.update(d, m=d["n"])
    list.append(h, 1.0)
    heapq.heappush(h, 2.0)
return x.sum() * d["m"] + len(h)

# a list added to in a branch
d = [x.mean()]
if x.sum() > 0:
    d += [x.sum()]
return sum(d)

# a dict joined in a loop
d = {"n": 0}
for row in x:
    d |= {"n": d["n"] + 1}
return x.sum() + d["n"]

# an item of an array of numpy
import numpy as np
a = np.zeros(2)
for row in x:
    a[0] += 1
return x.sum() + a[0]

# an iterator that a loop goes on with
it = iter([1.0, 2.0, 3.0, 4.0, 5.0])
s = x.sum()
for row in x:
    s = s + next(it)
return s

# an iterator that a branch goes on with
it = iter([1.0, 2.0])
a = next(it) if x.sum() > 0 else 0.0
return x.sum() + a + next(it)

# numbers that Python draws
import random
draw = random.Random(0)
s = x.sum()
for row in x:
    s = s + draw.random() + draw.randint(0, 9)
return s

# a global set in a loop
global count_
count_ = x.sum() * 0
def bump(v):
    global count_
    count_ = count_ + v
for row in x:
    bump(row.max())
return count_ + 1
"""

# Of classes that are defined elsewhere: nothing of them is converted but what is called by name.
CLASS = """
class Box:
    def __init__(self, v): self.v = v
    def __setitem__(self, k, v): self.v = v
    def __iadd__(self, v):
        self.v = self.v + v
        return self
"""
ELSEWHERE = {"an item": "b['k'] = b.v + 1", "in place": "b += 1", "by name": "b.__setitem__('k', b.v + 1)"}

ROWS = ((3, 1.0, 0.0), (1, 2.0, -0.5), (2, -0.7, 0.2), (5, 0.4, -1.0), (4, 1.5, 0.5))
FED = [torch.linspace(-1, 2, 3 * n).reshape(n, 3) * scale + shift for n, scale, shift in ROWS]


@pytest.mark.parametrize(("name", "body"), STAGED, ids=[name for name, _ in STAGED])
def test_a_staged_statement_gives_what_python_gives(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED)
    assert not any("stays Python" in note for note in notes), notes
    assert refused == 0


@pytest.mark.filterwarnings("ignore:.*became the constant", "ignore:.*Python took the", "ignore:.*took the sample")
@pytest.mark.parametrize(("name", "body"), blocks(PYTHON), ids=[name for name, _ in blocks(PYTHON)])
def test_a_statement_of_python_is_guarded(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED, (BranchChanged, ShapeError))
    assert any("stays Python" in note for note in notes) or name in ("walrus", "any and all")
    assert 0 < refused < len(FED)


@pytest.mark.filterwarnings("ignore:.*became the constant", "ignore:.*Python took the")
@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.parametrize("head", ["for row in x:", "if x.sum() > 0:"])
def test_what_an_object_of_a_class_of_elsewhere_does_is_guarded(kind: str, head: str) -> None:
    body = f"b = Box(x.mean() * 0)\n{head}\n    {ELSEWHERE[kind]}\nreturn b.v"
    notes, refused = compared(body, FED[0], FED, (BranchChanged, ShapeError), Box=function(CLASS + "return Box")(None))
    assert any("stays Python" in note for note in notes), notes
    assert 0 < refused < len(FED)
