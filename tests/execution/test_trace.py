"""A traced run: the same results, every node with its time and bytes, and the bytes that the step held."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import DeadlineExceeded, InvalidArgument


@pytest.fixture
def chain():
    """Three matrices of 16 x 16 float32, 1,024 bytes each, and a sum."""
    with tfnb.record("chain") as graph:
        x = tfnb.placeholder(torch.ones(16, 16), shape=[16, 16], name="x")
        a = x + 1
        b = a * x
        c = b.exp()
        total = c.sum()
    return tfnb.Session(graph, compile="off"), x, total, graph


@pytest.fixture
def trained():
    """A network with Adam and dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
    with tfnb.record("trained") as graph:
        x = tfnb.placeholder(torch.rand(4, 12), name="x")
        y = tfnb.placeholder(torch.zeros(4, dtype=torch.long), name="y")
        loss = F.cross_entropy(model(x), y)
        step = tfnb.train.Adam(1e-2).minimize(loss)
    return graph, step, loss, {x: torch.rand(5, 12), y: torch.tensor([0, 1, 2, 3, 0])}


def test_bytes_and_peak_are_those_counted_by_hand(chain) -> None:
    session, x, total, _ = chain
    session.run(total, {x: torch.ones(16, 16)}, trace=True)
    trace = session.trace
    assert [(event.op, event.bytes) for event in trace.events] == [
        ("aten.add.Tensor", 1024), ("aten.mul.Tensor", 1024), ("aten.exp.default", 1024), ("aten.sum.default", 4),
    ]  # fmt: skip
    # a; a b; b; b c; c; c total; total: x is the caller's
    assert [count for _, count in trace.live] == [0, 1024, 2048, 1024, 2048, 1024, 1028, 4]
    assert trace.peak == 2048


def test_views_and_borrowed_memory_take_no_bytes() -> None:
    weight = tfnb.Variable(torch.ones(64, 64), name="weight")
    with tfnb.record("views") as graph:
        x = tfnb.placeholder(torch.ones(64, 64), shape=[64, 64])
        y = (x.t() + weight.t()).t().reshape(8, 512)
    session = tfnb.Session(graph, compile="off")
    session.run(y, {x: torch.ones(64, 64)}, trace=True)
    assert session.trace.peak == 64 * 64 * 4


def test_results_and_variables_are_those_of_a_plain_run(trained) -> None:
    graph, step, loss, feeds = trained
    runs = []
    start = {label: variable.value() for label, variable in graph.contents.variables.items()}
    for trace in (False, True):
        for label, variable in graph.contents.variables.items():
            variable.set(start[label])
        session = tfnb.Session(graph, compile="off")
        losses = [session.run([step, loss], feeds, trace=trace)[1] for _ in range(3)]
        runs.append([*losses, *(variable.value() for variable in graph.contents.variables.values())])
    for plain, traced in zip(*runs, strict=True):
        assert torch.equal(plain, traced)


def test_ids_and_names_are_the_graphs_and_the_commit_is_an_event(trained) -> None:
    graph, step, loss, feeds = trained
    session = tfnb.Session(graph)
    session.run([step, loss], feeds, trace=True)
    *computed, commit = session.trace.events
    assert computed and all(graph.contents.by_id[event.node.id].name == event.name for event in computed)
    assert (commit.node, commit.name) == (None, "commit")
    assert commit.bytes == sum(v.storage.nbytes for v in graph.contents.variables.values())
    for before, after in zip(session.trace.events, session.trace.events[1:], strict=False):
        assert 0 <= before.start <= before.end <= after.start <= session.trace.seconds


def test_bars_cover_the_wall_time_of_a_step_of_large_matmuls() -> None:
    with tfnb.record("large") as graph:
        x = tfnb.placeholder(torch.ones(512, 512), shape=[512, 512])
        y = x
        for _ in range(8):
            y = (y @ x).mul(1 / 512)
    session = tfnb.Session(graph, compile="off")
    best = 0.0
    for _ in range(5):  # the machine may be busy between two bars
        session.run(y, {x: torch.ones(512, 512)}, trace=True)
        best = max(best, sum(event.seconds for event in session.trace.events) / session.trace.seconds)
    assert 0.9 <= best <= 1.0


def test_only_the_last_traced_run_is_kept_and_others_keep_it(chain) -> None:
    session, x, total, _ = chain
    assert session.trace is None
    session.run(total, {x: torch.ones(16, 16)}, trace=True)
    first = session.trace
    session.run(total, {x: torch.ones(16, 16)})
    assert session.trace is first
    session.run(total, {x: torch.ones(16, 16)}, trace=True)
    assert session.trace is not first


def test_run_traces_on_the_default_session(chain) -> None:
    _, x, total, graph = chain
    tfnb.run(total, {x: torch.ones(16, 16)}, trace=True)
    assert tfnb.session.default_session(graph).trace.fetched == {total.node.id}


@pytest.mark.parametrize("how", [{"trace": True}, {"timeout": 60}, {}])
def test_a_failing_kernel_names_its_line_and_writes_nothing(how) -> None:
    counter = tfnb.Variable(torch.zeros(2), name="counter")
    with tfnb.record("failing") as graph:
        table = tfnb.placeholder(torch.rand(4, 3), shape=[4, 3], name="table")
        rows = tfnb.placeholder(torch.tensor([0, 1]), name="rows")
        found = F.embedding(rows, table)
        counted = counter.assign_add(torch.ones(2))
    session = tfnb.Session(graph, compile="off")
    with pytest.raises(InvalidArgument, match=r"found = F\.embedding") as caught:
        session.run([found, counted], {table: torch.rand(4, 3), rows: torch.tensor([9])}, **how)
    assert caught.value.op == "aten.embedding.default"
    assert torch.equal(counter.value(), torch.zeros(2)) and session.trace is None


def test_a_traced_run_keeps_its_deadline(chain) -> None:
    session, x, total, _ = chain
    with pytest.raises(DeadlineExceeded):
        session.run(total, {x: torch.ones(16, 16)}, trace=True, timeout=0.0)
    assert session.trace is None


def test_tables_by_node_op_line_and_scope_have_the_same_sums(trained) -> None:
    graph, step, _, feeds = trained
    session = tfnb.Session(graph)
    session.run(step, feeds, trace=True)
    trace = session.trace
    seconds = sum(event.seconds for event in trace.events)
    for by in ("node", "op", "line", "scope"):
        rows = trace.table(by=by)
        assert sum(row.seconds for row in rows) == pytest.approx(seconds)
        assert sum(row.calls for row in rows) == len(trace.events)
        assert list(rows) == sorted(rows, key=lambda row: -row.seconds)
        assert trace.table(2, by=by) == rows[:2]
    assert {"0", "3"} <= {row.name.rpartition("/")[2] for row in trace.table(by="scope")}
    with pytest.raises(InvalidArgument, match="not by 'shape'"):
        trace.table(by="shape")


def test_repr_shows_the_top_rows(chain) -> None:
    session, x, total, _ = chain
    session.run(total, {x: torch.ones(16, 16)}, trace=True)
    head, *rows = repr(session.trace).splitlines()
    assert head.startswith("<Trace of total in graph chain: 4 events in ") and "at most 2,048 bytes" in head
    assert len(rows) == 4 and any("aten.exp.default" in row and "1,024 bytes" in row for row in rows)


def test_file_has_complete_events_and_counters(chain, tmp_path) -> None:
    session, x, total, graph = chain
    session.run(total, {x: torch.ones(16, 16)}, trace=True)
    found = json.loads(session.trace.save(tmp_path / "run.json").read_text())
    kinds = {kind: [event for event in found["traceEvents"] if event["ph"] == kind] for kind in "MXCsf"}
    assert sum(map(len, kinds.values())) == len(found["traceEvents"])
    assert {event["name"] for event in kinds["M"]} == {"process_name", "thread_name"}
    for event in found["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["args"], dict)
    for event in kinds["X"]:
        node = graph.contents.by_id[event["args"]["node"]]
        assert (event["name"], event["args"]["op"]) == (node.name, node.op)
        assert event["dur"] >= 0 and 0 <= event["ts"] <= 1e6 * session.trace.seconds
    assert [event["args"]["bytes"] for event in kinds["C"]] == [count for _, count in session.trace.live]


def test_file_has_an_arrow_for_each_use(chain, tmp_path) -> None:
    session, x, total, _ = chain
    session.run(total, {x: torch.ones(16, 16)}, trace=True)
    events = json.loads(session.trace.save(tmp_path / "run.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]

    def bar(arrow: dict[str, object]) -> str:
        (found,) = [b["args"]["op"] for b in bars if b["ts"] <= arrow["ts"] <= b["ts"] + b["dur"]]
        return found.split(".")[1]

    ends = {kind: {event["id"]: bar(event) for event in events if event["ph"] == kind} for kind in "sf"}
    assert [(ends["s"][i], ends["f"][i]) for i in ends["s"]] == [("add", "mul"), ("mul", "exp"), ("exp", "sum")]


def test_file_goes_beside_a_torch_profile(chain, tmp_path) -> None:
    session, x, total, _ = chain
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        session.run(total, {x: torch.ones(16, 16)}, trace=True)
    profile.export_chrome_trace(str(tmp_path / "torch.json"))
    session.trace.save(tmp_path / "both.json", profile=tmp_path / "torch.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    (ours,) = [
        event for event in events if event.get("cat") == "tfnb" and event["args"].get("op") == "aten.exp.default"
    ]
    named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {event.name for event in session.trace.events} <= named  # torch's own lane shows our names
    (theirs,) = [event for event in events if event.get("cat") == "cpu_op" and event["name"] == "aten::exp"]
    assert abs(ours["ts"] - theirs["ts"]) < 1e5  # microseconds: the same clock


def test_what_a_pass_adds_counts_for_the_node_that_it_is_named_after() -> None:
    model = nn.Conv2d(3, 4, 3)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.rand(4, 3, 32, 32), name="x")
        y = model(x).relu()
    session = tfnb.Session(g, compile="off", layout="channels_last")
    session.run(y, {x: torch.rand(4, 3, 32, 32)}, trace=True)
    assert session.trace is not None
    recorded = [event for event in session.trace.events if event.node is not None]
    (prepared,) = session._prepared.values()
    assert any("layout" in node.name for node in prepared.code.program.graph.nodes)
    assert all(event.node.id in g.contents.by_id for event in recorded)


def test_nodes_in_a_branch_outside_of_loops_have_bars_inside_of_its_bar(tmp_path) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(4))
        total = tfnb.cond(
            x.sum() > 0, lambda: tfnb.cond(x[0] > 0, lambda: (x * 3).exp(), lambda: -x), lambda: x.sin()
        ).sum()
    session = tfnb.Session(graph)
    session.run(total, {x: torch.ones(6)}, trace=True)
    spans = session.trace.spans
    outer = next(span for span in spans if span.op == "tfnb.cond")
    inner = [span for span in spans if len(span.path) > 1]
    assert [span.op for span in inner] == ["aten.select.int", "aten.gt.Tensor", "aten.mul.Tensor", "aten.exp.default"]
    assert all(outer.start <= span.start <= span.end <= outer.end for span in inner)
    events = json.loads(session.trace.save(tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {span.name for span in inner}
    assert session.trace._repr_html_().count("<rect") > len(spans)


def test_another_kind_of_trace_is_refused(chain) -> None:
    session, x, total, _ = chain
    with pytest.raises(InvalidArgument, match="trace is True, 'kernels' or 'health'"):
        session.run(total, {x: torch.ones(16, 16)}, trace="regions")
