"""How often staged bodies are recorded: once, however deep loops are nested."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.written import function
from tfnb.errors import InvalidArgument

# What stands in the innermost loop, and what is returned: names that the body of the loop sets first.
FIRST_SET = {
    "a tensor": ("v = r * 2\nt = t + v", "v + t"),
    "a number": ("v = 3\nt = t + v", "v + t"),
    "several in a tuple": ("v = r, {'a': r * 2}\nt = t + v[1]['a']", "v[0] + v[1]['a'] + t"),
    "a row": ("v = x[r.long() - 2]\nt = t + v", "v + t"),
    "in a branch": ("t = t + r\nif r > 1:\n    v = r * 3", "v + t"),
    "in both branches": ("if r > 1:\n    v = r * 3\nelse:\n    v = -r\nt = t + v", "v + t"),
    "of a size that only the body knows": ("v = x[x > r]\nt = t + v.sum()", "t"),
}
LOOPS = {"for": "for r in x:", "while": "r = x[0]\nwhile r < 3:\n    r = r + 1"}


def nested(head: str, body: str, depth: int) -> str:
    """The body in so many loops."""
    for _ in range(depth):
        body = f"{head}\n" + "\n".join(f"    {line}" for line in body.split("\n"))
    return body


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("head", LOOPS)
@pytest.mark.parametrize("what", FIRST_SET)
def test_a_name_that_the_innermost_loop_sets_first_is_recorded_once(what: str, head: str, depth: int) -> None:
    body, result = FIRST_SET[what]
    recorded = itertools.count()
    lines = nested(LOOPS[head], f"count()\n{body}", depth)
    program = function(f"t = x.sum() * 0\n{lines}\nreturn {result}", count=recorded.__next__)
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([1.0, 2.0, 3.0]), shape=["n"], name="x")
        if "v" in result and (depth > 1 or what == "in a branch"):  # a run may have no value
            with pytest.raises(InvalidArgument, match="`v` has no value here: it is first set in the loop"):
                tfnb.autograph(program)(x)
            assert next(recorded) == 1
            return
        y = tfnb.autograph(program)(x)
        fetches = [y, *(tfnb.gradients(y, [x]) if depth < 3 else ())]
    assert next(recorded) == 1
    for fed in (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0, 2.0, 3.0])):
        leaf = fed.clone().requires_grad_()
        wanted: Any = program(leaf)
        found = tfnb.run(fetches, {x: fed})
        torch.testing.assert_close(found, [wanted.detach(), torch.autograd.grad(wanted, leaf)[0]][: len(fetches)])
