"""The loop of a task against real cores, in one process: messages arrive in the order that a test wants. No socket."""

from __future__ import annotations

import asyncio
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from tests.cluster.alone.test_core import Add
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import Reply, RequestArrival, Send
from tfnb.cluster.tasks.computing import Computing
from tfnb.cluster.tasks.data import Data, written
from tfnb.cluster.tasks.pieces import PieceOrder, Prefetch, TaskShare
from tfnb.cluster.tasks.programs import Push
from tfnb.cluster.tasks.resident import TrainingLoop
from tfnb.cluster.wire.asking import gathered
from tfnb.cluster.wire.messages import NotDone, NotSent, Ok, OpId, Refusal, Request
from tfnb.cluster.wire.transport import read_outcome
from tfnb.state.batch_order import RowOrder
from tfnb.state.chunks import ChunkedArray
from tfnb.state.store import Store

SOON = 30.0  # seconds; what hangs would take 600


class Servers:
    """Servers with a variable each, w0 and w1; a host for loops."""

    name = "task:0"
    room = 1 << 20

    def __init__(self, shards=(0, 1)):
        self.shards, self.computing = list(shards), Computing()
        self.tickets, self.ops = itertools.count(), itertools.count()
        self.streams = SimpleNamespace(op=lambda: OpId("loop", next(self.ops)), end=lambda: None)
        self.waiting: dict[int, asyncio.Future] = {}
        self.sends: list[Send] = []
        self.before = lambda shard, method, meta: None  # called as a request arrives
        self.cores = {}
        for shard in shards:
            program = type("Program", (Add,), {"reads": (f"w{shard}",), "writes": (f"w{shard}",)})
            compile = lambda meta, tensors, p=program: p()  # noqa: E731
            self.cores[shard] = Core(Store(), compile, epoch=1, incarnation=7, shard=shard)
            self.tell(shard, "create", {"keys": [f"w{shard}"]}, [torch.zeros(1)])
            self.tell(shard, "register_shard", {"plan": "add"})
            self.tell(shard, "open_training", {"training": "t"})

    def tell(self, shard, method, meta, tensors=(), op=None):
        """The ticket of a request, and its answer if there is one already."""
        ticket, op = next(self.tickets), op or OpId("other", next(self.ops))
        answer = None
        for effect in self.cores[shard].on(RequestArrival(ticket, Request(method, op, 1, 7, meta, list(tensors))), 0.0):
            match effect:
                case Reply(of, given) if of == ticket:
                    answer = given
                case Reply(of, given) if of in self.waiting:
                    waits = self.waiting.pop(of)
                    if not waits.done():
                        waits.set_result(given)
                case Send():
                    self.sends.append(effect)
        return ticket, answer

    async def open_streams(self, shards):
        """There are none here."""

    def stream(self, asks):
        return [NotSent() for _ in asks]

    async def ask(self, asks):
        may_leave = not any(ask.method == "push" for ask in asks)
        return await gathered([self.ask_one(*ask) for ask in asks], may_leave=may_leave)

    async def ask_one(self, shard, method, meta, tensors, op):
        self.before(shard, method, meta)
        ticket, answer = self.tell(shard, method, meta, tensors, op or OpId("loop", next(self.ops)))
        if answer is None:
            waits = self.waiting[ticket] = asyncio.get_running_loop().create_future()
            answer = await waits
        if not isinstance(answer, Ok):
            raise NotDone(answer)
        return answer

    def deliver(self):
        """Messages between servers, until there are none."""
        while self.sends:
            send = self.sends.pop(0)
            self.tell(send.shard, send.method, send.meta)

    def contribute(self, number, worker, *, deliver=True):
        """Another worker's part of a round, of one of two workers."""
        for shard in self.shards:
            meta = {
                "training": "t", "round": number, "worker": worker, "place": 0, "places": 1, "parts": 1,
                "shards": self.shards, "plan": "add", "rows": 1, "spare": True,
            }  # fmt: skip
            self.tell(shard, "contribute", meta, [torch.ones(1)])
        if deliver:
            self.deliver()


def loop_on(servers, staleness=None, name="loop", before=lambda: None, ahead=None):
    """A loop whose program notes the values that it computes from."""
    seen = []

    def run(feeds, values, index, task, rows):
        seen.append({key: value.item() for key, value in values.items()})
        before()
        return [], [Push(shard, "add", (torch.full((1,), 1.0),), ("w",)) for shard in servers.shards]

    program = SimpleNamespace(reads={shard: [f"w{shard}"] for shard in servers.shards}, run=run, lookups=[])
    return TrainingLoop(servers, name, "t", program, ahead, servers.shards, staleness), seen


def piece(count, part=None, first=1, number=1):
    return PieceOrder(number, "stream", first, count, part=part, batches=[((), 2, i, ()) for i in range(count)])


async def until(is_so):
    end = asyncio.get_running_loop().time() + SOON
    while not is_so():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("without", [0, 1])
def test_a_failure_on_one_server_is_told_while_another_one_waits_for_the_round(without):
    async def play():
        servers = Servers()
        servers.cores[without].plans.clear()
        loop, _ = loop_on(servers)
        loop.lend(piece(3, part=TaskShare(0, 1, 1)))
        await until(lambda: loop.is_over)
        failure = read_outcome(loop.report(0).meta["failure"], ())
        assert failure == Refusal("unknown-plan", "add")

    asyncio.run(play())


def test_a_worker_that_was_late_goes_on_with_values_of_one_round():
    async def play():
        servers = Servers()
        loop, seen = loop_on(servers)
        servers.contribute(1, 1)
        servers.contribute(2, 1, deliver=False)
        ready = servers.sends.pop(0)
        servers.tell(ready.shard, ready.method, ready.meta)  # the first server writes
        assert [core.step for core in servers.cores.values()] == [2, 1], "the second one has not heard of the decision"
        went_on = []

        def before(shard, method, meta):
            if "absent" in meta and not went_on:
                went_on.append(meta["round"])
                servers.deliver()
                servers.contribute(3, 1)  # the others are quick

        servers.before = before
        loop.lend(piece(4, part=TaskShare(0, 2, 1)))
        await until(lambda: len(seen) == 2)
        assert went_on == [2] and seen[1] == {"w0": 3.0, "w1": 3.0}
        for shard in servers.shards:
            servers.tell(shard, "end_training", {"training": "t", "clients": []})
        await until(lambda: loop.is_over)

    asyncio.run(play())


@pytest.mark.parametrize("is_early", [False, True])
def test_a_loop_that_waits_for_a_slower_one_stops_at_once(is_early):
    async def play():
        servers = Servers()
        for shard in servers.shards:
            servers.tell(shard, "enter", {"training": "t", "loop": "slow", "clock": 0})
        loop, seen = loop_on(servers, staleness=0)
        loop.lend(piece(3, first=0))
        if not is_early:
            await until(lambda: len(seen) == 1 and bool(servers.waiting))
        answer = await asyncio.wait_for(loop.stop(0), SOON)
        assert answer.meta["failure"] is None and answer.meta["over"]
        applied = {core.ledger.has(OpId("stream", 0)) for core in servers.cores.values()}
        assert applied == {bool(answer.meta["groups"])}, "told as it is"
        clocks = [core.trainings.courses["t"].clocks for core in servers.cores.values()]
        assert clocks == [{"slow": 0}, {"slow": 0}], "nobody waits for it"

    asyncio.run(play())


def test_a_pause_is_answered_while_a_long_step_computes():
    async def play():
        servers, goes_on = Servers(), threading.Event()
        loop, seen = loop_on(servers, before=lambda: goes_on.wait(SOON))
        loop.lend(piece(3, first=0))
        await until(lambda: len(seen) == 1)
        answer = await asyncio.wait_for(loop.pause(True, 0), SOON / 2)
        assert not answer.meta["paused"]
        goes_on.set()
        while not answer.meta["paused"]:
            answer = await asyncio.wait_for(loop.pause(True, 0), SOON)
        assert [count for _, _, count, *_ in answer.meta["groups"]] == [1], "the step was not lost"
        await loop.pause(False, 1)
        await until(lambda: len(seen) == 3)
        await loop.stop(1)

    asyncio.run(play())


def steps_of(report):
    """Steps that a loop tells of."""
    return sum(count for _, _, count, *_ in report.meta["groups"])


class Streaming(Servers):
    """A host whose loops have direct streams, but for the calls that ``lost`` names by number: no answer came."""

    def __init__(self, shards=(0, 1), lost=()):
        super().__init__(shards)
        self.lost, self.calls, self.hops = set(lost), itertools.count(), 0

    async def open_streams(self, shards):
        self.hops += 1

    def stream(self, asks):
        return [self.streamed(ask) for ask in asks]

    def streamed(self, ask):
        _, answer = self.tell(*ask)
        return NotSent() if next(self.calls) in self.lost else answer


def test_steps_follow_each_other_in_the_compute_thread_and_count_once_where_an_answer_was_lost():
    async def play():
        servers = Streaming(lost=(8, 21))  # of the first server in step 4, of the second one in step 10
        threads = set()
        loop, seen = loop_on(servers, before=lambda: threads.add(threading.current_thread().name))
        loop.lend(piece(40, first=0))
        await until(lambda: steps_of(loop.report(0)) == 40)
        answer = await loop.stop(0)
        assert [s["w0"] for s in seen] == [s["w1"] for s in seen] == list(range(40)), "each step reads the last one"
        assert steps_of(answer) == 40 and answer.meta["failure"] is None
        assert [core.ledger.applied for core in servers.cores.values()] == [41, 41], "with the creation of w"
        assert [core.ledger.dups for core in servers.cores.values()] == [1, 1]
        assert 3 <= servers.hops < 40 and len(threads) == 1

    asyncio.run(play())


def test_a_pause_and_a_stop_come_between_two_steps_of_the_compute_thread():
    async def play():
        servers, asked, goes_on = Streaming(), threading.Event(), threading.Event()
        begun = itertools.count(1)

        def before():
            if next(begun) == 5:
                asked.set()
                goes_on.wait(SOON)

        loop, seen = loop_on(servers, before=before)
        loop.lend(piece(1000, first=0))
        await asyncio.to_thread(asked.wait, SOON)
        pausing = asyncio.ensure_future(loop.pause(True, 0))
        await asyncio.sleep(0)
        goes_on.set()
        answer = await pausing
        while not answer.meta["paused"]:
            answer = await asyncio.wait_for(loop.pause(True, 0), SOON)
        assert len(seen) == 5 == steps_of(answer)
        await loop.pause(False, 0)
        await until(lambda: len(seen) > 5)
        answer = await asyncio.wait_for(loop.stop(0), SOON)
        done = steps_of(answer)
        assert answer.meta["over"] and [core.version - 1 for core in servers.cores.values()] == [done, done]

    asyncio.run(play())


def test_chunks_of_the_next_piece_are_read_while_a_step_of_this_one_computes():
    async def play():
        servers, reads, is_ahead, found = Servers(), [], threading.Event(), []
        array = ChunkedArray("x", (4, 4, 4), (2,), torch.float32, keys=("a", "b", "c"))

        async def read(key, what):
            reads.append(key)
            if key == "b":
                is_ahead.set()
            return torch.zeros(4, 2)

        order = RowOrder(12, 4, shuffle=False)
        data = Data([written(array)], [0], read, room=2 * 4 * 2 * 4)
        loop, seen = loop_on(servers, before=lambda: found.append(is_ahead.wait(SOON)), ahead=Prefetch(data, order))
        for step in range(2):  # as many as a task is lent at a time
            loop.lend(PieceOrder(step, "stream", step, 1, steps=step))
        await until(lambda: len(seen) == 2)
        assert found[0], "the first step had not ended"
        assert reads == ["a", "b"], "and nothing that is not lent"
        await loop.stop(0)

    asyncio.run(play())
