"""What structured control flow computes, given its parts as functions of tensors. Knows no graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tfnb.kernels.random import mix

Function = Callable[..., Sequence[torch.Tensor]]  # of tensors and, last, the number that random draws depend on


def while_loop(
    cond: Function | None, body: Function, init: Sequence[torch.Tensor], xs: Sequence[torch.Tensor],
    captures: Sequence[torch.Tensor], *, limit: int | None, rows: Sequence[tuple[Sequence[int], torch.dtype, str]],
    reverse: bool = False, run: int = 0, draws: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """The carried values after the last turn, the number of turns (int64, on the CPU), and stacked rows.

    See `tfnb.graph.subgraph` for the meaning. rows: (shape, dtype, device) of a row of each stacked result. draws: each
    turn gets a random number of its own.
    """
    if xs:
        length = len(xs[0])
        limit = length if limit is None else min(limit, length)
    state, turns = list(init), 0
    carried = len(state)
    made: list[list[torch.Tensor]] = [[] for _ in rows]
    while limit is None or turns < limit:
        number = mix(run, turns) if draws else run
        if cond is not None and not cond(*state, *captures, number)[0]:
            break
        at = -1 - turns if reverse else turns
        out = body(*state, *[x[at] for x in xs], *captures, number)
        state = list(out[:carried])
        for row, value in zip(made, out[carried:], strict=True):
            row.append(value)
        del out
        turns += 1
    return [*state, torch.tensor(turns), *(_stacked(m, row, reverse) for m, row in zip(made, rows, strict=True))]


def _stacked(
    made: list[torch.Tensor], row: tuple[Sequence[int], torch.dtype, str], reverse: bool
) -> torch.Tensor:  # fmt: skip
    if made:
        return torch.stack(made[::-1] if reverse else made)
    shape, dtype, device = row
    return torch.empty((0, *shape), dtype=dtype, device=device)
