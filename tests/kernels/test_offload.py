"""Rows that move out come back with the same values, and their memory is used again once nobody holds it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tfnb.kernels import memory_budget
from tfnb.kernels.memory_budget import MemoryBudget
from tfnb.kernels.offload import RowStack
from tfnb.kernels.spill_blocks import SpillBlock
from tfnb.kernels.spill_file import SpillFile

ITERATIONS, FITS = 40, 12
CPU = torch.device("cpu")


def refuse(iteration: int, why: str) -> Exception:
    raise AssertionError(iteration, why)


def took(
    spill: SpillFile, made: list[list[torch.Tensor]], *, reverse: bool, each: Callable[[int, tuple[Any, ...]], None]
) -> Any:
    """Keep rows within a budget for `FITS` iterations, and take them again; what was moved."""
    sizes = [column[0].numel() * column[0].element_size() for column in made]
    with MemoryBudget(FITS * sum(sizes), spill, {}) as budget:
        stack = RowStack(budget, sizes, ITERATIONS, True, 1, refuse)
        for iteration in range(ITERATIONS):
            for column, rows in zip(stack.columns, made, strict=True):
                column.put(rows[iteration].clone())
        for column in stack.columns:
            column.end(False)
        for iteration, rows in enumerate(zip(*(column.taken(reverse) for column in stack.columns), strict=True)):
            each(ITERATIONS - 1 - iteration if reverse else iteration, rows)
            assert budget.held <= budget.bytes
    assert budget.held == 0
    return budget.counts


def columns() -> list[list[torch.Tensor]]:
    """Of several kinds: scalars, another order of axes, nothing at all, and twice the same."""
    shapes = [(), (2, 3), (2, 0), (5,), (5,)]
    made = [[torch.randn(shape) for _ in range(ITERATIONS)] for shape in shapes]
    made[1] = [torch.randn(3, 2).t() for _ in range(ITERATIONS)]
    made[0] = [row.double() for row in made[0]]
    return made


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_rows_come_back_as_they_were_also_those_that_somebody_holds(
    reverse: bool, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "AT_ONCE", memory_budget.AT_ONCE if at_once else 0)
    monkeypatch.setattr(memory_budget, "LATE", 1e9)  # whatever else the machine does
    spill, held = SpillFile(), []
    for _ in range(3):  # the later ones use memory of the first
        made = columns()

        def each(iteration: int, rows: tuple[Any, ...], made: Any = made) -> None:
            for row, column in zip(rows, made, strict=True):
                assert torch.equal(row, column[iteration]) and row.shape == column[iteration].shape
                assert row.stride() == column[iteration].stride()
            if iteration % 3 == 0:
                held.append((rows[1], made[1][iteration]))
            elif iteration % 3 == 1:
                held.append((rows[3][1:3], made[3][iteration][1:3]))

        counts = took(spill, made, reverse=reverse, each=each)
        beyond = (ITERATIONS - FITS) * counts.saved // ITERATIONS
        assert counts.out == counts.back
        assert counts.out == beyond if reverse or at_once else counts.out > beyond
    for row, want in held:
        assert torch.equal(row, want)


def test_the_other_thread_copies_as_soon_as_a_tier_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    move = SpillBlock.move

    def slow(self: SpillBlock, spill: SpillFile) -> None:
        moved.append(threading.current_thread().name)
        time.sleep(memory_budget.LATE / 2)
        move(self, spill)

    monkeypatch.setattr(SpillBlock, "move", slow)
    made = [[torch.randn(4) for _ in range(ITERATIONS)]]

    def each(iteration: int, rows: tuple[Any, ...]) -> None:
        assert torch.equal(rows[0], made[0][iteration])

    counts = took(SpillFile(), made, reverse=True, each=each)
    assert counts.out == counts.back > 0
    assert any(name.startswith("tfnb-swap") for name in moved) and not moved[0].startswith("tfnb-swap")


@pytest.mark.parametrize(
    "held",
    [
        lambda row: row,
        lambda row: row[1:],
        lambda row: row.t().detach(),
        lambda row: row.numpy(),
        lambda row: torch.from_dlpack(row),
        lambda row: row.untyped_storage(),
        lambda row: row.mul(torch.ones((), requires_grad=True)).grad_fn,
    ],
)
def test_memory_that_somebody_holds_is_not_used_again(held: Callable[[torch.Tensor], Any]) -> None:
    spill = SpillFile()
    memory = spill.take(96, torch.uint8, CPU)
    first, rows = memory.data_ptr(), memory.view(torch.float32).view(4, 3, 2).unbind(0)
    somebody = held(rows[2])
    del memory, rows
    assert spill.take(96, torch.uint8, CPU).data_ptr() != first  # one more piece, which is free again
    del somebody
    both = [spill.take(96, torch.uint8, CPU) for _ in range(2)]
    assert first in [memory.data_ptr() for memory in both]


def test_what_a_run_moved_out_is_free_at_its_end_and_not_when_the_collector_comes() -> None:
    spill, made = SpillFile(), [[torch.randn(64) for _ in range(ITERATIONS)]]
    gc.disable()
    try:
        left = []
        for _ in range(3):
            took(spill, made, reverse=True, each=lambda *_: None)
            left.append(len(spill._rest))
    finally:
        gc.enable()
    assert left[0] == left[1] == left[2]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_pieces_of_a_tier_share_few_files_and_do_not_overlap() -> None:
    before, spill = open_files(), SpillFile()
    pieces = [spill.take(1 << 20, torch.uint8, CPU) for _ in range(100)]
    assert open_files() - before < 50
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all(piece.eq(number).all() for number, piece in enumerate(pieces))


def test_a_forked_process_takes_files_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    spill = SpillFile()
    kept, free = spill.take(64, torch.uint8, CPU).fill_(1), spill.take(64, torch.uint8, CPU).data_ptr()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert spill.take(64, torch.uint8, CPU).fill_(2).data_ptr() not in (kept.data_ptr(), free)
    assert kept.eq(1).all()
