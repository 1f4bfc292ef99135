"""Loops in native steps: the module that is compiled computes what generated code does, and its size is the body's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import tfnb
from tfnb.errors import Unimplemented
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.compiled_loops import obstacle
from tfnb.execution.tiers.decompositions import decompositions
from tfnb.execution.tiers.native import package
from tfnb.execution.tiers.native.exportable import ExtraOperands, exportable, obstacles
from tfnb.execution.tiers.native.request import NativeRequest, Operand
from tfnb.execution.tiers.native.tier import loaded
from tfnb.execution.tiers.native.unrolling import MOST_ITERATIONS, unroll_scans
from tfnb.execution.tiers.operand_checks import OperandRefused

pytestmark = pytest.mark.filterwarnings("ignore")  # inductor's own
TIME, BATCH, WIDTH = 7, 3, 4


class Recorded:
    """The program of what ``make`` records of placeholders for these samples."""

    def __init__(self, make: Callable[..., Any], *samples: torch.Tensor) -> None:
        with tfnb.record() as graph:
            fed = [tfnb.placeholder(sample, name=f"x{place}") for place, sample in enumerate(samples)]
            fetches = make(*fed)
        self.session = tfnb.Session(graph, compile="off")
        self.session.run(fetches, dict(zip(fed, samples, strict=True)))
        (prepared,) = self.session._prepared.values()
        self.program: Program = prepared.code.program.undonated()

    def storages(self) -> list[torch.Tensor]:
        return [variable.storage.clone() for variable in self.program.variables]

    def module(self, *feeds: torch.Tensor) -> Callable[..., Any]:
        """What is compiled, run as it is."""
        operands = [Operand.of(x) for x in (*feeds, *self.storages())]
        module, _, about = exportable(self.program, operands, decompositions(select_decomp_table()))
        given = ExtraOperands.of(self.program, operands)
        self.loops = [node for node in module.graph.nodes if node.target is torch.ops.higher_order.scan]

        def run(*args: torch.Tensor) -> list[Any]:
            outs = module(*args, *given.constants)
            if about.flag and outs[-1]:
                raise OperandRefused
            return [None if at is None else outs[at] if at >= 0 else args[~at] for at in about.fetched]

        return run


class Cell:
    """A recurrent net with its step; its loop is one of the graph."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weights = [torch.nn.Parameter(0.3 * torch.randn(n, WIDTH)) for n in (4 * WIDTH, 4 * WIDTH)]
        self.bias = torch.nn.Parameter(torch.zeros(4 * WIDTH))

    def __call__(self, xs: Any, start: Any) -> list[Any]:
        def cell(state: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
            hidden, memory = state
            gates = F.linear(x, self.weights[0], self.bias) + F.linear(hidden, self.weights[1])
            entry, forget, new, out = gates.chunk(4, 1)
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(entry) * torch.tanh(new)
            return torch.sigmoid(out) * torch.tanh(memory), memory

        hidden, _ = tfnb.fold(cell, (start, start), xs)
        loss = (hidden - 1).square().mean()
        return [loss, tfnb.train.SGD(0.5).minimize(loss)]


def backwards(xs: Any) -> list[Any]:
    """Rows from the last to the first, a constant of the body, and gradients through both."""
    scale = torch.tensor([1.0, 0.5, 2.0, 1.5])

    def step(total: Any, x: Any) -> tuple[Any, Any]:
        total = total * 0.9 + x * torch.tensor([0.5, 1.0, 1.5, 2.0])
        return total, torch.sin(total * scale)

    last, rows = tfnb.scan(step, xs[0] * 0, xs, reverse=True)
    loss = (rows * torch.arange(float(TIME)).view(-1, 1, 1)).sum() + last.sum()
    return [loss, rows, *tfnb.gradients(loss, [xs])]


def nested(xs: Any) -> list[Any]:
    """A loop in a loop, of which each takes what the other carries."""

    def outer(total: Any, x: Any) -> tuple[Any, Any]:
        inner = tfnb.fold(lambda a, row: torch.tanh(a + row * total.sum()), total[0], x)
        return total + inner, inner

    last, rows = tfnb.scan(outer, xs[0], xs)
    return [last, rows, *tfnb.gradients(last.sum() + rows.square().sum(), [xs])]


def passed(xs: Any) -> list[Any]:
    """Bodies that give what they took, and the same value twice."""

    def step(state: tuple[Any, Any, Any], x: Any) -> tuple[Any, Any]:
        a, b, c = state
        return (b, a, c), (x, a, a + b, c)

    (a, b, c), rows = tfnb.scan(step, (xs[0], xs[1], xs[0]), xs)
    return [a, b, c, *rows]


CASES = {"backwards": backwards, "nested": nested, "passed": passed}


@pytest.mark.parametrize("name", CASES)
def test_a_loop_of_the_compiled_module_is_that_of_generated_code(name: str) -> None:
    recorded, xs = Recorded(CASES[name], torch.randn(TIME, BATCH, WIDTH)), torch.randn(TIME, BATCH, WIDTH)
    torch.testing.assert_close(recorded.module(xs)(xs), list(recorded.program.forward(xs, 0)))
    assert recorded.loops


def test_a_training_step_with_a_loop_writes_what_generated_code_does() -> None:
    recorded = Recorded(Cell(), torch.randn(TIME, BATCH, WIDTH), torch.zeros(BATCH, WIDTH))
    feeds = [torch.randn(TIME, BATCH, WIDTH), torch.randn(BATCH, WIDTH)]
    module, mine, theirs = recorded.module(*feeds), recorded.storages(), recorded.storages()
    assert len(recorded.loops) == 2  # forward, backward
    for run in range(4):
        wanted, pending = recorded.program.compute(feeds, theirs, run)
        recorded.program.commit(pending)
        torch.testing.assert_close(module(*feeds, *mine)[0], wanted[0])
    torch.testing.assert_close(mine, theirs)


def test_the_module_has_one_body_for_any_number_of_iterations() -> None:
    def nodes(time: int) -> int:
        recorded = Recorded(Cell(), torch.randn(time, BATCH, WIDTH), torch.zeros(BATCH, WIDTH))
        operands = [Operand.of(x) for x in (torch.randn(time, BATCH, WIDTH), torch.zeros(BATCH, WIDTH))]
        operands += map(Operand.of, recorded.storages())
        module, _, _ = exportable(recorded.program, operands, decompositions(select_decomp_table()))
        return sum(len(part.graph.nodes) for part in module.modules() if hasattr(part, "graph"))

    assert nodes(3) == nodes(50)


def test_an_index_out_of_range_in_some_iteration_is_flagged() -> None:
    table = torch.randn(5, WIDTH)
    recorded = Recorded(
        lambda at: [tfnb.fold(lambda total, i: total + F.embedding(i, tfnb.constant(table)), torch.zeros(WIDTH), at)],
        torch.tensor([0, 4, 2]),
    )
    good, bad = torch.tensor([4, 1, 3]), torch.tensor([0, 5, 1])
    run = recorded.module(good)
    torch.testing.assert_close(run(good), list(recorded.program.forward(good, 0)))
    with pytest.raises(OperandRefused):
        run(bad)


def test_a_loop_that_takes_no_iteration_is_generated_code() -> None:
    start = torch.ones(WIDTH)
    recorded = Recorded(lambda xs: [tfnb.fold(lambda total, x: total * x, start, xs)], torch.randn(TIME, WIDTH))
    one = torch.randn(1, WIDTH)
    torch.testing.assert_close(recorded.module(one)(one), [one[0]])
    with pytest.raises(Unimplemented, match="takes no iteration"):
        recorded.module(torch.randn(0, WIDTH))


def test_a_loop_that_is_none_of_these_says_why() -> None:
    def until(xs: Any) -> Any:
        return tfnb.while_loop(lambda a: a.sum() < 100, lambda a: a * 2 + xs.square().sum(), xs[0])

    def drawn(xs: Any) -> Any:
        return tfnb.fold(lambda total, x: total + F.dropout(x, 0.5), torch.zeros(BATCH, WIDTH), xs)

    for make, why in ((until, "runs as often as data decide"), (drawn, "draws in each iteration")):
        found = obstacles(Recorded(lambda xs, make=make: [make(xs)], torch.rand(TIME, BATCH, WIDTH)).program)
        assert any(why in each for each in found.values()), found


@pytest.mark.slow
@pytest.mark.skipif(obstacle() is not None, reason="there is no C++ compiler")
def test_a_compiled_loop_trains_as_generated_code_does(tmp_path: Path) -> None:
    recorded = Recorded(Cell(), torch.randn(TIME, BATCH, WIDTH), torch.zeros(BATCH, WIDTH))
    feeds: Sequence[torch.Tensor] = [torch.randn(TIME, BATCH, WIDTH), torch.randn(BATCH, WIDTH)]
    NativeRequest.of(recorded.program, [*feeds, *recorded.storages(), 0]).save(tmp_path)
    package.build(NativeRequest.load(tmp_path), tmp_path)
    step, mine, theirs = loaded(tmp_path, recorded.program), recorded.storages(), recorded.storages()
    for run in range(20):
        wanted, pending = recorded.program.compute(feeds, theirs, run)
        recorded.program.commit(pending)
        torch.testing.assert_close(step(feeds, mine, run), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, MOST_ITERATIONS, 12])
def test_several_iterations_in_a_body_give_what_one_gives(count: int) -> None:
    def iteration(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        new = torch.tanh(a @ w + x) * y
        return [new, a * 2, new - x]

    def function(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        last, doubled, less = torch.ops.higher_order.scan(iteration, [a], [x.flip(0), y], (w,))
        return [last, doubled, less.flip(0)]

    sizes = (2, 3), (count, 2, 3), (count, 2, 3), (3, 3)
    args = [torch.randn(size) for size in sizes]
    wanted = function(*args)
    made = torch.export.export(make_fx(function, tracing_mode="fake")(*args), tuple(args)).graph_module
    mode = next(node.meta["val"].fake_mode for node in made.graph.nodes if node.op == "placeholder")
    with V.set_fake_mode(mode):
        unroll_scans(made.graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    targets = [node.target for node in made.graph.nodes]
    assert torch.ops.higher_order.scan not in targets and torch.ops.aten.flip.default not in targets
    assert (torch.ops.higher_order.while_loop in targets) == (count > MOST_ITERATIONS)
    torch.testing.assert_close(made(*args), wanted)
