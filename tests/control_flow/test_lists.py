"""Lists that loops append to: tensors stand behind them where the loop is in the graph, and Python's list elsewhere."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.written import blocks, compared
from tfnb.errors import BranchChanged, ShapeError, Unsupported

STAGED = """
# a list of each iteration
s = x.new_zeros(())
for row in x:
    acc = []
    for j in range(x.shape[0]):
        acc.append(row.sum() * j)
    s = s + len(acc) * acc[-1]
return s

# stack, cat, len and index
outs = []
h = x.new_zeros(3)
for t in range(x.shape[0]):
    h = torch.tanh(h + x[t])
    outs.append(h)
return torch.stack(outs), torch.stack(outs, 1), torch.cat(outs), len(outs) * h, outs[-1]

# elements before and after
outs = [x[0]]
for row in x:
    outs.append(row + 1)
outs.append(x[0] * 7)
return torch.stack(outs), torch.cat(outs, -1), len(outs) * x.sum()

# how many there are where it is left by break
a, h = [], x[0] * 0
for row in x:
    h = h * 0.5 + row
    a.append(h)
    if h.sum() > 1:
        break
return torch.stack(a).sum(0) / len(a), torch.stack(a) * torch.arange(len(a))[:, None]

# a while
a = []
s = x.abs().sum()
while s > 0.5:
    a.append(s)
    s = s / 2
return torch.stack(a).sum() if len(a) > 0 else s

# a list of an object, in a method
class Rec:
    def __init__(self): self.seen = []
    def step(self, h):
        self.seen.append(h)
        return h * 2
r, y = Rec(), x[0]
for row in x:
    y = r.step(row)
return torch.stack(r.seen), y

# a list inside of an iteration
outs = []
for row in x:
    acc = []
    for v in row:
        acc.append(v * 2)
    outs.append(torch.stack(acc))
return torch.stack(outs)

# copies
outs = []
for row in x:
    outs.append(row)
return torch.stack(tuple(outs)), torch.stack([*outs, x[0]]), torch.stack(list(outs)), torch.stack(outs + [x[0]])

# two lists, over the rows of what they are after it
ys, zs = [], []
for row in x:
    ys.append(row * 2)
    zs.append(row.sum())
s = x.new_zeros(3)
for i, (row, y, z) in enumerate(zip(x, torch.stack(ys), torch.stack(zs))):
    s = s * 0.5 + y * z + row * i
return s
"""

# How many there are hangs on values: the loop stays Python, with a guard.
PYTHON = """
# in a branch, a list of the iteration
s = x.new_zeros(())
for row in x:
    acc = []
    if row.sum() > 0:
        acc.append(row.sum())
    s = s + len(acc)
return s

# a loop in a loop, from outside of both
outs = []
for row in x:
    for j in range(x.shape[0]):
        outs.append(row * j)
return torch.stack(outs)

# twice in an iteration
outs = []
for row in x:
    outs.append(row + 1)
    outs.append(row - 1)
return torch.stack(outs)

# a structure
rows = []
for i, row in enumerate(x):
    rows.append((row * 2, i))
return torch.stack([r * i for r, i in rows])

# plus and equal
outs = []
for row in x:
    outs += [row]
return torch.stack(outs)

# in some iterations, by a branch in a branch, and another list
a, b, s = [], [], x.sum() * 0
for i, row in enumerate(x):
    if row[0] > 0:
        if row[1] < 1.5:
            a.append(row * i)
        b.append(row.sum())
for row in a:
    s = s * 0.5 + row.prod()
for each in b:
    s = s * 0.5 + each
return s, len(a), len(b)

# after a break
a, h = [], x[0] * 0
for row in x:
    h = h * 0.5 + row
    if h.sum() > 2:
        break
    a.append(h)
return torch.stack(a).sum(0) if len(a) > 0 else h, len(a)

# a comprehension over rows
k = x.mean()
a = torch.stack([row * 2 if row.sum() > k else row for row in x])
return a, sum([row.sum() for row in x])
"""

# Python looks at the list.
REFUSED = """
# a comprehension over it
outs = []
for row in x:
    outs.append(row)
return torch.stack([o * 2 for o in outs])

# slices
ys = []
for row in x:
    ys.append(row * 2)
return torch.stack(ys[:2]), len(ys[1:]), torch.stack(ys[: len(ys) // 2 + 1]), len(ys[len(ys) // 2 :]) * x

# a loop over it
outs = []
for row in x:
    outs.append(row + 1)
s = x[0] * 0
for row in outs:
    s = s + row
return s

# its first element
outs = []
for row in x:
    outs.append(row + 1)
return outs[0]

# from behind
outs = []
for row in x:
    outs.append(row)
return torch.stack(list(reversed(outs)))

# an element is set
outs = []
for row in x:
    outs.append(row + 1)
outs[0] = x[0] * 5
return torch.stack(outs)

# the last one goes
outs = []
for row in x:
    outs.append(row + 1)
return outs.pop(), len(outs)

# unpacked
outs = []
for row in x:
    outs.append(row + 1)
first, *rest = outs
return first + len(rest)

# by code that is not staged
outs = []
for row in x:
    outs.append(row)
return take(outs).sum()

# are there none
outs = []
for row in x:
    outs.append(row)
return x * (1 if outs == [] else 2)

# a sum over it
outs = []
for row in x:
    outs.append(row.sum())
return sum(outs) / len(outs)
"""

FED = [
    torch.linspace(-1, 2, 3 * rows).reshape(rows, 3) * scale for rows, scale in ((3, 1.0), (1, 2.0), (2, 0.3), (5, 1.5))
]
CHANGED = (BranchChanged, ShapeError)


@pytest.mark.parametrize(("name", "body"), blocks(STAGED), ids=[name for name, _ in blocks(STAGED)])
def test_a_list_has_an_element_for_each_iteration_of_a_run(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED)
    assert not any("stays Python" in note for note in notes), notes
    assert refused == 0


@pytest.mark.filterwarnings("ignore:.*became the constant", "ignore:.*Python took the")
@pytest.mark.parametrize(("name", "body"), blocks(PYTHON), ids=[name for name, _ in blocks(PYTHON)])
def test_a_loop_that_appends_otherwise_is_python_and_guarded(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED, CHANGED)
    assert refused > 0
    assert any(("it is a comprehension" if "comprehension" in name else "stays Python") in note for note in notes)


@pytest.mark.parametrize(("name", "body"), blocks(REFUSED), ids=[name for name, _ in blocks(REFUSED)])
def test_what_looks_at_such_a_list_is_told_to_stack_it(name: str, body: str) -> None:
    with pytest.raises(Unsupported, match=r"loop of line \d+ of f appends to.*torch.stack\(items\)"):
        compared(body, FED[0], FED, take=operator.itemgetter(0))


def test_gradients_reach_what_was_appended() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        outs, h = [], torch.zeros(3, dtype=x.dtype)
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] @ w + h)
            outs.append(h)
        return (torch.stack(outs) * x).sum() + outs[-1].prod()

    w0 = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2, 3, dtype=torch.float64), name="x")
        w = tfnb.placeholder(w0, shape=(3, 3), name="w")
        dx, dw = tfnb.gradients(tfnb.autograph(f)(x, w), [x, w])
    for rows in (1, 4):
        fed = torch.linspace(-2, 1, 3 * rows, dtype=torch.float64).reshape(rows, 3).requires_grad_()
        weight = w0.clone().requires_grad_()
        want = torch.autograd.grad(f(fed, weight), [fed, weight])
        got = tfnb.run([dx, dw], {x: fed.detach(), w: w0})
        torch.testing.assert_close(got, list(want))


READ = """
# an element
a = [x[0]]
for row in x:
    a.append(a[-1] + row)
return a[-1]

# whether there are any
a, s = [], x.new_zeros(())
for row in x:
    if a:
        s = s + 1
    a.append(row)
return s

# how many there are
a, s = [], x.new_zeros(())
for row in x:
    s = s + len(a)
    a.append(row)
return s

# all of them
a = [x[0]]
for row in x:
    a.append(torch.stack(a).sum(0) + row)
return a[-1]
"""


@pytest.mark.parametrize(("name", "body"), blocks(READ), ids=[name for name, _ in blocks(READ)])
def test_a_loop_that_reads_a_list_that_it_appends_to_is_told_to_use_an_array(name: str, body: str) -> None:
    with pytest.raises(Unsupported, match=r"reads a list(.*\n)*.*tfnb.TensorArray.*a.write\(i") as found:
        compared(body, FED[0], FED)
    assert "line" in str(found.value)


@pytest.mark.parametrize("is_taken", [True, False])
def test_how_many_iterations_a_run_took_is_known_by_a_list_alone(is_taken: bool) -> None:
    def function(n: Any, x: Any) -> Any:
        k = 0
        if x > 0:
            ys = []
            for _ in range(n):
                ys.append(x)
            k += len(ys)
        return k

    with tfnb.record() as graph:
        n, x = tfnb.placeholder(torch.tensor(2), name="n"), tfnb.placeholder(torch.tensor(1.0 if is_taken else -1.0))
        k = tfnb.autograph(function)(n, x)
    session = tfnb.Session(graph)
    found = [
        session.run(k, {n: iterations, x: value}).tolist() for iterations, value in ((5, 1.0), (0, 1.0), (3, -1.0))
    ]
    assert found == [5, 0, 0]


def test_a_value_whose_name_the_loop_sets_first_is_appended_and_read_below() -> None:
    def running(x: torch.Tensor) -> Any:
        total, out = torch.zeros(3), []
        for t in range(x.shape[0]):
            total = total + x[t]
            value = torch.tanh(total)
            out.append(value)
        return torch.stack(out), value

    with tfnb.record():
        x = tfnb.placeholder(torch.randn(5, 3))
        found = tfnb.autograph(running)(x)
    data = torch.randn(8, 3)
    for mine, theirs in zip(tfnb.run(list(found), {x: data}), running(data), strict=True):
        torch.testing.assert_close(mine, theirs)
