"""Simulated steps over places: segments, messages, peaks worked by hand, and invariants of random ones."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfnb.placement.simulation import LinkCost, OpValue, PlacementProblem, Timeline, simulate, with_late_messages

SLOW = LinkCost(0.5, 100.0)


def problem(
    ops: list[tuple[float, list[int], int]], groups: list[int] | None = None, places: int = 2, **more: Any
) -> PlacementProblem:
    """Ops with their seconds, the ops whose values they take, and the bytes that they make."""
    count = len(ops) if groups is None else 1 + max(groups)
    return PlacementProblem(
        [seconds for seconds, _, _ in ops], [taken for _, taken, _ in ops],
        [OpValue(op, size) for op, (_, _, size) in enumerate(ops)],
        [*range(len(ops))] if groups is None else groups, [tuple(range(places))] * count, **more,
    )  # fmt: skip


def bars(timeline: Timeline) -> list[tuple[Any, ...]]:
    return sorted((bar.lane, bar.ops or bar.value, round(bar.start, 6), round(bar.end, 6)) for bar in timeline.bars)


def test_a_place_sends_when_all_that_waits_for_the_same_messages_is_done() -> None:
    made = problem([(1.0, [], 50), (2.0, [0], 0), (1.0, [0], 10), (1.0, [1, 2], 0)])
    timeline = simulate(made, [0, 0, 1, 0], lambda source, to: SLOW)
    assert bars(timeline) == [
        ((0,), [0, 1], 0.0, 3.0), ((0,), [3], 5.6, 6.6), ((0, 1), 0, 3.0, 4.0), ((1,), [2], 4.0, 5.0),
        ((1, 0), 2, 5.0, 5.6),
    ]  # fmt: skip
    assert timeline.seconds == pytest.approx(6.6) and timeline.sent == 60
    assert timeline.critical() == [3, 2, 0, 1]


def test_messages_of_a_link_follow_each_other_and_their_latencies_overlap() -> None:
    made = problem([(1.0, [], 100), (0.0, [], 100), (1.0, [0, 1], 0)])
    timeline = simulate(made, [0, 0, 1], lambda source, to: SLOW)
    assert bars(timeline) == [
        ((0,), [0, 1], 0.0, 1.0), ((0, 1), 0, 1.0, 2.5), ((0, 1), 1, 2.0, 3.5), ((1,), [2], 3.5, 4.5),
    ]  # fmt: skip


def test_the_most_that_a_place_holds() -> None:
    made = problem([(1.0, [], 100), (1.0, [0], 10), (1.0, [1], 1), (1.0, [0, 2], 1)])
    assert simulate(made, [0] * 4, lambda source, to: SLOW).peaks == {0: 111}
    split = simulate(made, [0, 0, 1, 0], lambda source, to: SLOW)
    assert split.peaks == {0: 110, 1: 11}
    sending = problem([(1.0, [], 100), (0.0, [], 0), (1.0, [1], 30), (1.0, [0], 0)])
    assert simulate(sending, [0, 1, 0, 1], lambda source, to: SLOW).peaks == {0: 130, 1: 100}, "until it has arrived"
    stored = problem([(1.0, [], 1), (1.0, [], 100), (1.0, [0, 1], 10)], stored=frozenset({1}))
    assert simulate(stored, [0, 0, 0], lambda source, to: SLOW).peaks == {0: 11}
    assert simulate(stored, [0, 0, 1], lambda source, to: SLOW).peaks == {0: 1, 1: 111}
    kept = problem([(1.0, [], 100), (1.0, [], 10), (1.0, [], 30)], kept=frozenset({0}))
    assert simulate(kept, [0, 0, 0], lambda source, to: SLOW).peaks == {0: 130}


def test_one_place_sends_all_that_a_server_takes() -> None:
    every = frozenset({0, 1, 2})
    made = problem([(1.0, [], 100), (3.0, [], 200), (1.0, [], 50)], kept=every, staged=every)
    timeline = simulate(made, [0, 1, 0], lambda source, to: SLOW)
    assert bars(timeline) == [
        ((0,), [0, 2], 0.0, 2.0), ((0, 1), 0, 2.0, 3.5), ((0, 1), 2, 3.0, 4.0), ((1,), [1], 0.0, 3.0),
    ]  # fmt: skip
    assert timeline.seconds == 4.0 and timeline.peaks == {0: 150, 1: 350}
    assert simulate(made, [0, 0, 0], lambda source, to: SLOW).seconds == 5.0


@st.composite
def placed(draw: Any) -> tuple[PlacementProblem, list[int]]:
    """A random step of up to 10 ops, and a placement of its groups."""
    count = draw(st.integers(1, 10))
    ops = []
    for number in range(count):
        taken = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        ops.append((float(draw(st.integers(0, 4))), sorted(taken), draw(st.integers(0, 90))))
    groups = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    numbers = {group: at for at, group in enumerate(sorted(set(groups)))}
    kept, staged = (draw(st.frozensets(st.integers(0, count - 1), max_size=2)) for _ in range(2))
    made = problem(ops, [numbers[group] for group in groups], 3, kept=kept | staged, staged=staged)
    return made, draw(st.lists(st.integers(0, 2), min_size=len(numbers), max_size=len(numbers)))


@given(placed())
def test_ops_wait_for_what_they_take_and_lanes_do_one_thing_at_a_time(case: tuple[PlacementProblem, list[int]]) -> None:
    made, at = case
    timeline = simulate(made, at, lambda source, to: SLOW)
    times = {op: (start, end) for op, start, end in timeline.op_times()}
    came = {(bar.value, bar.lane[1]): bar for bar in timeline.messages}
    home = [at[group] for group in made.groups]
    assert sorted(times) == [*range(len(home))]
    for op, taken in enumerate(made.takes):
        for value in taken:
            if home[value] == home[op]:
                assert times[value][1] <= times[op][0] + 1e-9
            else:
                assert times[value][1] <= came[value, home[op]].start + 1e-9
                assert came[value, home[op]].end <= times[op][0] + 1e-9
    crossing = {(value, home[op]) for op, taken in enumerate(made.takes) for value in taken if home[value] != home[op]}
    assert crossing <= came.keys() and len([*timeline.messages]) == len(came), "each crosses once to each place"
    assert {value for value, _ in came.keys() - crossing} <= made.staged
    for place in {*at}:
        mine = sorted(time for op, time in times.items() if home[op] == place)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(mine))
    assert max((end for _, end in times.values()), default=0.0) <= timeline.seconds + 1e-9
    assert timeline.seconds <= sum(made.seconds) + sum(SLOW.seconds(made.values[value].bytes) for value, _ in came)


@given(placed(), st.frozensets(st.integers(0, 9)))
def test_values_sent_late_wait_for_their_places(case: tuple[PlacementProblem, list[int]], late: frozenset[int]) -> None:
    made, at = case
    timeline = simulate(made, at, lambda source, to: SLOW, late)
    if timeline.seconds == math.inf:
        return  # what waits for each other
    times, home = {op: end for op, _, end in timeline.op_times()}, [at[group] for group in made.groups]
    for bar in timeline.messages:
        if made.values[bar.value].maker in late:
            users = [op for op in made.users[bar.value] if home[op] == bar.lane[0]]
            assert all(times[op] <= bar.start + 1e-9 for op in users)


@given(placed())
def test_late_messages_take_no_longer_and_no_place_holds_more(case: tuple[PlacementProblem, list[int]]) -> None:
    timeline = simulate(*case, lambda source, to: SLOW)
    late = with_late_messages(timeline, lambda source, to: SLOW)
    assert late.seconds <= timeline.seconds
    assert late.peaks.keys() == timeline.peaks.keys()
    assert all(late.peaks[place] <= most for place, most in timeline.peaks.items())


def test_a_value_is_sent_when_its_own_place_has_used_it_where_that_is_soon_enough() -> None:
    made = problem([
        (1.0, [], 80), (4.0, [], 100), (0.5, [1], 10), (2.5, [2], 5), (2.0, [], 0), (3.0, [0, 4], 0), (1.0, [0, 3], 0),
    ])  # fmt: skip

    def quick(source: int, to: int) -> LinkCost:
        return LinkCost(0.0, 1000.0)

    at_once = simulate(made, [0, 1, 1, 1, 2, 0, 1], quick)
    late = with_late_messages(at_once, quick)
    assert late.late == {0} and late.seconds == at_once.seconds == 8.0
    assert [bar.start for bar in at_once.messages if bar.value == 0] == [1.0]
    assert [bar.start for bar in late.messages if bar.value == 0] == [5.0]
    assert (at_once.peaks[1], late.peaks[1]) == (190, 110) and at_once.peaks[0] == late.peaks[0] == 80


def test_messages_that_wait_for_each_other_never_come() -> None:
    made = problem([(1.0, [], 1), (1.0, [0], 1), (1.0, [0, 1], 0)])
    assert simulate(made, [0, 1, 0], lambda source, to: SLOW, frozenset({0})).seconds == math.inf
    assert with_late_messages(simulate(made, [0, 1, 0], lambda source, to: SLOW), lambda source, to: SLOW).late == set()
