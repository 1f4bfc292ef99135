"""Offsets of clocks from messages: the true ones lie within the stated errors, and no message goes back in time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tfnb.execution.tracing.clock_offsets import Flight, clock_name, offsets


def test_a_round_trip_gives_the_middle_and_half_of_what_is_not_known() -> None:
    # b is 100 ahead; 7 there, 3 of work, 4 back
    there, back = Flight("a", "b", 0, 107), Flight("b", "a", 110, 14)
    assert offsets("a", [there, back]) == {"a": (0.0, 0.0), "b": (101.5, 5.5)}
    faster = [Flight("a", "b", 20, 121), Flight("b", "a", 121, 22)]  # 1 and 1: all that counts
    assert offsets("a", [there, back, *faster])["b"] == (100.0, 1.0)


def test_a_place_that_only_others_talk_to_is_known_through_them() -> None:
    flights = [Flight("a", "b", 0, 12), Flight("b", "a", 12, 4), Flight("b", "c", 0, 31), Flight("c", "b", 30, 1)]
    assert offsets("a", flights)["c"].error == offsets("a", flights)["b"].error + offsets("b", flights)["c"].error


def test_who_never_answers_has_no_offset() -> None:
    assert offsets("a", [Flight("a", "b", 0, 1)]) == {"a": (0.0, 0.0)}


PLACES = ["notebook", "task:0", "task:1", "ps:0"]
MESSAGE = st.tuples(st.sampled_from(PLACES), st.sampled_from(PLACES), st.integers(0, 10**9), st.integers(0, 10**7))


@settings(max_examples=25)
@given(st.tuples(*[st.integers(-(10**15), 10**15)] * 3), st.lists(MESSAGE, max_size=8))
def test_true_offsets_are_within_the_errors_and_messages_go_forward(true: tuple[int, ...], sent: list) -> None:
    of = dict(zip(PLACES, (0, *true), strict=True))
    round_trips = [(PLACES[0], place, 0, 500) for place in PLACES] + [(place, PLACES[0], 900, 700) for place in PLACES]
    flights = [
        Flight(source, to, at + of[source], at + takes + of[to])
        for source, to, at, takes in (*round_trips, *sent)
        if source != to
    ]
    found = offsets("notebook", flights)
    assert all(abs(found[place].value - of[place]) <= found[place].error for place in PLACES)
    for source, to, at, received in flights:
        assert at - found[source].value <= received - found[to].value


def test_processes_of_one_host_name_the_same_clock() -> None:
    assert clock_name() == clock_name()
