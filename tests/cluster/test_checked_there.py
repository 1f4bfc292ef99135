"""What a step computes on a cluster is looked at before anything is written: ``check="nan"``, and breakpoints."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn

import tfnb
from tests.cluster.conftest import close_to
from tests.cluster.test_queues_on_servers import fifo
from tfnb.errors import BreakpointReached, DeadlineExceeded, FailedPrecondition, InvalidArgument, NonFinite

MODES = {"sync": {}, "async": {"mode": "async"}}
TEXT = r"(?s)aten\.log.*made nan of finite numbers.*node .*loss = layer\(x\)\.log\(\)"


def logarithm():
    """A step whose loss is NaN for rows below 0, and whose gradient is finite for them: its slope is that of 0 * x."""
    layer = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(layer.weight)
    with tfnb.record("logarithm"):
        x = tfnb.placeholder(torch.rand(4, 2, dtype=torch.float64), name="x")
        loss = layer(x).log().mean()
        train = tfnb.train.SGD(0.01).minimize(layer(x).square().mean())
    return layer, x, loss, train


@pytest.mark.parametrize("mode", MODES)
def test_a_checked_fit_stops_before_the_step_that_would_give_nan(connect, mode):
    layer, x, loss, train = logarithm()
    cluster = connect(2)
    rows = torch.full((24, 2), 0.25, dtype=torch.float64)
    rows[-3] = -1.0
    with pytest.raises(NonFinite, match=TEXT) as caught:
        tfnb.fit(
            train, {x: rows}, batch_size=4, shuffle=False, watch={"loss": loss}, check="nan", timeout=120, **MODES[mode]
        )
    assert caught.value.task in ("task:0", "task:1") and caught.value.op == "aten.log.default" and caught.value.line
    cluster.pull()
    assert cluster.step <= 6 and layer.weight.isfinite().all()
    if mode == "sync":
        weight = torch.ones(2, dtype=torch.float64)
        for _ in range(5):
            weight -= 0.01 * 2 * 0.25 * 0.25 * weight.sum()
        assert cluster.step == 5 and torch.allclose(layer.weight.detach()[0], weight, rtol=1e-12)
    done = tfnb.fit(train, {x: rows[:12]}, batch_size=4, check="nan", watch={"loss": loss}, **MODES[mode])
    assert done.steps == 3, "what is finite goes on"


def test_a_checked_run_names_the_op_and_writes_nothing(connect):
    _, x, loss, train = logarithm()
    cluster = connect(2)
    bad = torch.tensor([[1.0, 2.0], [-3.0, 1.0]], dtype=torch.float64)
    assert tfnb.run([train, loss], {x: bad})[1].isnan(), "unless it is asked for, a value may be NaN"
    before = cluster.step
    with pytest.raises(NonFinite, match=TEXT):
        tfnb.run([train, loss], {x: bad}, check="nan")
    assert cluster.step == before
    with pytest.raises(NonFinite, match=r"\n(?:  )?x held nan before the step") as caught:
        tfnb.run([train, loss], {x: bad * float("nan")}, check="nan")
    assert caught.value.step == before and caught.value.__notes__ == [f"variables are at step {before} of the cluster"]
    assert tfnb.run(loss, {x: bad.abs()}, check="nan").isfinite()
    with pytest.raises(InvalidArgument, match="check is None or 'nan'"):
        tfnb.run(loss, {x: bad}, check="inf")
    with pytest.raises(InvalidArgument, match="check is None or 'nan'"):
        tfnb.fit(train, {x: bad}, check="inf")


def test_an_update_that_overflows_is_not_written(connect):
    layer = nn.Linear(2, 1)
    with tfnb.record("overflow"):
        x = tfnb.placeholder(torch.rand(5, 2), name="x")
        train = tfnb.train.Adam(1e39).minimize(layer(x).square().mean())
    before = [p.detach().clone() for p in layer.parameters()]
    cluster = connect(2)
    with pytest.raises(NonFinite, match=r"the update of .* made NaN or infinite"):
        tfnb.fit(train, {x: torch.rand(8, 2)}, check="nan", timeout=120)
    with pytest.raises(NonFinite, match=r"the update of .* made NaN or infinite"):
        tfnb.run(train, {x: torch.rand(8, 2)}, check="nan")
    cluster.pull()
    assert cluster.step == 0
    assert all(torch.equal(p, old) for p, old in zip(layer.parameters(), before, strict=True))


def test_a_checked_step_that_runs_whole_on_one_task(connect):
    layer, x, _, _ = logarithm()
    with tfnb.record("whole"):
        x = tfnb.placeholder(torch.rand(4, 2, dtype=torch.float64), name="x")
        optimizer = tfnb.train.SGD(0.1)
        pairs = optimizer.compute_gradients(layer(x).log().mean())
        norm = pairs[0][0].norm()
        train = optimizer.apply_gradients(pairs)
    connect(2)
    zero = torch.zeros(4, 2, dtype=torch.float64)
    with (
        pytest.warns(UserWarning, match="whole on one task"),
        pytest.raises(NonFinite, match=r"made .*inf.* of finite"),
    ):
        tfnb.fit(train, {x: zero}, watch={"norm": norm}, check="nan")
    assert torch.equal(layer.weight.detach(), torch.ones(1, 2, dtype=torch.float64))


def over_tasks():
    """A step whose second task computes the loss, of what the first one does in a loop to the rows."""
    layer = nn.Linear(2, 2, bias=False).double()
    nn.init.eye_(layer.weight)
    with tfnb.record("over_tasks"):
        x = tfnb.placeholder(torch.rand(4, 2, dtype=torch.float64), name="x")
        with tfnb.device("task:0"):
            masked = torch.where(x > 0, x.log(), torch.zeros(()))
            _, deep = tfnb.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, (h - 1).sqrt()), (torch.tensor(0), x))
        with tfnb.device("task:1"):
            loss = layer(deep).square().mean()
            fine = layer(masked).sum()
        train = tfnb.train.SGD(0.01).minimize(loss)
    return layer, x, loss, fine, train


def test_a_checked_step_over_tasks_names_the_op_its_line_and_the_task_where_nan_began(connect):
    layer, x, loss, fine, train = over_tasks()
    cluster = connect(2)
    good, bad = torch.full((4, 2), 30.0, dtype=torch.float64), torch.full((4, 2), 1.5, dtype=torch.float64)
    assert tfnb.run([loss, train], {x: good}, check="nan")[0].isfinite()
    assert tfnb.run(fine, {x: -good}, check="nan").isfinite(), "numbers that nothing bad comes of do not count"
    cluster.pull()
    before = layer.weight.detach().clone()
    text = r"(?s)aten\.sqrt\.default made nan of finite numbers.*while_loop/sqrt.*deep = tfnb.*in iteration 2 of its"
    for way in (
        lambda: tfnb.run([loss, train], {x: bad}, check="nan"),
        lambda: tfnb.run(train, {x: bad}, check="nan"),
        lambda: tfnb.fit(train, {x: torch.cat([good, bad])}, batch_size=4, shuffle=False, check="nan", timeout=120),
    ):
        with pytest.raises(NonFinite, match=text) as caught:
            way()
        assert caught.value.task == "task:0" and caught.value.op == "aten.sqrt.default" and caught.value.line
    cluster.pull()
    assert cluster.step == 2 and layer.weight.isfinite().all() and not torch.equal(layer.weight, before)
    with pytest.raises(NonFinite, match=r"the gradient of .*dropped on every server(?s:.*)aten\.sqrt") as caught:
        tfnb.run(train, {x: bad})
    assert caught.value.task == "task:0" and caught.value.line and cluster.step == 2
    with pytest.raises(NonFinite, match="x held nan before the step"):
        tfnb.run(loss, {x: bad * float("nan")}, check="nan")


def test_a_breakpoint_stops_a_run_before_anything_is_written(connect, problem):
    p = problem()
    states, _ = p.local(2)
    feeds = [dict(zip(p.feeds, p.batch(run, 12), strict=True)) for run in range(2)]
    cluster = connect(2)
    tfnb.run(p.train, feeds[0])
    tfnb.break_at(p.loss, lambda value: value > 0)
    with pytest.raises(BreakpointReached, match=r"stopped at .*nothing was written") as caught:
        tfnb.run(p.train, feeds[1])
    *inputs, loss = caught.value.details.values()
    assert inputs and loss > 0 and cluster.step == 1
    tfnb.break_at(p.loss, "value < 0")
    tfnb.run(p.train, feeds[1])
    tfnb.break_at(p.loss, off=True)
    cluster.pull()
    assert cluster.step == 2 and close_to(p.values(), states[2])


@pytest.mark.filterwarnings("ignore:mode=async takes one step after the other. a breakpoint is set")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_breakpoint_stops_a_fit_at_its_step(connect, problem, mode):
    p = problem(tfnb.train.SGD(0.1))
    states, _ = p.local(5)
    data = [dict(zip(p.feeds, p.batch(run, 12), strict=True)) for run in range(5)]
    data[3] = {**data[3], p.feeds[0]: torch.full((12, 4), torch.nan, dtype=torch.float64)}
    cluster = connect(2)
    tfnb.break_at(p.loss, "nan")
    with pytest.raises(BreakpointReached) as caught:
        tfnb.fit(p.train, data, watch=p.loss, mode=mode)
    tfnb.break_at(p.loss, off=True)
    assert list(caught.value.details.values())[-1].isnan() and cluster.step == 3
    assert close_to(p.values(), states[3])
    assert tfnb.fit(p.train, data[4:], mode=mode).steps == 1


@pytest.mark.parametrize("way", ["read", "run", "assign", "close"])
def test_a_condition_may_not_use_the_cluster_that_waits_for_it(connect, problem, way):
    p = problem()
    first = next(iter(p.graph.variables))
    feeds = dict(zip(p.feeds, p.batch(0, 12), strict=True))
    cluster = connect(2)
    tfnb.run(p.train, feeds)
    ways = {
        "read": first.value, "run": lambda: tfnb.run(p.loss, feeds), "assign": lambda: first.assign(first.storage),
        "close": cluster.close,
    }  # fmt: skip
    tfnb.break_at(p.loss, lambda value: ways[way]() is None)
    with pytest.raises(InvalidArgument, match=r"the condition of a breakpoint asked the cluster .*before the run"):
        tfnb.run(p.train, feeds, timeout=100)
    tfnb.break_at(p.loss, off=True)
    assert cluster.step == 1
    tfnb.run(p.train, feeds)
    assert cluster.step == 2 and first.value().isfinite().all()


@pytest.mark.parametrize("way", ["a deadline", "an interrupt"])
def test_a_condition_that_does_not_end_is_not_waited_for(connect, problem, way):
    p, ends = problem(), threading.Event()
    feeds = dict(zip(p.feeds, p.batch(0, 12), strict=True))
    cluster = connect(2)
    tfnb.run(p.train, feeds)

    def condition(value: torch.Tensor) -> bool:
        if way == "an interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        return ends.wait(200)

    tfnb.break_at(p.loss, condition)
    try:
        if way == "a deadline":
            with pytest.raises(DeadlineExceeded, match=r"(?s)within 1.* s; it waited for.*condition of a breakpoint"):
                tfnb.run(p.train, feeds, timeout=1.0)
        else:
            with pytest.raises(KeyboardInterrupt):
                tfnb.run(p.train, feeds, timeout=100)
        assert cluster.step == 1
        tfnb.break_at(p.loss, off=True)
        tfnb.run(p.train, feeds, timeout=100)
        assert cluster.step == 2
    finally:
        ends.set()


def test_what_a_stopped_step_took_is_in_its_queue_again(connect):
    q = fifo("looked", 2)
    with tfnb.record():
        doubled = q.dequeue() * 2
    connect(1)
    q.enqueue(21.0)
    tfnb.break_at(doubled)
    with pytest.raises(BreakpointReached):
        tfnb.run(doubled)
    assert q.size() == 1
    tfnb.break_at(doubled, off=True)
    assert tfnb.run(doubled) == 42


def test_a_changed_formula_keeps_no_values_on_the_servers(connect, tmp_path):
    layer, x = torch.nn.Linear(4, 3), torch.randn(12, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    with tfnb.record() as graph:
        fed = tfnb.placeholder(x)
        step = tfnb.train.from_torch(optimizer).minimize(layer(fed).square().sum())
    cluster, before = connect(1), layer.weight.detach().clone()
    for _ in range(3):
        tfnb.run(step, {fed: x})
    optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(FailedPrecondition, match=r"nesterov was False, and is True now"):
        tfnb.run(step, {fed: x})
    tfnb.Session(graph).save(tmp_path / "there.safetensors")
    there = next(v for v in graph.variables if v.held is not None and v.spec.shape == (3, 4)).value()
    cluster.close()
    assert torch.equal(layer.weight, there) and not torch.equal(layer.weight, before)
    assert all(str(variable.device) == "cpu" and variable.nbytes for variable in graph.variables)
