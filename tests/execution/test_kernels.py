"""A traced run inside torch.profiler: kernels belong to nodes, and the file is one that trace viewers take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.view import models
from tfnb.errors import FailedPrecondition, InvalidArgument
from tfnb.execution import Trace
from tfnb.execution.tracing.kernel_events import kernels
from tfnb.execution.tracing.trace import Event

pytestmark = pytest.mark.filterwarnings("ignore:.*profiler")


def looped() -> tuple[tfnb.Graph, Any, dict[Any, Any]]:
    with tfnb.record("looped") as graph:
        x = tfnb.placeholder(torch.ones(4, 4), shape=[4, 4], name="x")

        def shrink(k: Any, s: Any) -> Any:
            smaller = tfnb.while_loop(
                lambda a: a.norm() > 1, lambda a: tfnb.cond(k > 0, lambda: a / 2, lambda: a / 4), s
            )
            return k + 1, smaller

        y = tfnb.while_loop(lambda k, s: k < 3, shrink, (0, x @ x))[1]
    return graph, y, {x: torch.ones(4, 4)}


def trained() -> tuple[tfnb.Graph, Any, dict[Any, Any]]:
    feeds = {"x": torch.rand(4, 1, 8, 8), "y": torch.randint(0, 10, (4,))}
    return models.digits(), ["step", "loss"], feeds


def traced(program: tuple[tfnb.Graph, Any, dict[Any, Any]], how: Any) -> Trace:
    graph, fetches, feeds = program
    session = tfnb.Session(graph, compile="off")
    session.run(fetches, feeds, trace=how)
    assert session.trace is not None
    return session.trace


KNOWN = {"X": {"dur", "ts"}, "M": {"args"}, "C": {"args", "ts"}, "s": {"id", "ts"}, "f": {"id", "ts"}, "i": {"ts"}}


@pytest.mark.parametrize("program", [looped, trained])
@pytest.mark.parametrize("how", [True, "kernels"])
def test_the_file_is_a_valid_trace(program: Any, how: Any, tmp_path: Path) -> None:
    trace = traced(program(), how)
    found = json.loads(trace.save(tmp_path / "run.json").read_text())
    events = found["traceEvents"]
    for event in events:
        assert event["ph"] in KNOWN and {"name", "pid", "tid", *KNOWN[event["ph"]]} <= set(event), event
        assert isinstance(event["name"], str) and isinstance(event.get("args", {}), dict)
        for number in ("ts", "dur"):
            assert number not in event or (isinstance(event[number], (int, float)) and event.get("dur", 0) >= 0)
    ours = [event for event in events if event.get("cat") == "tfnb"]
    assert all(isinstance(event[name], int) for event in ours for name in ("pid", "tid"))
    arrows = {kind: sorted(event["id"] for event in ours if event["ph"] == kind) for kind in "sf"}
    assert arrows["s"] == arrows["f"]
    lanes = {event["tid"] for event in ours if event["ph"] == "X"}
    for lane in lanes:  # bars of one track lie in one another, or beside
        ends = [float("inf")]
        bars = [e for e in ours if e["ph"] == "X" and e["tid"] == lane]
        for bar in sorted(bars, key=lambda e: (e["ts"], -e["dur"])):
            while ends[-1] <= bar["ts"] + 1e-3:
                ends.pop()
            assert bar["ts"] + bar["dur"] <= ends[-1] + 1e-3, bar
            ends.append(bar["ts"] + bar["dur"])
    live = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["name"] == "live bytes"]
    assert live == [count for _, count in trace.live]
    if how == "kernels":
        assert {"cpu_op", "user_annotation", "tfnb"} <= {event.get("cat") for event in events}
        assert trace.profile["traceEvents"] and not any(e.get("cat") == "tfnb" for e in trace.profile["traceEvents"])


def test_calls_of_torch_belong_to_the_nodes_that_made_them() -> None:
    trace = traced(trained(), "kernels")
    pairs = {(event.node.name, event.kernel) for event in trace.kernels if event.node}
    assert {("model/0/conv2d/convolution", "aten::convolution"), ("logits", "aten::addmm")} <= pairs
    bars = {event.node: event for event in trace.events if event.node}
    for event in trace.kernels:
        assert event.thread == "torch" and (
            event.node is None or bars[event.node].start <= event.start <= bars[event.node].end
        )
    assert ("torch", "cpu") in trace.lanes and set(trace.kernels) <= set(trace.spans)
    assert sum(row.calls for row in trace.table()) == len(trace.events)  # they are counted once


def test_kernels_of_an_accelerator_have_a_lane_for_each_stream() -> None:
    graph, *_ = trained()
    node = next(node for node in graph.nodes if node.op == "aten.relu.default")
    bar = Event(node, 0.001, 0.003, 64, "cuda:0", "MainThread")

    def kernel(ts: float, stream: int, cat: str = "kernel") -> dict[str, Any]:
        args = {"device": 0, "stream": stream, "correlation": 7}
        return {
            "ph": "X",
            "cat": cat,
            "name": "relu_kernel",
            "pid": 0,
            "tid": stream,
            "ts": ts,
            "dur": 10.0,
            "args": args,
        }

    base, began = 1_700_000_000_000_000_000, 1_700_000_000_500_000_000
    events = [
        kernel(500_000 + 1500, 7),
        kernel(500_000 + 2000, 20),
        kernel(500_000 + 9000, 7),
        kernel(501_200, 7, "cpu_op"),
    ]
    first, second = kernels({"baseTimeNanoseconds": base, "traceEvents": events}, began, (bar,))
    assert (first.node, first.kernel, first.device, first.thread) == (node, "relu_kernel", "cuda:0", "stream 7")
    assert (first.start, first.seconds, second.thread) == (pytest.approx(0.0015), pytest.approx(1e-5), "stream 20")


def test_two_profilers_are_refused_and_neither_is_left_running() -> None:
    graph, fetches, feeds = looped()
    session = tfnb.Session(graph)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(FailedPrecondition, match="which is running already: use trace=True"):
            session.run(fetches, feeds, trace="kernels")
        session.run(fetches, feeds, trace=True)
    with pytest.raises(InvalidArgument):
        session.run(fetches, {next(iter(feeds)): torch.ones(4, 7)}, trace="kernels")
    with pytest.raises(InvalidArgument, match="trace is True, 'kernels' or 'health', not 'torch'"):
        session.run(fetches, feeds, trace="torch")
    assert not torch.autograd._profiler_enabled()
    session.run(fetches, feeds, trace="kernels")
