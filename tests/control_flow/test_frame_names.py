"""`exec`, `eval` and `locals` see the names of the scope they are written in, or leave a statement to Python."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.written import blocks, function
from tfnb.control_flow import Cell
from tfnb.errors import BranchChanged

CELLS = r"""
# exec
exec("y = x * 2")

# exec of several lines
exec('''
a = x
for _ in range(1):
    a = a * 2
y = a
''')

# exec of a definition
exec("def f(v): return v * 2")
y = f(x)

# exec in a loop of Python's
for i in range(3):
    exec(f"z{i} = x * i")
y = z2

# exec after a staged statement
if x.sum() > 0:
    k = x * 2
else:
    k = x * 2
exec("y = k * 1")

# locals written
locals()["y"] = x * 2

# vars written
vars()["y"] = x * 2

# locals read, dir
k = x * 2
y = locals()["k"] if "k" in dir() else x

# eval in a comprehension
y = [eval("x * i") for i in range(3)][2]

# eval with names of its own
y = eval("q * 2", {"q": x})

# another function of this name
def vars(): return x * 2
y = vars()
"""

FUNCTIONS = r"""
# eval in a staged branch
k = 2
if x.sum() > 0:
    u = eval("x * k")
else:
    u = x
return u

# locals in a staged branch
if x.sum() > 0:
    u = locals()["x"] * 2
else:
    u = x
return vars()["u"]

# eval in a conditional expression
return eval("x * 2") if x.sum() > 0 else x

# eval in a staged loop
s = x.sum() * 0
for row in x:
    s = s + eval("row.sum() * 2")
return s

# exec that changes an object
d, k = {}, 3
exec("d['u'] = x * k")
return d["u"]

# a name that has no value
if x.sum() > 0:
    u = x.sum()
    return u * ("w" in locals())
w = 1
return x.sum() * ("w" in dir())

# a comprehension in a staged branch
if x.sum() > 0:
    u = [x * eval("i * 2") for i in range(3)][2]
else:
    u = x
return u
"""

FED = (torch.ones(3, 2), -torch.ones(2, 2))


def cell(text: str) -> tuple[Any, Any]:
    with tfnb.record():
        names: dict[str, Any] = {"x": tfnb.placeholder(FED[0], name="x")}
        Cell(ast.parse(text).body, None, "<cell>").run(names)
    return names["x"], names["y"]


@pytest.mark.parametrize(("name", "text"), blocks(CELLS), ids=[name for name, _ in blocks(CELLS)])
def test_in_a_cell(name: str, text: str) -> None:
    x, y = cell(text)
    for fed in FED:
        torch.testing.assert_close(tfnb.run(y, {x: fed}), fed * 2)


@pytest.mark.parametrize(("name", "body"), blocks(FUNCTIONS), ids=[name for name, _ in blocks(FUNCTIONS)])
def test_in_a_function(name: str, body: str) -> None:
    program = function(body)
    with tfnb.record() as g:
        x = tfnb.placeholder(FED[0], name="x")
        out = tfnb.autograph(program)(x)
    assert not any("stays Python" in note for note in g.notes), g.notes
    for fed in FED:
        torch.testing.assert_close(tfnb.run(out, {x: fed}), program(fed))


@pytest.mark.filterwarnings("ignore:.*Python took the")
@pytest.mark.parametrize("setting", ["exec('y = x * 2')", "locals()['y'] = x * 2"])
def test_what_sets_any_name_in_a_staged_branch_leaves_it_to_python(setting: str) -> None:
    x, y = cell(f"if x.sum() > 0:\n    {setting}\nelse:\n    y = x\n")
    torch.testing.assert_close(tfnb.run(y, {x: FED[0]}), FED[0] * 2)
    with pytest.raises(BranchChanged, match=r"the `if` is Python's: .*line 2"):
        tfnb.run(y, {x: FED[1]})
