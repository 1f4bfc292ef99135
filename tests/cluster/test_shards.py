"""Servers that hold several shards each: values as here, one message for each process, faults name the shards."""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import time

import pytest
import torch
from distributed import Security

import tfnb
import tfnb.placement.shards as shards_module
from tests.cluster.alone.test_core import Add
from tests.cluster.conftest import WORKERS, close_to, one_by_one, worker_processes, workers
from tests.cluster.test_cuts import Counters, served
from tests.cluster.test_faults import kill, train
from tests.cluster.test_resident import ROWS
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import Reply, RequestArrival
from tfnb.cluster.server.cores import Cores
from tfnb.cluster.server.serving import Serving
from tfnb.cluster.wire import asking, envelope
from tfnb.cluster.wire.messages import Ask, Failure, Ok, OpId, Peer, Refusal, Request, Unknown
from tfnb.cluster.wire.streams import Stream, Streams
from tfnb.errors import ParameterServerLost
from tfnb.state.store import Store


@pytest.fixture(scope="module")
def two():
    """A Dask cluster of two workers: one task, and one server that holds all shards."""
    with worker_processes(2) as client:
        yield client


@pytest.fixture
def four(dask):
    """Four shards on two servers, and two tasks."""
    workers(dask, WORKERS)
    with tfnb.connect(dask, ps=4, timeout=60) as cluster:
        assert (len(cluster.tasks), len(cluster.servers), len(cluster._engine.shards)) == (2, 2, 4)
        yield cluster


@pytest.fixture(params=[1, 2])
def shared(request):
    """Four shards on one server, or on two."""
    if request.param == 2:
        yield request.getfixturevalue("four")
        return
    with tfnb.connect(request.getfixturevalue("two"), ps=4, timeout=60) as cluster:
        assert (len(cluster.tasks), len(cluster.servers), len(cluster._engine.shards)) == (1, 1, 4)
        yield cluster


def used(cluster):
    """Shards on which something lies."""
    return {piece.shard for pieces in cluster._variables.held.homes.values() for piece in pieces}


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("large", [64 << 20, 100], ids=["whole", "divided"])
def test_run_is_bitwise_equal_to_local(shared, problem, monkeypatch, large):
    monkeypatch.setattr(shards_module, "LARGE", large)
    p = problem(tfnb.train.Adam(1e-2))
    states, losses = p.local(4)
    for step, batch in enumerate(p.batches(4)):
        _, loss = tfnb.run([p.train, p.loss], dict(zip(p.feeds, batch.tensors, strict=True)))
        assert float(loss) == losses[step]
    assert used(shared) == {0, 1, 2, 3}
    shared.pull()
    assert all(map(torch.equal, p.values(), states[-1]))


def test_sync_equals_the_local_run_bitwise_on_one_task_and_closely_on_two(shared, problem):
    p = problem(tfnb.train.SGD(0.1, momentum=0.9))
    states, losses = p.local(12)
    seen = [float(values[1]) for _, values in one_by_one(shared, p.program, p.batches(12))]
    if len(shared.tasks) == 1:
        assert all(map(torch.equal, p.values(), states[-1])) and seen == losses
    else:
        assert close_to(p.values(), states[-1], 1e-12) and seen == pytest.approx(losses, rel=1e-12)


MODES = [{}, {"mode": "async"}, {"mode": "bounded", "staleness": 1}, {"backup": 1}]
NAMES = ["sync", "async", "bounded", "backup"]


def asked(cluster):
    """How many calls to servers each task has made, by method."""

    def told(dask_worker):
        links = [actor.task.link for actor in dask_worker.state.actors.values() if hasattr(actor, "task")]
        return [{method: len(seconds) for method, seconds in link.latencies.items() if seconds} for link in links]

    found = cluster.client.run(told, workers=[member.peer.addr for member in cluster._engine.tasks])
    return [counts for some in found.values() for counts in some if counts]


@pytest.mark.parametrize("options", MODES, ids=NAMES)
def test_every_mode_counts_exactly_on_all_shards_and_a_step_is_one_message_to_a_process(four, options):
    c = Counters(shards=4)
    done = tfnb.fit(c.train, {c.x: ROWS}, steps=40, batch_size=4, **options)
    assert c.counts() == [40.0] * 4 and served(four) == [40] * 4 and four.step == done.steps == 40
    calls = asked(four)  # beside those on direct streams, of which one goes to a process at a time
    alone = {"enter", "stream"}
    alone |= {"pull"} if "staleness" in options else {"contribute"} if "backup" in options else set()  # one is behind
    assert calls and all(set(some) <= {"batch", *alone} for some in calls), "what is for a process is one"


@pytest.mark.parametrize("options", MODES, ids=NAMES)
def test_a_killed_task_loses_and_doubles_nothing_on_any_shard(four, options):
    c = Counters(shards=4)
    task = four._engine.tasks[1]
    rows = c.rows(150, lambda step: kill(task) if step == 40 else None)
    if "backup" in options:
        options = {}  # one task is left, and none to spare: as in the other modes
    done = tfnb.fit(c.train, rows, **options)
    assert done.steps == 150 and c.counts() == [150.0] * 4 and served(four) == [150] * 4 and four.step == 150


def test_what_fails_on_a_shard_is_told_while_the_one_beside_it_waits(four):
    """A shard that forgot its plan gets it again; the others of its process would wait for the round till then."""
    c = Counters(shards=4)
    tfnb.fit(c.train, c.rows(2))

    def forget(dask_worker):
        for actor in dask_worker.state.actors.values():
            for core in actor.task.cores:
                core.plans.clear() if core.shard == 2 else None

    four.client.run(forget, workers=[member.peer.addr for member in four._engine.servers])
    begin = time.monotonic()
    tfnb.fit(c.train, c.rows(4))
    assert c.counts() == [6.0] * 4 and time.monotonic() - begin < 60  # else it takes 600


@pytest.mark.slow
def test_a_pull_in_mid_training_sees_one_count(four):
    c = Counters(shards=4)
    seen = []
    for options in MODES:
        tfnb.fit(
            c.train,
            c.rows(60, lambda step: seen.append((four.pull(), *c.counts())) if step % 9 == 5 else None),
            **options,
        )
    assert all(counts == [step] * 4 for step, *counts in seen), seen
    assert len({step for step, *_ in seen}) > 4 and c.counts() == [240.0] * 4


# -- faults and what is told ----------------------------------------------------------------------------------------


def test_a_killed_server_is_named_with_its_shards(four, problem):
    p = problem()
    states, _ = p.local(2000)
    pulled = []

    def strike():
        pulled.append(four.pull())
        kill(four._engine.servers[1])

    with pytest.raises(ParameterServerLost, match=r"server 2 of 2 \(.*\), which held shards 1 and 3 of 4, was lost"):
        train(four, p, p.batches(2000), 20, strike)
    assert close_to(p.values(), states[pulled[0]]), "the last pulled values are kept, of one step on all shards"
    with pytest.warns(UserWarning, match="runs are here now"):
        assert tfnb.run(p.loss, dict(zip(p.feeds, (p.data, p.labels), strict=True))) > 0


def test_what_the_status_says(four):
    c = Counters(shards=4)
    tfnb.fit(c.train, c.rows(5))
    text, page = str(four.status()), four.status()._repr_html_()
    for fact in (
        "parameter servers: 2, 4 shards",
        "holds 2 variables, 3.2 kB",
        "shards 0 and 2",
        "shards 1 and 3",
        "versions 6, 6",
    ):
        assert fact in text and fact.partition(": ")[2] in page
    assert c.variables[2].device.startswith("ps:0 (shard 2) (tcp://")


# -- the machine, and messages --------------------------------------------------------------------------------------


def hosted(budget=None, shards=(0, 1)):
    cores = Cores()
    for shard in shards:
        cores.add(Core(Store(budget=budget), lambda meta, tensors: Add(), epoch=1, incarnation=7, shard=shard))
    return cores


def answers(cores, *asks):
    """To requests at shards that come together."""
    events = [
        (ask.shard, RequestArrival(ticket, Request(ask.method, OpId("c", id(ask)), 1, 7, ask.meta, ask.tensors)))
        for ticket, ask in enumerate(asks)
    ]
    found = {effect.ticket: effect.answer for effect in cores.on(events, 0.0) if isinstance(effect, Reply)}
    return [found.get(ticket) for ticket in range(len(asks))]


def test_the_shards_of_a_process_share_its_bytes():
    cores = hosted(budget=100)
    first = Ask(0, "create", {"keys": ["v"]}, [torch.zeros(8, dtype=torch.float64)])
    second = Ask(1, "create", {"keys": ["w"]}, [torch.zeros(8, dtype=torch.float64)])
    ok, refused = answers(cores, first, second)
    assert isinstance(ok, Ok) and (refused.tag, refused.message) == (
        "ResourceExhausted", "bytes on this parameter server: asked 64, used 64, limit 100",
    )  # fmt: skip


def test_a_request_without_sense_hinders_none_beside_it():
    cores = hosted()
    bad, good = answers(cores, Ask(0, "pull", {"keys": 3}), Ask(1, "stat"))
    assert isinstance(bad, Failure) and isinstance(good, Ok)
    bad, good = answers(cores, Ask(0, "contribute", {}), Ask(1, "stat"))
    assert isinstance(bad, Failure) and isinstance(good, Ok)


class There:
    """A process that answers, one request or a batch of them, as `Task` does; each pull with 64 bytes."""

    def __init__(self, most):
        self.client, self.budget, self.most = "c", most, most
        self.seen: list[list[tuple]] = []
        self.forms: list[str] = []
        self.seq = 0

    def op(self):
        self.seq += 1
        return OpId("c", self.seq)

    async def call(self, peer, method, meta, tensors=(), *, op=None, epoch=0):
        request = Request(method, op or self.op(), meta=meta, tensors=tensors)
        parts = asking.parts(request) if method == "batch" else [request]
        self.forms.append(method)
        self.seen.append([(part.method, part.meta["shard"], part.op.seq) for part in parts])
        found = [
            Failure("NotFound", "") if part.method == "drop" else
            Refusal("again") if part.method == "take" else Ok({"of": part.meta["shard"]}, [torch.ones(16)])
            for part in parts
        ]  # fmt: skip
        return asking.answered(found, self.most) if method == "batch" else found[0]


@pytest.mark.parametrize(("most", "sizes"), [(1 << 20, [4]), (128, [4, 2]), (64, [4, 3, 2, 1])])
def test_values_that_find_no_room_in_an_answer_come_in_another_one_under_the_same_identity(most, sizes):
    there = There(most)
    asks = [Ask(shard, "pull") for shard in range(4)]
    found = asyncio.run(asking.persisted(there, None, asks, epoch=1))
    assert [end.meta["of"] for end in found] == [0, 1, 2, 3] and list(map(len, there.seen)) == sizes
    assert len({part for some in there.seen for part in some}) == 4, "each keeps its identity"


def test_what_waits_for_a_part_that_failed_is_not_asked_again():
    there = There(1 << 20)
    asks = [Ask(0, "take"), Ask(1, "drop"), Ask(2, "pull")]
    found = asyncio.run(asking.persisted(there, None, asks, epoch=1))
    assert [type(end) for end in found] == [Refusal, Failure, Ok] and len(there.seen) == 1


@pytest.mark.parametrize("most", [64, 100, 1 << 20])
def test_large_parts_travel_on_their_own(most):
    there = There(most)
    asks = [Ask(shard, "push", {}, [torch.ones(16)]) for shard in range(3)]
    found = asyncio.run(asking.persisted(there, None, asks, epoch=1))
    assert all(isinstance(end, Ok) for end in found)
    assert {len(some) for some in there.seen} == ({3} if most > 1000 else {1})
    assert set(there.forms) == {"batch"}, "one alone would wait on where another one failed"


def test_many_names_travel_in_several_messages():
    names = [f"v{i}" for i in range(asking.ENTRIES // 2)]
    asks = [Ask(shard, "pull", {"keys": names, "since": names}) for shard in range(3)]
    assert list(map(len, asking.messages(asks, 1 << 20))) == [1, 1, 1]
    many = [Ok({}, [torch.ones(1)] * (asking.ENTRIES // 2))] * 3
    ends = asking.outcomes(asking.answered(many, 1 << 30))
    assert [type(end) for end in ends] == [Ok, Ok, Refusal] and ends[2].reason == "again"


def test_silence_is_the_outcome_of_every_part(monkeypatch):
    monkeypatch.setattr(asking, "PATIENCE", 1.0)
    monkeypatch.setattr(asking, "REDIAL", 0.1)
    dialled = []

    class Silent(There):
        confirm = dialled.append

        async def call(self, *_, **__):
            return Unknown("nobody", lost=True)

    peer = Peer("tcp://127.0.0.1:1", "k", 1)
    found = asyncio.run(asking.persisted(Silent(1 << 20), peer, [Ask(0, "pull"), Ask(1, "pull")], epoch=1))
    assert [type(end) for end in found] == [Unknown, Unknown]
    assert len(dialled) > 2, "it is tried again until then"


# -- direct streams to processes with several shards -----------------------------------------------------------------


@pytest.fixture
def processes():
    """Two processes' threads, with two shards each, and streams to both. Shard 2 does not know the plan."""
    servings, here, ops = {}, Streams(There(envelope.BUDGET), Security()), itertools.count()
    for number in range(2):
        cores = hosted(shards=(number, number + 2))
        for core in cores:
            asks = [
                Ask(core.shard, "create", {"keys": ["w"]}, [torch.zeros(1)]),
                Ask(core.shard, "open_training", {"training": "t"}),
            ]
            asks += [Ask(core.shard, "register_shard", {"plan": "add"})] if core.shard != 2 else []
            for ask in asks:
                request = Request(ask.method, OpId("setup", next(ops)), 1, 7, ask.meta, ask.tensors)
                assert isinstance(cores.on([(core.shard, RequestArrival(0, request))], 0.0)[0].answer, Ok)
        peer, serving = Peer("tcp://127.0.0.1:0", str(number), 7), Serving(cores, lambda send: None)
        servings[peer] = serving
        here._streams[peer] = Stream.connect(serving.offer(peer.addr, Security()), envelope.BUDGET)
    yield servings, here
    here.end()
    for serving in servings.values():
        serving.close()


def all_shards(servings, ask):
    """A call for each shard, by process."""
    return {peer: [ask(shard) for shard in (number, number + 2)] for number, peer in enumerate(servings)}


def test_a_stream_is_left_when_a_shard_of_another_process_fails(processes):
    servings, here = processes
    about = {"training": "t", "round": 1, "worker": 0, "shards": [0, 1, 2, 3], "plan": "add"}
    about |= {"place": 0, "places": 2, "parts": 2}
    about |= {"reads": ["w"], "since": [-1]}
    asks = all_shards(servings, lambda shard: Ask(shard, "contribute", about, [torch.ones(1)], OpId("c", shard)))
    (waits, fails), others = here.call(asks, epoch=1)
    assert waits.reason == "again" and fails.reason == "unknown-plan"
    assert all(isinstance(end, Unknown) for end in others), "else they wait for the round, until they are asked again"


def test_pushes_wait_for_nobody_and_are_not_left(processes):
    servings, here = processes
    asks = all_shards(
        servings,
        lambda shard: Ask(shard, "push", {"plan": "add", "reads": ["w"], "since": [-1]}, [torch.ones(1)], OpId("c", 1)),
    )
    for is_again in (False, True):  # what is asked again under its identity is applied once
        (first, fails), others = here.call(asks, epoch=1)
        assert fails.reason == "unknown-plan"
        for end in (first, *others):
            assert isinstance(end, Ok) and end.dup == is_again and end.tensors[0].tolist() == [1.0]
    assert not here.lacks(servings), "all streams are open still"


def test_a_request_names_its_shard_where_there_are_several(processes):
    servings, here = processes
    peer, serving = next(iter(servings.items()))

    def answer(meta, method="stat"):
        answers = queue.SimpleQueue()
        serving.ask(Request(method, OpId("c", 9), 1, 7, meta), answers.put)
        return answers.get(timeout=30)

    assert isinstance(answer({"shard": 2}), Ok)
    for meta in ({}, {"shard": 1}, {"shard": [2]}, {"shard": None}):
        refused = answer(meta)
        assert refused.reason == "protocol" and refused.message.endswith("here are 0, 2")
    for wrong in ({}, {"parts": 3}, {"parts": [[0, "stat", None, {}, 0]]}, {"parts": [[0, "stat"]]}):
        assert answer(wrong, "batch").tag == "ProtocolError"
    for wrong in ([0, "stat", [], {}, 0], [float("inf"), "stat", ["c", 1], {}, 0]):
        assert answer({"parts": [wrong]}, "batch").tag == "ProtocolError"
    for method, wrong in (("post", {}), ("pull", {"staleness": 1}), ("contribute", {})):  # no line to stand in
        assert isinstance(answer({"shard": 2, **wrong}, method), Failure)
    asks = [Ask(0, "stat", op=OpId("c", 10)), Ask(2, "pull", {"keys": ["w"]}, op=OpId("c", 11))]
    ((stat, pull),) = here.call({peer: asks}, epoch=1)
    assert stat.reason == "protocol", "a stream carries steps only"
    assert isinstance(pull, Ok)


def test_a_question_is_never_left_until_the_next_event(processes):
    serving = next(iter(processes[0].values()))
    answers, before = queue.SimpleQueue(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(4000):  # each comes while the thread is about to listen again
            serving.ask(Request("stat", OpId("c", 30), 1, 7, {"shard": 0}), answers.put)
            assert answers.get(timeout=5) is not None, turn
    finally:
        sys.setswitchinterval(before)


def test_the_thread_of_a_server_outlives_whatever_one_call_does(processes):
    servings, here = processes
    peer, serving = next(iter(servings.items()))
    answers, told = queue.SimpleQueue(), []

    def fails(answer):
        told.append(answer)
        raise ValueError("nobody listens")

    asks = [Ask(0, "stat"), Ask(2, "stat")]
    one = asking.batch([ask._replace(op=OpId("c", 20)) for ask in asks])
    for ask in (asks[0]._replace(meta={"shard": 0}), one):
        serving.ask(Request(ask.method, OpId("c", 21), 1, 7, ask.meta), fails)
    serving.ask(Request("stat", OpId("c", 22), 1, 7, {"shard": 0}), answers.put)
    assert isinstance(answers.get(timeout=30), Ok) and len(told) >= 2
    ((pull,),) = here.call({peer: [Ask(0, "pull", {"keys": ["w"]}, op=OpId("c", 23))]}, epoch=1)
    assert isinstance(pull, Ok)
