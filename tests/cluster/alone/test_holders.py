"""Who holds copies of shards: a process that serves none of them, on another host if there is one, evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfnb.cluster.engine.holders import ServedShard, chosen
from tfnb.cluster.server.room import Room
from tfnb.errors import ResourceExhausted

PROCESS = st.tuples(st.sampled_from("abc"), st.integers(0, 3))
SHARDS = st.dictionaries(st.integers(0, 5), st.builds(ServedShard, PROCESS, st.integers(0, 9)), min_size=1)


@given(SHARDS, st.lists(PROCESS, max_size=6, unique=True))
def test_holders_serve_no_shard_and_lie_on_another_host_where_there_is_one(
    shards: dict[int, ServedShard], holders: list[tuple[str, int]]
) -> None:
    serving = {shard.process for shard in shards.values()}
    found = chosen(shards, holders, serving)
    free = [holder for holder in holders if holder not in serving]
    assert found.keys() == (shards.keys() if free else set())
    for number, place in found.items():
        holder, server = holders[place], shards[number].process
        assert holder in free
        assert holder[0] != server[0] or all(one[0] == server[0] for one in free)


@given(st.integers(1, 6), st.integers(1, 4))
def test_equal_shards_are_held_evenly(shards: int, holders: int) -> None:
    served = {number: ServedShard(("a", 0), 8) for number in range(shards)}
    found = list(chosen(served, [("b", number) for number in range(holders)], {("a", 0)}).values())
    counts = [found.count(place) for place in range(holders)]
    assert max(counts) - min(counts) <= 1


def test_copies_beside_the_shards_count_in_the_budget_of_a_process() -> None:
    room = Room([])
    room.take(60, budget=100)
    room.beside(50)
    try:
        room.take(60, budget=100)
    except ResourceExhausted as error:
        assert "asked 60, used 50, limit 100" in error.message
    else:
        raise AssertionError("there is no room")
    room.beside(0)
    room.take(60, budget=100)
