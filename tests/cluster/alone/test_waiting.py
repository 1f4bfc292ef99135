"""Requests that wait inside of a server's core: in order, answered once, told to ask again, and never lost.

Queues have tests of their own, in tests/state/test_queues_there.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.cluster.alone.test_core import Add
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import CoreTick, Reply, RequestArrival
from tfnb.cluster.server.lines import PATIENCE
from tfnb.cluster.wire.messages import POLL, Failure, Ok, OpId, Refusal, Request
from tfnb.state.store import Store


class Host:
    """A core, and which calls it answered."""

    def __init__(self, fail=""):
        self.core = Core(Store(budget=10_000), lambda meta, tensors: Add(fail), epoch=1, incarnation=7)
        self.now, self.ticket, self.seq = 0.0, 0, 0
        self.answers = {}
        self("create", [torch.zeros(3)], keys=["w"])
        self("register_shard", plan="add")

    def send(self, method, tensors=(), op=None, **meta):
        """The ticket of a call."""
        self.ticket, self.seq = self.ticket + 1, self.seq + 1
        request = Request(method, op or OpId("host", self.seq), 1, 7, meta, list(tensors))
        self.feed(RequestArrival(self.ticket, request))
        return self.ticket

    def __call__(self, *args, **kwargs):
        """The answer of a call, None while it waits."""
        return self.answers.get(self.send(*args, **kwargs))

    def feed(self, event):
        for effect in self.core.on(event, self.now):
            assert isinstance(effect, Reply) and effect.ticket not in self.answers, "a call is answered once"
            self.answers[effect.ticket] = effect.answer

    def pass_time(self, seconds):
        self.now += seconds
        self.feed(CoreTick())


def test_a_pull_of_a_later_step_waits_for_the_commit():
    host = Host()
    late = [host.send("pull", keys=["w"], step=step) for step in (2, 1)]
    assert not set(late) & set(host.answers) and host.core.lines.names(with_turns=True) == ["step:2", "step:1"]
    for step in (1, 2):
        host("stage", [torch.ones(3)], plan="add", round=step, worker=0)
        host("commit", round=step, workers=[0])
    assert [host.answers[ticket].meta["step"] for ticket in late] == [2, 1]
    assert [host.answers[ticket].tensors[0][0] for ticket in late] == [2, 1]
    assert host("pull", keys=["w"], step=1).meta["step"] == 2


def test_who_waits_long_is_told_to_ask_again_and_keeps_the_place():
    host = Host()
    op = OpId("a", 1)
    call = host.send("pull", op=op, keys=["w"], step=1)
    host.pass_time(POLL)
    assert host.answers[call] == Refusal("again", "it waits still")
    again, twice = (host.send("pull", op=op, keys=["w"], step=1) for _ in range(2))
    assert host.answers[again].reason == "again", "only the last call of one request waits"
    host("stage", [torch.ones(3)], plan="add", round=1, worker=0)
    host("commit", round=1, workers=[0])
    assert host.answers[twice].meta["step"] == 1


def test_who_does_not_come_back_or_is_gone_leaves():
    host = Host()
    host.send("pull", op=OpId("a", 1), keys=["w"], step=1)
    gone = host.send("pull", op=OpId("b", 1), keys=["w"], step=1)
    host("gone", client="b")
    assert host.answers[gone].reason == "fenced"
    host.pass_time(POLL)
    host.pass_time(PATIENCE)
    assert len(host.core.lines) == 0


def test_a_poisoned_core_refuses_who_waits():
    host = Host(fail="commit")
    waits = host.send("pull", keys=["w"], step=1)
    assert isinstance(host("push", [torch.ones(3)], plan="add"), Failure)
    assert host.answers[waits].reason == "poisoned"


def test_rounds_end_one_by_one_or_up_to_a_floor():
    host = Host()
    for number in (1, 2, 3):
        host("stage", [torch.ones(3)], plan="add", round=number, worker=0)
    assert isinstance(host("abort", round=2, floor=0), Ok)
    assert host("stage", [torch.ones(3)], plan="add", round=2, worker=0).reason == "stale"
    assert isinstance(host("commit", round=1, workers=[0], floor=0), Ok)
    assert isinstance(host("commit", round=3, workers=[0], floor=3), Ok)
    assert host.core.step == 2 and not host.core.rounds.over and not host.core.rounds.staged


@pytest.mark.parametrize(
    ("method", "meta", "tag"),
    [("pull", {"keys": ["w"], "step": "x"}, "InvalidArgument"), ("contents", {"key": "none", "start": 0}, "NotFound")],
)
def test_bad_requests_are_typed_errors_and_wait_for_nothing(method, meta, tag):
    host = Host()
    assert host(method, **meta).tag == tag
    assert len(host.core.lines) == 0


def test_a_contribution_that_is_asked_for_again_after_its_round_is_answered_then():
    host = Host()
    host("open_training", training="t")
    about = {"training": "t", "round": 1, "places": 2, "parts": 2, "shards": [0], "plan": "add", "reads": ["w"]}
    op = OpId("first", 1)
    first = host.send("contribute", [torch.ones(3)], op, worker=0, place=0, **about)
    host.pass_time(POLL + 1)
    assert host.answers[first] == Refusal("again", "it waits still")
    assert isinstance(host("contribute", [torch.full((3,), 3.0)], worker=1, place=1, **about), Ok), "the round is whole"
    again = host("contribute", [torch.ones(3)], op, worker=0, place=0, **about)
    assert again.meta["counts"] and again.tensors[0].tolist() == [2, 2, 2]
    assert host.core.lines.names(with_turns=True) == []


@pytest.mark.parametrize("how", ["cut", "end_training", "fail", "fence"])
def test_contributions_that_wait_hear_when_their_round_will_not_be(how):
    host = Host("compute" if how == "fail" else "")
    host("open_training", training="t")
    about = {"training": "t", "round": 1, "places": 3, "parts": 3, "shards": [0], "plan": "add", "reads": ["w"]}
    waiting = [host.send("contribute", [torch.ones(3)], OpId(str(w), 1), worker=w, place=w, **about) for w in range(2)]
    assert not set(waiting) & set(host.answers)
    match how:
        case "cut":
            host("cut", training="t", upto=1)
        case "end_training":
            host("end_training", training="t", clients=[])
        case "fail":
            assert isinstance(host("contribute", [torch.ones(3)], worker=2, place=2, **about), Failure)
        case "fence":
            host.core.epoch = 2
            host.pass_time(0.1)
    kind = Failure if how == "fail" else Refusal
    assert all(isinstance(host.answers.get(ticket), kind) for ticket in waiting)
