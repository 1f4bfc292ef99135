"""Whether compiled code gives what generated code gives, and whether it is faster."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tfnb.errors import DeadlineExceeded
from tfnb.execution.commit import commit
from tfnb.execution.lowering.program import Program
from tfnb.execution.running import Running
from tfnb.execution.tiers.interface import Forward, first_line
from tfnb.execution.tiers.native.request import varying_axes
from tfnb.execution.tiers.operand_checks import OperandRefused

TURNS = 10  # timed steps of each kind
CLEAR_TURNS = 3  # that are enough where one is always twice as fast
CLEAR = 0.8  # of the pairs of steps agree on which kind is faster
MOST_TURNS = 40  # then what there is decides
LONGEST_COMPARED = 5.0  # seconds of a step that compiled code is compared with


def difference(program: Program, generated: Forward, compiled: Forward, args: Sequence[Any]) -> str | None:
    """What a step of compiled code leaves that differs, in a few words; None where it agrees or takes too long."""
    args = _copied(args)  # other steps write meanwhile
    try:
        late = LONGEST_COMPARED, lambda _: DeadlineExceeded("")
        wanted = Running().compute(_after, program, generated, _copied(args), until=late)
    except DeadlineExceeded:
        return None
    try:
        found = _after(program, compiled, args)
        torch.testing.assert_close(found, _tensors(wanted, found), rtol=1e-3, atol=1e-4, equal_nan=True)
    except OperandRefused:  # it would have given way
        return None
    except AssertionError as error:
        return first_line(error)
    return None


def _after(program: Program, forward: Forward, args: Sequence[Any]) -> list[Any]:
    """What a step gives, and all that it read, as it leaves it; no Variable knows."""
    *tensors, run = args
    feeds, storages = tensors[: len(program.feeds)], tensors[len(program.feeds) :]
    if getattr(forward, "writes", False):
        return [*forward(feeds, storages, run), *storages]
    fetched, pending = program.compute(feeds, storages, run, forward)
    commit(replace(pending, variables=()))
    return [*fetched, *storages]


def _copied(args: Sequence[Any]) -> list[Any]:
    return [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]


def _tensors(outs: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Outputs with a tensor for each number, as the other code gives it."""
    return [
        out if out is None or isinstance(out, torch.Tensor) else torch.full_like(other, out)
        for out, other in zip(outs, like, strict=True)
    ]


def verdict(generated: Sequence[float], compiled: Sequence[float]) -> float | None:
    """What compiled code takes of the time of generated code; None as long as that is not clear.

    Steps are compared in pairs, one right after the other, so that a machine which gets slower or faster in the
    meantime, or stumbles, decides nothing.

    >>> verdict([1, 1, 1, 5, 5, 5, 5, 5, 5, 5], [1.1, 1.1, 1.1, 5.5, 5.5, 5.5, 5.5, 5.5, 5.5, 9])
    1.1
    """
    ratios = [b / a for a, b in zip(generated, compiled, strict=False)]
    count, faster = len(ratios), sum(ratio < 1 for ratio in ratios)
    if count >= CLEAR_TURNS and (2 * max(compiled) < min(generated) or 2 * max(generated) < min(compiled)):
        return statistics.median(ratios)
    clear = count >= TURNS and max(faster, count - faster) >= CLEAR * count
    return statistics.median(ratios) if clear or count >= MOST_TURNS else None


def at_other_sizes(program: Program, args: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments of a run for other sizes of the feeds, with elements of these; none of feeds that do not vary."""
    axes = varying_axes(program)
    for factor, more in ((1, 1), (2, 3), (0, 2)):
        given = list(args)
        for place, axis, _ in axes:
            size = args[place].shape[axis]
            given[place] = given[place].index_select(axis, torch.arange(factor * size + more) % size)
        if axes:
            yield given
