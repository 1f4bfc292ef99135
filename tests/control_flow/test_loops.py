"""Loops in the graph give what the same Python loop over plain tensors gives, for values that only a run knows."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.control_flow.random_programs import python_branch, python_loop
from tfnb.errors import BranchChanged, DeadlineExceeded, InvalidArgument, ShapeError
from tfnb.execution.tiers import tiered as tiers


def halvings(x: torch.Tensor, loop: Callable[..., Any]) -> Any:
    """How often x can be halved before its norm is below one, and what is left."""
    return loop(lambda n, y: y.norm() > 1, lambda n, y: (n + 1, y / 2), (0, x))


@pytest.mark.parametrize("scale", [0.1, 3.0, 1000.0])
def test_a_run_decides_how_often_the_body_runs(scale: float) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 2), name="x")
        n, y = halvings(x, tfnb.while_loop)
    fed = torch.randn(5, 2) * scale
    expected = halvings(fed, python_loop)
    torch.testing.assert_close(tuple(tfnb.run([n, y], {x: fed})), expected, rtol=0, atol=0)
    torch.testing.assert_close((n.sample, y.sample), halvings(torch.ones(3, 2), python_loop), rtol=0, atol=0)


def test_outside_a_recording_it_is_a_python_loop() -> None:
    x = torch.full((3,), 8.0)
    torch.testing.assert_close(halvings(x, tfnb.while_loop), halvings(x, python_loop), rtol=0, atol=0)


def test_maximum_iterations_end_a_loop() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        (y,) = tfnb.while_loop(lambda y: y < 1e9, lambda y: (y * 2,), (x,), maximum_iterations=5)
    assert tfnb.run(y, {x: 3.0}) == 96
    assert tfnb.run(y, {x: 1e9}) == 1e9
    assert tfnb.while_loop(lambda y: y < 9, lambda y: (y * 2,), (1.0,), maximum_iterations=2)[0] == 4


def test_one_loop_variable_alone() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        y = tfnb.while_loop(lambda y: y < 100, lambda y: y * 3, x)
        both = tfnb.while_loop(lambda v: v["n"] < 3, lambda v: {"n": v["n"] + 1, "y": v["y"] + x}, {"n": 0, "y": x})
    assert tfnb.run(y, {x: 2.0}) == 162
    assert tfnb.run(both, {x: 2.0}) == {"n": 3, "y": 8.0}
    assert tfnb.while_loop(lambda y: y < 100, lambda y: y * 3, 2.0) == 162
    assert tfnb.while_loop(lambda v: v["n"] < 3, lambda v: {"n": v["n"] + 1}, {"n": 0}) == {"n": 3}


def test_nested_loops_and_branches_see_what_is_around_them() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, loop: Any, branch: Any) -> Any:
        def body(i: Any, y: Any) -> Any:
            _, inner = loop(lambda j, z: j < i, lambda j, z: (j + 1, z + w[j] * y.sum()), (0, y))
            return i + 1, branch(inner.sum() > 4, lambda: inner / 2, lambda: inner + w[i])

        return loop(lambda i, y: i < 3, body, (0, x))

    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        w = tfnb.placeholder(torch.arange(4.0), shape=(4,), name="w")
        outs = program(x, w, tfnb.while_loop, tfnb.cond)
    for _ in range(5):
        fed = {x: torch.randn(4, 3), w: torch.randn(4)}
        expected = program(fed[x], fed[w], python_loop, python_branch)
        torch.testing.assert_close(tuple(tfnb.run(outs, fed)), expected, rtol=0, atol=0)


def test_a_body_uses_sizes_that_only_outside_knows() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 2), name="x")
        rows = x.shape[0]
        (y,) = tfnb.while_loop(lambda y: y.sum() < 20, lambda y: (y + torch.ones(rows).sum(),), (torch.zeros(()),))
    assert tfnb.run(y, {x: torch.ones(6, 2)}) == 24


def test_writes_in_a_body_are_carried_and_reach_outside() -> None:
    count = tfnb.Variable(torch.zeros(()), name="count")

    def program(x: torch.Tensor, buffer: torch.Tensor, count: Any, loop: Any) -> Any:
        def body(i: Any, y: Any) -> Any:
            count.assign_add(y.sum())
            buffer[i] = count.read()
            buffer[i] += 1
            return i + 1, y * 2

        i, y = loop(lambda i, y: i < 4, body, (0, x))
        return i, y, buffer * 2

    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2), name="x")
        outs = program(x, torch.zeros(5), count, tfnb.while_loop)
        after = count.read()
    fed = torch.randn(3)
    other = tfnb.Variable(torch.zeros(()))
    torch.testing.assert_close(
        tuple(tfnb.run([*outs, after], {x: fed})), (*program(fed, torch.zeros(5), other, python_loop), other.value())
    )
    assert count.value() == other.value()


def test_parameters_and_buffers_of_a_module_work_inside() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3), name="x")
        (y,) = tfnb.while_loop(lambda y: y.norm() > 0, lambda y: (layer(y),), (x,), maximum_iterations=3)
        step = tfnb.group(layer[1].running_mean)
    fed = torch.randn(5, 3)
    expected_mean = layer[1].running_mean.clone()
    out = tfnb.run([y, step], {x: fed})[0]
    seen = layer[1].running_mean.clone()
    with torch.no_grad():
        layer[1].running_mean.copy_(expected_mean)
        layer[1].running_var.fill_(1)
        want = layer(layer(layer(fed)))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(seen, layer[1].running_mean)


def test_draws_differ_from_iteration_to_iteration_and_repeat_with_the_run() -> None:
    with tfnb.record() as g:
        draws, _ = tfnb.scan(lambda c, x: (c + torch.rand(2), torch.rand(2)), torch.zeros(2), torch.zeros(50))
        _, ys = tfnb.scan(lambda c, x: (c, torch.rand(2)), torch.zeros(()), torch.zeros(50))
    first, second = (tfnb.Session(g).run([draws, ys]) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert len(torch.unique(first[1])) == 100
    torch.testing.assert_close(ys.sample, tfnb.Session(g).run(ys), rtol=0, atol=0)


def test_scan_map_and_fold_over_structures() -> None:
    def program(xs: Any) -> Any:
        total, ys = tfnb.scan(lambda c, x: ({"s": c["s"] + x[0]}, (c["s"], x[1] * 2)), {"s": torch.zeros(2)}, xs)
        back = tfnb.scan(lambda c, x: (c * 2 + x, c), torch.zeros(2), xs[0], reverse=True)
        return total, ys, back, tfnb.map_fn(lambda x: x[0].sum() + x[1], xs), tfnb.fold(torch.maximum, xs[0][0], xs[0])

    with tfnb.record():
        a = tfnb.placeholder(torch.randn(3, 2), shape=("T", 2), name="a")
        b = tfnb.placeholder(torch.randn(3), shape=("T",), name="b")
        outs = program((a, b))
    for length in (1, 3, 6):
        fed = {a: torch.randn(length, 2), b: torch.randn(length)}
        torch.testing.assert_close(tfnb.run(outs, fed), program((fed[a], fed[b])), rtol=0, atol=0)


def test_a_loop_variable_may_grow_along_a_declared_axis() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2), shape=(2,), name="x")
        n, rows = tfnb.while_loop(
            lambda n, rows: rows.sum() < 10, lambda n, rows: (n + 1, torch.cat([rows, x[None]])),
            (0, torch.zeros(0, 2)), shape_invariants=((), (None, 2)),
        )  # fmt: skip
        total = rows.sum(0)
    n_, rows_, total_ = tfnb.run([n, rows, total], {x: [1.0, 2.0]})
    assert (n_, rows_.shape, total_.tolist()) == (4, (4, 2), [4.0, 8.0])
    assert rows.sample.shape == (5, 2)


@pytest.mark.parametrize("loop", [
    lambda xs: tfnb.map_fn(lambda t: t[0] * t[1], xs),
    lambda xs: tfnb.scan(lambda c, t: (c + t[0] * t[1], c), 0.0, xs, reverse=True)[0],
    lambda xs: tfnb.fold(lambda c, t: c * t[0] + t[1], 0.0, xs),
])  # fmt: skip
def test_what_a_loop_goes_over_has_one_length(loop: Callable[[Any], Any]) -> None:
    one, three, five = torch.ones(1), torch.ones(3), torch.ones(5)
    for xs in ((three, five), (five, three)):
        with pytest.raises(ShapeError, match="tensors of one length"):
            loop(xs)
        with pytest.raises(ShapeError, match=r"tensors of one length.*\n  at test_loops\.py"), tfnb.record():
            loop(tuple(map(tfnb.placeholder, xs)))
    with tfnb.record():
        x, y = tfnb.placeholder(three, name="x"), tfnb.placeholder(three, name="y")
        found = loop((x, y))
    torch.testing.assert_close(tfnb.run(found, {x: one, y: one}), loop((one, one)))
    with pytest.raises(ShapeError, match="Cannot feed"):
        tfnb.run(found, {x: three, y: five})
    with pytest.warns(UserWarning, match="became the constant 3"), tfnb.record():
        x = tfnb.placeholder(three, name="x")
        found = loop((x, three))
    with pytest.raises(ShapeError, match="Cannot feed"):
        tfnb.run(found, {x: five})


@pytest.mark.parametrize("options", [{"compile": "off"}, {"executor": "dataflow"}, {"compile": "now"}])
def test_a_run_looks_whether_rows_that_data_picked_are_as_many(options: dict[str, Any]) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor([1.0, 2.0, 3.0]), name="x")
        found = tfnb.map_fn(lambda t: t[0] * t[1], (x[x > 0], x))
    session = tfnb.Session(g, **options)
    assert session.run(found, {x: torch.tensor([4.0, 2.0])}).tolist() == [16.0, 4.0]
    with pytest.raises(BranchChanged, match="map_fn goes over the rows of tensors of one length"):
        session.run(found, {x: torch.tensor([1.0, -2.0, 3.0])})


def endless(**how: Any) -> tuple[tfnb.Variable, Any, Any]:
    """A loop that goes on where x is above 0, what it and a line below it count, x, and all of it as a fetch."""
    steps = tfnb.Variable(torch.zeros(()), name="steps")
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor(-1.0), name="x")

        def body(y: Any) -> Any:
            steps.assign_add(1.0)
            return (y + 0,)

        (y,) = tfnb.while_loop(lambda y: y > 0, body, (x,), **how)
        steps.assign_add(1.0)
        done = tfnb.group(y, steps)
    return steps, x, done


def test_a_loop_that_never_ends_ends_at_the_deadline_and_writes_nothing() -> None:
    steps, x, done = endless()
    with pytest.raises(DeadlineExceeded, match="did not end within"):
        tfnb.run(done, {x: 1.0}, timeout=0.3)
    assert steps.value() == 0
    tfnb.run(done, {x: -1.0})
    assert steps.value() == 1


@pytest.mark.parametrize(
    "options",
    [{"executor": "dataflow"}, pytest.param({"compile": "now"}, marks=pytest.mark.slow), {"compile": "off"}],
)
def test_a_deadline_names_the_line_of_the_loop_whatever_runs_it(options: dict[str, Any]) -> None:
    _, x, done = endless()
    session = tfnb.Session(done.graph, **options)
    session.run(done, {x: -1.0})  # compiled where it is to be
    with pytest.raises(DeadlineExceeded, match=r"it stood at node .*, test_loops\.py line") as raised:
        session.run(done, {x: 1.0}, timeout=0.3)
    assert raised.value.line and raised.value.cell == Path(__file__).name


def test_a_deadline_says_that_the_step_waited_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers.WORKER, "submit", lambda *_: threading.Event())
    _, x, done = endless()
    with pytest.raises(DeadlineExceeded, match=r"what it waited for:\n  the compiler \(compile='now'\), for \d+\.\d s"):
        tfnb.Session(done.graph, compile="now").run(done, {x: -1.0}, timeout=0.2)


def test_an_interrupt_ends_a_loop() -> None:
    import _thread

    with tfnb.record():
        x = tfnb.placeholder(torch.tensor(-1.0), name="x")
        (y,) = tfnb.while_loop(lambda y: y > 0, lambda y: (y + 0,), (x,))
    tfnb.run(y, {x: -1.0})
    timer = threading.Timer(0.3, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        tfnb.run(y, {x: 1.0})
    timer.join()


def test_a_graph_with_loops_is_saved_and_loaded(tmp_path: Path) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3, 2), name="x")
        n, y = tfnb.while_loop(
            lambda n, y: y.norm() > 1, lambda n, y: (n + 1, tfnb.cond(n > 2, lambda: y / 4, lambda: y / 2)), (0, x)
        )
        z = y + 1
    g.save(tmp_path / "g.json")
    loaded = tfnb.Graph.load(tmp_path / "g.json")
    assert loaded.text() == g.text()
    fed = torch.randn(4, 2) * 100
    torch.testing.assert_close(tfnb.Session(loaded).run(["n:0", "z"], {"x": fed}), tfnb.run([n, z], {x: fed}))


def test_a_failing_kernel_inside_names_its_line() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), shape=(None,), name="x")
        i = tfnb.placeholder(torch.tensor(0), name="i")
        _, y = tfnb.while_loop(lambda n, y: n < 2, lambda n, y: (n + 1, y + x[i + n]), (0, torch.zeros(())))
    assert tfnb.run(y, {x: [1.0, 2.0, 3.0], i: 1}) == 5
    with pytest.raises(InvalidArgument, match="index") as raised:
        tfnb.run(y, {x: [1.0, 2.0, 3.0], i: 2})
    assert raised.value.line is not None


# -- what is refused ------------------------------------------------------------------------------------------------


def test_a_loop_variable_that_changes_shape_or_dtype_is_named() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 2), name="x")
        with pytest.raises(ShapeError, match=r"h enters as float32\[B, 2\] and is float32\[B, 4\].*\n.*line"):
            tfnb.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, torch.cat([h, h], 1)), (0, x))
        with pytest.raises(InvalidArgument, match=r"h enters as float32\[B, 2\] and is float64\[B, 2\]"):
            tfnb.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h.double()), (0, x))
        with pytest.raises(InvalidArgument, match=r"returns \(tensor, tensor, tensor\), .* given \(tensor, tensor\)"):
            tfnb.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h, h), (0, x))
        with pytest.raises(InvalidArgument, match=r"i enters as int64\[\] and is float32\[\]"):
            tfnb.while_loop(lambda i: i < 3, lambda i: 2.5, 0)
        with pytest.raises(InvalidArgument, match=r"one truth value.*float32\[B, 2\]"):
            tfnb.while_loop(lambda i, h: h, lambda i, h: (i + 1, h), (0, x))
        with pytest.raises(InvalidArgument, match="parallel_iterations"):
            tfnb.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h), (0, x), parallel_iterations=0)
        (y,) = tfnb.while_loop(lambda h: h.sum() < 9, lambda h: (h + 1,), (x,))
    torch.testing.assert_close(tfnb.run(y, {x: torch.zeros(1, 2)}), torch.full((1, 2), 5.0))


def test_a_size_that_a_body_fixes_is_fixed_before_it_too() -> None:
    with pytest.warns(UserWarning, match="size B became the constant 3"), tfnb.record():
        x = tfnb.placeholder(torch.ones(3), name="x")
        (y,) = tfnb.while_loop(lambda y: y.sum() < 9, lambda y: (y + torch.tensor([1.0, 2.0, 3.0]),), (x,))
    assert tfnb.run(y, {x: torch.zeros(3)}).tolist() == [2, 4, 6]
    with pytest.raises(ShapeError):
        tfnb.run(y, {x: torch.zeros(4)})


def test_a_number_read_inside_a_loop_is_refused() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), name="x")
        with pytest.raises(InvalidArgument, match="inside a loop"):
            tfnb.while_loop(lambda y: y.sum() < 9, lambda y: (y + y.sum().item(),), (x,))
    assert [node.op for node in g.nodes] == ["tfnb.placeholder"]


def test_an_optimizer_step_inside_a_loop_is_taken_in_every_iteration() -> None:
    torch.manual_seed(0)
    layer, twin = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    twin.load_state_dict(layer.state_dict())
    xs, ys = torch.randn(4, 5, 3), torch.randn(4, 5, 1)
    with tfnb.record():
        x = tfnb.placeholder(xs, shape=("T", "B", 3), name="x")
        y = tfnb.placeholder(ys, shape=("T", "B", 1), name="y")
        adam = tfnb.train.Adam(0.1)

        def body(i: Any, total: Any) -> Any:
            loss = (layer(x[i]) - y[i]).square().mean()
            adam.minimize(loss)
            return i + 1, total + loss

        _, total = tfnb.while_loop(lambda i, total: i < x.shape[0], body, (0, 0.0))
        step = tfnb.group(total, *layer.parameters())
    optimizer, want = torch.optim.Adam(twin.parameters(), 0.1), 0.0
    for _ in range(2):
        for a, b in zip(xs, ys, strict=True):
            optimizer.zero_grad()
            loss = (twin(a) - b).square().mean()
            loss.backward()
            optimizer.step()
            want = want + loss.item()
        got, _ = tfnb.run([total, step], {x: xs, y: ys})
        torch.testing.assert_close(list(layer.parameters()), list(twin.parameters()))
    assert want > got


def test_an_optimizer_step_in_a_branch_is_taken_with_it() -> None:
    w = tfnb.Variable(torch.ones(3), name="w")
    seen = tfnb.Variable(torch.zeros(()), name="seen")
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        seen.assign_add(1.0)
        momentum = tfnb.train.SGD(0.5, momentum=0.9)
        learn = tfnb.cond(seen.read() % 2 == 0, lambda: momentum.minimize((w.read() * x).sum()), lambda: None)
        step = tfnb.group(learn, seen)
        with pytest.raises(InvalidArgument, match="different structures: a step and tensor"):
            tfnb.cond(x.sum() > 0, lambda: tfnb.train.SGD(0.1).minimize((w.read() * x).sum()), lambda: x)
    assert isinstance(learn, tfnb.Operation)
    found = []
    for _ in range(4):
        assert tfnb.run(step, {x: torch.ones(3)}) is None
        found.append(w.value()[0].item())
    assert found == pytest.approx([1, 0.5, 0.5, 0.5 - 0.5 * 1.9])


def test_a_run_decides_how_many_iterations_there_are_at_most() -> None:
    with tfnb.record():
        most = tfnb.placeholder(torch.tensor(3), name="most")
        (y,) = tfnb.while_loop(lambda y: y < 50, lambda y: (y * 2,), (1.0,), maximum_iterations=most)
        with pytest.raises(InvalidArgument, match="maximum_iterations is one whole number"):
            tfnb.while_loop(lambda y: y < 50, lambda y: (y * 2,), (1.0,), maximum_iterations=most * 0.5)
    assert [tfnb.run(y, {most: n}).item() for n in (0, 2, 99)] == [1, 4, 64]
    assert tfnb.while_loop(lambda y: y < 50, lambda y: (y * 2,), (1.0,), maximum_iterations=torch.tensor(2))[0] == 4


def test_a_signal_ends_a_loop_and_variables_stay_at_the_last_step() -> None:
    steps, x, done = endless(maximum_iterations=10**9)
    tfnb.run(done, {x: -1.0})
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        tfnb.run(done, {x: 1.0})
    timer.join()
    assert steps.value() == 1
    tfnb.run(done, {x: -1.0})
    assert steps.value() == 2


def test_a_python_if_inside_is_guarded_in_every_iteration() -> None:
    def body(n: Any, y: Any) -> Any:
        if y.sum() < 100:
            y = y * 2
        return n + 1, y

    with tfnb.record(), pytest.warns(UserWarning, match="BranchChanged"):
        x = tfnb.placeholder(torch.ones(3), name="x")
        _, y = tfnb.while_loop(lambda n, y: n < 3, body, (0, x))
    assert tfnb.run(y, {x: torch.ones(2)}).tolist() == [8, 8]
    with pytest.raises(BranchChanged):
        tfnb.run(y, {x: torch.full((3,), 10.0)})
