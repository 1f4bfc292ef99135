"""Steps under a memory budget: the same bits, a peak that keeps the budget, and errors that say what would do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import nn

import tfnb
from tests.graph.build import evaluate
from tests.graph.strategies import graphs
from tests.passes.test_pipeline import all_values
from tfnb.errors import InvalidArgument, ResourceExhausted, Unimplemented
from tfnb.execution import lower
from tfnb.graph import Graph
from tfnb.graph.check import check
from tfnb.memory import spare, step_passes, within
from tfnb.memory.rematerialize import AGAIN, plans
from tfnb.memory.scratch import state_bytes
from tfnb.passes import ONCE, optimize, peak, table

BATCH, WIDTH = 512, 64


def dropping() -> tuple[Graph, nn.Module, list[Any], dict[Any, torch.Tensor]]:
    """A deep network with dropout and batch norm whose activations are large beside its weights."""
    torch.manual_seed(0)
    layers = [[nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.2)] for _ in range(8)]
    net = nn.Sequential(*(layer for block in layers for layer in block), nn.Linear(WIDTH, 1))
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)
    with tfnb.record() as g:
        fed = {tfnb.placeholder(x): x, tfnb.placeholder(y): y}
        a, b = fed
        loss = F.mse_loss(net(a), b)
        step = tfnb.train.Adam(0.01).minimize(loss)
    return g, net, [loss, step], fed


def losses(budget: int | None, steps: int = 4) -> tuple[list[torch.Tensor], int]:
    """The loss curve and final weights, and the measured peak of a step with its Variables."""
    g, net, (loss, step), fed = dropping()
    session = tfnb.Session(g, compile="off", memory_budget=budget)
    curve = [session.run([loss, step], fed)[0] for _ in range(steps)]
    session.run([loss, step], fed, trace=True)
    assert session.trace is not None
    return [*curve, *(v.detach().clone() for v in net.state_dict().values())], session.trace.peak + state_bytes(g)


def smallest(budget: int) -> int:
    """What the error says of a budget that is too small."""
    with pytest.raises(ResourceExhausted, match=r"largest node, .* line \d+.*, are [\d,]+ bytes") as info:
        losses(budget)
    assert f"a memory budget of {budget:,} bytes is too small" in str(info.value) and info.value.node
    (found,) = re.findall(r"the smallest feasible budget is ([\d,]+) bytes", str(info.value))
    return int(found.replace(",", ""))


def test_half_of_the_memory_gives_the_same_loss_curve() -> None:
    want, most = losses(None)
    budget = most // 2
    assert smallest(1) <= budget
    got, measured = losses(budget)
    assert measured <= 1.01 * budget  # a reshape that has to copy is predicted to share memory
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


class Normed(nn.Module):
    """Blocks of a layer norm and a product, with a residual: the product's gradient takes what the norm gave."""

    def __init__(self) -> None:
        super().__init__()
        width = 512
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize(("rows", "again"), [(1024, True), (8, False)])
def test_layer_norms_are_computed_again_where_that_costs_next_to_nothing(rows: int, again: bool) -> None:
    net, x = Normed(), torch.randn(rows, 512)
    with tfnb.record() as g:
        fed = tfnb.placeholder(x, shape=tuple(x.shape))
        loss = net(fed)
        found = [loss, *tfnb.gradients(loss, list(net.parameters()))]
    ask = [f.value for f in found], [fed.value]
    kept, spared = optimize(g, *ask), optimize(g, *ask, last=(*ONCE, spare))
    copies = [node.op for node in spared.nodes if AGAIN in node.tags]
    assert set(copies) == ({"aten.native_layer_norm.default"} if again else set())
    assert peak(spared, *ask) <= (0.9 if again else 1) * peak(kept, *ask)
    want = net(x)
    torch.testing.assert_close(tfnb.run(found, {fed: x}), [want.detach(), *torch.autograd.grad(want, net.parameters())])


@pytest.mark.slow
def test_a_binary_search_finds_the_smallest_budget_that_is_said() -> None:
    g, _, fetches, fed = dropping()
    ask = [f.value for f in fetches], [x.value for x in fed]
    sizes = {next(iter(g.nodes[0].outputs[0].symbols)): BATCH}

    def fits(budget: int) -> bool:
        try:
            found = lower(g, *ask, step_passes(ONCE, within(budget, sizes)))
        except ResourceExhausted:
            return False
        return state_bytes(g) + peak(found.graph, *ask, sizes) <= budget

    said = smallest(1)
    low, high = 1, 1 << 30
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    assert low == said


def test_a_budget_that_is_too_small_names_the_node_its_line_and_what_is_enough() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 100), name="x")
        y = (x.exp() @ torch.ones(100, 300)).sum()
    text = (
        r"a memory budget of 130,000 bytes is too small for this step: the inputs and outputs of its largest node, "
        r"matmul/mm \(test_rematerialize.py line \d+:  y = .*\), are 132,800 bytes; the smallest feasible budget is "
        r"132,800 bytes. Give at least that, or feed fewer rows"
    )
    with pytest.raises(ResourceExhausted, match=text) as raised:
        tfnb.Session(g, memory_budget=130_000).run(y, {x: torch.ones(8, 100)})
    error = raised.value
    assert error.node == "matmul/mm" and error.op == "aten.mm.default" and error.line is not None
    assert tfnb.Session(g, memory_budget=132_800).run(y, {x: torch.ones(8, 100)}) > 0
    assert tfnb.Session(g, memory_budget=130_000).run(y, {x: torch.ones(5, 100)}) > 0


def test_plans_are_made_for_the_sizes_that_are_fed() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 1000))
        h = x
        for _ in range(6):
            h = h.sin().exp().tanh()
        (dx,) = tfnb.gradients(h.sum(), [x])
    session = tfnb.Session(g, memory_budget=100_000)
    leaf = torch.randn(10, 1000, requires_grad=True)
    h = leaf
    for _ in range(6):
        h = h.sin().exp().tanh()
    want = torch.autograd.grad(h.sum(), leaf)[0]
    torch.testing.assert_close(session.run(dx, {x: leaf.detach()[:1]}), want[:1])
    with pytest.raises(ResourceExhausted, match="smallest feasible budget"):
        session.run(dx, {x: leaf.detach()})
    session = tfnb.Session(g, memory_budget=400_000)
    for rows in (1, 10, 4):
        torch.testing.assert_close(session.run(dx, {x: leaf.detach()[:rows]}), want[:rows])
    again = {name: len(found.plan.values) for name, found in session.plans()}
    assert again["x [1, 1000]"] == 0 < again["x [10, 1000]"]
    assert "x [10, 1000]: generated code; at most" in session.status()[1]
    programs = {plan.program for _, plan in session.plans()}
    assert len(programs) == 2  # the one without a plan fits at four rows too


@given(contents=graphs(stateful=False))
def test_every_plan_computes_the_same(contents: Any) -> None:
    graph, feed = Graph("g", contents), {"x": torch.randn(2, 3)}
    values = all_values(contents)
    want = evaluate(contents, feed)
    for ask in (values[-1:], values[-4::2]):
        peaks = []
        for _, planned in plans(graph, ask, []):
            check(planned.contents)
            got = evaluate(planned.contents, feed)
            peaks.append(peak(planned, ask, []))
            for value in ask:
                torch.testing.assert_close(got[value], want[value], equal_nan=True, rtol=0, atol=0)
        assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)


def test_what_writes_and_what_others_made_is_kept() -> None:
    @torch.library.custom_op("tfnb_test::wide", mutates_args=())
    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    wide.register_fake(torch.empty_like)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(64, 64), shape=(64, 64))
        kept = wide(x)
        again = x.sin()
        middle = (again @ kept).view(1, -1).repeat(8, 1).exp().sum()
        y = middle * again.sum() * kept.sum()
    *_, (_, last) = plans(g, [y.value], [x.value])
    ops = [n.op for n in last.nodes]
    assert ops.count("aten.sin.default") == 2 and ops.count("tfnb_test.wide.default") == 1


@pytest.mark.slow
def test_a_long_chain_needs_no_recursion() -> None:
    with tfnb.record() as g:
        h = x = tfnb.placeholder(torch.randn(8, 8), shape=(8, 8))
        for _ in range(1500):
            h = h.sin()
        (dx,) = tfnb.gradients(h, [x])
    first, second, *_ = plans(g, [dx.value], [x.value])
    assert second[0] < first[0]


def test_what_a_budget_does_not_go_with() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3))
        y = x.exp()
    for wrong in (0, -1, 1.5, "one GB", True):
        with pytest.raises(InvalidArgument, match="number of bytes"):
            tfnb.Session(g, memory_budget=wrong)
    with pytest.raises(Unimplemented, match="step in parts"):
        tfnb.Session(g, memory_budget=1 << 20).step([y], [x])


def test_the_table_of_passes_shows_what_a_budget_saves() -> None:
    g, _, fetches, fed = dropping()
    ask = [f.value for f in fetches], [x.value for x in fed]
    most = peak(lower(g, *ask).graph, *ask)
    limit = state_bytes(g) + 3 * most // 4
    rows = {stage.name: stage for stage in table(g, *ask, last=step_passes(ONCE, within(limit)))}
    assert rows["recompute"].nodes > rows["prune"].nodes and rows["recompute"].peak <= 3 * most // 4
