"""What code does with a list that a loop appended to: elements read, sliced, set, deleted; what two of them share."""

from __future__ import annotations

import pytest

from tests.control_flow.test_lists import CHANGED, FED
from tests.control_flow.written import blocks, compared
from tfnb.errors import Unsupported

MADE = """
m, ys, zs = x * 1, [], []
for row in m:
    ys.append(row * 2)
    zs.append((row.sum(), x[0]))
"""

STAGED = """
# slices
return torch.stack(ys[::-1]), torch.stack(ys[:2]), len(ys[1:]), len(ys[1:-1]), torch.stack(ys[::2]), len(ys[::-2])

# slices by what a run has
k = (x[:, 0] > 0).sum()
return torch.stack(ys[: len(ys) // 2 + 1]), len(ys[len(ys) // 2 :]) * x

# slices of a list with others before and after
ws = [x[0], *ys, x[-1]]
a, b, c = ws[1:], ws[:-1], ws[1:-1]
return torch.stack(a), torch.stack(b), torch.stack(c), torch.stack(ws[2:]), torch.stack(ws[::-1]), a[-1], len(ws[:]) * x

# slices of several
a, b = zs[1:], zs[::-1]
s = x.new_zeros(())
for total, row in b:
    s = s * 0.5 + total + row.sum()
return s, len(a) * x, b[-1][1]

# an element is set
ys[0] = x[0] * 5
ys[-1] = x[-1] - 1
return torch.stack(ys), len(ys)

# elements are swapped
ys[0], ys[-1] = ys[-1], ys[0]
return torch.stack(ys)

# an element is set, in a copy
other = list(ys)
other[0] = x[0]
return torch.stack(ys), torch.stack(other)

# an element is written in place
ys[0] += 1
ys[-1][1:] *= 2
last = ys[-1]
last -= 3
return torch.stack(ys)

# an element of several is set
zs[0] = (x.max(), x[0] * 2)
s = x.new_zeros(())
for total, row in zs:
    s = s * 0.5 + total + row.sum()
return s

# an element before them is set
ws = [x[0], *ys]
ws[0] = x[0] * 3
return torch.stack(ws)

# the first and the last one go
z = ys.pop()
ys.append(z * 2)
y = ys.pop(0)
ys.append(y)
del zs[0]
return z, y, torch.stack(ys), len(zs) * x

# reversed in place, and more of them
ys.reverse()
ys.extend(ys)
return torch.stack(ys)

# numbered, and together
s, t = x.new_zeros(3), x.new_zeros(3)
for i, y in enumerate(ys, 1):
    s = s + y * i
for i, (row, y, (total, _)) in enumerate(zip(m, ys, zs)):
    t = t * 0.5 + y * total + row * i
return s, t
"""

# Python looks at each of them.
PYTHON = """
# are there none
return x * (1 if ys == [] else 2)

# unpacked
first, *rest = ys
return first + len(rest)

# unpacked, the last one
*_, last = ys
return last

# the largest
totals = [total for total, _ in zs]
return max(totals)

# of torch's others
return torch.vstack(ys), torch.hstack(ys)

# by a function of a package
return torch.nn.utils.rnn.pad_sequence(ys)

# folded
import functools
return functools.reduce(lambda a, b: a * 0.5 + b, ys)

# some of them are set
ys[0:1] = [x[0], x[1]]
return torch.stack(ys)

# one goes
del ys[1]
return torch.stack(ys)

# backwards, some
return torch.stack(ys[1::-1])
"""


@pytest.mark.parametrize(("name", "body"), blocks(STAGED), ids=[name for name, _ in blocks(STAGED)])
def test_what_code_does_with_the_elements_is_done_with_those_of_a_run(name: str, body: str) -> None:
    notes, refused = compared(MADE + body, FED[0], [fed for fed in FED if len(fed) > 1])
    assert not any("stays Python" in note for note in notes), notes
    assert refused == 0


@pytest.mark.filterwarnings("ignore:.*became the constant", "ignore:.*Python took the")
@pytest.mark.parametrize(("name", "body"), blocks(PYTHON), ids=[name for name, _ in blocks(PYTHON)])
def test_what_python_looks_at_is_guarded_and_noted(name: str, body: str) -> None:
    feeds = [fed for fed in FED if len(fed) > 1]
    notes, refused = compared(MADE + body, FED[0], feeds, CHANGED)
    assert 0 < refused < len(feeds)
    assert any("stays Python" in note for note in notes)


OVERLAPS = """
# twice in a turn
for row in m:
    t = row * 2
    ys.append(t)
    ys.append(t)

# a tensor of before the loop
for row in m:
    ys.append(u)

# what a turn may leave as it was
for row in m:
    ys.append(u)
    if row.sum() > 1:
        u = row * 2

# parts of one that overlap
for row in m:
    t = row * 2
    ys.append(t[1:])
    ys.append(t[:2])

# in some turns
for row in m:
    if row.sum() > -9:
        ys.append(u)
"""


@pytest.mark.parametrize(("name", "loop"), blocks(OVERLAPS), ids=[name for name, _ in blocks(OVERLAPS)])
@pytest.mark.parametrize("write", ["ys[0] += 1", "ys = ys[::-1]\nys[0] += 1", "ys[1] = ys[0]\nys[1].mul_(2)"])
def test_elements_that_are_one_tensor_are_not_looked_at_after_a_write_of_one(name: str, loop: str, write: str) -> None:
    text = f"m, u, ys = x * 1, x.sum(0), []\n{loop}\n{{}}\nreturn torch.stack(ys)"
    feeds = [fed for fed in FED if len(fed) > 1]
    _, refused = compared(text.format(""), FED[0], feeds)
    assert refused == 0
    with pytest.raises(Unsupported, match=r"shares memory(.|\n)*that was written(.|\n)*appended it twice"):
        compared(text.format(write), FED[0], feeds)


def test_elements_that_are_tensors_of_their_own_may_be_written() -> None:
    body = """
ys, u = [], x.sum(0)
for row in x:
    ys.append(u)
    ys.append(row * 2)
    u = u + 1
ys[0] += 1
ys[-1] *= 2
return torch.stack(ys), u
"""
    _, refused = compared(body, FED[0], FED)
    assert refused == 0
