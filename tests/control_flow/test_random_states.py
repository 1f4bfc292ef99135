"""Random functions with state give what Python gives: values, gradients, and what a training step leaves behind."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tests.control_flow.random_programs import python_loop
from tests.control_flow.random_states import PlainArray, PlainNet, PlainVariable, put, source, through
from tests.control_flow.written import module
from tfnb.errors import BranchChanged, InvalidArgument, ShapeError

F64 = torch.float64
RATE = 0.05
SAMPLE = [0.5, -0.25], 2
FEEDS = (([0.5, 1.0, -2.0], 3), ([-1.0, 0.25], 0), ([3.0], 1), ([0.1, -0.4, 0.7, 1.3], 4))
PROGRAMS = int(os.environ.get("TFNB_GRAPHS", "0"))  # more than the quick tests run
pytestmark = pytest.mark.filterwarnings("ignore:.*Python took the", "ignore:.*became the constant", "ignore:.*dense")


class Net(nn.Module):
    """Two parameters and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, -0.6, 0.9], dtype=F64))
        self.s = nn.Parameter(torch.tensor(0.7, dtype=F64))
        self.register_buffer("seen", torch.tensor(0.25, dtype=F64))
        self.register_buffer("table", torch.tensor([1.0, -0.5, 0.125], dtype=F64))


def written(seed: int, *, plain: bool) -> Any:
    text, name = source(seed, plain=plain), f"<state {seed} {plain}>"
    return module(text, name, through=through, put=put)["program"]


class Pair:
    """A program recorded, and beside it the state for plain Python."""

    def __init__(self, seed: int, executor: str, **options: Any) -> None:
        self.net, self.plain, self.executor = Net(), written(seed, plain=True), executor
        self.v = tfnb.Variable(torch.tensor(0.5, dtype=F64), name="v")
        self.u = tfnb.Variable(torch.tensor([0.1, 0.2, -0.3], dtype=F64), name="u")
        self.of_sample = self.python(*SAMPLE)
        if self.of_sample is None:
            return
        with tfnb.record() as self.graph:
            self.x = tfnb.placeholder(torch.tensor(SAMPLE[0], dtype=F64), name="x")
            self.n = tfnb.placeholder(torch.tensor(SAMPLE[1]), name="n")
            program = tfnb.autograph(written(seed, plain=False))
            self.out = program(self.x, self.n, self.v, self.u, self.net, tfnb.TensorArray, tfnb.while_loop)
            self.found = [item for item in self.out if isinstance(item, torch.Tensor)]
            loss = sum(item.square().sum() for item in self.found if item.is_floating_point())
            self.slopes = tfnb.gradients(loss, [self.x, self.v, self.u, self.net.w, self.net.s], unconnected="zero")
            train = tfnb.train.SGD(RATE).minimize(loss)
            self.step = tfnb.group(train, self.net.seen, self.net.table, self.v, self.u, self.net.w, self.net.s)
        self.session = tfnb.Session(self.graph, executor=executor, **options)

    def state(self) -> list[torch.Tensor]:
        kept = (self.net.w, self.net.s, self.net.seen, self.net.table)
        return [self.v.value(), self.u.value(), *(item.detach().clone() for item in kept)]

    def python(
        self, fed: list[float], iterations: int
    ) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor]] | None:
        """Values, gradients and the state after a step; None where the program is wrong for these."""
        v, u = (PlainVariable(item.value().requires_grad_()) for item in (self.v, self.u))
        x, net = torch.tensor(fed, dtype=F64, requires_grad=True), PlainNet(self.net)
        leaves = [x, v.now, u.now, net.w, net.s]
        try:
            out = self.plain(x, iterations, v, u, net, PlainArray, python_loop)
        except LookupError:
            return None
        loss = sum(y.square().sum() for y in out if isinstance(y, torch.Tensor) and y.is_floating_point())
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True)
        slopes = [torch.zeros_like(leaf) if s is None else s for leaf, s in zip(leaves, slopes, strict=True)]
        trained = zip((v.now, u.now, net.w, net.s), slopes[1:], strict=True)
        return out, slopes, [*((item - RATE * dx).detach() for item, dx in trained), net.seen, net.table]

    def run(self, seed: int, fed: list[float], iterations: int) -> list[torch.Tensor]:
        """By `run`, `make_callable` or a step in parts."""
        feeds = {self.x: torch.tensor(fed, dtype=F64), self.n: torch.tensor(iterations)}
        wanted = [*self.found, *self.slopes, self.step]
        if seed % 3 == 1:
            return self.session.make_callable(wanted, list(feeds))(*feeds.values())
        if seed % 3 == 2 and self.executor == "auto":
            with self.session.step(wanted, list(feeds)) as step:
                step.feed(feeds)
                return [step.fetch(item) for item in wanted]
        return self.session.run(wanted, feeds)


def check(seed: int, feeds: Any = FEEDS, **options: Any) -> None:
    rng = random.Random(seed)
    pair = Pair(seed, **{"executor": rng.choice(["auto", "dataflow"]), "compile": "off", **options})
    if pair.of_sample is None or any("took the sample" in note for note in pair.graph.notes):
        return
    for fed, iterations in feeds:
        before, expected = pair.state(), pair.python(fed, iterations)
        try:
            *got, _ = pair.run(seed, fed, iterations)
        except (BranchChanged, ShapeError, InvalidArgument) as error:
            torch.testing.assert_close(pair.state(), before, rtol=0, atol=0)
            assert expected is None or isinstance(error, (BranchChanged, ShapeError)), f"seed {seed}: {error}"
            continue
        assert expected is not None, f"seed {seed}: an element that was not written was read"
        wanted, slopes, after = expected
        wanted = [torch.as_tensor(w) for w, o in zip(wanted, pair.out, strict=True) if isinstance(o, torch.Tensor)]
        for a, b in zip([*got, *pair.state()], [*wanted, *slopes, *after], strict=True):
            torch.testing.assert_close(a.to(F64), b.detach().to(F64), rtol=1e-7, atol=1e-9, msg=f"seed {seed}")


@pytest.mark.parametrize("seed", (0, 8, 151))
def test_random_functions_with_state_give_what_python_gives(seed: int) -> None:
    check(seed)


@pytest.mark.slow
def test_many_random_functions_with_state_give_what_python_gives() -> None:
    for seed in range(max(16, PROGRAMS)):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (7, 18, *range(PROGRAMS // 100)))  # short ones: long ones compile for minutes
def test_compiled_random_functions_with_state_give_what_python_gives(seed: int) -> None:
    check(seed, FEEDS[:2], executor="auto", compile="now")
