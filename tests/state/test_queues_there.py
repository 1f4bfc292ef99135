"""Queues that live on a server: as at home, over a connection that loses answers and repeats messages.

What serves them is a real core in this process. `tests/cluster/test_queues_on_servers.py` has processes that die.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
import torch

import tfnb
from tests.state.distance import Distance, queues_there
from tests.state.test_queues import in_thread, until
from tfnb.cluster.queues.contents_there import RemoteContents
from tfnb.cluster.queues.journal import ChannelMark
from tfnb.cluster.queues.queues_there import in_round
from tfnb.cluster.wire.messages import Refusal
from tfnb.errors import OutOfRange, ParameterServerLost, QueueClosed, ResourceExhausted, StepAborted
from tfnb.state.queue_contents import QueueSnapshot
from tfnb.state.queue_machine import QueueMachine
from tfnb.state.queue_operations import HOMES, move

pytestmark = pytest.mark.filterwarnings("ignore:still waiting", "ignore:an accumulator at step")


def kinds() -> dict[str, Any]:
    """A queue of each kind that holds something."""
    return {
        "fifo": tfnb.FIFOQueue(9, torch.float32, (), name="fifo"),
        "shuffle": tfnb.RandomShuffleQueue(9, 1, torch.float32, (), seed=5, name="shuffle"),
        "padding": tfnb.PaddingFIFOQueue(9, torch.float32, (None,), name="padding"),
        "priority": tfnb.PriorityQueue(9, torch.float32, (), name="priority"),
        "barrier": tfnb.Barrier(torch.float32, (), name="barrier"),
        "mean": tfnb.ConditionalAccumulator(torch.float32, (2,), name="mean"),
        "sparse": tfnb.SparseConditionalAccumulator(torch.float32, (5, 1), name="sparse"),
    }


def filled(kind: str, queue: Any) -> None:
    match kind:
        case "priority":
            queue.enqueue_many(([3, 1, 2], [0.3, 0.1, 0.2]))
        case "padding":
            queue.enqueue([1.0]), queue.enqueue([1.0, 2.0]), queue.enqueue([])
        case "barrier":
            queue.insert_many(0, [7, 5], [0.7, 0.5])
        case "mean":
            queue.apply_grad([1.0, 2.0], 0), queue.apply_grad([3.0, 4.0], 0)
        case "sparse":
            queue.apply_grad(tfnb.IndexedSlices(torch.tensor([[4.0]]), torch.tensor([2]), (5, 1)), 0)
        case _:
            queue.enqueue_many([1.0, 2.0, 3.0, 4.0])


def emptied(kind: str, queue: Any) -> Any:
    match kind:
        case "barrier":
            queue.close()
            return queue.incomplete_size()
        case "mean":
            return queue.take_grad(2).tolist(), queue.apply_grad([1.0, 1.0], 0)
        case "sparse":
            found = queue.take_grad(1)
            return found.indices.tolist(), found.values.tolist()
        case "padding":
            return queue.dequeue_many(3).tolist()
        case "priority":
            return [part.tolist() for part in queue.dequeue_many(3)]
        case _:
            queue.close()
            return queue.dequeue_many(4).tolist()


@pytest.mark.parametrize("kind", kinds())
def test_contents_go_there_and_come_home(kind: str) -> None:
    here, moved = kinds()[kind], kinds()[kind]
    filled(kind, here), filled(kind, moved)
    with queues_there() as distance:
        move([moved])
        distance.settle()
        assert distance.machine(moved).level == here.level
        home(moved, distance)
        assert moved.level == here.level and not distance.core.objects.queues
    assert emptied(kind, moved) == emptied(kind, here)


def home(queue: Any, distance: Distance) -> None:
    HOMES.remove(distance.home)
    try:
        asyncio.run_coroutine_threadsafe(queue.machine.come_home(queue), distance.loop).result(30)
    finally:
        HOMES.append(distance.home)
    distance.settle()


def test_who_waits_goes_with_the_queue_and_comes_home_with_it() -> None:
    queue = tfnb.FIFOQueue(2, torch.float32, (), name="moving")
    batch, found = in_thread(lambda: queue.dequeue_many(5))
    queue.enqueue(1.0)
    with queues_there() as distance:
        move([queue])
        queue.enqueue(2.0)
        distance.settle()
        assert distance.machine(queue).level.absorbed == 2
        out = tfnb.FIFOQueue(2, torch.float32, (), name="out")
        put, _ = in_thread(lambda: out.enqueue_many([1.0, 2.0, 3.0]))
        until(lambda: out.machine is not None and out.machine.level.enqueues == 1)
        home(queue, distance)
        assert queue.level.absorbed == 2 and queue.level.dequeues == 1
        home(out, distance)
    assert out.level.size == 2 and out.level.enqueues == 1 and out.dequeue_many(3).tolist() == [1, 2, 3]
    queue.enqueue_many([3.0, 4.0, 5.0])
    batch.join(30), put.join(30)
    assert found[0].tolist() == [1, 2, 3, 4, 5]


def test_elements_that_a_round_took_are_back_in_their_order_when_it_is_aborted() -> None:
    with queues_there(loss=0.2) as distance:
        queue = tfnb.FIFOQueue(9, torch.float32, (), name="rounds")
        queue.enqueue_many([1.0, 2.0, 3.0, 4.0, 5.0])
        for number in (1, 2, 3):
            with in_round(number):
                assert queue.dequeue() == number
        assert queue.dequeue() == 4
        distance.call("keep", round=2, floor=0)
        distance.call("abort", round=3, floor=0), distance.call("abort", round=1, floor=0)
        assert queue.dequeue_many(3).tolist() == [1, 3, 5]
        with in_round(3), pytest.raises(StepAborted, match="round 3 is over"):
            queue.dequeue()


def test_a_closed_queue_waits_for_what_may_come_back() -> None:
    with queues_there() as distance:
        queue = tfnb.FIFOQueue(9, torch.float32, (), name="ends")
        queue.enqueue(5.0), queue.close()
        with in_round(1):
            queue.dequeue()
        taker, found = in_thread(queue.dequeue)
        until(lambda: distance.machine(queue).level.dequeues == 1)
        distance.call("abort", round=1)
        taker.join(30)
        assert found[0] == 5
        with pytest.raises(OutOfRange):
            queue.dequeue()
        with pytest.raises(QueueClosed):
            queue.enqueue(1.0)


def test_a_server_without_room_refuses_what_is_put_and_serves_who_takes() -> None:
    with queues_there(budget=10_000) as distance:
        queue = tfnb.FIFOQueue(9, torch.float32, (1000,), name="large")
        queue.enqueue(torch.ones(1000)), queue.enqueue(torch.ones(1000))
        with pytest.raises(ResourceExhausted, match="asked 4000, used 8000, limit 10000"):
            queue.enqueue(torch.ones(1000))
        queue.dequeue()
        distance.settle()
        until(lambda: distance.core.objects.nbytes == 4000)
        queue.enqueue(torch.ones(1000))


def test_what_nobody_knows_is_refused() -> None:
    with queues_there() as distance:
        queue = tfnb.FIFOQueue(2, torch.float32, (), name="known")
        queue.size()
        answer = distance.call(
            "post", channel="x", number=0, got=0, acts=[["do", 0, "none", {}, 0], ["sing", 1, "", {}, 0]]
        )
        assert [end[2]["error"]["tag"] for end in answer.meta["ends"]] == ["NotFound", "InvalidArgument"]
        assert not isinstance(answer, Refusal)


@pytest.mark.parametrize("loss", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(3))
def test_what_queues_hold_is_copied_and_changed_over_a_bad_connection(seed: int, loss: float) -> None:
    """Messages that are lost or come twice or late neither hold a queue still nor change it once more."""
    rng = random.Random(seed)
    with queues_there(loss=loss, seed=seed) as distance:
        queue, lines, line = tfnb.FIFOQueue(99, torch.int64, ()), list[Any](), list[int]()
        queue.size()
        key = queue.machine.key

        async def ask(asks: Any) -> Any:
            return [await distance.asking(0)(one.method, one.meta, one.tensors) for one in asks]

        def do(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, distance.loop).result(30)

        async def copies() -> Any:
            async with contents.held({0: [key]}) as held:
                return await contents.fetched(held)

        async def refill(found: Any) -> None:
            await contents.refill(await contents.bring({0: {key: found}}))

        contents, begin = RemoteContents(ask, ask), time.monotonic()
        for number in range(150):
            match rng.randrange(4):
                case 0 | 1:
                    queue.enqueue(number)
                    line.append(number)
                case 2 if line:
                    assert int(queue.dequeue(timeout=5)) == line.pop(0)
                case 3 if lines and rng.random() < 0.5:
                    found, line = rng.choice(lines)
                    line = [*line]
                    do(refill(found))
                case 3:
                    lines.append((do(copies())[key], [*line]))
        assert queue.size() == len(line) and time.monotonic() - begin < 8


@pytest.mark.parametrize("loss", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["fifo", "shuffle"])
@pytest.mark.parametrize("seed", range(3))
def test_a_lost_queue_holds_what_this_process_put_and_did_not_take(seed: int, kind: str, loss: float) -> None:
    """Whenever it was copied, and whoever waits then: each element is taken once, of a FIFO queue in order."""
    rng, count = random.Random(seed), 60
    make = {
        "fifo": lambda: tfnb.FIFOQueue(5, torch.int64, (), name="lost"),
        "shuffle": lambda: tfnb.RandomShuffleQueue(5, 0, torch.int64, (), seed=seed, name="lost"),
    }
    with queues_there(loss=loss, seed=seed) as distance:
        queue, got = make[kind](), list[int]()
        queue.size()
        home, journal = queue.machine, queue.machine.journal

        async def ask(asks: Any) -> Any:
            return [await distance.asking(0)(one.method, one.meta, one.tensors) for one in asks]

        async def copy() -> None:
            era, contents = journal.era, RemoteContents(ask, ask)
            async with contents.held({0: [home.key]}, unheard=True) as held:
                found = await contents.fetched(held)
            empty = {"ended": 0, "heard": 0, "put": []}
            journal.copied(era, QueueSnapshot(*found[home.key]), ChannelMark.of(held.seen.get(home.channel.id, empty)))

        async def lose() -> None:
            assert home.stay(queue)
            home.channel.close(ParameterServerLost("gone"))
            home.lose(queue)

        def do(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, distance.loop).result(30)

        def put() -> None:
            number = 0
            while number < count:
                some = [*range(number, min(count, number + rng.randrange(1, 9)))]
                queue.enqueue_many(torch.tensor(some), timeout=60)
                number += len(some)

        def take() -> None:
            while len(got) < count:
                got.append(int(queue.dequeue(timeout=60)))

        threads = [in_thread(put), in_thread(take)]
        for part in (0.1, 0.4):
            until(lambda part=part: len(got) >= part * count)
            do(copy())
        until(lambda: len(got) >= count * 0.7)
        do(lose())
        for thread, failed in threads:
            thread.join(60)
            assert not failed or not isinstance(failed[0], BaseException), failed
        assert isinstance(queue.machine, QueueMachine) and queue.size() == 0
        assert got == [*range(count)] if kind == "fifo" else sorted(got) == [*range(count)]
