"""Random functions that AutoGraph stages give what Python gives, by any executor, and autograd's gradients."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.random_sources import source
from tests.control_flow.written import module
from tfnb.errors import BranchChanged, ShapeError

F64 = torch.float64
FEEDS = (([0.5, 1.0, -2.0], 3), ([-1.0, 0.25], 0), ([3.0], 1), ([0.1, -0.4, 0.7, 1.3], 5))
PROGRAMS = int(os.environ.get("TFNB_GRAPHS", "0"))  # more than the quick tests run


def written(seed: int) -> Any:
    return module(source(seed), f"<program {seed}>")["program"]


def is_float(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.is_floating_point()


def check(seed: int) -> None:
    program = written(seed)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor([0.5, -0.25], dtype=F64), name="x")
        n = tfnb.placeholder(torch.tensor(2), name="n")
        out = list(tfnb.autograph(program)(x, n))
        found = [item for item in out if isinstance(item, torch.Tensor)]
        (dx,) = tfnb.gradients(sum(o.square() for o in found if is_float(o)), [x], unconnected="zero")
    session = tfnb.Session(graph, executor=random.Random(seed).choice(["auto", "dataflow"]), compile="off")
    for fed, iterations in FEEDS:
        leaf = torch.tensor(fed, dtype=F64, requires_grad=True)
        plain = program(leaf, iterations)
        try:
            *got, slope = session.run([*found, dx], {x: leaf.detach(), n: torch.tensor(iterations)})
        except (BranchChanged, ShapeError):
            assert any("stays Python" in note for note in graph.notes), f"seed {seed}"
            continue
        wanted = [torch.as_tensor(w).detach() for w, o in zip(plain, out, strict=True) if isinstance(o, torch.Tensor)]
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.to(F64), b.to(F64), rtol=1e-12, atol=1e-13, msg=f"seed {seed}")
        loss = sum(w.square() for w, o in zip(plain, out, strict=True) if is_float(o))
        (expected,) = torch.autograd.grad(loss, leaf, allow_unused=True) if loss.requires_grad else (None,)
        expected = torch.zeros_like(leaf) if expected is None else expected
        torch.testing.assert_close(slope, expected, rtol=1e-8, atol=1e-10, msg=f"seed {seed}")


@pytest.mark.filterwarnings("ignore:.*Python took the", "ignore:.*became the constant")
@pytest.mark.parametrize("seed", range(3))
def test_random_functions_give_what_python_gives(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Python took the", "ignore:.*became the constant")
def test_many_random_functions_give_what_python_gives() -> None:
    for seed in range(3, max(40, PROGRAMS)):
        check(seed)
