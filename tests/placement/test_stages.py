"""Modules cut in stages: the least slowest stage, what users ask for, and the same requests as by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tfnb
from tfnb.errors import FailedPrecondition, InvalidArgument, InvalidType, Unimplemented
from tfnb.graph import Variable
from tfnb.placement.module_calls import ModuleCall, Passage
from tfnb.placement.stages import INFINITE, RATE, StageWeights, least_maximum

SIZES = st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n + 1)))


def largest(cost: Callable[[int, int, int], float], ends: tuple[int, ...]) -> float:
    return max(cost(stage, start, stop) for stage, (start, stop) in enumerate(pairwise((0, *ends))))


def exhaustive(cost: Callable[[int, int, int], float], units: int, stages: int) -> float:
    """The least largest cost of all cuts, infinite if there is none."""
    cuts = itertools.combinations(range(1, units), stages - 1)
    return min((largest(cost, (*cut, units)) for cut in cuts), default=INFINITE)


@given(SIZES, st.data())
def test_the_least_largest_stage_is_that_of_all_cuts(sizes: tuple[int, int], data: Any) -> None:
    units, stages = sizes
    costs: dict[Any, float] = {}

    def cost(*stage: int) -> float:
        if stage not in costs:
            costs[stage] = data.draw(st.one_of(st.integers(0, 9), st.just(INFINITE)))
        return costs[stage]

    found, best = least_maximum(cost, units, stages), exhaustive(cost, units, stages)
    assert (found is None) == (best == INFINITE)
    if found is not None:
        assert len(found) == stages and found[-1] == units and largest(cost, found) == best


def weights(seconds: list[float], passages: list[Passage], rows: list[int]) -> StageWeights:
    """Calls of modules with these seconds, and Variables of so many numbers."""
    calls = [ModuleCall((str(at),), variables=[Variable(torch.zeros(n))]) for at, n in enumerate(rows)]
    return StageWeights(calls, seconds, passages)


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=6),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(0, 4)), max_size=5),
    st.integers(2, 3),
)
def test_messages_count_at_both_ends_of_a_border(seconds: list[int], values: list[Any], stages: int) -> None:
    units = len(seconds)
    passages = [
        Passage(source, (source + more,), (int(size * RATE),))
        for source, more, size in values if source + more < units
    ]  # fmt: skip

    def cost(stage: int, start: int, stop: int) -> float:
        crossing = [p for p in passages if (start <= p.source < stop) != (start <= p.users[0] < stop)]
        return sum(seconds[start:stop]) + sum(1e-4 + p.bytes[0] / RATE for p in crossing)

    if units >= stages:
        found = weights(list(map(float, seconds)), passages, [1] * units).ends(stages)
        assert largest(cost, found) <= 1.05 * exhaustive(cost, units, stages) + 1e-9


def test_bytes_decide_among_cuts_as_quick() -> None:
    assert weights([1.0, 0.0, 0.0, 1.0], [], [9, 1, 1, 1]).ends(2) == (1, 4)
    assert weights([1.0, 0.0, 0.0, 1.0], [], [1, 1, 9, 8]).ends(2) == (3, 4)


class Stack(nn.Module):
    """Blocks of a product and a norm, and requests around each of the eight layers."""

    def __init__(self, where: Callable[[int], Any]) -> None:
        super().__init__()
        self.where = where
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(layer for block in self.blocks for layer in block):
            with self.where(at):
                h = torch.tanh(layer(h))
        return h


class Net:
    """A step of a stack, recorded under the requests that ``where`` makes for a layer."""

    def __init__(self, where: Callable[[int], Any] = lambda at: nullcontext(), *, tied: bool = False) -> None:
        torch.manual_seed(5)
        model = self.model = Stack(where)
        if tied:
            model.blocks[3][0].weight = model.blocks[0][0].weight
        with tfnb.record() as self.graph:
            self.x = tfnb.placeholder(torch.linspace(-1, 1, 32).reshape(4, 8), name="x")
            h = model(self.x)
            with where(7):
                self.loss = F.mse_loss(h, self.x)
            self.train = tfnb.train.Momentum(0.1, momentum=0.9).minimize(self.loss)


def test_a_stage_asks_as_a_user_would_around_its_modules() -> None:
    free = Net()
    shown = tfnb.place([free.loss, free.train], stages=3)
    assert [str(stage.place) for stage in shown.stages] == ["task:0", "task:1", "task:2"]
    at = {node.scope[2:4]: node.device for node in free.graph.nodes if node.op != "tfnb.assign"}
    stages = [at[str(layer // 2), str(layer % 2)] for layer in range(8)]
    assert stages == sorted(stages) and {*stages} == {"task:0", "task:1", "task:2"}
    asked = Net(lambda layer: tfnb.device(stages[layer]))
    found, expected = ({n.name: n.device for n in net.graph.nodes if n.op != "tfnb.assign"} for net in (free, asked))
    assert found == expected


def test_turns_of_a_loop_over_layers_are_modules_of_their_own() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)]
    with tfnb.record() as g:
        h = tfnb.placeholder(torch.ones(2, 4), name="x")
        for layer in layers:
            h = torch.tanh(layer(h)) + h
    assert len(tfnb.place(h, stages=4).stages) == 4
    assert [n.device for n in g.nodes if "addmm" in n.op] == [f"task:{at}" for at in range(4)]
    with pytest.raises(InvalidArgument, match="stages=6 of 5 modules"):
        tfnb.place(h, stages=6)


def test_another_number_of_stages_places_anew_and_a_gradient_that_is_recorded_later_follows() -> None:
    net, other = Net(), Net()
    tfnb.place(net.train, stages=4)
    with tfnb.record(net.graph):
        more = tfnb.gradients(net.loss * 2, [net.x])[0]
    assert "task:3" in {node.device for node in net.graph.nodes if "gradient" in node.tags}
    tfnb.place([net.train, more], stages=2)
    assert {node.device for node in net.graph.nodes} == {None, "task:0", "task:1"}
    tfnb.place(other.train, stages=2, soft=True)
    assert {node.device for node in other.graph.nodes} == {None, "/task:0/soft", "/task:1/soft"}


@pytest.mark.parametrize("tied", [False, True])
def test_parts_give_the_values_of_one_device_and_measuring_writes_nothing(tied: bool) -> None:
    here, there = Net(tied=tied), Net(tied=tied)
    before = {name: value.clone() for name, value in there.model.state_dict().items()}
    shown = tfnb.place([there.loss, there.train], feeds={there.x: torch.ones(6, 8)}, stages=3)
    assert all(torch.equal(value, before[name]) for name, value in there.model.state_dict().items())
    assert sum(s.variables for s in shown.stages) == sum(
        v.numel() * v.element_size() for v in {*here.model.buffers()}
    ) + (sum(v.numel() * v.element_size() for v in here.model.parameters()))
    assert sum(s.slots for s in shown.stages) == sum(v.numel() * 4 for v in here.model.parameters())
    assert shown.stages[0].sends == 6 * 8 * 4 + (8 * 8 * 4 if tied else 0)  # a row, and the tied weight
    assert all(stage.seconds > 0 for stage in shown.stages)
    batch = torch.linspace(-2, 2, 40).reshape(5, 8)
    for _ in range(2):
        one = tfnb.Session(here.graph, compile="off").run([here.loss, here.train], {here.x: batch})[0]
        parts = tfnb.Session(there.graph, executor="parts").run([there.loss, there.train], {there.x: batch})[0]
        torch.testing.assert_close(parts, one)
    for name, value in there.model.state_dict().items():
        torch.testing.assert_close(value, here.model.state_dict()[name])


def test_a_request_of_the_user_stands() -> None:
    net = Net(lambda at: tfnb.device("task:2") if at == 4 else nullcontext())
    stages = tfnb.place(net.train, stages=3).stages
    assert [name for name in stages[2].modules if name in ("model.blocks.2", "model.blocks.2.0")]
    assert "task:2" in {node.device for node in net.graph.nodes if node.scope[:3] == ("model", "blocks", "2")}


def test_requests_that_no_stages_meet_are_named() -> None:
    def crossed(at: int) -> Any:
        return tfnb.device(f"task:{2 if at == 1 else 0}") if at in (1, 6) else nullcontext()

    with pytest.raises(InvalidArgument, match=r"0\.1 asks for task:2 \(.*, but .*\.3\.0 asks for task:0"):
        tfnb.place(Net(crossed).train, stages=3)
    with pytest.raises(InvalidArgument, match=r"task:0 to task:1, and model\.blocks\.0\.0 asks for task:2"):
        tfnb.place(Net(lambda at: tfnb.device("task:2")).train, stages=2)
    with pytest.raises(InvalidArgument, match=r"asks for task:1.*a stage would be empty"):
        tfnb.place(Net(lambda at: tfnb.device("task:1") if at == 0 else nullcontext()).train, stages=2)


def test_what_cannot_be_placed() -> None:
    net = Net()
    with pytest.raises(InvalidArgument, match=r"stages=9 of 8 modules: model\.blocks\.0\.0, "):
        tfnb.place(net.train, stages=9)
    with pytest.raises(InvalidArgument, match=r"stages=0: a step has one stage at least"):
        tfnb.place(net.train, stages=0)
    with pytest.raises(InvalidArgument, match=r"soft=True is of stages"):
        tfnb.place(net.train, soft=True)
    with pytest.raises(InvalidType, match=r"stages takes int"):
        tfnb.place(net.train, stages=True)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2), name="x")
        plain = (x * 2).sum()
        y = tfnb.placeholder(shape=(2, 8), dtype=torch.float32, name="y")
        unseen = net.model.blocks[0][0](y)
        taken = net.model.blocks[0][0](tfnb.FIFOQueue(4, [torch.float32], shapes=[(2, 8)], name="q").dequeue()[0])
    with pytest.raises(InvalidArgument, match=r"none of the step's nodes is in one: call modules"):
        tfnb.place(plain, stages=1)
    with pytest.raises(InvalidArgument, match=r"y has no sample: give feeds={y: values}"):
        tfnb.place(unseen, stages=1)
    with pytest.raises(Unimplemented, match=r"uses a queue: place modules by tfnb.device"):
        tfnb.place(taken, stages=1)
    assert {node.device for node in net.graph.nodes} == {None}
    net.graph.finalize()
    with pytest.raises(FailedPrecondition, match="finalized"):
        tfnb.place(net.train, stages=2)


def test_the_table_has_modules_by_their_outermost_names() -> None:
    net = Net()
    shown = tfnb.place([net.loss, net.train], stages=1)
    lines = str(shown).splitlines()
    assert lines[0].split() == ["stage", "Variables", "slots", "ms", "sends", "modules"]
    assert lines[1].split()[0] == "task:0" and lines[1].endswith(" model")
    assert shown._repr_html_().startswith("<pre>stage")
    assert shown.why(net.loss).rule == "asks for task:0"
