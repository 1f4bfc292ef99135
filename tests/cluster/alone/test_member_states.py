"""A member is alive, silent or dead; no process."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tfnb.cluster.engine.members import Member
from tfnb.cluster.wire.messages import GIVEN_UP, SILENCE, Peer


@pytest.fixture
def member():
    return Member("task:0", Peer("tcp://a", "k", 1), SimpleNamespace(status="finished", key="k"))


def test_a_silent_member_gets_no_work_and_may_answer_until_it_is_dead(member):
    assert member.is_there and member.may_answer and not member.is_silent
    member.fall_silent(time.monotonic() - 5.0)
    assert not member.is_there and member.may_answer and member.is_silent and 5.0 <= member.silence < 10.0
    member.fall_silent(time.monotonic())
    assert member.silence >= 5.0, "since its last answer"
    member.lose()
    assert not member.may_answer and not member.is_silent
    member.fall_silent(time.monotonic())
    assert not member.may_answer, "the dead stay dead"


def test_a_silent_member_whose_worker_dask_lost_is_dead(member):
    member.fall_silent(time.monotonic())
    member.future.status = "lost"
    assert not member.is_silent and not member.may_answer


def test_a_successor_is_a_newcomer_with_more_patience_until_it_did_something(member):
    member.plans.add("p")
    for patience in (2 * SILENCE, 4 * SILENCE, 8 * SILENCE, GIVEN_UP, GIVEN_UP):
        member.fall_silent(time.monotonic())
        member = member.successor()
        assert member.is_there and not member.plans and member.patience == min(patience, GIVEN_UP)
    member.seconds.append(0.1)
    assert member.successor().patience == SILENCE
