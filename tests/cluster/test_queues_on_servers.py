"""Queues on the servers of a real cluster: tasks share them, and who dies loses and doubles nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import tfnb
from tests.state.test_queues import in_thread
from tfnb.cluster.notebook.queue_homes import QueueHomes
from tfnb.cluster.queues.queues_there import QueueChannel
from tfnb.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    OutOfRange,
    StepAborted,
    Unimplemented,
    WorkerLost,
)  # fmt: skip
from tfnb.state.queue_machine import QueueMachine
from tfnb.state.queue_operations import attempt_on

pytestmark = pytest.mark.filterwarnings("ignore:still waiting", "ignore:task.* was lost")


def fifo(name: str, capacity: int = 50) -> tfnb.FIFOQueue:
    return tfnb.FIFOQueue(capacity, torch.float32, (), name=name)


def kill(cluster: Any, name: str) -> None:
    (member,) = [member for member in cluster._engine.tasks if member.name == name and member.alive]
    os.kill(member.info["pid"], signal.SIGKILL)


def until(holds: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_several_tasks_put_and_one_stream_takes_and_all_of_it_comes_home(connect) -> None:
    queue, out = fifo("shared"), fifo("out")
    queue.enqueue(0.0)
    total = tfnb.Variable(torch.zeros(()), name="total", trainable=False)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        puts = []
        for task in range(3):
            with tfnb.device(f"/job:worker/task:{task}"):
                puts.append(queue.enqueue(x + 100 * task))
        moved = out.enqueue(queue.dequeue() * 10)
        added = total.assign_add(queue.dequeue())
        batch = queue.dequeue_many(4)
    session = tfnb.Session(graph)
    cluster = connect(3)
    assert queue.size() == 1 and not isinstance(queue.machine, QueueMachine)
    threads = [in_thread(lambda put=put, n=n: session.run(put, {x: float(n)}))[0] for n, put in enumerate(puts)]
    [thread.join(60) for thread in threads]
    assert sorted(session.run(batch).tolist()) == [0, 0, 101, 202], "the step took what is at home, and what tasks put"
    waits, found = in_thread(lambda: session.run(moved))
    until(lambda: _waiting(cluster) == 1)
    queue.enqueue(4.0)
    waits.join(60)
    assert not isinstance(found[0], BaseException) and out.dequeue() == 40
    queue.enqueue_many([5.0, 6.0])
    session.run(added), session.run(added)
    assert total.value() == 11 and queue.size() == 0
    with pytest.raises(DeadlineExceeded, match="dequeue of 4 on queue shared") as late:
        session.run(batch, timeout=1.0)
    assert "0 of 50 elements" in str(late.value)
    queue.enqueue_many([7.0, 8.0]), queue.close()
    with pytest.raises(OutOfRange, match=r"requested 4, current size 2"):
        session.run(batch)
    with pytest.raises(Unimplemented, match=r"can be taken once: let fit take the elements, fit\("):
        tfnb.fit(added, {x: torch.zeros(4)}, epochs=1, batch_size=1)
    cluster.close()
    assert isinstance(queue.machine, QueueMachine) and queue.level.closed and total.value() == 11
    assert [float(element) for element in queue] == [7, 8]


def test_fit_takes_the_elements_of_a_queue_on_a_server(connect) -> None:
    """What the refusal of a step that takes them says to write."""
    queue, weight = tfnb.FIFOQueue(50, torch.float32, (4,), name="rows"), torch.nn.Parameter(torch.zeros(()))
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4), name="x")
        step = tfnb.train.SGD(0.1).minimize(-(weight * x).mean())
    connect(2)
    queue.enqueue_many(torch.arange(5.0)[:, None].expand(5, 4))
    queue.close()
    assert tfnb.fit(step, queue, feeds=x).steps == 5
    assert weight.item() == pytest.approx(1.0)


def _waiting(cluster: Any) -> int:
    found = cluster._do("stat", 60, cluster._engine.stats, 60.0)
    return sum(stat["queued"] for stat in found.values())


def test_a_killed_consumer_gives_back_what_it_took_in_order(connect) -> None:
    queue = fifo("survives")
    never = fifo("never")
    with tfnb.record() as graph, tfnb.device("/job:worker/task:1"):
        taken = queue.dequeue_many(2)
        stuck = taken.sum() + never.dequeue(sample=torch.tensor(0.0))
    session = tfnb.Session(graph)
    cluster = connect(2)
    queue.enqueue_many([1.0, 2.0, 3.0])
    thread, found = in_thread(lambda: session.run(stuck, timeout=120))
    until(lambda: queue.size() == 1 and _waiting(cluster) == 1)
    kill(cluster, "task:1")
    never.enqueue(100.0)  # the step is tried again by the successor, and takes the same elements
    thread.join(120)
    assert found[0] == 103, found
    assert queue.dequeue() == 3 and queue.size() == 0 and never.size() == 0


def test_a_killed_producers_put_is_there_once(connect, nobody_joins) -> None:
    queue, never = fifo("once"), fifo("never")
    with tfnb.record() as graph, tfnb.device("/job:worker/task:1"):
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        put = queue.enqueue(x)
        stuck = never.dequeue(sample=torch.tensor(0.0))
    session = tfnb.Session(graph)
    cluster = connect(2)
    thread, found = in_thread(lambda: session.run([put, stuck], {x: 7.0}, timeout=120))
    until(lambda: queue.size() == 1 or found)
    assert not found, found
    kill(cluster, "task:1")
    thread.join(120)
    assert isinstance(found[0], WorkerLost) and "those that it put are there" in str(found[0])
    assert queue.dequeue() == 7 and queue.size() == 0


def test_runners_and_accumulators_work_there(connect) -> None:
    source, numbers = fifo("source"), fifo("numbers", 3)
    grads = tfnb.ConditionalAccumulator(torch.float32, (2,), name="grads")
    source.enqueue_many([float(n) for n in range(8)]), source.close()
    with tfnb.record() as graph:
        put = numbers.enqueue(source.dequeue() + 100)
        g = tfnb.placeholder(torch.ones(2), name="g")
        applied, mean = grads.apply_grad(g, 0), grads.take_grad(2)
    session = tfnb.Session(graph)
    runner = tfnb.QueueRunner(numbers, [put, put], session=session)
    cluster = connect(2)
    found = [float(numbers.dequeue()) for _ in range(3)]
    thread, taken = in_thread(lambda: session.run(mean))
    assert session.run(applied, {g: torch.tensor([1.0, 2.0])}) and grads.apply_grad([3.0, 4.0], 0)
    thread.join(60)
    assert taken[0].tolist() == [2, 3] and not session.run(applied, {g: torch.ones(2)})
    cluster.close()  # in the middle of it
    found += [float(number) for number in numbers]
    assert sorted(found) == [100 + n for n in range(8)]
    runner.coordinator.join(stop_grace_period_secs=30)


def test_a_step_in_parts_has_each_on_its_task_while_one_of_them_waits(connect) -> None:
    never, numbers = fifo("never"), fifo("numbers")
    with tfnb.record() as graph:
        with tfnb.device("task:0"):
            stuck, taken = never.dequeue(sample=torch.tensor(0.0)), numbers.dequeue()
        with tfnb.device("task:1"):
            doubled = taken * 2
    session = tfnb.Session(graph)
    cluster = connect(2)
    thread, found = in_thread(lambda: session.run(stuck, timeout=120))
    until(lambda: _waiting(cluster) == 1 or found)
    numbers.enqueue(3.0)
    assert session.run(doubled, timeout=60) == 6
    never.enqueue(1.0), thread.join(60)
    assert found == [1]


def test_a_queue_lies_where_its_device_says(connect) -> None:
    with tfnb.record(), tfnb.device("ps:1"):
        queue = fifo("there")
    with tfnb.record(), tfnb.device("ps:7"):
        lost = fifo("nowhere")
    used = fifo("used")
    used.enqueue(2.0)
    cluster = connect(2)
    queue.enqueue(1.0)
    assert cluster._queues._here[queue][0] == 1 and used.dequeue() == 2
    with pytest.raises(
        InvalidArgument, match=r'made under tfnb.device\("ps:7"\), and the cluster has servers ps:0 to ps:1'
    ):
        lost.size()


@pytest.mark.slow
def test_ten_thousand_waits_on_a_real_server(connect) -> None:
    queue, ended = fifo("crowd"), []
    cluster = connect(3)
    before = threading.active_count()
    attempts = [attempt_on(queue, "dequeue", ended.append, {}) for _ in range(10_000)]
    for attempt in attempts:
        attempt.machine.submit(attempt)
    until(lambda: _waiting(cluster) == 10_000)
    assert threading.active_count() - before <= 8
    begin = time.monotonic()
    queue.machine.withdraw(attempts)
    assert _waiting(cluster) == 0 and all(attempt.is_over for attempt in attempts)
    assert time.monotonic() - begin < 60, "a second where nobody else computes; each one by itself takes minutes"


def test_a_queue_that_asks_for_a_server_that_is_not_there(connect) -> None:
    """The connection is refused before anything moves, and everything works here afterwards."""
    first, waiting = fifo("first"), fifo("waiting")
    with tfnb.record() as graph:
        with tfnb.device("ps:1"):
            second = fifo("second")
        taken = second.dequeue(sample=torch.tensor(0.0)) + first.dequeue(sample=torch.tensor(0.0))
    first.enqueue(1.0), second.enqueue(2.0)
    thread, found = in_thread(waiting.dequeue)
    homes = [queue.machine for queue in (first, second)]
    with pytest.raises(InvalidArgument, match=r'queue second was made under tfnb.device\(".*ps.*1"\).*ps:0.*ps=2'):
        connect(3)
    assert [queue.machine for queue in (first, second)] == homes, "nothing was placed"
    assert tfnb.Session(graph).run(taken) == 3
    waiting.enqueue(5.0), thread.join(30)
    assert found == [5.0]
    first.enqueue(1.0), second.enqueue(2.0)
    cluster = connect(2)
    assert tfnb.Session(graph).run(taken) == 3
    cluster.close()


def test_what_a_training_did_not_use_comes_home_though_the_queue_is_on_its_way(connect) -> None:
    """One thread trains from the queue, another one closes the cluster: the queue has left its server by then."""
    queue = fifo("leaving")
    cluster = connect(2)
    queue.enqueue_many(torch.tensor([3.0, 4.0]))
    home, left = queue.machine, threading.Event()
    ask = home.channel.ask

    async def slow(method: str, *args: Any) -> Any:
        if method == "contents":
            left.set()
            await asyncio.sleep(0.5)
        return await ask(method, *args)

    home.channel.ask = slow
    closing, _ = in_thread(cluster.close)
    assert left.wait(30)
    home.put_front([(torch.tensor(1.0),), (torch.tensor(2.0),)])
    closing.join(60)
    assert queue.dequeue_many(4).tolist() == [1, 2, 3, 4] and queue.size() == 0


def test_elements_that_a_server_does_not_take_back_are_an_error(connect) -> None:
    queue = fifo("dropped")
    connect(2)
    queue.enqueue(1.0)
    home = queue.machine
    home.abort("as if nobody needed it")
    with pytest.raises(NotFound, match="holds no queue"):
        home.put_front([(torch.tensor(1.0),)])


def test_a_queue_that_was_reset_does_not_come_home_and_others_do(connect) -> None:
    short = tfnb.FIFOQueue(3, torch.float32, (), name="short", container="short")
    long = fifo("long")
    cluster = connect(2)
    short.enqueue(1.0), long.enqueue(2.0)
    thread, found = in_thread(lambda: short.dequeue_many(2, timeout=60))
    until(lambda: short.level.dequeues == 1)
    tfnb.reset("short")
    thread.join(60)
    assert isinstance(found[0], StepAborted) and "reset" in str(found[0])
    cluster.close()
    assert long.dequeue() == 2
    with pytest.raises(NotFound, match="'short' was reset"):
        short.size()


def test_a_step_that_put_on_another_server_keeps_what_it_took_when_it_fails(connect) -> None:
    """As here: elements that a step moved are moved, also where it is stopped later."""
    with tfnb.record() as graph:
        with tfnb.device("ps:0"):
            a, never = fifo("a"), fifo("never")
        with tfnb.device("ps:1"):
            b = fifo("b")
        moved = b.enqueue(a.dequeue(sample=torch.tensor(1.0)) * 10)
        with tfnb.control_dependencies([moved]):
            stuck = never.dequeue(sample=torch.tensor(0.0)) + 1
    a.enqueue_many([1.0, 2.0, 3.0])
    session = tfnb.Session(graph)
    with pytest.raises(DeadlineExceeded):
        session.run([moved, stuck], timeout=0.5)
    assert (a.size(), b.size()) == (2, 1)
    connect(2)
    with pytest.raises(DeadlineExceeded):
        session.run([moved, stuck], timeout=1.0)
    assert (a.size(), b.size()) == (1, 2)
    assert [float(n) for n in b.dequeue_many(2)] == [10, 20]


@pytest.mark.parametrize("is_placed", [True, False], ids=["step", "call"])
def test_the_end_of_a_queue_whose_runner_failed_has_that_as_its_cause(connect, is_placed):
    source, queue = fifo("source", 9), fifo("fed", 9)
    source.enqueue_many(torch.tensor([4.0, -1.0]))
    with tfnb.record():
        put = queue.enqueue(torch.linalg.cholesky(source.dequeue(sample=torch.tensor(4.0)).reshape(1, 1))[0, 0])
    with tfnb.record():
        fed = queue.dequeue(sample=torch.tensor(1.0)) + 1
    connect(2)
    runner = tfnb.QueueRunner(queue, [put])
    take = (lambda: tfnb.run(fed)) if is_placed else (lambda: queue.dequeue() + 1)
    assert take() == 3
    with pytest.raises(OutOfRange) as end:
        take()
    assert "positive" in str(end.value.__cause__)
    with pytest.raises(InvalidArgument, match="positive"):
        runner.coordinator.join()


def test_a_look_at_a_queue_that_goes_home_meanwhile_sees_what_it_holds(connect, monkeypatch) -> None:
    cluster, queue = connect(2), fifo("looked at")
    queue.enqueue_many(torch.arange(3.0))
    machine: Any = queue.machine
    ask = machine.channel.ask

    async def after_it_left(method: str, *asked: Any) -> Any:
        while method == "first" and machine.heir is None:
            await asyncio.sleep(0.2)  # by then the server has dropped it
        return await ask(method, *asked)

    monkeypatch.setattr(machine.channel, "ask", after_it_left)
    thread, seen = in_thread(lambda: [float(element[0]) for element in machine.first(9)])
    cluster.close()
    thread.join(30)
    assert seen == [[0.0, 1.0, 2.0]]


def test_a_queue_is_looked_at_only_when_its_server_has_made_it(connect, monkeypatch) -> None:
    connect(1)
    begin = QueueChannel._begin_posting
    monkeypatch.setattr(QueueChannel, "_begin_posting", lambda self: self.loop.call_later(0.3, begin, self))
    tokens = tfnb.TokenQueue()
    with tfnb.record() as graph:
        taken = tokens.take()  # asks for a sample at once, beside the act that makes the queue
    tokens.give(7)
    assert [int(value) for value in tfnb.Session(graph).run(taken, timeout=60)][1] == 7


def test_a_step_that_began_while_the_cluster_was_closed_is_to_be_run_again(connect, monkeypatch) -> None:
    queue, cluster = fifo("numbers"), connect(1)
    queue.enqueue_many([1.0, 2.0])
    with tfnb.record() as graph:
        taken = queue.dequeue()
    session, used = tfnb.Session(graph), QueueHomes.used
    assert session.run(taken) == 1

    def late(self: Any, queues: Any) -> Any:
        cluster.close()
        return used(self, queues)

    monkeypatch.setattr(QueueHomes, "used", late)
    with pytest.raises(Aborted, match=r"the cluster was closed at step .* run it again"):
        session.run(taken)
    assert session.run(taken) == 2


def test_a_step_on_a_task_finds_a_queue_that_was_made_just_now(connect, monkeypatch) -> None:
    connect(1)
    begin = QueueChannel._begin_posting
    monkeypatch.setattr(QueueChannel, "_begin_posting", lambda self: self.loop.call_later(0.5, begin, self))
    queue = fifo("late")
    with tfnb.record() as graph:
        got = queue.dequeue(sample=torch.tensor(1.0)) + 1
    tfnb.QueueRunner(queue, tfnb.Source(range(3), name="few"))
    session = tfnb.Session(graph)
    assert [float(session.run(got, timeout=60)) for _ in range(3)] == [1, 2, 3]


def test_a_queue_that_is_no_more_asks_for_no_server(connect) -> None:
    with tfnb.record(), tfnb.device("ps:7"):
        queue = fifo("gone")
    queue.enqueue(1.0)
    queue.drop("nobody wants it")
    assert connect(2).tasks == ("task:0", "task:1")
