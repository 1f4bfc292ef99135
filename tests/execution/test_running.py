"""Steps stopped from other threads: at any instant, once, and never while they commit."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import tfnb
from tfnb.errors import Cancelled, DeadlineExceeded, FailedPrecondition, TfnbError
from tfnb.execution import lower
from tfnb.execution.explain import _at_line
from tfnb.execution.running import Running, Stop, unstoppable
from tfnb.execution.tracing.probes import ProbedCode

# Python says which stops it drops
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def long_graph(nodes: int = 100) -> tuple[tfnb.Session, tfnb.Tensor, tfnb.Tensor, list[tfnb.Variable]]:
    """A step that adds one to each element of two variables; of seconds, for thousands of rows."""
    a, b = tfnb.Variable(torch.zeros(8), name="a"), tfnb.Variable(torch.zeros(8), name="b")
    with tfnb.record("long") as g:
        x = tfnb.placeholder(torch.ones(2, 200), name="x")
        y = x
        for _ in range(nodes):
            y = y.sin()
        one = (y.sum() * 0 + 1).expand(8)
        step = tfnb.group(a.assign_add(one), b.assign_add(one))
    return tfnb.Session(g, compile="off"), x, step, [a, b]


def test_a_result_or_an_error_passes_through() -> None:
    assert Running().compute(lambda a, b: a + b, 1, 2, until=(60.0, lambda _: Cancelled("late"))) == 3
    with pytest.raises(ZeroDivisionError):
        Running().compute(lambda: 1 / 0)


def test_a_stop_that_python_drops_is_raised_at_the_end() -> None:
    class Last:
        def __del__(self) -> None:
            end = time.monotonic() + 60
            while not running._sent and time.monotonic() < end:
                pass
            for _ in range(1000):  # in here it comes
                pass

    def drops() -> int:
        Last()
        return 3

    for _ in range(3):
        with pytest.raises(Cancelled, match="stopped"):
            running = Running()
            running.compute(drops, until=(0.05, lambda _: Cancelled("stopped")))
        assert [i for i in range(1000) if i < 0] == []  # nothing is on its way any more


def test_a_library_that_a_step_imports_is_whole_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_library_of_a_step.py").write_text(
        "import time\nfor _ in range(50):\n    time.sleep(0.01)\nis_whole = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    steps: list[Running] = []

    def call() -> None:
        import slow_library_of_a_step  # type: ignore[import-not-found]  # noqa: F401

        while True:
            time.sleep(0.001)

    def compute() -> None:
        steps.append(step := Running())
        with pytest.raises(Cancelled, match="stopped"):
            step.compute(call)

    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.1)
    steps[0].stop(lambda at: Cancelled("stopped"))
    thread.join(10)
    assert not thread.is_alive()
    assert sys.modules.pop("slow_library_of_a_step").is_whole


def test_a_stop_after_the_end_does_nothing() -> None:
    running = Running()
    assert running.compute(lambda: 5) == 5
    running.stop(lambda _: Cancelled("never seen"))
    for _ in range(1000):
        time.sleep(0)


def test_a_block_that_nothing_stops_may_have_another_one_inside() -> None:
    """The collector may run a step in a finalizer, anywhere."""
    seen: list[str] = []

    def blocks() -> None:
        with unstoppable():
            with unstoppable():
                seen.append("inside")
            running.stop(lambda _: Cancelled("stopped"))
            Running().compute(inner)
            seen.append("behind")
        seen.append("never")

    def inner() -> None:
        with unstoppable():
            seen.append("a step inside")

    def work() -> None:
        nonlocal running
        running = Running()
        try:
            running.compute(blocks)
        except Cancelled as error:
            seen.append(str(error))

    running = Running()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert seen == ["inside", "a step inside", "behind", "stopped"]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_interrupt_between_holding_and_letting_go_ends_the_step(is_stopped: bool) -> None:
    """A second Ctrl-C may come there: the step has nothing to wait for."""
    running = Running()

    def call() -> None:
        running.hold()
        if is_stopped:
            running.stop(lambda at: Cancelled("stopped"))
            with contextlib.suppress(Stop):
                running.let_go()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.compute(call)


def test_no_except_of_a_users_op_keeps_a_stop() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.001)

    with pytest.raises(Cancelled, match="enough"):
        Running().compute(stubborn, until=(0.05, lambda _: Cancelled("enough")))


def test_the_outer_of_two_steps_of_a_thread_is_stopped_as_a_whole() -> None:
    def inner() -> None:
        Running().compute(lambda: time.sleep(0) or [None for _ in iter(int, 1)])

    with pytest.raises(Cancelled, match="outer"):
        Running().compute(inner, until=(0.05, lambda _: Cancelled("outer")))


@pytest.mark.slow
def test_stops_at_random_instants_arrive_once_and_nowhere_else() -> None:
    draw = random.Random(0)

    def endless() -> None:
        while True:
            pass

    stopped = 0
    for trial in range(400):
        running = Running()
        timer = threading.Timer(draw.uniform(0, 2e-3), running.stop, (lambda _: Cancelled("stopped"),))
        timer.start()
        try:
            running.compute(endless if trial % 2 else lambda: sum(range(int(20_000 * draw.random()))))
        except Cancelled:
            stopped += 1
        timer.join()  # a stop that left its step would be raised here, or in the next turn
    assert stopped >= 200


def test_close_ends_the_runs_of_all_threads() -> None:
    session, x, step, variables = long_graph()
    session.run(step, {x: torch.ones(4, 200)})
    seen: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                session.run(step, {x: torch.ones(20_000, 200)})
        except BaseException as error:
            seen.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(session._steps.running) < len(threads):
        time.sleep(0.01)
    session.close()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 3 and {type(error) for error in seen} <= {Cancelled, FailedPrecondition}  # in or between runs
    assert any("long was closed" in str(error) for error in seen)
    a, b = (variable.value() for variable in variables)
    assert torch.equal(a, b) and a.unique().numel() == 1
    with pytest.raises(FailedPrecondition, match="is closed"):
        session.run(step, {x: torch.ones(4, 200)})


def test_a_callable_of_a_closed_session_refuses() -> None:
    session, x, step, _ = long_graph(2)
    call = session.make_callable(step, [x])
    call(torch.ones(4, 200))
    session.close()
    with pytest.raises(FailedPrecondition, match="is closed"):
        call(torch.ones(4, 200))


@pytest.mark.slow
@pytest.mark.parametrize("trace", [False, True])
def test_a_deadline_ends_a_step_between_its_kernels_and_names_the_node(trace: bool) -> None:
    session, x, step, variables = long_graph(1000)
    session.run(step, {x: torch.ones(4, 200)}, trace=trace)
    start = time.monotonic()
    with pytest.raises(
        DeadlineExceeded,
        match=r"within 2 s \(it stood at node sin_?\d*, .*line \d+:  y = y.sin\(\)\); nothing was written",
    ) as info:
        session.run(step, {x: torch.ones(150_000, 200)}, timeout=2, trace=trace)  # of a minute
    assert time.monotonic() - start < 30
    assert info.value.node.startswith("sin")
    assert all(variable.value().eq(1).all() for variable in variables)
    session.run(step, {x: torch.ones(4, 200)}, timeout=60)
    assert all(variable.value().eq(2).all() for variable in variables)


def test_each_line_of_traced_code_belongs_to_a_node() -> None:
    """A step may be stopped while the value of the last kernel is looked at, too."""
    with tfnb.record("lines") as g:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        step = (x.sin() + 1).exp().sum()
    probed = ProbedCode.of(lower(g, [step.value], [x.value]))
    lines = dict(enumerate(probed.code.splitlines(), start=1))
    calls = [number for number, text in lines.items() if "probe.probe(" in text]
    assert len(calls) == 4
    for number in calls:
        kernel, look = _at_line(probed, number - 1), _at_line(probed, number)
        assert kernel is look is not None, (lines[number - 1], lines[number])


def test_deadlines_at_random_instants_leave_whole_steps() -> None:
    session, x, step, variables = long_graph(60)
    one, draw, counts = torch.ones(4, 200), random.Random(1), {True: 0, False: 0}
    call = lambda seconds: session.run(step, {x: one}, timeout=seconds)  # noqa: E731
    call(60)
    for _ in range(300):
        try:
            call(draw.uniform(0, 6e-4))
            counts[True] += 1
        except TfnbError as error:
            assert isinstance(error, DeadlineExceeded)
            counts[False] += 1
        a, b = (variable.value() for variable in variables)
        assert torch.equal(a, b) and a.eq(counts[True] + 1).all()
    assert counts[False] > 10
