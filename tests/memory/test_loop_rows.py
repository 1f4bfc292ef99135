"""What loops keep for their gradients, within a memory budget: moved out and back, or refused with the iteration."""

from __future__ import annotations

import re
import resource
import tempfile
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tfnb.errors import DeadlineExceeded, ResourceExhausted
from tfnb.kernels.memory_budget import OffloadCounts
from tfnb.memory import prices

BATCH, WIDTH = 4, 16
FITS = 60  # iterations that the budget has room for


def cell(state: Any, x: Any, weights: Any) -> Any:
    wx, wh = weights
    h, c = state
    i, f, g, o = (F.linear(x, wx) + F.linear(h, wh)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def folded(xs: Any, start: Any, weights: Any, **how: Any) -> Any:
    """The feeds tell how many iterations there are."""
    return tfnb.fold(lambda state, x: cell(state, x, weights), (start, start), xs, **how)[0]


def counted(xs: Any, start: Any, weights: Any, **how: Any) -> Any:
    """Only the run knows."""
    last = xs.sum() * 0 + xs.shape[0]

    def iteration(i: Any, h: Any, c: Any) -> Any:
        return (i + 1, *cell((h, c), xs[i], weights))

    return tfnb.while_loop(lambda i, *_: i < last, iteration, (torch.tensor(0), start, start), **how)[1]


class Net:
    """A recorded step and the sessions that run it."""

    def __init__(self, program: Any, *, order: int = 1, **how: Any) -> None:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * 0.3) for _ in "xh"]
        with tfnb.record() as self.graph:
            self.xs = tfnb.placeholder(torch.randn(3, BATCH, WIDTH), shape=("T", BATCH, WIDTH))
            self.start = tfnb.placeholder(torch.zeros(BATCH, WIDTH), shape=(BATCH, WIDTH))
            loss = program(self.xs, self.start, weights, **how).square().mean()
            self.found = [loss, *tfnb.gradients(loss, weights)]
            for _ in range(order - 1):
                total = sum((g * g).sum() for g in self.found[1:])
                self.found += tfnb.gradients(total, weights)

    def call(self, iterations: int, budget: int | None) -> tuple[list[torch.Tensor], Any]:
        """The results, and what was planned."""
        generator = torch.Generator().manual_seed(iterations)
        feeds = {
            self.xs: torch.randn(iterations, BATCH, WIDTH, generator=generator),
            self.start: torch.zeros(BATCH, WIDTH),
        }
        session = tfnb.Session(self.graph, compile="off", memory_budget=budget)
        results = session.run(self.found, feeds)
        return results, session.plans()[0][1] if budget else None


def limits(program: Any) -> tuple[int, int]:
    """Bytes that the loop keeps of one iteration, and a budget for `FITS` iterations."""
    _, plan = Net(program, swap_memory=True).call(4, 1 << 30)
    return plan.offloaded.saved // 4, plan.plan.peak + FITS * (plan.offloaded.saved // 4)


@pytest.mark.slow
@pytest.mark.parametrize("program", [folded, counted])
def test_what_does_not_fit_moves_out_and_comes_back(program: Any) -> None:
    each, budget = limits(program)
    for iterations in (0, 1, FITS - 1, FITS, FITS + 1, 3 * FITS):
        want, _ = Net(program).call(iterations, None)
        got, plan = Net(program, swap_memory=True).call(iterations, budget)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        beyond = max(0, iterations - FITS) * each
        assert plan.offloaded.saved == iterations * each and plan.offloaded.out == plan.offloaded.back
        assert plan.offloaded.most <= FITS * each
        if program is folded:
            assert plan.offloaded.out == beyond
        else:  # what nobody can foresee leaves in blocks
            assert beyond <= plan.offloaded.out <= beyond + 2 * each * (FITS // 4)


@pytest.mark.parametrize("program", [folded, counted])
def test_without_swapping_the_iteration_that_does_not_fit_is_refused(program: Any) -> None:
    each, budget = limits(program)
    Net(program, swap_memory=False).call(FITS, budget)
    with pytest.raises(ResourceExhausted, match=f"iteration {FITS + 1} of loop .*swap_memory=False") as info:
        Net(program, swap_memory=False).call(FITS + 5, budget)
    text = str(info.value)
    assert f"keeps {each:,} bytes of each iteration (" in text and f"leaves {FITS * each:,} bytes" in text
    assert "tanh" in text and "float32[4, 16]" in text and "test_loop_rows.py line" in text and info.value.node


@pytest.mark.parametrize("program", [folded, counted])
def test_second_derivatives_take_what_moved_out_twice(program: Any) -> None:
    want, _ = Net(program, order=2).call(90, None)
    _, free = Net(program, order=2, swap_memory=True).call(90, 1 << 30)
    got, plan = Net(program, order=2, swap_memory=True).call(90, free.plan.peak + free.offloaded.saved // 4)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert plan.offloaded.back > plan.offloaded.out > 0


def test_rows_whose_shapes_differ_and_strided_ones_move_too() -> None:
    values = torch.randn(12, 3, dtype=torch.float64)

    def iteration(total: Any, x: Any) -> Any:
        wide = torch.outer(x, total).t()  # strided
        return (wide.sin() @ x.exp() + total).tanh(), None

    def growing(i: Any, kept: Any) -> Any:
        return i + 1, torch.cat([kept, kept[-1:].sin() * kept.sum()]).cos()

    results = []
    for budget in (None, 4000):
        with tfnb.record() as g:
            xs = tfnb.placeholder(values, shape=(12, 3))
            end = tfnb.scan(lambda t, x: (iteration(t, x)[0], ()), xs[0], xs, swap_memory=True)[0]
            grown = tfnb.while_loop(
                lambda i, kept: i < 9, growing, (torch.tensor(0), xs[:1].sum(1)), shape_invariants=((), (None,)),
                swap_memory=True,
            )[1]  # fmt: skip
            found = tfnb.gradients(end.sum() + grown.sum(), [xs])
        session = tfnb.Session(g, compile="off", memory_budget=budget)
        results += session.run(found, {xs: values})
    assert torch.equal(*results)
    assert session.plans()[0][1].offloaded.out > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python says which stops it drops
def test_an_end_in_the_middle_leaves_nothing_behind() -> None:
    before = set(threading.enumerate())
    _, budget = limits(counted)
    net = Net(counted, swap_memory=True)
    session = tfnb.Session(net.graph, compile="off", memory_budget=budget)
    feeds = {net.xs: torch.randn(20_000, BATCH, WIDTH), net.start: torch.zeros(BATCH, WIDTH)}
    with pytest.raises(DeadlineExceeded):
        session.run(net.found, feeds, timeout=0.3)
    assert {t for t in threading.enumerate() if "tfnb-swap" in t.name} <= before
    small = {net.xs: torch.randn(2 * FITS, BATCH, WIDTH), net.start: torch.zeros(BATCH, WIDTH)}
    assert session.run(net.found, small)[0].isfinite()
    assert "moved out" in session.status()[-1]


def test_what_cannot_be_written_is_an_error_with_the_iteration_and_the_next_run_works(monkeypatch: Any) -> None:
    _, budget = limits(counted)
    net = Net(counted)
    session = tfnb.Session(net.graph, compile="off", memory_budget=budget)
    feeds = {net.xs: torch.randn(3 * FITS, BATCH, WIDTH), net.start: torch.zeros(BATCH, WIDTH)}
    monkeypatch.setattr(tempfile, "tempdir", "/tfnb/nowhere")
    with pytest.raises(ResourceExhausted, match=r"iteration .* moving them out failed: .*nowhere"):
        session.run(net.found, feeds)
    monkeypatch.undo()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ResourceExhausted, match=r"iteration .* moving them out failed: .*[Ff]ile too large"):
            session.run(net.found, feeds)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    got = session.run(net.found, feeds)
    assert all(map(torch.equal, got, tfnb.Session(net.graph, compile="off").run(net.found, feeds)))


def test_a_budget_too_small_for_one_iteration_says_so() -> None:
    _, plan = Net(counted, swap_memory=True).call(4, 1 << 30)
    budget = plan.plan.peak + 10
    with pytest.raises(ResourceExhausted, match=r"(?s)iteration 1 of loop.* test_loop_rows\.py line ") as raised:
        Net(counted, swap_memory=True).call(4, budget)
    (more,) = re.findall(r"a budget that is ([\d,]+) bytes larger holds one iteration", str(raised.value))
    Net(counted, swap_memory=True).call(4, budget + int(more.replace(",", "")))


def wide(start: Any, xs: Any, **how: Any) -> Any:
    """An iteration keeps much and computes little; it draws."""

    def cell(h: Any, x: Any) -> Any:
        return (F.dropout(torch.sigmoid(h + x), 0.5) * h).sin()

    return tfnb.fold(cell, start, xs, **how)


def doubled(start: Any, xs: Any) -> Any:
    """It takes a sequence that is gone before the gradient."""
    return wide(start, xs[:, :, :1] * 2)


def branching(start: Any, xs: Any, **how: Any) -> Any:
    """Loops and branches in an iteration; only the run knows how many iterations there are."""
    last = xs.sum() * 0 + xs.shape[0]

    def inner(h: Any) -> Any:
        return tfnb.while_loop(lambda j, h: j < 2, lambda j, h: (j + 1, (h * h).sin()), (torch.tensor(0), h))[1]

    def iteration(i: Any, h: Any) -> Any:
        return i + 1, tfnb.cond((i % 2) > 0, lambda: inner(h + 1), lambda: torch.cos(h) * xs[i])

    return tfnb.while_loop(lambda i, h: i < last, iteration, (torch.tensor(0), start), **how)[1]


@tfnb.autograph
def staged(start: Any, xs: Any) -> Any:
    """A loop of Python cannot ask for anything."""
    h = start
    for x in xs:
        h = torch.sigmoid(h * x) * h if h.sum() > 0 else (h - x).sin()
    return h


@pytest.mark.parametrize(
    ("program", "again"),
    [
        (wide, True),
        (wide, False),
        (doubled, True),
        (branching, None),
        (staged, None),
    ],
)
def test_the_plan_chooses_what_loops_do_that_did_not_ask(program: Any, again: bool | None, monkeypatch: Any) -> None:
    if again:  # to move is as slow as to a disk
        monkeypatch.setattr(prices, "MOVED", {"cpu": 100})
    wide_rows, iterations = torch.randn(40, 64, 64) * 0.1, 40
    with tfnb.record() as g:
        xs = tfnb.placeholder(wide_rows[:3], shape=("T", 64, 64))
        start = tfnb.placeholder(torch.ones(64, 64), shape=(64, 64))
        loss = program(start, xs).square().sum()
        (dx,) = tfnb.gradients(loss, [start])
        (ddx,) = tfnb.gradients(dx.square().sum(), [start])
    feeds = {xs: wide_rows, start: torch.ones(64, 64)}
    for found in ([loss, dx], [loss, dx, ddx]):
        want, free = tfnb.Session(g, compile="off"), tfnb.Session(g, compile="off", memory_budget=1 << 40)
        results = [session.run(found, feeds) for session in (want, free)]
        plan = free.plans()[0][1]
        assert plan.offloaded.out == plan.offloaded.again == 0
        room = plan.offloaded.saved // 3
        tight = tfnb.Session(g, compile="off", memory_budget=plan.plan.peak + room)
        results.append(tight.run(found, feeds))
        for other in results[1:]:
            assert all(map(torch.equal, other, results[0]))
        kept = tight.plans()[0][1].offloaded
        assert kept.out + kept.again > 0 and kept.most <= room
        if again and len(found) == 2:
            assert kept.again >= plan.offloaded.saved - room - plan.offloaded.saved // iterations and not kept.out
            assert "is computed again" in tight.status()[0]
        if again is False:
            assert kept.out and not kept.again and "moves out" in tight.status()[0]


def test_without_a_budget_nothing_moves() -> None:
    assert Net(folded, swap_memory=True).call(5, None)[1] is None
    _, plan = Net(folded, swap_memory=True).call(5, 1 << 30)
    assert plan.offloaded == OffloadCounts(plan.offloaded.saved, 0, 0, plan.offloaded.saved)


@pytest.mark.parametrize("program", [folded, counted])
def test_what_will_be_kept_is_said_before_a_run(program: Any) -> None:
    net = Net(program, swap_memory=True)
    _, plan = net.call(7, 1 << 30)
    (note,) = [note for note in net.graph.notes if "keeps" in note]
    each = plan.offloaded.saved // 7
    assert note.startswith("test_loop_rows.py line") and f"keeps {each:,} bytes of each iteration" in note
    assert (f", {3 * each:,} of the sample's 3 iterations" in note) is (program is folded)
