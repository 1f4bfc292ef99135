"""The choice of the processes that hold copies of shards for the recovery from the loss of a server. Pure.

A process that serves one of the shards holds no copy: its death would take the values of a shard and a copy at once,
and a recovery needs all shards of one step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

Process = tuple[str, int]  # host and process id


class ServedShard(NamedTuple):
    """A shard: the process that serves the shard, and the bytes of its values."""

    process: Process
    nbytes: int


def free_of(holders: Sequence[Process], serving: Collection[Process]) -> list[int]:
    """The places in ``holders`` of the processes that may hold copies."""
    return [place for place, process in enumerate(holders) if process not in serving]


def chosen(
    shards: Mapping[int, ServedShard], holders: Sequence[Process], serving: Collection[Process]
) -> dict[int, int]:
    """For each shard the place in ``holders`` of the process that holds its copy; nothing if there is none.

    A process on another host than the shard's server comes first, then the one that was given the fewest bytes, the
    largest shards being placed first; then the first in order. serving: the processes that serve any shard.

    >>> served = {0: ServedShard(("a", 1), 80), 1: ServedShard(("a", 2), 40), 2: ServedShard(("a", 2), 30)}
    >>> serving = {("a", 1), ("a", 2)}
    >>> chosen(served, [("a", 2), ("a", 3), ("b", 3), ("b", 4)], serving)
    {0: 2, 1: 3, 2: 3}
    >>> chosen(served, [("a", 1)], serving)
    {}
    """
    free = free_of(holders, serving)
    given = dict.fromkeys((holders[place] for place in free), 0)
    found: dict[int, int] = {}
    for number in sorted(shards, key=lambda number: (-shards[number].nbytes, number)) if free else ():
        (host, _), nbytes = shards[number]
        found[number] = place = min(free, key=lambda one: (holders[one][0] == host, given[holders[one]]))
        given[holders[place]] += nbytes
    return dict(sorted(found.items()))
