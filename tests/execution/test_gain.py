"""The predicted gain of compiling: pure properties, the kinds of calls, and what sessions do with it."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tfnb
from tfnb.execution import lower
from tfnb.execution.compiling import compiler_process
from tfnb.execution.compiling.compiled_packages import PREDICTED, PROCESSOR, machine_scale
from tfnb.execution.compiling.package_cache import packages
from tfnb.execution.tiers import compiled_loops, gain
from tfnb.execution.tiers import tiered as tiers
from tfnb.execution.tiers.gain import CallCost, ExpectedSteps, Gain, compile_seconds, predicted, reason, worth
from tfnb.execution.tiers.step_profile import StepProfile
from tfnb.session import default_session

KINDS = st.sampled_from(["library", "fused", "view", "loop"])


@st.composite
def steps(draw: st.DrawFn) -> list[CallCost]:
    """Calls in program order."""
    found: list[CallCost] = []
    for place in range(draw(st.integers(1, 12))):
        sources = draw(st.lists(st.integers(0, place - 1), max_size=2)) if place else []
        found.append(CallCost(
            draw(KINDS), draw(st.floats(1e-6, 1e-2)), draw(st.integers(0, 1 << 22)), tuple(sources),
            draw(st.integers(0, 1 << 20)), draw(st.booleans()), draw(st.sampled_from([0.0, 1e-9])),
            draw(st.integers(0, 1 << 20)),
        ))  # fmt: skip
    return found


@given(steps(), st.floats(0, 1e-2))
def test_predictions_are_finite_and_what_is_saved_is_a_part_of_the_step(calls: list[CallCost], commit: float) -> None:
    found = predicted(calls, commit)
    assert 0 <= found.saved <= found.seconds and 0 <= found.share <= 1
    assert found.seconds == pytest.approx(sum(call.seconds for call in calls) + commit)
    assert found.compiled >= found.library - gain.DISPATCH * found.calls - 1e-12


@given(steps(), st.integers(0, 1 << 22))
def test_fused_kernels_move_no_more_memory_than_their_calls_do(calls: list[CallCost], written: int) -> None:
    moved = sum(call.bytes + call.given for call in calls)
    slow = sum(call.slow * call.elements for call in calls)
    assert 0 <= gain.fused_seconds(calls) <= moved / gain.RATE + slow + gain.KERNEL * len(calls)
    assert predicted(calls, 1e-3, written).compiled <= predicted(calls, 1e-3).compiled  # written in the same call


@given(st.integers(1, 30), st.integers(1, 1 << 22))
def test_a_longer_chain_of_fused_calls_moves_no_more_memory(length: int, size: int) -> None:
    chain = [
        CallCost("fused", 1e-4, size, (place - 1,) if place else (), 0 if place else size) for place in range(length)
    ]
    chain[-1] = chain[-1]._replace(taken=True)
    assert gain.fused_seconds(chain) == pytest.approx(2 * size / gain.RATE + gain.KERNEL)


def test_a_view_hands_on_the_memory_of_its_source() -> None:
    made = CallCost("library", 1e-3, 1000)
    seen = CallCost("view", 1e-6, 1000, (0,))
    taken = CallCost("fused", 1e-4, 1000, (1,), taken=True)
    assert gain.fused_seconds([made, seen, taken]) == pytest.approx(2000 / gain.RATE + gain.KERNEL)
    inside = [taken._replace(sources=(), taken=False), seen, taken]
    assert gain.fused_seconds(inside) == pytest.approx(1000 / gain.RATE + gain.KERNEL)


@given(st.floats(1e-6, 1.0), st.floats(0, 2), st.floats(0.1, 600), st.floats(0, 1e9), st.floats(1, 10))
def test_more_steps_never_undo_a_decision(seconds: float, ratio: float, cost: float, steps: float, more: float) -> None:
    found = Gain(seconds, ratio * seconds)
    order = ["never", "later", "now"]
    first, second = worth(found, cost, steps), worth(found, cost, more * steps)
    assert order.index(first) <= order.index(second)
    assert (first == "never") == (second == "never") == (found.share < gain.LEAST_GAIN)
    if first == "now":
        assert found.saved * steps >= cost
    assert worth(found, cost, steps, within=cost / 2) == "never"  # even if it saved the whole step


def test_the_reason_says_what_is_saved_and_what_it_costs() -> None:
    found = Gain(2e-3, 1e-3, 0.5e-3, 1)
    said = (
        "compiling would save about 50 % of a step (2 ms, of which 500 us are in 1 library call), and cost about 20 s"
    )
    assert reason(found, 20.0, "never", within=30.0) == f"{said}: more than it saves within 30 s (quiet, or on battery)"
    assert reason(found, 20.0, "later") == f"{said}: not yet, it pays after 20,000 steps"


def test_announced_steps_are_shared_by_the_sizes_of_the_feeds() -> None:
    expected = ExpectedSteps()
    assert expected.after(0) == 0 and expected.after(7) == 7
    expected.announced = lambda: 1000
    assert expected.after(0) == 0
    expected.taken = 10
    assert expected.after(7) == 700 and expected.after(3) == 300


@pytest.mark.usefixtures("own_packages")
def test_the_cost_is_that_of_the_packages_that_were_compiled_here() -> None:
    packages().clear()
    for place, seconds in enumerate((30.0, 20.0, 90.0)):
        assert machine_scale() == 1.0  # of so few
        facts = {PROCESSOR: seconds, PREDICTED: 20.0}
        packages().keep(f"a{place}", packages().draft(), facts)
        packages().keep(f"b{place}", packages().draft(), {"seconds": 5.0})
    assert machine_scale() == 1.5


# -- the calls of a step ------------------------------------------------------------------------------------------


def profiled(fetches: list[Any], feeds: dict[Any, torch.Tensor]) -> tuple[StepProfile, list[CallCost]]:
    graph = fetches[0].graph
    program = lower(graph, [fetch.value for fetch in fetches], [key.value for key in feeds])
    profile, args = StepProfile(program), [*feeds.values(), *(v.storage for v in program.variables), 0]
    for _ in range(2):
        outs = profile.forward(*args)
        profile.commits.append(0.0)
    for mine, wanted in zip(outs, program.forward(*args), strict=True):
        assert mine is wanted or torch.equal(mine, wanted)
    return profile, profile.calls(args)


def test_calls_are_told_apart_and_their_memory_is_counted_once() -> None:
    data = torch.randn(8, 16)
    with tfnb.record():
        x = tfnb.placeholder(data, shape=(8, 16))
        y = (x.t() @ x).softmax(1) * 2 + x.sum()
    _, calls = profiled([y], {x: data})
    assert [call.kind for call in calls] == ["view", "library", "fused", "fused", "fused", "fused"]
    assert sum(call.given for call in calls) == data.nbytes
    assert [call.bytes for call in calls] == [512, 1024, 1024, 1024, 4, 1024]
    assert [call.taken for call in calls] == [False] * 5 + [True]
    assert [call.slow > 0 for call in calls] == [False, False, True, False, False, False]
    assert all(call.seconds >= 0 for call in calls) and sum(call.seconds for call in calls) > 0


def test_what_has_no_form_in_compiled_code_stays_as_long_as_it_is() -> None:
    data = torch.randn(8, 16)
    with tfnb.record():
        x = tfnb.placeholder(data, shape=(8, 16))
        y = x.exp()[x > 0].sin().sum()
    profile, calls = profiled([y], {x: data})
    assert profile.unfit and all(calls[place].kind == "library" for place, _ in enumerate(calls[-2:], len(calls) - 2))


def test_loops_are_not_looked_into() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(5), shape=(5,))
        y = tfnb.fold(lambda s, row: s + row, torch.zeros(()), x)
    _, calls = profiled([y], {x: torch.ones(5)})
    assert "loop" in [call.kind for call in calls] and compile_seconds(calls) == gain.BASE_LOOP


# -- sessions ------------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(compiled_loops.obstacle() is not None, reason="there is no C++ compiler")


@pytest.fixture
def asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions choose after the first steps."""
    monkeypatch.setenv("TFNB_COMPILE", "auto")
    monkeypatch.setattr(tiers, "WORTH_COMPILING", 0.0)


def products() -> tuple[Any, Any, torch.Tensor]:
    """A step of large products: its step, its feed, and what is fed."""
    torch.manual_seed(0)
    net, data = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))), torch.randn(2048, 256)
    with tfnb.record():
        x = tfnb.placeholder(data, name="x")
        train = tfnb.train.SGD(1e-3).minimize(net(x).square().mean())
    return train, x, data


def chain(length: int = 8) -> tuple[Any, Any, torch.Tensor]:
    """Element-wise ops, one after the other."""
    data = torch.rand(300, 1000)
    with tfnb.record():
        x = tfnb.placeholder(data, name="x")
        y = x
        for _ in range(length):
            y = (y * 0.5 - x).relu()
    return y, x, data


@needs_compiler
@pytest.mark.usefixtures("own_packages", "asked_at_once")
def test_a_step_of_library_calls_is_not_compiled_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[object] = []
    monkeypatch.setattr(tiers.WORKER, "submit", lambda *given: submitted.append(given))
    (train, x, data), values = products(), list[torch.Tensor]()
    with tfnb.Session(train.graph) as session, tfnb.Session(train.graph, compile="off") as plain:
        session.expected(train, [x]).announced = lambda: 10**9
        for _ in range(tiers.PROFILED + 3):
            session.run(train, {x: data})
        (status,) = session.status()
        assert status.startswith("x [2048, 256]: generated code (compiling would save about "), status
        assert " in 8 library calls), and cost about " in status and "not yet" not in status
        values = [variable.storage.clone() for variable in train.graph.contents.variables.values()]
        assert plain.status() == [] and not submitted
    (train, x, data), steps = products(), tiers.PROFILED + 3
    with tfnb.Session(train.graph, compile="off") as plain:
        for _ in range(steps):
            plain.run(train, {x: data})
    for mine, variable in zip(values, train.graph.contents.variables.values(), strict=True):
        assert torch.equal(mine, variable.storage)  # steps with clocks compute the same bits


@needs_compiler
@pytest.mark.usefixtures("own_packages", "asked_at_once")
def test_a_chain_is_compiled_when_so_many_steps_are_to_come_that_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[object] = []
    monkeypatch.setattr(tiers.WORKER, "submit", lambda *given: submitted.append(given))
    y, x, data = chain()
    with tfnb.Session(y.graph) as session:
        for _ in range(3 * tiers.PROFILED):
            session.run(y, {x: data})
        assert "not yet, it pays after " in session.status()[0] and not submitted
        session.expected(y, [x]).announced = lambda: 10**9
        for _ in range(16):  # asked again after twice as many
            session.run(y, {x: data})
        assert "compiling in the background" in session.status()[0] and len(submitted) == 1


@needs_compiler
@pytest.mark.usefixtures("own_packages", "asked_at_once")
def test_fit_announces_its_steps_and_takes_the_announcement_back(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []
    monkeypatch.setattr(tiers, "worth", lambda found, cost, steps, **_: left.append(steps) or "later")
    train, x, data = products()
    session = default_session(train.graph)
    tfnb.fit(train, {x: data[:256]}, batch_size=64, epochs=5, progress_after=9)
    assert left[0] == 20 - tiers.PROFILED  # this step among them
    assert session.expected(train, [x]).announced is None
    session.close()


@needs_compiler
@pytest.mark.usefixtures("own_packages", "asked_at_once")
def test_a_profiled_step_that_fails_says_what_generated_code_says() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor([1, 2]), shape=(2,), name="x")
        y = torch.arange(5.0)[x] * 2
    with tfnb.Session(graph) as session, tfnb.Session(graph, compile="off") as plain:
        session.run(y, {x: torch.tensor([0, 1])})
        for at in (2, 9, 3, 1, 0):
            said = []
            for each in (session, plain):
                try:
                    said.append(str(each.run(y, {x: torch.tensor([0, at])})))
                except Exception as error:
                    said.append(str(error))
            assert said[0] == said[1] and ("index" in said[0]) == (at == 9)


@needs_compiler
@pytest.mark.usefixtures("own_packages", "asked_at_once")
def test_a_step_whose_gain_cannot_be_predicted_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Gain:
        raise ValueError("no prediction")

    submitted: list[object] = []
    monkeypatch.setattr(tiers.WORKER, "submit", lambda *given: submitted.append(given))
    monkeypatch.setattr(StepProfile, "gain", fails)
    y, x, data = chain()
    with tfnb.Session(y.graph) as session, tfnb.Session(y.graph, compile="off") as plain:
        wanted = plain.run(y, {x: data})
        for _ in range(tiers.PROFILED + 3):
            assert torch.equal(session.run(y, {x: data}), wanted)
        assert len(submitted) == 1 and "compiling in the background" in session.status()[0]


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.usefixtures("own_packages", "asked_at_once")
def test_a_chain_gets_faster_as_predicted_and_its_package_is_free_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_process, "NICE", 0)  # tests have no idle processor
    y, x, data = chain()
    with tfnb.Session(y.graph) as session:
        session.expected(y, [x]).announced = lambda: 10**9
        end, wanted = time.monotonic() + 250, session.run(y, {x: data})
        while "compiled: " not in session.status()[0] and time.monotonic() < end:
            torch.testing.assert_close(session.run(y, {x: data}), wanted)
            assert "generated code (" not in session.status()[0], session.status()
            if "compiling" in session.status()[0]:
                time.sleep(0.05)
        assert "compiled: " in session.status()[0], session.status()
    monkeypatch.setattr(tiers, "worth", lambda *_, **__: pytest.fail("a package that is there costs nothing"))
    y, x, data = chain()
    with tfnb.Session(y.graph) as session:
        session.run(y, {x: data})
        assert session.status()[0].endswith("; from the cache"), session.status()


@pytest.mark.usefixtures("own_packages", "asked_at_once")
def test_a_profile_holds_no_feed_of_the_steps_that_it_timed() -> None:
    (train, x, data), freed = products(), list[bool]()
    with tfnb.Session(train.graph) as session:
        for _ in range(tiers.PROFILED + 1):
            fed = data.clone()
            session.run(train, {x: fed})
            seen = weakref.ref(fed)
            del fed
            gc.collect()
            freed.append(seen() is None)
    assert all(freed), freed


@needs_compiler
@pytest.mark.usefixtures("own_packages", "asked_at_once")
@pytest.mark.parametrize("battery", [True, False])
def test_a_quiet_machine_compiles_only_what_pays_within_a_minute(
    battery: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages().clear()
    (tmp_path / "BAT0").mkdir()
    (tmp_path / "BAT0" / "status").write_text("Discharging\n" if battery else "Full\n")
    monkeypatch.setattr(tiers, "POWER", tmp_path)
    monkeypatch.setattr(tiers, "compile_seconds", lambda _: 61.0)  # no step saves more than all of itself
    y, x, data = chain()
    with tfnb.Session(y.graph, compile="auto" if battery else "quiet") as session:
        session.expected(y, [x]).announced = lambda: 10**9
        for _ in range(tiers.PROFILED + 2):
            session.run(y, {x: data})
        assert session.status()[0].endswith("more than it saves within 60 s (quiet, or on battery))")
        assert torch.equal(session.run(y, {x: data}), tfnb.Session(y.graph, compile="off").run(y, {x: data}))
