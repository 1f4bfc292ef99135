"""Compiled code computes what generated code computes, and gives way to it whatever happens."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tests.compiling import compile_soon
from tfnb.errors import InvalidArgument
from tfnb.execution.compiling import compiled_packages
from tfnb.execution.compiling.compiler_process import CompilerProcess
from tfnb.execution.compiling.package_cache import packages
from tfnb.execution.tiers import compiled_loops
from tfnb.execution.tiers import tiered as tiers
from tfnb.execution.tiers.interface import TierRequest, first

pytestmark = pytest.mark.usefixtures("own_packages")


@pytest.fixture
def needs_compiler() -> None:
    """Skips where nothing can be compiled."""
    if compiled_loops.obstacle() is not None:
        pytest.skip(str(compiled_loops.obstacle()))


@pytest.fixture(autouse=True)
def cold() -> None:
    """No test finds what another one compiled."""
    packages().clear()


def classifier() -> tuple[Any, list[Any], list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
    with tfnb.record() as g:
        x, y = tfnb.placeholder(torch.randn(4, 6), name="x"), tfnb.placeholder(torch.tensor([0, 1, 2, 0]), name="y")
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.Adam(0.1).minimize(loss)
    return g, [train, loss], [x, y]


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, generator=made), torch.randint(3, (rows,), generator=made)


def losses(mode: str, rows: list[int]) -> tuple[list[float], tfnb.Session]:
    g, fetches, keys = classifier()
    session = tfnb.Session(g, compile=mode)
    return [float(session.run(fetches, dict(zip(keys, batch(n), strict=True)))[1]) for n in rows], session


@pytest.mark.slow
@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_compiled_steps_equal_generated_steps_with_the_same_draws() -> None:
    rows = [4, 4, 7, 4, 5, 4, 9, 20, 5]
    want, _ = losses("off", rows)
    got, session = losses("now", rows)
    assert got == pytest.approx(want, rel=1e-5)
    assert [re.sub(r"[\d.]+ s", "... s", line) for line in session.status()] == [
        "x [4, 6], y [4]: compiled; ... s to compile", "x [7, 6], y [7]: compiled; ... s to compile",
        "other sizes [...]: compiled; ... s to compile",
    ]  # fmt: skip


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_code_is_swapped_in_while_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFNB_COMPILE", "auto")
    compile_soon(monkeypatch)
    g, fetches, keys = classifier()
    session, feed = tfnb.Session(g, compile="auto"), dict(zip(keys, batch(4), strict=True))
    seen: dict[str, None] = {}
    got: list[float] = []
    deadline = time.monotonic() + 200
    while not any("us" in status for status in seen) and time.monotonic() < deadline:
        got.append(float(session.run(fetches, feed)[1]))
        seen.setdefault(session.status()[0])
        if len(got) > 50:
            time.sleep(0.01)  # the compiler needs the processor
    assert "x [4, 6], y [4]: generated code; compiling in the background" in seen
    assert any("compiled" in status and "us" in status for status in seen), seen
    want, _ = losses("off", [4] * min(len(got), 50))
    assert got[:50] == pytest.approx(want, rel=1e-4)


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_module_with_other_strides_goes_on_with_generated_code() -> None:
    model = nn.Linear(6, 3)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 6), name="x")
        y = model(x).exp()
    session, data = tfnb.Session(g, compile="now"), torch.randn(4, 6)
    torch.testing.assert_close(session.run(y, {x: data}), model(data).exp().detach())
    model.weight.data = torch.randn(6, 3).t()
    for _ in range(tiers.MOST_UNFIT):
        torch.testing.assert_close(session.run(y, {x: data}), model(data).exp().detach())
    assert "generated code (what it reads lies in memory another way" in session.status()[0]


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_compiled_says_why_and_runs() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4), name="x")
        y = x + 1 if x.sum() > 0 else x
    session = tfnb.Session(g, compile="now")
    assert torch.equal(session.run(y, {x: torch.ones(4)}), torch.full((4,), 2.0))
    assert "decides what runs next" in session.status()[0]


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_factors_of_sums_and_products_are_in_compiled_code() -> None:
    """Inductor's patterns make ``x + 0.1 * (a @ b)`` of them, and leave out the factor."""
    torch.manual_seed(0)
    with tfnb.record() as g:
        x, a, b = (tfnb.placeholder(torch.randn(*shape), shape=shape) for shape in ((4, 6), (4, 3), (3, 6)))
        bias = tfnb.placeholder(torch.full((6,), float("nan")), shape=(6,))
        results = [  # products of their own: those with several users are left alone
            torch.add(x, a @ b, alpha=0.1), torch.add((a + 1) @ b, x, alpha=0.1), torch.sub(x, (a + 2) @ b, alpha=3),
            torch.addmm(x, a, b, beta=0.5, alpha=2).relu(), torch.addmm(x, a, b, beta=0.5).sin(),
            torch.addmm(bias, a, b, beta=0), torch.baddbmm(x[None], a[None], b[None], beta=3, alpha=0.5).exp(),
        ]  # fmt: skip
    feed = {x: torch.randn(4, 6), a: torch.randn(4, 3), b: torch.randn(3, 6), bias: torch.full((6,), float("nan"))}
    session = tfnb.Session(g, compile="now")
    torch.testing.assert_close(session.run(results, feed), tfnb.Session(g, compile="off").run(results, feed))
    assert ": compiled; " in session.status()[0]


class Says:
    """A tier that gives this, or raises it."""

    def __init__(self, found: Any) -> None:
        self.name, self.found = f"says {found}", found

    def made(self, request: TierRequest) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_the_first_tier_that_has_code_is_chosen_and_others_say_why_not() -> None:
    request = TierRequest(None, max)  # type: ignore[arg-type]
    none, broken, good = Says("it has no loops"), Says(ValueError("no\nway")), Says(min)
    assert first([none, broken, good, Says(max)], request) == (min, good.name)
    assert first([none, broken, none], request) == (None, "it has no loops; ValueError: no")


@pytest.mark.parametrize("mode", ["auto", "now"])
@pytest.mark.usefixtures("needs_compiler")
def test_wrong_code_never_runs_a_step(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        name = "compiled"

        def made(self, request: TierRequest) -> Any:
            forward = request.program.forward
            return lambda *given: tuple(x + 1 if isinstance(x, torch.Tensor) else x for x in forward(*given))

    monkeypatch.setenv("TFNB_COMPILE", mode)
    monkeypatch.setattr(tiers, "COMPILED", (Wrong(),))
    compile_soon(monkeypatch)
    g, fetches, keys = classifier()
    session, feed = tfnb.Session(g), dict(zip(keys, batch(4), strict=True))
    got, end = [], time.monotonic() + 100
    while not session.status() or "differs" not in session.status()[0]:
        assert time.monotonic() < end
        got.append(float(session.run(fetches, feed)[1]))
    assert got == losses("off", [4] * len(got))[0]
    assert "generated code (compiled code differs: " in session.status()[0]


def test_a_step_too_large_to_be_compared_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "MOST_COPIED", 0)
    assert "no room for what the step reads" in losses("now", [4])[1].status()[0]


@pytest.mark.usefixtures("needs_compiler")
def test_a_step_that_is_too_dear_to_compile_is_generated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = CompilerProcess(budget=0.2)
    monkeypatch.setattr(compiled_packages, "COMPILER", alone)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 13), name="x")
        y = (x * 3).exp().sin()
    session, data = tfnb.Session(g, compile="now"), torch.randn(4, 13)
    for _ in range(2):
        assert torch.equal(session.run(y, {x: data}), (data * 3).exp().sin())
    assert "generated code (it takes more than 0.2 s of a processor to compile: a loop of" in session.status()[0]
    assert alone.pid is None


@pytest.mark.slow
def test_without_a_compiler_generated_code_runs() -> None:
    script = """
import torch, tfnb
with tfnb.record() as g:
    x = tfnb.placeholder(torch.ones(4), name="x")
    y = x.exp().sin()
session = tfnb.Session(g, compile="now")
for rows in (4, 5):
    assert torch.equal(session.run(y, {x: torch.ones(rows)}), torch.ones(rows).exp().sin())
print(session.status())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        env={"CXX": "/no/such/compiler", "PATH": "", "TFNB_CACHE_DIR": os.environ["TFNB_CACHE_DIR"]},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("generated code (no C++ compiler: ") == 2
    assert ended.stderr.count("UserWarning: no C++ compiler: install g++") == 1


@pytest.mark.usefixtures("needs_compiler")
@pytest.mark.slow
def test_who_stops_waiting_for_the_compiler_gets_compiled_code_later() -> None:
    """In a fresh process: there the interrupt comes while inductor is being loaded."""
    script = """
import signal, threading, time, torch, tfnb
with tfnb.record() as g:
    x = tfnb.placeholder(torch.ones(4), name="x")
    y = x.exp().sin()
session, feed = tfnb.Session(g, compile="now"), {x: torch.ones(4)}
timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
try:
    timer.start()
    session.run(y, feed)
except KeyboardInterrupt:
    print("interrupted")
try:
    session.run(y, feed, timeout=0.1)
except tfnb.errors.DeadlineExceeded:
    print("late")
print(session.status()[0].split("; ")[1])
torch.testing.assert_close(session.run(y, feed), torch.ones(4).exp().sin())
print(session.status()[0].split(";")[0])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["interrupted", "late", "compiling in the background", "x [4]: compiled"]


def test_a_machine_that_is_busy_in_between_does_not_decide_which_code_runs() -> None:
    busy = [1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0, 1.0, 1.0, 9.0]
    slower, faster = [1.1 * t for t in busy], [0.9 * t for t in busy]
    slower[5], faster[5] = 0.1, 40.0  # a stumble
    assert tiers.verdict(busy, slower) == pytest.approx(1.1) and tiers.verdict(busy, faster) == pytest.approx(0.9)
    undecided = [1.0 + 0.1 * (-1) ** i for i in range(10)]
    assert tiers.verdict([1.0] * 10, undecided) is None and tiers.verdict([1.0] * 40, undecided * 4) is not None
    assert tiers.verdict([1.0] * 3, [0.4] * 3) == pytest.approx(0.4) and tiers.verdict([1.0] * 3, [0.9] * 3) is None


def test_the_environment_chooses_for_sessions_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFNB_COMPILE", "off")
    assert tiers.mode("auto") == "off" and tiers.mode("now") == "now"
    monkeypatch.delenv("TFNB_COMPILE")
    assert tiers.mode("auto") == "auto"
    with pytest.raises(InvalidArgument, match="'auto', 'quiet', 'off', 'now', not 'never'"):
        tiers.mode("never")


WARM = """
import sys, torch, tfnb
from torch import nn
torch.manual_seed(0)
model, data = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 1)), torch.randn(8, 20)
with tfnb.record() as g:
    x = tfnb.placeholder(data, name="x")
    loss = model(x).square().mean()
    train = tfnb.train.Adam(0.1).minimize(loss)
session = tfnb.Session(g, compile=sys.argv[1])
found = [float(session.run([train, loss], {x: data})[1]) for _ in range(5)]
print(found, session.status(), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("needs_compiler")
def test_a_second_process_runs_compiled_from_its_first_step(tmp_path: Path) -> None:
    def ran(mode: str) -> tuple[list[float], str]:
        ended = subprocess.run(
            [sys.executable, "-c", WARM, mode], capture_output=True, text=True, timeout=280,
            env={**os.environ, "TFNB_CACHE_DIR": str(tmp_path)},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        losses, status = ended.stdout.splitlines()
        return ast.literal_eval(losses), status

    want, cold, warm = ran("off"), ran("now"), ran("now")
    assert cold[0] == pytest.approx(want[0], rel=1e-4) and warm[0] == pytest.approx(want[0], rel=1e-4)
    assert "s to compile" in cold[1] and warm[1] == "['x [8, 20]: compiled; from the cache']"
    (library,) = tmp_path.glob("packages/*/step.so")
    data = library.read_bytes()
    library.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "s to compile" in ran("now")[1]  # damaged: not loaded, compiled again


@pytest.mark.usefixtures("needs_compiler")
def test_a_session_that_closes_ends_the_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFNB_COMPILE", "auto")
    compile_soon(monkeypatch)
    alone = CompilerProcess()  # sessions of other tests may wait for the common one
    monkeypatch.setattr(tiers, "COMPILER", alone)
    monkeypatch.setattr(compiled_packages, "COMPILER", alone)
    g, fetches, keys = classifier()
    with tfnb.Session(g) as session:
        for _ in range(tiers.PROFILED + 1):
            session.run(fetches, dict(zip(keys, batch(9), strict=True)))
        end = time.monotonic() + 60
        while alone.pid is None and time.monotonic() < end:
            time.sleep(0.01)
        pid = alone.pid
        assert pid is not None and "compiling in the background" in session.status()[0]
    assert alone.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
