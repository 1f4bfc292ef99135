"""The rendezvous of a task, alone: a value meets who wants it once, whatever comes in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tfnb.cluster.tasks import meeting as m
from tfnb.errors import Internal, ResourceExhausted, StepAborted, Unavailable

BUDGET = 8 * m.MESSAGE
HERE, OTHER, OLD = 1, 2, 3  # incarnations
CAUSE = Unavailable("gone")


def fresh(*rounds: int) -> m.Meeting:
    """One in which these rounds have begun."""
    meeting = m.Meeting(BUDGET)
    for number in rounds:
        assert meeting.on(m.Begin(number, frozenset({HERE, OTHER})), 0.0) == []
    return meeting


def came(
    number: int = 1, edge: int = 0, tag: tuple[int, ...] = (), value: Any = 5, sender: int = OTHER, nbytes: int = 0
):
    return m.MessageArrival(number, edge, tag, value, None, sender, nbytes)


def failures(effects: list[m.Effect]) -> list[tuple[int, str]]:
    return [(one.round, str(one.cause)) for one in effects if isinstance(one, m.Fail)]


def test_a_value_waits_for_who_wants_it_and_the_other_way_round():
    meeting = fresh(1)
    assert meeting.on(came(), 0.0) == [] and meeting.held == 1
    assert meeting.on(m.Want(1, 0, (), print), 0.0) == [m.Deliver(print, 5, None)]
    assert meeting.on(m.Want(1, 0, (3,), print), 0.0) == []
    assert meeting.on(came(tag=(3,)), 0.0) == [m.Deliver(print, 5, None)]
    assert meeting.held == 0 and meeting.on(m.PartEnd(1), 0.0) == [] and meeting.rounds == []


def test_dead_values_say_which_branch_was_not_taken():
    meeting = fresh(1)
    meeting.on(m.MessageArrival(1, 0, (), None, (4, 1), OTHER), 0.0)
    assert meeting.on(m.Want(1, 0, (), print), 0.0) == [m.Deliver(print, None, (4, 1))]


@pytest.mark.parametrize("first", ["kept", "delivered"])
@pytest.mark.parametrize("second", ["came", "was wanted"])
def test_a_key_that_is_used_twice_poisons_the_round_and_is_named(first, second):
    meeting = fresh(1)
    use = came(edge=7, tag=(0, 2)) if second == "came" else m.Want(1, 7, (0, 2), print)
    assert meeting.on(use, 0.0) == []
    if first == "delivered":
        other = m.Want(1, 7, (0, 2), print) if second == "came" else came(edge=7, tag=(0, 2))
        assert len(meeting.on(other, 0.0)) == 1
    (fail,) = meeting.on(use, 0.0)
    assert type(fail.cause) is Internal and fail.cause.message == f"round 1: edge 7 {second} twice with tag (0, 2)"
    assert meeting.held == 0


def test_what_comes_for_a_round_that_is_over_is_dropped_and_counted():
    meeting = fresh(1, 2)
    meeting.on(m.PartEnd(1), 0.0)
    meeting.on(m.Abort(2, 5, CAUSE), 0.0)
    for number in (1, 3, 5):
        assert meeting.on(came(number), 0.0) == []
    assert meeting.counts == {"stale": 3}
    assert meeting.on(came(2), 0.0) == [] and meeting.counts["poisoned"] == 1, "its part has not ended yet"
    assert failures(meeting.on(m.Begin(4, frozenset({HERE})), 0.0)) == [(4, "round 4 begins when it is over")]
    assert meeting.rounds == [2]


def test_thousands_of_rounds_leave_a_bounded_number_of_tombstones():
    meeting = fresh()
    for number in range(2, 20 * m.TOMBSTONES, 2):
        meeting.on(m.Begin(number, frozenset({HERE})), 0.0)
        meeting.on(m.PartEnd(number), 0.0)
    assert len(meeting._over) <= 2 * m.TOMBSTONES and meeting.rounds == []
    meeting.on(came(number), 0.0), meeting.on(came(2), 0.0)
    assert meeting.counts == {"stale": 2}


def test_an_open_round_outlives_thousands_that_begin_later():
    meeting = fresh(1)
    for number in range(2, 4 * m.TOMBSTONES):
        meeting.on(m.PartEnd(number), 0.0)
    assert meeting.floor > 1 and meeting.on(came(1), 0.0) == []
    assert meeting.on(m.Want(1, 0, (), print), 0.0) == [m.Deliver(print, 5, None)]


def test_the_keys_that_were_delivered_are_remembered_up_to_a_bound():
    meeting = fresh(1)
    for turn in range(3 * m.REMEMBERED):
        meeting.on(m.Want(1, 0, (turn,), print), 0.0)
        assert len(meeting.on(came(tag=(turn,)), 0.0)) == 1
    assert len(meeting._rounds[1].delivered) <= m.REMEMBERED
    assert failures(meeting.on(came(tag=(turn - 100,)), 0.0))


def test_early_values_beyond_the_budget_pause_their_sender_until_the_round_begins():
    meeting = m.Meeting(BUDGET)
    for turn in range(8):
        assert meeting.on(came(tag=(turn,)), 0.0) == []
    assert meeting.on(came(tag=(8,)), 0.0) == [m.PauseReading(OTHER)]
    assert meeting.on(m.MeetingTick(), 1.0) == []
    assert meeting.on(m.Begin(1, frozenset({OTHER})), 2.0) == [m.ResumeReading(OTHER)]
    assert meeting.early == 0 and meeting.held == 9


def test_early_values_that_nobody_wants_for_long_abort_their_round_when_it_begins():
    meeting = m.Meeting(BUDGET)
    meeting.on(came(2), 0.0)
    assert meeting.on(came(1, nbytes=BUDGET), 0.0) == [m.PauseReading(OTHER)]
    assert meeting.on(m.MeetingTick(), m.PATIENCE) == [m.ResumeReading(OTHER)]
    assert meeting.on(came(1, tag=(1,), nbytes=BUDGET), 0.0) == [], "of a poisoned round nothing is kept"
    (fail,) = meeting.on(m.Begin(1, frozenset({OTHER})), 20.0)
    assert type(fail.cause) is ResourceExhausted and "used" in str(fail.cause)
    assert meeting.on(m.Begin(2, frozenset({OTHER})), 20.0) == [] and meeting.held == 1, "the other one goes on"


def test_a_lost_connection_poisons_the_rounds_of_that_task_only():
    meeting = fresh(1)
    meeting.on(m.Begin(2, frozenset({HERE})), 0.0)
    meeting.on(came(3), 0.0)
    assert failures(meeting.on(m.ConnectionLoss(OTHER, CAUSE), 0.0)) == [(1, "gone")]
    assert failures(meeting.on(m.Begin(3, frozenset({HERE, OTHER})), 0.0)) == [(3, "gone")]
    assert meeting.on(m.Want(2, 0, (), print), 0.0) == []


def test_a_round_that_ends_with_values_says_which():
    meeting = fresh(1, 2)
    for number in (1, 2):
        meeting.on(came(number, edge=3, tag=(0, 1)), 0.0)
    meeting.on(came(edge=-1, tag=(0, 2)), 0.0)  # how far a loop is: nobody has to wait for that
    assert meeting.on(m.PartEnd(1), 0.0) == [m.Leftover(1, [(3, (0, 1))])]
    assert meeting.on(m.PartEnd(2, has_failed=True), 0.0) == []


def test_a_round_that_begins_twice_is_a_bug():
    meeting = fresh(1)
    assert failures(meeting.on(m.Begin(1, frozenset({HERE})), 0.0)) == [(1, "round 1 begins twice")]


# -- random orders ----------------------------------------------------------------------------------------------------

numbers, edges, tags = st.integers(1, 4), st.integers(0, 1), st.sampled_from([(), (0,), (1,)])
senders = st.sampled_from([HERE, OTHER, OLD])


class Round:
    """One round by the contract: what came and is wanted, in plain dicts."""

    def __init__(self) -> None:
        self.begun: frozenset[int] | None = None
        self.came: dict[Any, list[m.MessageArrival]] = {}  # by key, in order
        self.wants: dict[Any, list[m.Receive]] = {}
        self.cause: str | None = None
        self.has_failed = False


class Meetings(RuleBasedStateMachine):
    """Events in any order against plain rules: who is given what, and which rounds fail with what."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting, self.now, self.made = m.Meeting(BUDGET), 0.0, 0
        self.rounds: dict[int, Round] = {}
        self.over: set[int] = set()
        self.floor = 0
        self.paused: set[int] = set()
        self.asked: dict[m.Receive, Any] = {}  # who wants which key, until it is delivered

    def on(self, event: m.Event) -> list[m.Effect]:
        effects = self.meeting.on(event, self.now)
        for effect in effects:
            match effect:
                case m.Deliver(receive, value, _):
                    number, key = self.asked.pop(receive)
                    one = self.rounds[number]
                    assert one.cause is None and number not in self.over
                    (message,) = [message for message in one.came[key] if message.sender in one.begun]
                    assert value is message.value
                case m.Fail(number, cause):
                    one = self.rounds.get(number)
                    if one is None:
                        assert self.is_over(number)
                    else:
                        assert one.cause in (None, str(cause)) and one.begun is not None and not one.has_failed
                        one.cause, one.has_failed = str(cause), True
                case m.PauseReading(sender):
                    self.paused.add(sender)
                case m.ResumeReading(sender):
                    self.paused.discard(sender)
        return effects

    def is_over(self, number: int) -> bool:
        return number not in self.rounds and (number <= self.floor or number in self.over)

    def of(self, number: int) -> Round:
        return self.rounds.setdefault(number, Round())

    @rule(number=numbers, edge=edges, tag=tags, sender=senders, nbytes=st.sampled_from([0, BUDGET // 4, BUDGET]))
    def comes(self, number, edge, tag, sender, nbytes):
        if sender in self.paused:
            return  # it is not read
        message = m.MessageArrival(number, edge, tag, object(), None, sender, nbytes)
        if not self.is_over(number) and self.of(number).cause is None:
            one = self.of(number)
            if one.begun is None or sender in one.begun:
                one.came.setdefault((edge, tag), []).append(message)
                self.check_twice(number, one, one.came, (edge, tag), "came")
        self.on(message)

    def check_twice(self, number: int, one: Round, of: dict[Any, list[Any]], key: Any, what: str) -> None:
        """The next effect is the failure of this round, if the key was there before."""
        if one.begun is None:
            return
        found = [use for use in of[key] if what != "came" or use.sender in one.begun]
        if len(found) > 1 and one.cause is None:
            one.cause = f"round {number}: edge {key[0]} {what} twice with tag {key[1]}"

    @rule(number=numbers, edge=edges, tag=tags)
    def wants(self, number, edge, tag):
        one = self.rounds.get(number)
        if one is not None and one.begun is None:
            return  # a part can want nothing before it began

        def receive(value, dead):
            raise AssertionError("the machine calls nobody")

        if one is not None and one.cause is None:
            self.asked[receive] = number, (edge, tag)
            one.wants.setdefault((edge, tag), []).append(receive)
            self.check_twice(number, one, one.wants, (edge, tag), "was wanted")
        self.on(m.Want(number, edge, tag, receive))

    @rule(number=numbers, begun=st.sampled_from([{HERE, OTHER}, {HERE}]))
    def begins(self, number, begun):
        if self.is_over(number):
            (fail,) = self.on(m.Begin(number, frozenset(begun)))
            assert type(fail.cause) is StepAborted
            return
        one = self.of(number)
        if one.begun is not None:
            one.cause = one.cause or f"round {number} begins twice"
        else:
            one.begun = frozenset(begun)
            for (edge, tag), messages in one.came.items():
                found = [message for message in messages if message.sender in begun]
                if len(found) > 1 and one.cause is None:
                    one.cause = f"round {number}: edge {edge} came twice with tag {tag}"
                    break
        several = one.begun == frozenset(begun) and sum(
            len([x for x in messages if x.sender in begun]) > 1 for messages in one.came.values()
        )
        if several and not one.has_failed:
            one.cause = None if several > 1 else one.cause  # which of several is first is the order of their coming
        self.on(m.Begin(number, frozenset(begun)))

    @rule(number=numbers, floor=st.integers(0, 2))
    def aborts(self, number, floor):
        cause, self.made = Unavailable(f"cause {self.made}"), self.made + 1
        self.floor = max(self.floor, floor)
        self.over.add(number)
        for other, one in list(self.rounds.items()):
            if other == number or other <= self.floor:
                one.cause = one.cause or str(cause)
                if one.begun is None:
                    del self.rounds[other]
        self.on(m.Abort(number, floor, cause))

    @rule(sender=senders)
    def loses(self, sender):
        cause, self.made = Unavailable(f"cause {self.made}"), self.made + 1
        for one in self.rounds.values():
            early = one.begun is None and any(x.sender == sender for found in one.came.values() for x in found)
            if early or sender in (one.begun or ()):
                one.cause = one.cause or str(cause)
        self.paused.discard(sender)
        self.on(m.ConnectionLoss(sender, cause))

    @rule(number=numbers)
    @precondition(lambda self: self.rounds)
    def ends(self, number):
        one = self.rounds.get(number)
        if one is None:
            return
        left = [] if one.begun is None or one.cause is not None else self.unmet(one)
        found = [key for effect in self.on(m.PartEnd(number)) if isinstance(effect, m.Leftover) for key in effect.keys]
        assert sorted(found) == sorted(left)
        del self.rounds[number]
        self.over.add(number)
        self.asked = {receive: at for receive, at in self.asked.items() if at[0] != number}

    def unmet(self, one: Round) -> list[Any]:
        """Keys of live values that nobody asked for."""
        there = {key for key, found in one.came.items() if any(x.sender in one.begun for x in found)}
        return [key for key in there if key not in one.wants]

    @rule(seconds=st.sampled_from([1.0, m.PATIENCE + 1.0]))
    def waits(self, seconds):
        self.now += seconds
        before = {number: one for number, one in self.rounds.items() if one.begun is None and one.cause is None}
        had_time = any(until <= self.now for until in self.meeting.paused.values())
        self.on(m.MeetingTick())
        for number, one in before.items():
            inside = self.meeting._rounds[number]
            if inside.cause is not None:
                assert had_time and type(inside.cause) is ResourceExhausted
                one.cause = str(inside.cause)
        assert not had_time or not self.paused, "nobody is paused for good"

    @invariant()
    def every_value_that_is_there_was_delivered_to_who_waits(self):
        for one in self.rounds.values():
            if one.begun is not None and one.cause is None:
                there = {key for key, found in one.came.items() if any(x.sender in one.begun for x in found)}
                waiting = {key for key, found in one.wants.items() if any(x in self.asked for x in found)}
                assert not there & waiting

    @invariant()
    def every_round_that_is_poisoned_has_said_so_once(self):
        for one in self.rounds.values():
            assert one.has_failed == (one.begun is not None and one.cause is not None)

    @invariant()
    def early_bytes_are_bounded_and_counted_right(self):
        early = [x for one in self.meeting._rounds.values() for x in one.early]
        assert self.meeting.early == sum(x.nbytes + m.MESSAGE for x in early)
        assert self.meeting.early <= BUDGET + 3 * (BUDGET + m.MESSAGE), "one message of each sender beyond it"
        assert self.paused == set(self.meeting.paused)

    def teardown(self):
        for number in list(self.rounds):
            self.meeting.on(m.PartEnd(number, has_failed=True), self.now)
        assert (self.meeting.rounds, self.meeting.held, self.meeting.early, self.meeting.paused) == ([], 0, 0, {})


@pytest.mark.parametrize("examples", [50, *[pytest.param(2_500, marks=pytest.mark.slow)] * 4])
def test_random_events_meet_as_in_a_plain_model(examples: int) -> None:
    options = {"derandomize": False, "database": None} if examples > 50 else {}
    run_state_machine_as_test(
        Meetings, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None, **options)
    )  # fmt: skip
