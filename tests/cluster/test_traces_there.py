"""Traced runs on a real cluster: every place and link, by one clock; the values and writes of a run that is not."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tests.cluster.test_parts_there import assert_nothing_left
from tests.magics.conftest import Notebook, ipython, notebook  # noqa: F401
from tests.over_tasks import on
from tfnb.errors import ResourceExhausted, TfnbError, Unimplemented
from tfnb.execution import Trace
from tfnb.graph.subgraph import nested


def assert_in_time(trace: Trace) -> None:
    """Nothing runs or travels before the step begins, after it ends, or backwards."""
    for one in (*trace.events, *trace.transmissions):
        assert -1e-9 <= one.start <= one.end <= trace.seconds
    assert set(trace.clocks) == {place for sent in trace.transmissions for place in (sent.source, sent.to)} - {
        "notebook"
    }
    assert all(0 <= error < 60 for error in trace.clocks.values())


def moved(trace: Trace, source: str, to: str, call: str) -> int:
    """Bytes of the messages of one kind."""
    found = [sent for sent in trace.transmissions if (sent.source, sent.to, sent.name) == (source, to, call)]
    assert found, (source, to, call)
    return sum(sent.bytes for sent in found)


@pytest.fixture
def linear() -> Any:
    """A step of SGD on 8 x 4 weights, its loss, and what is fed."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3, 8), name="x")
        loss = model(x).pow(2).mean()
        step = tfnb.train.SGD(0.1).minimize(loss)
    return graph, step, loss, x


def test_a_step_on_one_task_and_two_servers(connect, linear, tmp_path: Path) -> None:
    graph, step, loss, x = linear
    here = tfnb.Session(graph, compile="off").run(loss, {x: torch.ones(5, 8)})
    cluster = connect(2)
    session = tfnb.session.default_session(graph)
    assert tfnb.run([loss, step], {x: torch.ones(5, 8)}, trace=True)[0] == here
    assert tfnb.run(loss, {x: torch.ones(5, 8)}) < here, "a traced step writes"
    assert cluster.step == 1
    trace = session.trace
    assert_in_time(trace)
    assert {event.thread for event in trace.events} == {"task:0", "ps:0", "ps:1"}
    nodes = [event for event in trace.events if event.node is not None]
    assert {event.thread for event in nodes} == {"task:0"} and all(event.node in graph.nodes for event in nodes)
    assert [event.op for event in nodes].count("aten.addmm.default") == 1
    assert trace.peak > 0
    shards = ("ps:0", "ps:1")
    assert moved(trace, "notebook", "task:0", "feeds") == 5 * 8 * 4
    assert moved(trace, "task:0", "notebook", "fetches") == 4
    assert sum(moved(trace, shard, "task:0", "pull, answer") for shard in shards) == (8 * 4 + 4) * 4
    assert sum(moved(trace, "task:0", shard, "stage") for shard in shards) == (8 * 4 + 4) * 4
    for shard in shards:  # in the order in which things happen there
        done = [(event.name, event.start, event.end) for event in trace.events if event.thread == shard]
        assert [name for name, *_ in done] == ["pull", "stage", "update", "commit"]
        assert all(one[2] <= other[1] for one, other in pairwise(done))
    places = {row.name: row.calls for row in trace.table(by="place")}
    assert places["ps:0 → task:0"] == 2 and places["task:0"] == len(nodes)
    assert "untraced it is" not in repr(trace) and "clock" in repr(trace)
    assert_file_has_arrows(trace, tmp_path / "run.json")


def assert_file_has_arrows(trace: Trace, path: Path) -> None:
    """Each link is a lane of the file, and arrows go between lanes."""
    found = json.loads(trace.save(path).read_text())["traceEvents"]
    lanes = {one["tid"]: one["args"]["name"] for one in found if one["name"] == "thread_name"}
    assert {name for name, _ in trace.links} <= set(lanes.values())
    bars = [(lanes[one["tid"]], one["name"]) for one in found if one["ph"] == "X"]
    assert len(bars) == len(trace.events) + len(trace.transmissions)
    ends: dict[int, list[Any]] = {}
    for one in found:
        if one["ph"] in "sf" and one["name"] == "dataflow":
            ends.setdefault(one["id"], []).append(one)
    assert all(start["ts"] <= end["ts"] for start, end in ends.values())
    assert any(lanes[start["tid"]] == "task:0, cpu" and "→" in lanes[end["tid"]] for start, end in ends.values())


def test_a_loop_over_three_tasks_has_each_iteration_and_message(connect, dask) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")

        def body(i: Any, h: torch.Tensor) -> Any:
            with on(0):
                h = h + 1
            with on(1):
                return i + 1, torch.tanh(h)

        y = tfnb.while_loop(lambda i, h: i < 4, body, (0, x), maximum_iterations=4)[1]
        with on(2):
            z = y * 2
    cluster = connect(3)
    plain = tfnb.run(z, {x: torch.ones(2, 3)})
    session = tfnb.session.default_session(graph)
    for _ in range(2):  # the second one finds all that the first one made
        assert torch.equal(tfnb.run(z, {x: torch.ones(2, 3)}, trace=True), plain)
        trace = session.trace
        assert_in_time(trace)
        ran = [(event.thread, event.op) for event in trace.events if event.node is not None]
        assert ran.count(("task:0", "aten.add.Tensor")) == ran.count(("task:1", "aten.tanh.default")) == 4
        assert ran.count(("task:2", "aten.mul.Tensor")) == 1
        inner = [event for event in trace.events if event.op == "aten.tanh.default"]
        (top,) = {event.path[0] for event in inner}
        assert {event.node for event in inner} <= set(nested(graph.contents.by_id[top]))
        values = [sent for sent in trace.transmissions if (sent.source, sent.to) == ("task:0", "task:1")]
        assert sum(sent.bytes for sent in values) == 4 * 2 * 3 * 4
        assert trace.live == () and trace.peak == 0
    assert all(name in trace._repr_html_() for name in ("task:0 → task:1", "places and links"))
    assert_nothing_left(dask)
    assert cluster.step == 0


def test_one_task_that_is_asked_for(connect) -> None:
    with tfnb.record() as graph, tfnb.device("task:1"):
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        y = x + 1
    connect(2)
    tfnb.run(y, {x: torch.ones(3)}, trace=True)
    trace = tfnb.session.default_session(graph).trace
    assert {event.thread for event in trace.events} == {"task:1"}
    assert trace.links == (("task:1 → notebook", "link"), ("notebook → task:1", "link"))


def test_an_error_of_a_traced_part_writes_nothing_and_keeps_the_last_trace(connect, dask) -> None:
    v = tfnb.Variable(torch.zeros(3, 3), name="v")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.eye(3), shape=(3, 3), name="x")
        with on(0):
            y = x * 2
        with on(1):
            z = torch.linalg.cholesky(y)
        step = v.assign_add(z)
    connect(2)
    session = tfnb.session.default_session(graph)
    tfnb.run(step, {x: torch.eye(3)}, trace=True)
    before, kept = tfnb.run(v), session.trace
    with pytest.raises(TfnbError, match="cholesky"):
        tfnb.run(step, {x: -torch.ones(3, 3)}, trace=True)
    assert session.trace is kept and torch.equal(tfnb.run(v), before)
    tfnb.run(step, {x: torch.eye(3)}, trace=True)
    assert session.trace is not kept
    assert_nothing_left(dask)


def test_what_a_cluster_cannot_trace_is_refused(connect, linear, dask) -> None:
    _, step, loss, x = linear
    cluster = connect(2)
    for how, words in {"kernels": "not of kernels", "health": "not their numbers"}.items():
        with pytest.raises(Unimplemented, match=words):
            tfnb.run([loss, step], {x: torch.ones(5, 8)}, trace=how)

    def most(count: int) -> None:
        from tfnb.execution.tracing import place_tracer

        place_tracer.MOST = count

    dask.run(most, 10)
    try:
        with pytest.raises(ResourceExhausted, match="a trace holds 10 runs of nodes"):
            tfnb.run([loss, step], {x: torch.ones(5, 8)}, trace=True)
    finally:
        dask.run(most, 200_000)
    assert cluster.step == 0


def test_a_profile_in_a_notebook(connect, notebook: Notebook, tmp_path: Path) -> None:  # noqa: F811
    notebook.ok("%%tfgraph g\nx = tfnb.placeholder(torch.ones(3, 4))\nw = nn.Linear(4, 2)\ny = w(x).sum()")
    connect(2)
    notebook.ok("%tfrun y -f x=torch.ones(5,4) --profile")
    found = notebook.ok(f"%tfprof --trace {tmp_path / 'run.json'}").result
    assert found.lanes[0] == ("task:0", "cpu") and (tmp_path / "run.json").exists()
