"""Programs with mistakes of control flow: each reads ``x`` and leaves ``out``, and says what is to be said of it.

After the name: ``record`` or ``run``, which raises; the error; the line; words of the message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import tfnb.errors

PROGRAMS = """
# branches of another structure: record, InvalidArgument, 2, `v` is of another structure in each branch
v = (x,)
if x.sum() > 0:
    v = (x, x)
out = v[0]

# branches of another dtype: record, InvalidArgument, 2, `v` is int64[B] in one branch and float32[B] in the other
v = x
if x.sum() > 0:
    v = x.long()
out = v

# branches of another shape: record, ShapeError, 1, in one branch and float32[B] in the other
out = x.sum() if x.sum() > 0 else x

# rows of what has none: record, InvalidArgument, 1, map_fn goes over the rows of tensors, and was given float32[]
out = tfnb.map_fn(lambda v: v, x.sum())

# a fold of another structure: record, InvalidArgument, 1, the body of fold returns
out = tfnb.fold(lambda total, v: (total, v), x.sum(), x)

# fewer iterations than none: record, InvalidArgument, 1, maximum_iterations is at least 0, not -1
out = tfnb.while_loop(lambda v: v.sum() < 9, lambda v: v + 1, x, maximum_iterations=-1)

# branches of cond of another structure: record, InvalidArgument, 1, the branches of cond return different structures
out = tfnb.cond(x.sum() > 0, lambda: (x, x), lambda: x)

# branches of cond of another dtype: record, InvalidArgument, 1, int64[B] in one branch and float32[B] in the other
out = tfnb.cond(x.sum() > 0, lambda: x.long(), lambda: x)

# branches of cond of another shape: record, ShapeError, 1, float32[] in one branch and float32[B] in the other
out = tfnb.cond(x.sum() > 0, lambda: x.sum(), lambda: x)

# a variable that changes its dtype: record, InvalidArgument, 2, enters as int64[] and is float32[] after one iteration
n = x.sum().long()
while n < 9:
    n = n * 1.5 + 1
out = n

# a variable that changes its shape: record, ShapeError, 2, enters as float32[1] and is float32[2] after one iteration
v = x[:1].sum().reshape(1)
while v.sum() < 9:
    v = torch.cat([v, v])
out = v

# a variable that changes its structure: record, InvalidArgument, 2, 1 values before the loop and 2 after an iteration
v = (x,)
while v[0].sum() < 9:
    v = (v[0] * 2, v[0])
out = v[0]

# while_loop that changes a dtype: record, InvalidArgument, 1, enters as int64[] and is float32[] after one iteration
out, = tfnb.while_loop(lambda n: n < 9, lambda n: (n + 0.5,), (torch.tensor(0),))

# while_loop that changes a shape: record, ShapeError, 1, enters as float32[B] and is float32[2*B] after one iteration
out, = tfnb.while_loop(lambda v: v.sum() < 9, lambda v: (torch.cat([v, v]),), (x,))

# while_loop that changes the structure: record, InvalidArgument, 1, the body of while_loop returns (tensor, tensor)
out, = tfnb.while_loop(lambda v: v.sum() < 9, lambda v: (v, v), (x,))

# a while that never ends: run, DeadlineExceeded, 2, did not end within
v = x.sum()
while v > -99:
    v = v.abs() * 1
out = v

# a while_loop that never ends: run, DeadlineExceeded, 1, did not end within
out, = tfnb.while_loop(lambda v: v > -99, lambda v: (v.abs(),), (x.sum(),))

# an array of fewer elements than none: record, InvalidArgument, 1, a TensorArray has a whole number of elements, not -1
out = tfnb.TensorArray(-1, shape=()).stack()

# an array of half an element: record, InvalidArgument, 1, a TensorArray has a whole number of elements, not 0.5
out = tfnb.TensorArray(0.5, shape=()).stack()

# an array that a run makes too short: run, InvalidArgument, 1, a TensorArray has a whole number of elements, not -
out = tfnb.TensorArray((2 - x.sum()).long(), shape=()).stack()

# a list appended to twice: run, BranchChanged, 2, `out.append(-n)` is the second append() to its list
out, n = [], x.sum()
while n < 9:
    out.append(n)
    out.append(-n)
    n = n * 2
out = torch.stack(out)

# a list that shrinks: run, BranchChanged, 2, use a tfnb.TensorArray
out, n = [x.sum()], x.sum()
while n < 9:
    n = n + out.pop()
    out.append(n)
out = n

# an element written twice: record, InvalidArgument, 1, element 0 of a TensorArray is written twice
out = tfnb.TensorArray(3).write(0, x.sum()).write(0, x.sum()).stack()

# an element that a run writes twice: run, InvalidArgument, 2, is written twice
i = (x.sum() > 5).long()
out = tfnb.TensorArray(3).write(1, x.sum()).write(i, x.sum()).stack()

# an element that a while_loop writes twice: record, InvalidArgument, 1, element 0 of a TensorArray is written twice
_, a = tfnb.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, a.write(i * 0, x.sum())), (0, tfnb.TensorArray(3)))
out = a.stack()

# an element that a loop writes twice: record, InvalidArgument, 3, element 0 of a TensorArray is written twice
a, n = tfnb.TensorArray(3, shape=()), 0
while n < 2 + x.sum() * 0:
    a = a.write(0, x.sum())
    n += 1
out = a.stack()

# back_prop=False: record, NoGradient, 1, recorded with back_prop=False
y, = tfnb.while_loop(lambda v: v.sum() < 9, lambda v: (v * 2,), (x,), back_prop=False)
out, = tfnb.gradients(y.sum(), [x])

# a tensor of inside of a branch: record, InvalidArgument, 3, inside of
kept = []
out = tfnb.cond(x.sum() > 0, lambda: kept.append(x * 2) or kept[-1], lambda: x)
out = kept[-1] + 1

# a tensor of inside of a branch, fetched: run, InvalidArgument, 2, mul, inside of the `then` of
kept = []
tfnb.cond(x.sum() > 0, lambda: kept.append(x * 2) or kept[-1], lambda: x)
out = kept[-1]

# a tensor of three branches down, fetched: run, InvalidArgument, 4, taken where its predicate is True
kept = []
def third():
    return tfnb.cond(x.sum() > 0, lambda: kept.append(x * 2) or kept[-1], lambda: x)
tfnb.cond(x.sum() > 9, lambda: x, lambda: tfnb.cond(x.sum() > 1, third, lambda: x))
out = kept[-1]
"""


@dataclass(frozen=True)
class Bad:
    """A program, and what it raises."""

    name: str
    at: str
    error: type
    line: int
    words: str
    source: str

    @property
    def lines(self) -> set[int]:
        """Those of which one is named: a deadline finds a loop in its test, or in its body."""
        return {self.line, self.line + ("never" in self.name)}

    @property
    def sample(self) -> torch.Tensor:
        """One on which what a run raises is not raised."""
        return torch.full((3,), 1.0 if self.at == "record" else -99.0 if "never" in self.name else 0.5)


FED = torch.full((2,), 5.0)


def programs() -> list[Bad]:
    """All of them."""
    found = []
    for block in PROGRAMS.strip().split("\n\n#"):
        head, _, source = block.lstrip("# ").partition("\n")
        name, _, rest = head.partition(": ")
        at, error, line, words = rest.split(", ", 3)
        found.append(Bad(name, at, getattr(tfnb.errors, error), int(line), words, source.rstrip() + "\n"))
    return found
