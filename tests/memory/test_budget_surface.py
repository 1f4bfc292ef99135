"""Budgets as people give them, what of a step they leave as it is, and fed values inside of a step."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

import tfnb
from tfnb.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from tfnb.graph.graph import new_id
from tfnb.memory import rematerialize
from tfnb.memory.scratch import allocated
from tfnb.passes import peak


def deep(width: int = 64, depth: int = 6, rows: int = 256) -> tuple[tfnb.Graph, tfnb.Value, tfnb.Value]:
    """A net whose step holds more than it must, its feed and its update."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(rows, width), name="x")
        train = tfnb.train.SGD(0.1).minimize(torch.nn.Sequential(*layers)(x).square().mean())
    return graph, x, train


def least(graph: tfnb.Graph, x: tfnb.Value, train: tfnb.Value, rows: int = 256) -> int:
    """The smallest budget that the error of a budget of one byte names."""
    with pytest.raises(ResourceExhausted) as caught:
        tfnb.Session(graph, compile="off", memory_budget=1).run(train, {x: torch.randn(rows, 64)})
    return int(re.search(r"feasible budget is ([\d,]+)", str(caught.value))[1].replace(",", ""))  # type: ignore[index]


def test_the_smallest_budget_of_the_error_is_the_smallest_and_the_same_at_each_recording() -> None:
    found = set()
    for skipped in (0, 7, 1001):
        for _ in range(skipped):
            new_id()
        graph, x, train = deep()
        budget = least(graph, x, train)
        session = tfnb.Session(graph, compile="off", memory_budget=budget)
        session.run(train, {x: torch.randn(256, 64)})
        assert session.plans()[0][1].plan.peak == budget
        with pytest.raises(ResourceExhausted):
            tfnb.Session(graph, compile="off", memory_budget=budget - 1).run(train, {x: torch.randn(256, 64)})
        found.add(budget)
    assert len(found) == 1


@pytest.mark.parametrize("text", ["2GB", "2000 MB", "2000000000", 2_000_000_000])
def test_a_session_and_fit_take_text(text: str | int) -> None:
    graph, x, train = deep()
    assert tfnb.Session(graph, memory_budget=text).memory_budget == 2_000_000_000
    assert tfnb.fit(train, {x: torch.randn(512, 64)}, batch_size=256, memory_budget=text).steps == 2


@pytest.mark.parametrize("wrong", ["2 elephants", "", 0, -1, True, 1.5, "0", "-3GB", b"2GB"])
def test_what_is_no_size_is_refused(wrong: object) -> None:
    graph, x, train = deep()
    with pytest.raises(InvalidArgument, match="512MB"):
        tfnb.Session(graph, memory_budget=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="512MB"):
        tfnb.fit(train, {x: torch.randn(512, 64)}, memory_budget=wrong)  # type: ignore[arg-type]


def test_the_budget_of_fit_holds_for_its_steps_alone_with_the_same_weights() -> None:
    rows, weights = torch.randn(1024, 64), []
    for is_limited in (False, True):
        graph, x, train = deep()
        budget = least(graph, x, train) if is_limited else None
        result = tfnb.fit(train, {x: rows}, batch_size=256, shuffle=False, memory_budget=budget)
        assert result.steps == 4
        session = tfnb.session.default_session(graph)
        assert session.memory_budget is None
        with session.limited(budget):
            assert bool(session.plans()) == is_limited
        weights.append([value.value().clone() for value in graph.contents.variables.values()])
    assert all(map(torch.equal, *weights))


def test_a_budget_changed_between_runs_keeps_the_place_of_random_streams() -> None:
    found = []
    for changes in (False, True):
        torch.manual_seed(0)
        with tfnb.record() as graph:
            x = tfnb.placeholder(torch.ones(4, 64), name="x")
            y = torch.nn.functional.dropout(x)
        graph.seed = 7
        tfnb.run(y, {x: torch.ones(4, 64)})
        if changes:
            tfnb.session.limit(graph, "1GB")
        found.append(tfnb.run(y, {x: torch.ones(4, 64)}))
    assert torch.equal(*found)


@pytest.mark.slow
def test_a_step_that_fits_is_compiled_as_without_a_budget() -> None:
    graph, x, train = deep(depth=1, rows=8)
    session = tfnb.Session(graph, compile="now", memory_budget="1GB")
    session.run(train, {x: torch.randn(8, 64)})
    assert session.code(train, [x]).startswith("compiled")
    assert session.status()[0].startswith("x [8, 64]: compiled; ")
    tight = tfnb.Session(graph, compile="now", memory_budget=least(graph, x, train))
    tight.run(train, {x: torch.randn(256, 64)})
    assert tight.code(train, [x]) == "generated code" or not tight.plans()[0][1].plan.decisions


def test_a_fed_value_inside_of_a_large_step_is_its_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own node is not in the step: no pass looks at the operands of that node."""
    monkeypatch.setattr(rematerialize, "WORTH_SPARING", 1)
    w = torch.nn.Parameter(torch.randn(32, 32, dtype=torch.float64))
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(64, 32, dtype=torch.float64), shape=(64, 32))
        h = x * 2 + 1
        loss = torch.tanh(torch.nn.functional.layer_norm(h, (32,)) @ w).square().mean()
        gradient = tfnb.gradients(loss, [w])[0]
    value = torch.randn(64, 32, dtype=torch.float64)
    found = tfnb.Session(graph, compile="off").run(gradient, {h: value})
    expected = torch.tanh(torch.nn.functional.layer_norm(value, (32,)) @ w).square().mean()
    torch.testing.assert_close(found, torch.autograd.grad(expected, w)[0], rtol=1e-12, atol=1e-15)
    budgeted = tfnb.Session(graph, compile="off", memory_budget="1GB").run(gradient, {h: value})
    assert torch.equal(found, budgeted)


@pytest.mark.parametrize(
    "op", [torch.relu, torch.abs, lambda v: v.t().t(), lambda v: v.float(), lambda v: v.neg().neg()]
)
@pytest.mark.parametrize("executor", ["auto", "dataflow", "parts"])
def test_an_op_on_a_fed_value_is_not_simplified_by_the_op_that_made_it(op: object, executor: str) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(3, 3))
        h = op(x)  # type: ignore[operator]
        y = op(h)  # type: ignore[operator]
        values, places = x.topk(2)
        z = values * 2 + places
    session = tfnb.Session(graph, executor=executor)
    fed = torch.tensor([[-1.0, 2, -3], [4, -5, 6], [-7, 8, -9]])
    assert torch.equal(session.run(y, {h: fed}), op(fed))  # type: ignore[operator]
    assert torch.equal(session.run(z, {values: -torch.ones(3, 2), places: torch.ones(3, 2).long()}), -torch.ones(3, 2))


def test_variables_count_in_the_peak_the_error_and_the_answer() -> None:
    """The weights, and with Adam two slots and a step count for each of them."""
    torch.manual_seed(0)
    net = torch.nn.Linear(256, 256)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(2, 256), name="x")
        train = tfnb.train.Adam(1e-3).minimize(net(x).square().mean())
    weights, feed = 4 * (256 * 256 + 256), {x: torch.randn(2, 256)}
    session = tfnb.Session(graph, compile="off", memory_budget="1GB")
    session.run(train, feed)
    ((_, found),) = session.plans()
    assert 0 <= found.plan.state - 3 * weights < 64  # counts of steps
    assert found.plan.peak >= found.plan.state + weights  # gradients
    assert f"at most {found.plan.peak:,} bytes, {found.plan.state:,} of them Variables" in session.status()[0]
    with pytest.raises(ResourceExhausted, match=rf"its Variables are {found.plan.state:,} bytes, and .* largest node"):
        tfnb.Session(graph, compile="off", memory_budget=found.plan.state + weights - 1).run(train, feed)


def convolved(dtype: torch.dtype) -> tuple[tfnb.Graph, tfnb.Value, tfnb.Value]:
    """A net whose step holds more scratch of convolutions than values, in float64."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))).to(dtype)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(4, 8, 16, 16, dtype=dtype), name="x")
        train = tfnb.train.SGD(0.1).minimize(net(x).square().mean())
    return graph, x, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_convolutions_allocates_no_more_than_was_planned(dtype: torch.dtype) -> None:
    graph, x, train = convolved(dtype)
    session = tfnb.Session(graph, compile="off", memory_budget="1GB")
    feed = {x: torch.randn(4, 8, 16, 16, dtype=dtype)}
    session.run(train, feed)
    plan = session.plans()[0][1].plan
    measured, _ = allocated(lambda: [session.run(train, feed)], "cpu")
    planned = plan.peak - plan.state
    assert 0.8 * planned < measured <= 1.05 * planned
    if dtype is torch.float64:
        assert planned > 2 * peak(graph, [train.value], [x.value], {"B": 4})


def test_scratch_is_not_measured_inside_of_a_profiler() -> None:
    graph, x, train = convolved(torch.float32)
    with torch.profiler.profile(), pytest.raises(FailedPrecondition, match="before its block"):
        tfnb.Session(graph, compile="off", memory_budget="1GB").run(train, {x: torch.randn(5, 8, 16, 16)})


def test_the_profiler_writes_nothing_to_the_standard_error() -> None:
    code = "import torch; from tfnb.memory.scratch import allocated; allocated(lambda: torch.ones(3) + 1, 'cpu')"
    surroundings = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=surroundings, check=True)
    assert not done.stderr + done.stdout
