"""Numbers become constants where torch gives the same with a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb
from tfnb.passes import numbers

CASES: dict[str, tuple[Callable[[Any], Any], torch.dtype, int]] = {
    "integers": (lambda x: (x + 3) * -2 < 5, torch.int64, 3),
    "floats": (lambda x: (x - 0.1) / 3 >= 0.25, torch.float32, 3),
    "signs of zero": (lambda x: ((x * 0.0) / (x * -0.0), 1 / (x * -0.0)), torch.float64, 3),
    "not a number": (lambda x: (x + math.inf, x * math.nan), torch.float32, 2),
    "the same number twice": (lambda x: (x + 2) * 2.0, torch.float32, 1),
    "a factor of what is added": (lambda x: torch.add(x, 3, alpha=2), torch.int64, 1),
    "an integer that becomes a float": (lambda x: x * 0.5, torch.int64, 0),
    "a quotient of integers": (lambda x: x / 2, torch.int64, 0),
    "a truth value": (lambda x: x + True, torch.int64, 0),
    "small integers": (lambda x: x + 100, torch.int8, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_values_and_types_as_torch(case: str) -> None:
    compute, dtype, expected = CASES[case]
    sample = torch.tensor([1, 2, 3]).to(dtype)
    with tfnb.record() as g:
        x = tfnb.placeholder(sample)
        made = compute(x)
    values = made if isinstance(made, tuple) else (made,)
    after = numbers(g, [value.value for value in values], [x.value])
    assert sum(node.op == "tfnb.constant" for node in after.nodes) == expected
    with tfnb.record() as g:
        x, n = tfnb.placeholder(sample), tfnb.placeholder(torch.tensor(1))
        inside = tfnb.cond(n > 0, lambda: compute(x), lambda: compute(x))
    got = tfnb.Session(g, compile="off").run(inside, {x: sample, n: torch.tensor(1)})
    torch.testing.assert_close(got, compute(sample), rtol=0, atol=0, equal_nan=True)
