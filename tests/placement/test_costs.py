"""Costs of ops and messages: the formula by hand, medians of traces, and links as measured."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tfnb
from tfnb.execution.compiling.package_cache import packages
from tfnb.execution.tracing.trace import Event, Trace, Transmission
from tfnb.placement.costs import LATENCY, RATE, PlacementCosts, Roofline, RunMargins, StepTimes, op_key
from tfnb.placement.simulation import LinkCost
from tfnb.session.machine_speed import FILE, machine_speed

SPEED = Roofline(start=1e-5, flops=1e9, bytes=1e9)


@pytest.fixture
def step() -> Any:
    """A product of a batch, what follows, and a branch and a loop."""
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(4, 100), name="x")
        w = torch.ones(100, 50)
        h = x @ w
        r = torch.relu(h)
        c = tfnb.cond(r.sum() > 0, lambda: r.exp(), lambda: r)
        y = tfnb.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v + 1), (0, c))[1]
    return SimpleNamespace(graph=graph, x=x, h=h, r=r, c=c, y=y)


def nodes(step: Any, *names: str) -> list[tfnb.graph.Node]:
    return [getattr(step, name).node for name in names]


def test_a_kernel_takes_its_start_and_the_longer_of_arithmetic_and_bytes(step: Any) -> None:
    costs = PlacementCosts(SPEED, sizes={"B": 1000})
    product, relu = nodes(step, "h", "r")
    contents = step.graph.contents
    assert costs.seconds(product, contents) == pytest.approx(1e-5 + 2 * 1000 * 100 * 50 / 1e9)
    assert costs.seconds(relu, contents) == pytest.approx(1e-5 + 2 * 4 * 1000 * 50 / 1e9)
    assert costs.seconds(step.x.node, contents) == 0.0
    assert (costs.size(product, 0), costs.size(product, -1), costs.size(product, 1)) == (4 * 1000 * 50, 0, 0)
    assert Roofline(0.0, 1e18, 1e18).seconds(SimpleNamespace(bytes=1, flops=1)) == 1e-6


def test_a_branch_takes_its_longer_side_and_a_loop_32_iterations(step: Any) -> None:
    costs = PlacementCosts(SPEED, sizes={"B": 1000})
    branch, loop = nodes(step, "c", "y")
    assert costs.seconds(branch, step.graph.contents) == pytest.approx(1e-5 + 2 * 4 * 1000 * 50 / 1e9)
    one = costs.seconds(loop, step.graph.contents) / 32
    assert 1e-5 + 2 * 4 * 1000 * 50 / 1e9 < one < 5 * (1e-5 + 2 * 4 * 1000 * 50 / 1e9)


def trace(step: Any, seconds: dict[str, float], *sent: tuple[str, str, int, float]) -> Trace:
    """A trace of one run: nodes one after the other from 0.5 s on, and messages."""
    events, now = [], 0.5
    for name, lasts in seconds.items():
        events.append(Event(getattr(step, name).node, now, now + lasts, 0, "cpu", "task:0"))
        now += lasts
    messages = tuple(Transmission(source, to, 0.0, lasts, size) for source, to, size, lasts in sent)
    return Trace(step.graph, (), tuple(events), (), now + 0.25, 0, transmissions=messages)


def test_medians_of_traces_replace_the_formula_for_these_sizes_only(step: Any) -> None:
    times = StepTimes()
    for lasts in (0.3, 0.1, 0.2, 9.0, 0.15):
        times.learn(trace(step, {"h": lasts, "r": 0.01}), {"B": 1000})
    contents, (product, relu) = step.graph.contents, nodes(step, "h", "r")
    known = PlacementCosts(SPEED, times, {"B": 1000})
    assert known.seconds(product, contents) == pytest.approx(0.2)
    assert known.seconds(relu, contents) == pytest.approx(0.01)
    other = PlacementCosts(SPEED, times, {"B": 7})
    assert other.seconds(product, contents) == PlacementCosts(SPEED, sizes={"B": 7}).seconds(product, contents)
    assert times.margin == RunMargins(0.5, pytest.approx(0.25))
    assert StepTimes().margin == RunMargins(0.0, 0.0)


def test_a_node_of_several_kernels_counts_as_their_sum(step: Any) -> None:
    times, product = StepTimes(), step.h.node
    events = tuple(Event(product, start, start + 1.0, 0, "cpu", "task:0") for start in (0.0, 2.0))
    times.learn(Trace(step.graph, (), events, (), 3.0, 0), {"B": 5})
    assert [*times.ops[op_key(product, step.graph.contents, {"B": 5})]] == [2.0]  # type: ignore[index]


def test_an_op_whose_operand_is_unknown_has_no_key(step: Any) -> None:
    assert op_key(step.h.node, tfnb.Graph("other").contents, {}) is None


def test_links_are_guessed_then_pooled_then_their_own(step: Any) -> None:
    times = StepTimes()
    assert times.link("task:0", "task:1") == LinkCost(LATENCY, RATE)
    times.learn(trace(step, {}, ("task:0", "task:1", 8, 0.002), ("notebook", "task:0", 8, 9.0)), {})
    assert times.link("task:1", "task:0").latency == times.link("task:0", "task:1").latency == 0.002
    times.learn(trace(step, {}, ("task:1", "task:0", 8, 0.004), ("task:1", "task:0", 10**6, 0.014)), {})
    assert times.link("task:1", "task:0") == LinkCost(0.004, pytest.approx(1e8))
    assert times.link("task:0", "task:1") == LinkCost(0.002, RATE)


def test_the_speed_of_this_machine_is_kept() -> None:
    found = machine_speed()
    assert 1e-8 < found.start < 1e-2 and found.flops > 1e7 and found.bytes > 1e7
    machine_speed.cache_clear()
    assert machine_speed() == found, "the file has it"
    path = packages().folder.parent / FILE
    name = next(name for name, speed in json.loads(path.read_text()).items() if speed == [*found])
    for text in ("no speeds", "[1]", json.dumps({name: [1e-6, 0.0, 1e9]}), json.dumps({name: ["x"]})):
        path.write_text(text)
        machine_speed.cache_clear()
        assert min(machine_speed()) > 0 and json.loads(path.read_text())[name] == [*machine_speed()]
