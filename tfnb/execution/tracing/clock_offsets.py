"""Offsets between the clocks of processes, from messages that were sent by one clock and received by another.

A message is received after it was sent, so each bounds the difference of two clocks from one side, and a round trip
from both. All bounds together are a system of difference constraints: the largest and the smallest clock that it allows
are shortest paths, every clock between them agrees with it, and half of what lies between them is the error. With the
clocks in the middle no message is received before it was sent. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Flight(NamedTuple):
    """A message with its send time by the clock of ``source`` and receive time by the clock of ``to``, in
    nanoseconds.
    """

    source: str
    to: str
    sent: int
    received: int


class Offset(NamedTuple):
    """Offset of a clock from the reference clock in nanoseconds, with its error bound."""

    value: float
    error: float


@cache
def clock_name() -> str:
    """An identifier of the clock behind `time.monotonic_ns`, equal in processes that share the clock; empty if unknown.

    On Linux it counts since the host was started, in every process of one time namespace.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


def offsets(reference: str, flights: Iterable[Flight]) -> dict[str, Offset]:
    """The offset of each clock that messages go to and come from, directly or through others.

    Clocks that run at different rates contradict the bounds after a while; the error is the contradiction then.

    >>> offsets("a", [Flight("a", "b", 0, 107), Flight("b", "a", 110, 14)])
    {'a': Offset(value=0.0, error=0.0), 'b': Offset(value=101.5, error=5.5)}
    """
    bounds: dict[tuple[str, str], int] = {}
    for source, to, sent, received in flights:
        bounds[source, to] = min(bounds.get((source, to), received - sent), received - sent)
    most = _shortest(reference, bounds)
    least = _shortest(reference, {(to, source): bound for (source, to), bound in bounds.items()})
    found = {name: (most[name], -least[name]) for name in most if name in least}
    return {name: Offset((high + low) / 2, abs(high - low) / 2) for name, (high, low) in found.items()}


def _shortest(start: str, lengths: Mapping[tuple[str, str], int]) -> dict[str, float]:
    """The lengths of the shortest paths from a name (Bellman and Ford), as far as names can be reached."""
    names = dict.fromkeys([start, *(name for pair in lengths for name in pair)])  # in an order that does not vary
    found = dict.fromkeys(names, math.inf) | {start: 0.0}
    for _ in range(len(names) - 1):
        for (source, to), length in lengths.items():
            found[to] = min(found[to], found[source] + length)
    return {name: length for name, length in found.items() if length < math.inf}
