"""Random functions, most of which write in place, give what Python gives: values, buffers, and autograd's gradients.

Where nobody can say which names share memory a write is refused, with what to write instead; nothing else may differ.
"""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tests.control_flow.random_writes import source
from tests.control_flow.written import module
from tfnb.errors import BranchChanged, ShapeError, TfnbError, Unsupported

F64 = torch.float64
PROGRAMS = int(os.environ.get("TFNB_GRAPHS", "0"))  # more than the quick tests run
pytestmark = pytest.mark.filterwarnings("ignore:.*Python took the", "ignore:.*became the constant")


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 3, dtype=F64, generator=torch.Generator().manual_seed(count))


SAMPLE = rows(2), 2
FEEDS = [(rows(count), n) for count, n in ((3, 3), (1, 0), (4, 1), (5, 2))]


class Net(nn.Module):
    """Two buffers, into which programs write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor([1.0, -0.5, 0.125], dtype=F64))
        self.register_buffer("total", torch.tensor(0.25, dtype=F64))

    def state(self) -> list[torch.Tensor]:
        return [self.seen.clone(), self.total.clone()]


def written(seed: int, *, writes: bool) -> Any:
    return module(source(seed, writes=writes), f"<writes {seed} {writes}>")["program"]


def python(program: Any, x: torch.Tensor, n: int) -> tuple[Any, list[torch.Tensor]] | None:
    """What the program gives, and what it leaves in the buffers; None where it fails."""
    net = Net()
    try:
        return program(x, n, net), net.state()
    except Exception:  # whatever random code may raise
        return None


def loss(items: Any) -> Any:
    return sum(item.square().sum() for item in items if isinstance(item, torch.Tensor) and item.is_floating_point())


def slope(program: Any, fed: torch.Tensor, n: int) -> torch.Tensor | None:
    """Autograd's gradient; None where it refuses one, as of a tensor that was written after it was needed."""
    leaf = fed.clone().requires_grad_()
    try:
        total = loss(program(leaf, n, Net()) or ())
        if not isinstance(total, torch.Tensor) or not total.requires_grad:
            return torch.zeros_like(leaf)
        return torch.autograd.grad(total, leaf, materialize_grads=True)[0]
    except RuntimeError:
        return None


def check(seed: int, *, writes: bool = True) -> str:
    """What became of it, for whoever counts."""
    program, net = written(seed, writes=writes), Net()
    if python(program, *SAMPLE) is None:
        return "fails"
    try:
        with tfnb.record() as graph:
            x, n = tfnb.placeholder(SAMPLE[0].clone(), name="x"), tfnb.placeholder(torch.tensor(SAMPLE[1]), name="n")
            out = tfnb.autograph(program)(x, n, net) or ()
            found = [item for item in out if isinstance(item, torch.Tensor)]
            fetches = [*found, *tfnb.gradients(loss(found), [x], unconnected="zero"), tfnb.group(net.seen, net.total)]
    except Unsupported as error:
        said = str(error)
        assert "line" in said and ("clone it" in said or "torch.stack" in said), f"seed {seed}: {said}"
        return "refused"
    executor = random.Random(seed).choice(["auto", "dataflow"])
    session = tfnb.Session(graph, executor=executor, compile="off")
    if any("took the sample" in note for note in graph.notes):  # it is that in every run
        return "Python's"
    is_python = any("stays Python" in note for note in graph.notes)
    for fed, iterations in FEEDS:
        run = functools.partial(session.run, fetches, {x: fed.clone(), n: torch.tensor(iterations)})
        _compare(seed, program, net, out, run, fed, iterations, is_python=is_python)
    return "Python's" if is_python else "staged"


def _compare(
    seed: int, program: Any, net: Net, out: Any, run: Any, fed: torch.Tensor, iterations: int, *, is_python: bool
) -> None:  # fmt: skip
    """One run beside Python's."""
    before, plain = net.state(), python(program, fed.clone(), iterations)
    try:
        *got, dx, _ = run()
    except (TfnbError, RuntimeError, IndexError) as error:
        torch.testing.assert_close(net.state(), before, rtol=0, atol=0)
        is_guard = is_python and isinstance(error, (BranchChanged, ShapeError))
        assert plain is None or is_guard, f"seed {seed}: {error}"
        return
    if plain is None:  # what fails in Python need not be computed in a graph
        _put(net, before)
        return
    wanted, left = plain
    pairs = [(item, want) for item, want in zip(out, wanted, strict=True) if isinstance(item, torch.Tensor)]
    for mine, (_, want) in zip(got, pairs, strict=True):
        theirs = torch.as_tensor(want)
        torch.testing.assert_close(mine.to(F64), theirs.to(F64), rtol=1e-9, atol=1e-10, msg=f"seed {seed}")
    torch.testing.assert_close(net.state(), left, rtol=1e-9, atol=1e-10, msg=f"seed {seed}: buffers")
    _put(net, before)
    expected = slope(program, fed, iterations)
    if expected is not None:
        torch.testing.assert_close(dx, expected, rtol=1e-7, atol=1e-8, msg=f"seed {seed}: gradient")


def _put(net: Net, state: list[torch.Tensor]) -> None:
    net.seen.copy_(state[0])
    net.total.copy_(state[1])


@pytest.mark.parametrize(("seed", "writes"), [(0, True), (1, True), (2, True), (0, False), (2, False), (4, False)])
def test_random_functions_write_what_python_writes(seed: int, writes: bool) -> None:
    check(seed, writes=writes)


@pytest.mark.slow
def test_many_random_functions_write_what_python_writes() -> None:
    kinds = [check(seed) for seed in range(3, max(20, PROGRAMS))]
    assert kinds.count("staged") > len(kinds) // 4  # and are in the graph
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))})  # noqa: T201  the share that is refused
    assert kinds.count("refused") < len(kinds) // 2


@pytest.mark.slow
def test_many_random_functions_give_what_python_gives() -> None:
    kinds = [check(seed, writes=False) for seed in range(3, max(20, PROGRAMS))]
    assert kinds.count("staged") > len(kinds) // 3
