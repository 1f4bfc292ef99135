"""Steps in packs x microbatches on a device that enforces its budget: the values of plain microbatches, bit by bit."""

from __future__ import annotations

import re
import warnings
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument, ResourceExhausted, Unimplemented
from tfnb.execution.pack_step import PackPrograms, PackStep
from tfnb.memory.byte_counts import told
from tfnb.memory.pack_cut import PackCut
from tfnb.memory.pack_tasks import Phase
from tfnb.memory.packs import LayerPacks
from tfnb.memory.scratch import allocated
from tfnb.passes import StepGraph, step_graph

WIDTH, TIME, VOCABULARY, LAYERS, MICROBATCHES = 32, 4, 40, 6, 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(a))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """A GPT on rows of numbers. tied: the last layer takes weights of the first."""

    def __init__(self, dropout: float = 0.0, tied: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.head, self.tied = nn.Linear(WIDTH, VOCABULARY, bias=False), tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.h:
            x = block(x)
        if self.tied:
            x = x @ self.enter.weight
        return self.head(x)


def normed() -> nn.Module:
    """Layers whose batch norms write buffers in each microbatch."""
    return nn.Sequential(*(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TIME), nn.Tanh()) for _ in range(3)
    ), nn.Linear(WIDTH, VOCABULARY))  # fmt: skip


def dense() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)), nn.Linear(WIDTH, VOCABULARY)
    )


NETS = {
    "dense": dense,
    "batch norm": normed, "one layer": lambda: nn.Linear(WIDTH, VOCABULARY), "transformer": Transformer,
    "dropout": lambda: Transformer(0.2, layers=2), "tied": lambda: Transformer(tied=True, layers=2),
}  # fmt: skip


class Training:
    """A recorded step with its data, the same each time."""

    def __init__(self, net: str = "batch norm", rows: int = 16) -> None:
        torch.manual_seed(0)
        self.net = NETS[net]().to(torch.float64)
        self.rows = torch.randn(rows, TIME, WIDTH, dtype=torch.float64)
        self.labels = torch.randint(0, VOCABULARY, (rows, TIME))
        with tfnb.record() as self.graph:
            self.x = tfnb.placeholder(self.rows[:4], name="x")
            self.y = tfnb.placeholder(self.labels[:4], name="y")
            self.loss = F.cross_entropy(self.net(self.x).flatten(0, 1), self.y.flatten())
            self.ones = self.y.sum()
            self.train = tfnb.train.Adam(1e-2).minimize(self.loss)
        self.graph.seed = 3

    def trained(self, session: tfnb.Session, steps: int = 2) -> list[torch.Tensor]:
        call = session.make_callable([self.loss, self.train], [self.x, self.y], microbatches=MICROBATCHES)
        losses = [call(self.rows, self.labels)[0] for _ in range(steps)]
        return [*losses, *(variable.value().clone() for variable in self.graph.variables)]

    @cached_property
    def step(self) -> StepGraph:
        return step_graph(self.graph, (self.loss.value, self.train.value), (self.x.value, self.y.value))

    def programs(self, packing: LayerPacks | None = None) -> PackPrograms:
        return PackPrograms(self.step, packing)


@pytest.mark.parametrize(
    "net", [net if at < 3 else pytest.param(net, marks=pytest.mark.slow) for at, net in enumerate(NETS)]
)
def test_a_budget_of_a_quarter_of_weights_and_state_or_of_the_largest_task_trains_as_without(net: str) -> None:
    """P10, P11, P13: bytes as planned, never over the budget (the device raises), values bitwise in float64."""
    plain, tight = Training(net), Training(net)
    step = PackStep(tight.programs(), (2,) * MICROBATCHES)
    least = max(map(step.need, step.tasks))
    budget = max(least, step.state_bytes // 4)
    want = plain.trained(tfnb.Session(plain.graph, compile="off"))
    session = tfnb.Session(tight.graph, compile="off", memory_budget=budget)
    got = tight.trained(session)
    assert all(map(torch.equal, got, want))
    ((_, found),) = session.plans()
    assert found.last is not None and found.last.most <= found.schedule.most <= budget
    assert found.last.loaded + found.last.stored == found.schedule.moved
    is_quarter = budget == step.state_bytes // 4
    assert is_quarter == (net == "transformer")  # the update of the last layer of others, with its slots, is more
    if is_quarter:
        assert found.schedule.moved < 0.3 * found.lru
        text = rf"{LAYERS} packs x 8 microbatches, {told(found.schedule.moved)} a step move, \d\.\d times the time"
        assert re.search(text, session.status()[0])


def test_the_budget_of_fit_holds_for_microbatches_with_a_shorter_last_batch() -> None:
    weights = []
    for budget in (None, "100KB"):
        made = Training("dense", rows=22)
        fed = {made.x: made.rows, made.y: made.labels}
        tfnb.fit(made.train, fed, batch_size=16, epochs=2, microbatches=4, memory_budget=budget)
        weights.append([variable.value().clone() for variable in made.graph.variables])
    assert all(map(torch.equal, *weights))


def test_every_node_is_in_one_piece_but_for_what_is_computed_again_and_time_never_goes_back() -> None:
    """P1, P2, P3."""
    made = Training().programs().cut
    by_id, seen = made.graph.contents.by_id, set()
    homes: dict[int, list[Phase]] = {}
    for piece in made.pieces:
        assert all(value in seen for value in (*piece.takes, *(piece.gradients if piece.phase is Phase.UPDATE else ())))
        seen |= {*piece.gives, *piece.gradients}
        for node in piece.nodes:
            homes.setdefault(node, []).append(piece.phase)
    timed = {node.id for node in made.graph.nodes if node.id in made.time}
    assert timed - homes.keys() <= {node for node in timed if "update" in by_id[node].tags}
    doubled = {node for node, phases in homes.items() if len(phases) > 1 and node in made.time}
    assert doubled and all(homes[node] == [Phase.FORWARD, Phase.BACKWARD] for node in doubled)
    for node in made.graph.nodes:
        before = [made.time[value.node] for value in node.inputs if value.node in made.time]
        assert node.id not in made.time or made.time[node.id] >= max(before, default=0)


def test_pieces_allocate_no_more_than_was_planned() -> None:
    """Work is predicted; torch's profiler counts what each piece really allocates."""
    made = Training()
    step = PackStep(made.programs(), (2,) * MICROBATCHES)
    feeds = {made.x.value: made.rows, made.y.value: made.labels}
    plan = step.planned(step.state_bytes)
    compute, over = step._task, []

    def measured(task: Any, *args: Any) -> None:
        most, _ = allocated(lambda: compute(task, *args), "cpu")
        planned = task.work + sum(step.sizes[item] for item in task.makes)
        over.extend([(str(task), most, planned)] if most > 1.02 * planned + 512 else [])

    step._task = measured  # type: ignore[method-assign]
    step.compute(feeds, {v: v.storage for v in step.of.variables}, plan, step.state_bytes)
    assert not over


def test_a_step_that_is_stopped_at_any_move_has_written_nothing() -> None:
    """P12."""
    made = Training()
    programs = made.programs()
    step = PackStep(programs, (2,) * MICROBATCHES)
    before = [variable.value().clone() for variable in made.graph.variables]
    versions = [variable.writes.value for variable in made.graph.variables]
    compute, left = step._task, [0]

    def stopping(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        compute(*args)

    step._task = stopping  # type: ignore[method-assign]
    budget = step.state_bytes
    plan, feeds = step.planned(budget), {made.x.value: made.rows, made.y.value: made.labels}
    for at in (0, 1, len(step.tasks) // 2, len(step.tasks) - 1):
        left[0] = at
        with pytest.raises(KeyboardInterrupt):
            step.compute(feeds, {v: v.storage for v in programs.variables}, plan, budget)
        assert all(map(torch.equal, before, [variable.value() for variable in made.graph.variables]))
    assert versions == [variable.writes.value for variable in made.graph.variables]


def test_what_is_watched_of_the_update_is_that_of_the_whole_step() -> None:
    x0 = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def watched(**options: Any) -> dict[str, float]:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with tfnb.record():
            x = tfnb.placeholder(x0)
            loss = (net(x) - x).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            largest = net[0].weight.grad.abs().max()
            optimizer.step()
            after = net[1].weight.norm()
            step = tfnb.effects()
        found = tfnb.fit(
            step,
            {x: x0},
            batch_size=12,
            watch={"loss": loss, "norm": norm, "largest": largest, "after": after},
            **options,
        )
        return {name: value for name, value in found.history[-1].items() if name not in ("epoch", "step")}

    wanted = watched()
    for options in ({"microbatches": 3}, {"microbatches": 3, "memory_budget": "1MB"}, {"memory_budget": "1MB"}):
        assert watched(**options) == pytest.approx(wanted, rel=1e-12)


def test_a_budget_below_the_largest_task_names_it_and_the_least_that_works() -> None:
    made = Training()
    with pytest.raises(ResourceExhausted, match=r"largest task, (update|backward) of pack \d") as raised:
        made.trained(tfnb.Session(made.graph, memory_budget=1000))
    (least,) = re.findall(r"feasible budget is ([\d,]+)", str(raised.value))
    made.trained(tfnb.Session(made.graph, memory_budget=int(least.replace(",", ""))), 1)


def test_what_packs_do_not_do_is_refused_by_name() -> None:
    made = Training()
    session = tfnb.Session(made.graph, memory_budget=10**9)
    with pytest.raises(Unimplemented, match="is fetched, and packs give means"):
        call = session.make_callable([made.ones, made.train], [made.x, made.y], microbatches=2)
        call(made.rows, made.labels)
    call = session.make_callable([made.train], [made.x, made.y], microbatches=2, check="nan")
    with pytest.raises(Unimplemented, match="neither traced nor checked"):
        call(made.rows, made.labels)


def test_an_update_that_takes_a_value_of_rows_is_refused() -> None:
    v = tfnb.Variable(torch.zeros(()), name="v")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        w = tfnb.Variable(torch.ones(3), name="w")
        loss = (x @ w.read()).mean()
        (slope,) = tfnb.gradients(loss, [w])
        out = v.assign(slope.sum() * loss)
    with pytest.raises(Unimplemented, match="no dense gradient"):
        _ = PackCut(step_graph(graph, (out.value,), (x.value,))).pieces


def test_an_error_in_a_pack_names_the_line_and_writes_nothing() -> None:
    made = Training()
    session = tfnb.Session(made.graph, memory_budget=10**9)
    call = session.make_callable([made.loss, made.train], [made.x, made.y], microbatches=2)
    before = [variable.value().clone() for variable in made.graph.variables]
    with pytest.raises(InvalidArgument, match=r"(?s)failed: .*test_pack_steps.py line \d+:"):
        call(made.rows, made.labels + VOCABULARY)
    assert all(map(torch.equal, before, [variable.value() for variable in made.graph.variables]))


def test_a_buffer_that_two_packs_use_is_refused_or_read_in_order() -> None:
    """Grouped microbatches would read it in another order than they write it."""
    found = []
    for budget in (None, 10**9):
        torch.manual_seed(0)
        net = nn.ModuleList([nn.BatchNorm1d(3), nn.Linear(3, 3)])
        with tfnb.record() as graph:
            x = tfnb.placeholder(torch.randn(4, 3), name="x")
            before = net[0].running_mean * 2
            h = net[0](x)
            loss = (net[1](h) + before).square().mean()
            train = tfnb.train.SGD(0.1).minimize(loss)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = tfnb.Session(graph, memory_budget=budget).make_callable([loss, train], [x], microbatches=2)
        rows = torch.randn(6, 3)
        found.append([call(rows)[0] for _ in range(3)])
    assert all(map(torch.equal, *found))


def masked_loss(kind: str, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss that divides by what counts of its rows."""
    each, mask = F.cross_entropy(out, y, reduction="none"), (y > 0).double()
    match kind:
        case "ignored":
            return F.cross_entropy(out, y, ignore_index=0)
        case "masked":
            return (each * mask).sum() / mask.sum().clamp(min=1)
        case _:
            return each.sum()


@pytest.mark.parametrize("kind", ["ignored", "masked", "sum"])
def test_packs_weight_microbatches_by_what_a_loss_divides_by(kind: str) -> None:
    """As plain microbatches do; the second of them counts nothing."""
    found = []
    for budget in (None, "100KB"):
        torch.manual_seed(3)
        net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).double()
        x, y = torch.randn(20, 32, dtype=torch.float64), torch.randint(0, 5, (20,))
        y[4:8] = 0
        with tfnb.record(f"packs_{kind}") as g:
            px, py = tfnb.placeholder(x[:8]), tfnb.placeholder(y[:8])
            loss = masked_loss(kind, net(px), py)
            train = tfnb.train.Adam(0.01).minimize(loss)
        told = tfnb.fit(
            train, {px: x, py: y}, batch_size=16, epochs=3, shuffle=False, microbatches=4,
            memory_budget=budget, watch={"loss": loss},
        )  # fmt: skip
        found.append(([variable.value().clone() for variable in g.variables], told.history))
    (plain, history), (packed, history_of_packs) = found
    torch.testing.assert_close(packed, plain, rtol=1e-14, atol=1e-15)
    assert all(each.isfinite().all() for each in packed)
    assert [entry["loss"] for entry in history_of_packs] == pytest.approx(
        [entry["loss"] for entry in history], rel=1e-12
    )
