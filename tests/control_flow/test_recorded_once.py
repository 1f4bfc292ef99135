"""How often staged bodies are recorded: once, however deep loops are nested."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.written import function

# What stands in the innermost loop: names that the body of the loop sets first.
FIRST_SET = {
    "a tensor": "v = r * 2\nt = t + v",
    "a number": "v = 3\nt = t + v",
    "several in a tuple": "v = r, {'a': r * 2}\nt = t + v[1]['a']",
    "in both branches": "if r > 1:\n    v = r * 3\nelse:\n    v = -r\nt = t + v",
    "of a size that only the body knows": "v = x[x > r]\nt = t + v.sum()",
}
LOOPS = {"for": "for r in x:", "while": "r = x[0]\nwhile r < 3:\n    r = r + 1"}


def nested(head: str, body: str, depth: int) -> str:
    """The body in so many loops."""
    for _ in range(depth):
        body = f"{head}\n" + "\n".join(f"    {line}" for line in body.split("\n"))
    return body


@pytest.mark.parametrize(("what", "head", "depth"), [
    *((what, head, 1) for what in FIRST_SET for head in LOOPS),
    ("a tensor", "for", 3),
    ("in both branches", "while", 2),
])  # fmt: skip
def test_a_name_that_the_innermost_loop_sets_first_is_recorded_once(what: str, head: str, depth: int) -> None:
    recorded = itertools.count()
    lines = nested(LOOPS[head], f"count()\n{FIRST_SET[what]}", depth)
    program = function(f"t = x.sum() * 0\n{lines}\nreturn t", count=recorded.__next__)
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([1.0, 2.0, 3.0]), shape=["n"], name="x")
        y = tfnb.autograph(program)(x)
        fetches = [y, *(tfnb.gradients(y, [x]) if depth < 3 else ())]
    assert next(recorded) == 1
    for fed in (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0, 2.0, 3.0])):
        leaf = fed.clone().requires_grad_()
        wanted: Any = program(leaf)
        found = tfnb.run(fetches, {x: fed})
        torch.testing.assert_close(found, [wanted.detach(), torch.autograd.grad(wanted, leaf)[0]][: len(fetches)])
