"""Requests that wait inside of a server's core: in order, answered once, told to ask again, and never lost."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import tfnb
from tests.cluster.test_core import Add
from tfnb.cluster.core import Arrived, Core, Reply, Tick
from tfnb.cluster.hand_outs import LEASE
from tfnb.cluster.lines import PATIENCE, POLL
from tfnb.cluster.messages import Failed, Ok, OpId, Refused, Request, Unknown
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
        self.feed(Arrived(self.ticket, request))
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
        self.feed(Tick())


def number(value):
    return [torch.tensor(float(value))]


def test_a_pull_of_a_later_step_waits_for_the_commit():
    host = Host()
    late = [host.send("pull", keys=["w"], step=step) for step in (2, 1)]
    assert not set(late) & set(host.answers) and host.core.lines.names == ["step:2", "step:1"]
    for step in (1, 2):
        host("stage", [torch.ones(3)], plan="add", round=step, worker=0)
        host("commit", round=step, workers=[0])
    assert [host.answers[ticket].meta["step"] for ticket in late] == [2, 1]
    assert [host.answers[ticket].tensors[0][0] for ticket in late] == [2, 1]
    assert host("pull", keys=["w"], step=1).meta["step"] == 2


def test_elements_are_given_in_order_and_a_full_queue_lets_putters_wait():
    host = Host()
    host("make", key="q", kind="queue", capacity=1)
    takers = [host.send("dequeue", key="q") for _ in range(2)]
    putters = [host.send("enqueue", number(n), key="q") for n in range(4)]
    assert [host.answers[t].tensors[0] for t in takers] == [0, 1]
    assert [ticket in host.answers for ticket in putters] == [True, True, True, False]
    close = host.send("close", key="q")
    assert close not in host.answers, "behind the put before it"
    assert host("dequeue", key="q").tensors[0] == 2
    assert isinstance(host.answers[putters[3]], Ok) and isinstance(host.answers[close], Ok)
    assert host("enqueue", number(9), key="q").tag == "QueueClosed"
    assert host("dequeue", key="q").tensors[0] == 3
    for op in list(host.core.objects.outs.out):
        taken(host, op)
    assert host("dequeue", key="q").tag == "OutOfRange"


def taken(host, op):
    return host("taken", key="q", client=op.client, seq=op.seq)


def test_an_element_goes_back_unless_it_is_acknowledged():
    host = Host()
    host("make", key="q", kind="queue", capacity=4)
    for n in range(4):
        host("enqueue", number(n), key="q")
    ops = [OpId(client, 1) for client in "abc"]
    assert [host("dequeue", op=op, key="q").tensors[0] for op in ops] == [0, 1, 2]
    assert isinstance(taken(host, ops[1]), Ok)
    host("gone", client="c")
    host.pass_time(LEASE)
    assert taken(host, ops[0]).tag == host("dequeue", op=ops[0], key="q").tag == "FailedPrecondition"
    rest = [host("dequeue", key="q").tensors[0].item() for _ in range(3)]
    assert rest == [0, 2, 3], "in the order of the queue, whoever came back first"
    assert host("dequeue", op=ops[1], key="q").tag == "FailedPrecondition", "it was acknowledged, and is forgotten"


def test_a_closed_queue_waits_for_what_may_come_back():
    host = Host()
    host("make", key="q", kind="queue", capacity=4)
    host("enqueue", number(5), key="q")
    first = OpId("a", 1)
    host("dequeue", op=first, key="q")
    host("close", key="q")
    second = [host.send("dequeue", op=OpId("b", n), key="q") for n in range(2)]
    assert not set(second) & set(host.answers)
    host("gone", client="a")
    assert host.answers[second[0]].tensors[0] == 5 and second[1] not in host.answers
    assert isinstance(taken(host, OpId("b", 0)), Ok)
    assert host.answers[second[1]].tag == "OutOfRange"


def test_elements_on_their_way_count_for_the_budget():
    host = Host()
    host("make", key="q", kind="queue", capacity=4)
    host("enqueue", [torch.zeros(2000)], key="q")
    op = OpId("a", 1)
    host("dequeue", op=op, key="q")
    assert host("enqueue", [torch.zeros(2000)], key="q").tag == "ResourceExhausted"
    taken(host, op)
    assert isinstance(host("enqueue", [torch.zeros(2000)], key="q"), Ok)


def test_a_close_that_cancels_ends_who_waits():
    host = Host()
    host("make", key="q", kind="queue", capacity=1)
    host("enqueue", number(0), key="q")
    putter = host.send("enqueue", number(1), key="q")
    assert isinstance(host("close", key="q", cancel_pending=True), Ok)
    assert host.answers[putter].tag == "QueueClosed"


def test_a_mean_waits_for_enough_gradients_and_drops_old_ones():
    host = Host()
    host("make", [torch.zeros(2)], key="g", kind="accumulator")
    taker = host.send("take_grad", key="g", required=2)
    assert host("apply_grad", [torch.ones(2)], key="g", step=0).meta["applied"]
    assert taker not in host.answers
    host("apply_grad", [torch.full((2,), 4.0)], key="g", step=0, rows=2)
    assert host.answers[taker].tensors[0].tolist() == [3, 3] and host.answers[taker].meta["step"] == 1
    assert not host("apply_grad", [torch.ones(2)], key="g", step=0).meta["applied"]
    assert host("apply_grad", [torch.ones(3)], key="g", step=1).tag == "ShapeError"


def test_a_token_of_a_dead_holder_is_given_to_the_next_after_its_lease():
    host = Host()
    host("make", key="t", kind="tokens", lease=5.0)
    host("token_give", key="t", step=3)
    first = host("token_take", op=OpId("a", 1), key="t")
    second = host.send("token_take", op=OpId("b", 1), key="t")
    host.pass_time(4.0)
    assert isinstance(host("token_renew", key="t", token=first.meta["token"]), Ok)
    host.pass_time(4.0)
    assert second not in host.answers
    host.pass_time(1.5)
    assert host.answers[second].meta["step"] == 3
    assert host("token_end", key="t", token=first.meta["token"]).tag == "FailedPrecondition"


def test_who_waits_long_is_told_to_ask_again_and_keeps_the_place():
    host = Host()
    host("make", key="q", kind="queue", capacity=4)
    first, second = OpId("a", 1), OpId("b", 1)
    calls = [host.send("dequeue", op=op, key="q") for op in (first, second)]
    host.pass_time(POLL)
    assert [host.answers[call] for call in calls] == [Refused("again", "it waits still")] * 2
    again = host.send("dequeue", op=second, key="q"), host.send("dequeue", op=first, key="q")
    twice = host.send("dequeue", op=first, key="q")
    assert host.answers[again[1]].reason == "again", "only the last call of one request waits"
    host("enqueue", number(1), key="q"), host("enqueue", number(2), key="q")
    assert host.answers[twice].tensors[0] == 1 and host.answers[again[0]].tensors[0] == 2
    dup = host("dequeue", op=first, key="q")
    assert dup.dup and dup.tensors[0] == 1, "asked again after the answer: the same element"


def test_who_does_not_come_back_or_is_gone_leaves():
    host = Host()
    host("make", key="q", kind="queue", capacity=4)
    host.send("dequeue", op=OpId("a", 1), key="q")
    gone = host.send("dequeue", op=OpId("b", 1), key="q")
    host("gone", client="b")
    assert host.answers[gone].reason == "fenced"
    host.pass_time(POLL)
    host.pass_time(PATIENCE)
    assert len(host.core.lines) == 0
    host("enqueue", number(1), key="q")
    assert host("dequeue", key="q").tensors[0] == 1, "nothing was given to who left"


def test_a_close_stands_behind_a_putter_between_two_calls():
    host = Host()
    host("make", key="q", kind="queue", capacity=1)
    host("enqueue", number(0), key="q")
    op = OpId("a", 1)
    host.send("enqueue", number(1), op=op, key="q")
    host.pass_time(POLL)
    close = host.send("close", key="q")
    host("dequeue", key="q")
    assert close not in host.answers
    assert isinstance(host("enqueue", number(1), op=op, key="q"), Ok)
    assert isinstance(host.answers[close], Ok)


def test_a_poisoned_core_refuses_who_waits():
    host = Host(fail="commit")
    host("make", key="q", kind="queue", capacity=4)
    waits = host.send("dequeue", key="q")
    assert isinstance(host("push", [torch.ones(3)], plan="add"), Failed)
    assert host.answers[waits].reason == "poisoned"


@pytest.mark.parametrize(
    ("method", "meta", "tag"),
    [
        ("dequeue", {"key": "none"}, "NotFound"),
        ("dequeue", {"key": "g"}, "InvalidArgument"),
        ("take_grad", {"key": "g", "required": 0}, "InvalidArgument"),
        ("set_step", {"key": "g", "step": -1}, "InvalidArgument"),
        ("make", {"key": "g", "kind": "queue", "capacity": 3}, "InvalidArgument"),
        ("make", {"key": "n", "kind": "nothing"}, "InvalidArgument"),
        ("pull", {"keys": ["w"], "step": "x"}, "InvalidArgument"),
        ("token_renew", {"key": "t", "token": 5}, "FailedPrecondition"),
    ],
)
def test_bad_requests_are_typed_errors_and_wait_for_nothing(method, meta, tag):
    host = Host()
    host("make", [torch.zeros(2)], key="g", kind="accumulator")
    host("make", key="t", kind="tokens", lease=1)
    assert host(method, **meta).tag == tag
    assert len(host.core.lines) == 0


class Clients(RuleBasedStateMachine):
    """Putters and takers that ask again, die and come late: elements are conserved, in order, given once."""

    def __init__(self):
        super().__init__()
        self.host = Host()
        self.host("make", key="q", kind="queue", capacity=3)
        self.put = []  # values in the order in which their putters stand
        self.open = {}  # op -> its tickets, method
        self.dead = set()
        self.given = {}  # op of a taker -> value
        self.acknowledged = {}
        self.back = set()  # ops whose elements went back
        self.accepted = set()
        self.count = 0

    def _send(self, op, method, tensors=()):
        ticket = self.host.send(method, tensors, op=op, key="q")
        self.open.setdefault(op, (method, []))[1].append(ticket)
        self._look()

    def _look(self):
        for op, (method, tickets) in self.open.items():
            for ticket in tickets:
                answer = self.host.answers.get(ticket)
                if isinstance(answer, Ok) and method == "dequeue":
                    value = int(answer.tensors[0])
                    assert self.given.setdefault(op, value) == value, "one request gets one element"
                elif isinstance(answer, Ok):
                    self.accepted.add(op)

    @rule(client=st.sampled_from("abc"))
    def take(self, client):
        self.count += 1
        self._send(OpId(client, self.count), "dequeue")

    @rule(client=st.sampled_from("abc"))
    def put_one(self, client):
        self.count += 1
        op = OpId(client, self.count)
        self.put.append((op, self.count))
        self._send(op, "enqueue", number(self.count))

    @rule(which=st.integers(0, 1000))
    def ask_again(self, which):
        if self.open:
            op, (method, _) = list(self.open.items())[which % len(self.open)]
            if op not in self.dead:
                self._send(op, method, number(op.seq) if method == "enqueue" else ())

    @rule(which=st.integers(0, 1000))
    def acknowledge(self, which):
        ops = [op for op in self.given if op not in self.acknowledged and op not in self.back]
        if ops:
            op = ops[which % len(ops)]
            is_out = op in self.host.core.objects.outs.out
            answer = taken(self.host, op)
            assert isinstance(answer, Ok) == is_out
            if is_out:
                self.acknowledged[op] = self.given[op]
            else:
                assert answer.tag == "FailedPrecondition"
                self.back.add(op)
            self._look()

    @rule(seconds=st.sampled_from([1.0, POLL, PATIENCE]))
    def time(self, seconds):
        self.host.pass_time(seconds)
        waiting = {op for op in self.open if op in self.host.core.lines}
        self.dead |= {op for op in self.open if op not in waiting and not self._is_over(op)}
        self._look()

    @rule(client=st.sampled_from("abc"))
    def die(self, client):
        self.dead |= {op for op in self.open if op.client == client and op in self.host.core.lines}
        self.host("gone", client=client)
        self._look()

    def _is_over(self, op):
        return op in self.given or op in self.accepted

    @invariant()
    def elements_are_conserved_and_in_order(self):
        stored = [int(element[0]) for element in self.host.core.objects.things["q"].elements]
        entered = [value for op, value in self.put if op in self.accepted]
        out = [int(given.element[0]) for given in self.host.core.objects.outs.out.values()]
        assert sorted([*self.acknowledged.values(), *out, *stored]) == sorted(entered)
        assert stored == sorted(stored) or self.host.now, "first in, first out, of those who did not step aside"
        assert len(set(self.acknowledged.values())) == len(self.acknowledged)

    @invariant()
    def nobody_waits_for_what_is_there(self):
        lines, queue = self.host.core.lines, self.host.core.objects.things["q"]
        assert not (queue.size and lines.head("get:q")) and not (queue.size < 3 and lines.head("put:q"))

    @invariant()
    def nobody_who_lives_is_lost(self):
        for op in self.open:
            assert self._is_over(op) or op in self.dead or op in self.host.core.lines


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_requests_wait_inside_of_a_real_server(connect, problem):
    p = problem()
    cluster = connect(2)
    engine, link = cluster._engine, cluster._link
    tfnb.run(p.loss, dict(zip(p.feeds, (p.data, p.labels), strict=True)))
    peer = engine.servers[0].peer
    keys = [v.key for v in p.graph.variables if v in cluster._held and cluster._held.homes[v.key][0].shard == 0]

    async def ask(method, meta, tensors=(), seconds=40.0):
        return await link.persist(peer, method, meta, tensors, epoch=1, deadline=time.monotonic() + seconds)

    def now(*args):
        return link.wait(link.start(ask, *args), 50, args[0])

    def later(coroutine):  # not what the end of a training waits for
        return asyncio.run_coroutine_threadsafe(coroutine, link.loop)

    pulled = later(ask("pull", {"keys": keys, "step": 3}))
    assert isinstance(now("make", {"key": "q", "kind": "queue", "capacity": 2}), Ok)

    async def element():
        return await link.take(peer, "q", epoch=1, deadline=time.monotonic() + 40)

    taken = [later(element()) for _ in range(3)]
    while now("stat", {}).meta["waiting"] < 4:
        pass
    assert not pulled.done() and not any(handle.done() for handle in taken)
    list(cluster.train(p.program, p.batches(3)))
    assert pulled.result(20).meta["step"] == 3
    for n in range(3):
        now("enqueue", {"key": "q"}, number(n))
    assert sorted(float(handle.result(20).tensors[0]) for handle in taken) == [0, 1, 2]
    begin = time.monotonic()
    assert now("dequeue", {"key": "q"}, (), 1.0) == Unknown(f"{peer.addr} did not answer by the deadline")
    assert time.monotonic() - begin < 100
    assert now("stat", {}).meta["waiting"] == 1, "its place is kept for a while"


@pytest.mark.slow
def test_a_wait_longer_than_a_poll_is_asked_again(connect):
    cluster = connect(2)
    link, peer = cluster._link, cluster._engine.servers[0].peer

    async def ask(method, meta, tensors=()):
        return await link.persist(peer, method, meta, tensors, epoch=1, deadline=time.monotonic() + 60)

    link.wait(link.start(ask, "make", {"key": "long", "kind": "queue", "capacity": 2}), 20, "make")
    taken = link.start(ask, "dequeue", {"key": "long"})
    time.sleep(POLL + 3)
    assert not taken.task
    link.wait(link.start(ask, "enqueue", {"key": "long"}, number(5)), 20, "put")
    assert float(link.wait(taken, 20, "an element").tensors[0]) == 5
