"""Rows of large Variables for a step: the requests to servers, and the rows assembled from their answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from tfnb.cluster.wire.messages import Ask, Ok
from tfnb.placement.placement import Piece


class RowRequest(NamedTuple):
    """Rows of one Variable: distinct row numbers, the index into these (of any shape), and the Variable's pieces."""

    numbers: torch.Tensor
    places: torch.Tensor
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, index: torch.Tensor, pieces: Sequence[Piece]) -> RowRequest:
        """The request of an index of any shape, possibly with repeated rows."""
        numbers, places = torch.unique(index.long(), return_inverse=True)
        return cls(numbers, places, pieces)

    def parts(self) -> Iterable[tuple[Piece, torch.Tensor | None, torch.Tensor]]:
        """For each piece with requested rows: positions among the numbers (None: all), and row numbers in the piece."""
        for piece in self.pieces:
            if piece.rows is None:
                yield piece, None, self.numbers
                return
            start, stop = piece.rows
            (some,) = torch.nonzero((self.numbers >= start) & (self.numbers < stop), as_tuple=True)
            if len(some):
                yield piece, some, self.numbers[some] - start

    def joined(self, parts: Sequence[tuple[torch.Tensor | None, torch.Tensor]], empty: torch.Tensor) -> torch.Tensor:
        """The rows in the order of the index, from the rows of each piece; ``empty``: no rows of the Variable."""
        if len(parts) == 1 and parts[0][0] is None:
            found = parts[0][1]
        else:
            found = empty.new_empty(self.numbers.numel(), *empty.shape[1:])
            for some, rows in parts:
                found[some] = rows
        return found[self.places]


class LookedUp(NamedTuple):
    """The rows that one step wants of several Variables: one request to each shard. ``empty``: no rows of each."""

    wanted: Sequence[RowRequest]
    empty: Sequence[torch.Tensor]
    asks: Sequence[Ask] = ()

    @classmethod
    def of(cls, wanted: Sequence[RowRequest], empty: Sequence[torch.Tensor]) -> LookedUp:
        """The look-ups with their requests."""
        of: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for want in wanted:
            for piece, _, numbers in want.parts():
                of.setdefault(piece.shard, []).append((piece.key, numbers))
        asks = [
            Ask(shard, "pull", {"keys": [], "since": [], "rows_of": [key for key, _ in mine]}, [at for _, at in mine])
            for shard, mine in of.items()
        ]  # fmt: skip
        return cls(wanted, empty, asks)

    def rows(self, answers: Sequence[Ok]) -> list[torch.Tensor]:
        """The rows of each look-up, from the answers to the requests."""
        given = {ask.shard: iter(answer.tensors) for ask, answer in zip(self.asks, answers, strict=True)}
        return [
            want.joined([(some, next(given[piece.shard])) for piece, some, _ in want.parts()], empty)
            for want, empty in zip(self.wanted, self.empty, strict=True)
        ]
