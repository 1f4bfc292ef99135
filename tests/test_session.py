"""Running: fetches, feeds, pruning, program order, whole steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb import passes
from tfnb.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FeedError,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ShapeError,
)
from tfnb.execution.dataflow.executor import Dataflow
from tfnb.execution.lowering.lower import lower_step
from tfnb.passes import StepGraph

Pair = namedtuple("Pair", "left right")


@pytest.fixture
def small() -> tfnb.Graph:
    with tfnb.record("small") as g:
        a = tfnb.placeholder(torch.ones(2), name="a")
        b = tfnb.placeholder(torch.ones(2), name="b")
        c = a + b
        d = a * 2
        e = d.exp()
        f = c * 10
    return g


def test_any_nesting_comes_back(small: tfnb.Graph) -> None:
    feeds = {"a": torch.ones(2), "b": [1, 2]}
    got = tfnb.Session(small).run({"x": ["c", ("d", Pair("c", "c"))], "y": "f"}, feeds)
    assert got["y"].tolist() == [20, 30]
    assert isinstance(got["x"][1][1], Pair) and got["x"][1][1].right.tolist() == [2, 3]
    assert type(got["y"]) is torch.Tensor


def test_only_what_the_fetch_needs_is_run(small: tfnb.Graph) -> None:
    session = tfnb.Session(small)
    assert session.run("f", {"c": torch.tensor([1.0, 2.0])}).tolist() == [10, 20]
    program = next(iter(session._prepared.values())).code.program
    assert [n.name for n in program.graph.nodes] == ["f"]
    assert session.run("c", {"c": torch.zeros(2)}).tolist() == [0, 0]


@pytest.mark.parametrize("feeds, error, words", [
    ({"a": torch.ones(2)}, InvalidArgument, ["placeholder b", "float32[B", "must be fed", "test_session.py"]),
    ({"a": torch.ones(2), "b": torch.ones(3)}, ShapeError, ["Cannot feed value of shape (3,)", "2 in another"]),
    ({"a": torch.ones(2, 2), "b": torch.ones(2)}, ShapeError, ["(2, 2)", "a", "(B,)"]),
    ({"a": torch.ones(2).to(torch.complex64), "b": torch.ones(2)}, FeedError, ["complex64 for a", "float32[B]"]),
    ({"a": [0.5, 1e300], "b": torch.ones(2)}, FeedError, ["1e+300 (at [1]) for a", "largest float32 is 3.40282e+38"]),
    ({"a": np.array([1e300, 1.0]), "b": torch.ones(2)}, FeedError, ["1e+300 (at [0]) for a"]),
    ({"a": torch.ones(2), "b": "text"}, FeedError, ["str", "b"]),
    ({"a": torch.ones(2).to_sparse(), "b": torch.ones(2)}, FeedError, ["sparse_coo tensor for a", "to_dense()"]),
    ({"a": torch.ones(2), "b": torch.ones(2).to_mkldnn()}, FeedError, ["mkldnn tensor for b", "float32[B]"]),
    ({"a": torch.ones(2), "b": torch.ones(2), "zz": 1}, NotFound, ["zz"]),
    ({"a": torch.ones(2), "b": torch.ones(2), 7: 1}, FeedError, ["7"]),
])  # fmt: skip
def test_bad_feeds_say_what_is_wrong(small: tfnb.Graph, feeds: dict, error: type, words: list[str]) -> None:
    with pytest.raises(error) as info:
        tfnb.Session(small).run("f", feeds)
    assert all(word in str(info.value) for word in words), str(info.value)


FLOAT64 = {
    "numpy": lambda tensor: tensor.numpy(),
    "reversed": lambda tensor: tensor.flip(0).numpy()[::-1],
    "pandas": lambda tensor: pandas.DataFrame(tensor.numpy()),
    "torch": lambda tensor: tensor,
}


@pytest.mark.parametrize("kind", FLOAT64)
def test_float64_is_rounded_with_one_note_for_each_placeholder(kind: str) -> None:
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(torch.zeros(2, 3), name="x"), tfnb.placeholder(torch.zeros(2, 3), name="y")
        total = x * y
    data = torch.rand(4, 3, dtype=torch.float64)
    data[0, 0] = torch.inf  # one that was infinite stays so
    feeds = {x: FLOAT64[kind](data), y: FLOAT64[kind](data + 1)}
    with pytest.warns(UserWarning, match="float64 is fed for [xy], which is float32") as notes:
        found = [tfnb.Session(graph).run(total, feeds) for _ in range(2)]
    assert sorted(str(note.message).split(",")[0][-1] for note in notes) == ["x", "y"]
    assert all(note.filename == __file__ for note in notes)
    for one in found:
        assert torch.equal(one, data.float() * (data + 1).float())


@pytest.mark.parametrize("dtype, given, fits", [
    (torch.bfloat16, torch.float64, True), (torch.complex64, torch.complex128, True),
    (torch.complex64, torch.float64, True), (torch.float32, torch.complex128, False),
    (torch.int64, torch.float64, False), (torch.bfloat16, torch.float32, False), (torch.int32, torch.int64, False),
    (torch.float64, torch.float32, True), (torch.bool, torch.float64, False),
])  # fmt: skip
def test_only_dtypes_that_nobody_asked_for_are_rounded(dtype: torch.dtype, given: torch.dtype, fits: bool) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.zeros(2, dtype=dtype), name="x")
        y = torch.stack([x, x])
    value = torch.tensor([0.3, 1.7]).to(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if fits:
            assert torch.equal(tfnb.Session(graph).run(y, {x: value})[0], value.to(dtype))
        else:
            with pytest.raises(FeedError, match="values would be lost"):
                tfnb.Session(graph).run(y, {x: value})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_feed_is_no_tensor_of_a_shape(small: tfnb.Graph) -> None:
    with pytest.raises(FeedError, match=r"nested tensor for a.*to_padded_tensor"):
        tfnb.Session(small).run("f", {"a": torch.nested.nested_tensor([torch.ones(2)]), "b": torch.ones(2)})


@pytest.mark.parametrize("first", ["x", "y"])
def test_a_feed_may_be_of_a_size_that_another_one_tells(first: str) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.zeros(2, 3), name="x")
        y = torch.cat([x, x])
        total = y.sum() + x.sum()
    session = tfnb.Session(graph)
    for rows, fits in ((8, True), (7, False), (8, True)):
        feeds = {x: torch.ones(4, 3), y: torch.ones(rows, 3)}
        feeds = feeds if first == "x" else dict(reversed(feeds.items()))
        if fits:
            assert session.run(total, feeds) == 36
        else:
            with pytest.raises(ShapeError, match=r"Cannot feed value of shape \(7, 3\) .* \(2\*B, 3\)"):
                session.run(total, feeds)


def test_a_feed_of_another_length_where_the_axis_is_fixed_says_how_it_would_vary() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3, 4), name="x")
        y = x + 1
    for feed, told in ((torch.ones(2, 5, 4), "axis 1 is fixed"), (torch.ones(1, 5, 6), "axes 1, 2 are fixed")):
        with pytest.raises(ShapeError, match=rf"{told} by its recording; placeholder\(sample, shape=\(None"):
            tfnb.Session(graph).run(y, {x: feed})


def test_names_that_may_be_meant_are_of_the_users_lines() -> None:
    layer = torch.nn.Linear(3, 1)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        loss = layer(x).sum()
        step = tfnb.train.Adam(0.1).minimize(loss)
    assert step.name == "step"
    with pytest.raises(FeedError, match=r"fetch one of: x, loss$"):
        tfnb.Session(graph).run(torch.ones(3), {x: torch.ones(2, 3)})


def test_fetches_of_what_is_not_there() -> None:
    with tfnb.record("here") as here:
        a = tfnb.placeholder(torch.ones(2), name="a")
    with tfnb.record("there"):
        b = tfnb.placeholder(torch.ones(2), name="b")
    session = tfnb.Session(here)
    with pytest.raises(FeedError, match="in graph there, not in here"):
        session.run(b, {a: torch.ones(2)})
    with pytest.raises(NotFound, match="lossy"):
        session.run("lossy")
    with pytest.raises(FeedError, match="outside a recording"):
        session.run(torch.ones(3))
    with pytest.raises(NotFound, match="outputs"):
        session.run("a:3", {a: torch.ones(2)})


def test_a_failing_kernel_names_node_line_and_feeds() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(3, dtype=torch.int64), name="x")
        rows = F.embedding(x, torch.randn(4, 2))
    with pytest.raises(InvalidArgument) as info:
        tfnb.run(rows, {x: [7]})
    assert info.value.op == "aten.embedding.default"
    assert "F.embedding(x" in str(info.value) and "x: int64[1]" in str(info.value)


def test_reads_and_writes_follow_program_order() -> None:
    v = tfnb.Variable(torch.tensor(1.0), name="v")
    with tfnb.record():
        old = v.read() * 1
        v.assign(5.0)
        new = v.read() * 1
        plus = v.assign_add(2.0)
        doubled = v * 2
    assert v.value() == 1
    assert [t.item() for t in tfnb.run([old, new])] == [1, 5]
    assert v.value() == 5
    assert tfnb.run([old, plus, doubled])[2].item() == 14
    assert v.value() == 7


def test_between_cells_writes_are_ordered_but_not_pulled() -> None:
    v = tfnb.Variable(torch.tensor(1.0), name="v")
    with tfnb.record() as g:
        train = v.assign_add(1.0)
    with tfnb.record(g):
        y = v * 2
    assert tfnb.run(y).item() == 2 and v.value() == 1
    assert [t.item() for t in tfnb.run([train, y])] == [2, 4]


def test_swapping_two_variables_in_one_step() -> None:
    a, b = tfnb.Variable(torch.tensor([1.0]), name="a"), tfnb.Variable(torch.tensor([2.0]), name="b")
    with tfnb.record():
        old_a, old_b = a.read(), b.read()
        step = tfnb.group(a.assign(old_b), b.assign(old_a))
    tfnb.run(step)
    assert (a.value().item(), b.value().item()) == (2, 1)


def test_control_dependencies_make_reads_fresh_and_pull() -> None:
    v = tfnb.Variable(torch.tensor(1.0), name="v")
    with tfnb.record():
        bump = v.assign_add(1.0)
        with tfnb.control_dependencies([bump]):
            y = v * 1
    assert tfnb.run(y).item() == 2


@pytest.mark.parametrize("kind, want", [
    ("scatter_update", [[1, 1], [9, 9], [3, 3]]), ("scatter_add", [[1, 1], [11, 11], [3, 3]]),
    ("scatter_sub", [[1, 1], [-7, -7], [3, 3]]), ("scatter_mul", [[1, 1], [18, 18], [3, 3]]),
    ("scatter_div", [[1, 1], [2 / 9, 2 / 9], [3, 3]]),
])  # fmt: skip
def test_scatter_family_recorded_and_immediate(kind: str, want: list[list[float]]) -> None:
    start = torch.tensor([[1.0, 1], [2, 2], [3, 3]])
    v, w = tfnb.Variable(start, name="v"), tfnb.Variable(start, name="w")
    rows, index = torch.full((1, 2), 9.0), torch.tensor([1])
    with tfnb.record():
        out = getattr(v, kind)(index, rows)
    expected = torch.tensor(want, dtype=torch.float32)
    torch.testing.assert_close(tfnb.run(out), expected)
    torch.testing.assert_close(v.value(), expected)
    torch.testing.assert_close(getattr(w, kind)(index, rows), expected)


def test_a_step_for_which_there_is_no_memory_is_resource_exhausted_and_writes_nothing() -> None:
    w = torch.nn.Parameter(torch.ones(1))
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(2, 1), name="x")
        loss = (x @ x.T * w).sum()
        step = tfnb.train.SGD(0.1).minimize(loss)
    session = tfnb.Session(g, compile="off")
    with pytest.raises(ResourceExhausted, match=r"can't allocate memory.*fewer rows") as info:
        session.run(step, {x: torch.ones(1 << 22, 1)})
    assert info.value.line and info.value.op == "aten.mm.default" and w.item() == 1.0
    session.run(step, {x: torch.ones(2, 1)})
    assert w.item() == pytest.approx(0.6)


def test_assigning_another_shape_names_both() -> None:
    v = tfnb.Variable(torch.ones(2), name="v")
    with pytest.raises(ShapeError, match=r"float32\[3\](.|\n)*v, which is float32\[2\]"), tfnb.record():
        v.assign(torch.ones(3))
    with pytest.raises(ShapeError):
        v.assign(torch.ones(3))
    assert v.value().tolist() == [1, 1]


def test_results_are_not_the_variables_memory() -> None:
    layer = nn.Linear(2, 2)
    with tfnb.record():
        w = tfnb.variable(layer.weight).read()
        view = w.t()
    got_w, got_view = tfnb.run([w, view])
    got_w.zero_(), got_view.zero_()
    assert layer.weight.abs().sum() > 0


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_what_is_fed_may_be_memory_that_the_step_writes(executor: str, view: bool) -> None:
    online = torch.nn.Parameter(torch.ones(2, 3))
    target = tfnb.Variable(torch.zeros(3, 2) if view else torch.ones(2, 3))
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.zeros(2, 3), shape=(2, 3))
        step = tfnb.train.SGD(0.5).minimize(online.sum())
        copied = target.assign(x.mT if view else x)
    tfnb.Session(graph, executor=executor).run([step, copied], {x: online})
    assert torch.equal(online.detach(), torch.full((2, 3), 0.5))
    assert torch.equal(target.value(), torch.ones(3, 2) if view else torch.ones(2, 3))


def test_feeding_a_variable_is_not_an_assignment() -> None:
    v = tfnb.Variable(torch.ones(2), name="v")
    with tfnb.record():
        y = v * 2
    assert tfnb.run(y, {v: torch.full((2,), 5.0)}).tolist() == [10, 10]
    assert v.value().tolist() == [1, 1] and tfnb.run(v).tolist() == [1, 1]


def test_an_error_in_a_step_writes_nothing() -> None:
    v = tfnb.Variable(torch.zeros(()), name="v")
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(2, dtype=torch.int64), name="x")
        bump = v.assign_add(1.0)
        bad = F.embedding(x, torch.randn(3, 2))
    with pytest.raises(InvalidArgument):
        tfnb.run([bump, bad], {x: [9]})
    assert v.value() == 0


def test_unrelated_changes_keep_the_program(small: tfnb.Graph) -> None:
    session = tfnb.Session(small)
    session.run("d", {"a": torch.ones(2)})
    first = next(iter(session._prepared.values())).code.program
    with tfnb.record(small):
        tfnb.placeholder(torch.ones(2), name="other") * 3
    session.run("d", {"a": torch.ones(2)})
    assert next(iter(session._prepared.values())).code.program is first


class Elsewhere:
    """Stands for a cluster: it notes the steps, and answers with the names of their nodes."""

    def __init__(self) -> None:
        self.steps: list[StepGraph] = []

    def run(self, step: StepGraph, tensors: list[torch.Tensor], **options: Any) -> list[Any]:
        self.steps.append(step)
        return [[node.name for node in step.graph.nodes] for _ in step.fetches]


@pytest.fixture
def counts(small: tfnb.Graph, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the whole graph is pruned and a step lowered, by whatever module."""
    found: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def counted(graph: Any, *args: Any, **how: Any) -> Any:
            found[name] += name != "prune" or graph is small
            return original(graph, *args, **how)

        return counted

    for name, original in (("prune", passes.prune), ("lower", lower_step), ("dataflow", Dataflow)):
        for module in [module for key, module in sys.modules.items() if key.startswith("tfnb.")]:
            for attribute in [key for key, value in vars(module).items() if value is original]:
                monkeypatch.setattr(module, attribute, counting(name, original))
    return found


def test_a_first_run_prunes_once_and_lowers_once(small: tfnb.Graph, counts: Counter[str]) -> None:
    with tfnb.Session(small) as session:
        for _ in range(3):
            session.run("d", {"a": torch.ones(2)})
    assert counts == {"prune": 1, "lower": 1}


def test_what_runs_on_a_cluster_is_pruned_once_and_not_lowered_here(small: tfnb.Graph, counts: Counter[str]) -> None:
    cluster = Elsewhere()
    with tfnb.Session(small, cluster=cluster) as session:
        for _ in range(3):
            names = session.run("f", {"c": torch.ones(2)})
        assert names == ["f"] and len(set(map(id, cluster.steps))) == 1 and session.status() == []
        assert counts == {"prune": 1}
        session._cluster = None
        assert session.run("f", {"c": torch.ones(2)}).tolist() == [10, 10]
    assert counts == {"prune": 1, "lower": 1}


def test_node_count_and_cache_stay_constant_over_many_runs(small: tfnb.Graph) -> None:
    session = tfnb.Session(small)
    for _ in range(1000):
        session.run("d", {"a": torch.ones(2)})
    assert len(small.nodes) == 6 and len(session._prepared) == 1


@pytest.mark.parametrize("timeout", ["2", -1, float("nan"), True])
def test_a_timeout_is_a_number_of_seconds(timeout: object) -> None:
    with tfnb.record():
        y = torch.ones(2) + 1
    with pytest.raises(InvalidArgument, match="timeout is in seconds, at least 0"):
        tfnb.run(y, timeout=timeout)  # type: ignore[arg-type]


def test_timeout_names_the_node_and_writes_nothing() -> None:
    v = tfnb.Variable(torch.zeros(()), name="v")
    with tfnb.record():
        step = v.assign_add(1.0)
    with pytest.raises(DeadlineExceeded, match="nothing was written"):
        tfnb.run(step, timeout=0.0)
    assert v.value() == 0
    assert tfnb.run(step, timeout=5).item() == 1


def test_closed_session_refuses(small: tfnb.Graph) -> None:
    with tfnb.Session(small) as session:
        assert session.run("d", {"a": torch.ones(2)}).tolist() == [2, 2]
    with pytest.raises(FailedPrecondition, match="small is closed"):
        session.run("d", {"a": torch.ones(2)})


def test_make_callable_follows_the_graph(small: tfnb.Graph) -> None:
    call = tfnb.Session(small).make_callable({"f": "f"}, ["a", "b"])
    assert call([1.0, 1.0], torch.ones(2))["f"].tolist() == [20, 20]
    with tfnb.record(small):
        tfnb.placeholder(torch.ones(2), name="late")
    assert call([1.0, 1.0], torch.ones(2))["f"].tolist() == [20, 20]
    with pytest.raises(InvalidArgument, match="takes 2 values"):
        call(torch.ones(2))


def test_runs_from_many_threads() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = (x * 2).sum()
    bad: list[float] = []

    def work(k: int) -> None:
        for _ in range(200):
            if tfnb.run(y, {x: torch.full((3,), float(k))}).item() != 6 * k:
                bad.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not bad


def test_a_saved_graph_runs_in_a_fresh_process_without_ipython(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    with tfnb.record("net") as g:
        x = tfnb.placeholder(torch.randn(4, 1, 8, 8))
        logits = model(x)
        loss = logits.square().mean()
        step = tfnb.train.Adam(1e-2).minimize(loss)
    data = torch.randn(5, 1, 8, 8)
    for _ in range(3):
        tfnb.run(step, {x: data})
    g.save(tmp_path / "net.json")
    tfnb.Session(g).save(tmp_path / "net.safetensors")
    torch.save({"x": data, "want": tfnb.Session(g).run("logits", {"x": data})}, tmp_path / "io.pt")
    code = f"""
import sys, torch, tfnb
io = torch.load({str(tmp_path / "io.pt")!r})
g = tfnb.Graph.load({str(tmp_path / "net.json")!r})
session = tfnb.Session(g).restore({str(tmp_path / "net.safetensors")!r})
assert torch.equal(session.run("logits", {{"x": io["x"]}}), io["want"])
before = session.run("loss", {{"x": io["x"]}})
for _ in range(5): session.run("step", {{"x": io["x"]}})
assert session.run("loss", {{"x": io["x"]}}) < before
assert not {{"IPython", "distributed", "dask"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_restore_is_all_or_nothing(tmp_path: Path) -> None:
    a, b = tfnb.Variable(torch.zeros(2), name="a"), tfnb.Variable(torch.zeros(3), name="b")
    with tfnb.record("ab") as g:
        a + 1, b + 1
    session = tfnb.Session(g)
    session.save(tmp_path / "ab.safetensors")
    a.assign(torch.ones(2))
    c = tfnb.Variable(torch.zeros(4), name="c")
    with tfnb.record(g):
        c + 1
    with pytest.raises(NotFound, match="c"):
        session.restore(tmp_path / "ab.safetensors")
    assert a.value().tolist() == [1, 1]
    session.restore(tmp_path / "ab.safetensors", strict=False)
    assert a.value().tolist() == [0, 0]


SCRIPT = """
import os, signal, sys, threading, time, random, torch, tfnb
torch.set_num_threads(1)
v = [tfnb.Variable(torch.zeros(100), name=f"v{i}") for i in range(40)]
with tfnb.record("g") as g:
    x = tfnb.placeholder(torch.ones(2), name="x")
    step = tfnb.group(*[a.assign_add(torch.ones(100)) for a in v])
session = tfnb.Session(g)
call = session.make_callable(step, ["x"])
one = torch.ones(2)
call(one)
random.seed(int(sys.argv[1]))
torn = 0
for trial in range(40):
    timer = threading.Timer(random.uniform(0.0005, 0.01), lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            call(one)
    except KeyboardInterrupt:
        pass
    timer.join()
    values = {a.value()[0].item() for a in v} | {a.value()[-1].item() for a in v}
    torn += len(values) != 1
print("torn", torn, "steps", values)
assert torn == 0
"""


def test_interrupts_at_random_instants_leave_whole_steps() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_interrupt_is_delivered_after_the_commit() -> None:
    from tfnb.interrupts import no_interrupt

    reached = []
    with pytest.raises(KeyboardInterrupt), no_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(1)
    assert reached == [1] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_session_behind_a_watch_saves_and_restores_the_same_run_numbers():
    with tfnb.record("watched_runs") as g:
        x = tfnb.placeholder(torch.zeros(2), name="x")
        y = x + torch.rand_like(x)
    session = tfnb.Session(g)
    session.run(y, {x: torch.zeros(2)})
    twin = session._generated()
    assert twin.runs is session.runs and twin.state.positions == session.state.positions
    moment = session.state.moment()
    first, _ = session.looked_at(y, {x: torch.zeros(2)}, {})
    twin.state.go_back(moment)
    assert torch.equal(session.run(y, {x: torch.zeros(2)}), first)


def test_a_size_or_a_number_is_no_fetch_and_the_error_says_what_is():
    with tfnb.record("sizes"):
        x = tfnb.placeholder(torch.ones(4, 3))
        rows = x[x[:, 0] > 0]
        count, whole = rows.shape[0], torch.tensor(rows.shape[0])
    fed = {x: torch.tensor([[1.0, 0, 0], [-1, 0, 0]])}
    for size in (count, count + 1):
        for fetches in (size, [size], {"n": (whole, size)}):
            with pytest.raises(FeedError, match=r"cannot fetch the size .*: record torch.tensor\(SIZE\) in the cell"):
                tfnb.run(fetches, fed)
    for number in (x.shape[0], 2.5, [whole, True]):
        with pytest.raises(FeedError, match="is a number of Python, as the recording left it"):
            tfnb.run(number, fed)
    assert tfnb.run(whole, fed) == 1
