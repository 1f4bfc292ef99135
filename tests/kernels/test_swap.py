"""Rows that move out come back with the same values, into tensors that are used again once nobody holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tfnb.kernels.blocks import Tier
from tfnb.kernels.pieces import Piece, Pieces
from tfnb.kernels.swap import Room, Stack

TURNS, FITS = 40, 12
KIND = ((3, 2), 4, torch.float32, (1, 0))  # rows [2, 3], whose last axis lies outside
CPU = torch.device("cpu")


def refuse(turn: int, why: str) -> Exception:
    raise AssertionError(turn, why)


def took(
    tier: Tier, made: list[list[torch.Tensor]], *, reverse: bool, each: Callable[[int, tuple[Any, ...]], None]
) -> Any:
    """Keep rows in a room for `FITS` turns, and take them again; what was moved."""
    sizes = [column[0].numel() * column[0].element_size() for column in made]
    with Room(FITS * sum(sizes), tier, {}) as room:
        stack = Stack(room, sizes, TURNS, True, 1, refuse)
        for turn in range(TURNS):
            for column, rows in zip(stack.columns, made, strict=True):
                column.put(rows[turn].clone())
        for column in stack.columns:
            column.end(False)
        for turn, rows in enumerate(zip(*(column.taken(reverse) for column in stack.columns), strict=True)):
            each(TURNS - 1 - turn if reverse else turn, rows)
            assert room.held <= room.bytes
    assert room.held == 0
    return room.counts


def columns() -> list[list[torch.Tensor]]:
    """Of several kinds: scalars, another order of axes, nothing at all, and twice the same."""
    shapes = [(), (2, 3), (2, 0), (5,), (5,)]
    made = [[torch.randn(shape) for _ in range(TURNS)] for shape in shapes]
    made[1] = [torch.randn(3, 2).t() for _ in range(TURNS)]
    made[0] = [row.double() for row in made[0]]
    return made


@pytest.mark.parametrize("reverse", [True, False])
def test_rows_come_back_as_they_were_also_those_that_somebody_holds(reverse: bool) -> None:
    tier, held = Tier(), []
    for _ in range(3):  # the later ones use memory of the first
        made = columns()

        def each(turn: int, rows: tuple[Any, ...], made: Any = made) -> None:
            for row, column in zip(rows, made, strict=True):
                assert torch.equal(row, column[turn]) and row.shape == column[turn].shape
            if turn % 3 == 0:
                held.append((rows[1], made[1][turn]))
            elif turn % 3 == 1:
                held.append((rows[3][1:3], made[3][turn][1:3]))

        counts = took(tier, made, reverse=reverse, each=each)
        beyond = (TURNS - FITS) * counts.saved // TURNS
        assert counts.out == counts.back and (counts.out == beyond if reverse else counts.out > beyond)
    for row, want in held:
        assert torch.equal(row, want)


def test_the_tensors_of_rows_that_nobody_holds_are_used_again() -> None:
    tier, made, seen = Tier(), [[torch.randn(4) for _ in range(TURNS)] for _ in range(2)], []
    for _ in range(2):
        ids: set[int] = set()
        took(tier, made, reverse=True, each=lambda _, rows, ids=ids: ids.update(map(id, rows)))  # type: ignore[misc]
        seen.append(ids & {id(row) for free in tier.pieces._free.values() for piece in free for row in piece.rows})
    assert len(seen[0] & seen[1]) > len(seen[0]) // 2 > 0
    assert all(piece.memory.untyped_storage().nbytes() == 0 for free in tier.pieces._free.values() for piece in free)


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
    pieces = Pieces()
    (piece,) = pieces.take(KIND, 1, CPU)
    piece.memory.fill_(1)
    somebody = held(piece.rows[2])
    assert not piece.free() and torch.equal(piece.memory, torch.ones(4, 3, 2))
    resizable = piece.memory.untyped_storage().resizable()  # never again, once numpy has seen it
    del somebody
    assert piece.free() == resizable


def test_pieces_of_few_kinds_wait() -> None:
    pieces = Pieces()
    for size in range(100):
        pieces.give([Piece.of(((size, 2), 1, torch.float32, (0, 1)), CPU)])
    assert len(pieces._free) < 10
    (piece,) = pieces.take(((99, 2), 1, torch.float32, (0, 1)), 1, CPU)
    assert piece.rows[0].fill_(3).sum() == 3 * 99 * 2 and not pieces._free[piece.kind]  # type: ignore[index]
