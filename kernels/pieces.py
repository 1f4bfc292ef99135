"""Memory for rows that come back from a second tier, a piece for some rows. Knows no graph.

To make a row's tensor takes longer than to copy a small row. So a piece that nobody uses any more gives its memory back
and keeps its tensors, which stand for the rows of other turns as soon as it has memory again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from sys import getrefcount

import torch

KINDS = 8  # of pieces that wait to be used again

_storage_uses: Callable[[int], int] = torch._C._storage_Use_Count  # these two are private: torch 2.11 to 2.13
_tensor_uses: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
_ALONE = max(map(getrefcount, [object()]))  # references to what one list holds

Kind = tuple[tuple[int, ...], int, torch.dtype, tuple[int, ...]]
"""The shape of a row as it lies in memory, how many, dtype, the places of the row's axes in that shape."""


class Piece:
    """Some rows in memory of their own, which is used again if ``kind`` says what for."""

    __slots__ = ("_bytes", "_own", "_storage", "kind", "memory", "rows")

    def __init__(self, memory: torch.Tensor, rows: list[torch.Tensor], kind: Kind | None = None) -> None:
        self.memory, self.rows, self.kind = memory, rows, kind
        self._storage = memory.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._own = self._uses()

    @classmethod
    def of(cls, kind: Kind, device: torch.device) -> Piece:
        """Fresh memory for rows of this kind; used again on the CPU only, whose copies are over when they return."""
        shape, count, dtype, places = kind
        memory = torch.empty((count, *shape), dtype=dtype, device=device)
        rows = [*memory.unbind(0)]
        if places != tuple(range(len(places))):
            rows = [row.permute(places) for row in rows]
        return cls(memory, rows, kind if device.type == "cpu" else None)

    def _uses(self) -> tuple[int, int]:
        return _storage_uses(self._storage._cdata), getrefcount(self._storage)

    def fill(self) -> None:
        """Take memory again."""
        self._storage.resize_(self._bytes)

    def free(self) -> bool:
        """Give the memory back; False where somebody else has a row, or some part of one, or numpy had."""
        alone = (
            self._uses() == self._own
            and max(map(getrefcount, self.rows)) == _ALONE
            and max(map(_tensor_uses, self.rows)) == 1  # as seen from C++
            and self._storage.resizable()
        )
        if alone:
            self._storage.resize_(0)
        return alone


class Pieces:
    """Pieces that wait to be used again, of a few kinds. Threads may share them."""

    def __init__(self) -> None:
        self._free: dict[Kind, list[Piece]] = {}
        self._lock = threading.Lock()

    def take(self, kind: Kind, count: int, device: torch.device) -> list[Piece]:
        """So many pieces with memory."""
        with self._lock:
            free = self._free.get(kind, []) if device.type == "cpu" else []
            found = free[-count:]
            del free[-count:]
        for piece in found:
            piece.fill()
        return found + [Piece.of(kind, device) for _ in range(count - len(found))]

    def give(self, pieces: Sequence[Piece]) -> None:
        """Nobody should use these any more; where somebody does, they are gone with that."""
        free = [(piece.kind, piece) for piece in pieces if piece.kind is not None and piece.free()]
        with self._lock:
            for kind, piece in free:
                self._free.setdefault(kind, []).append(piece)
            while len(self._free) > KINDS:
                del self._free[next(iter(self._free))]
