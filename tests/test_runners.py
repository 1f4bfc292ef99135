"""Threads that fill queues, and who stops them."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tfnb
from tests.state.test_queues import in_thread, until
from tfnb.errors import FailedPrecondition, InvalidArgument, OutOfRange
from tfnb.runners import Coordinator, QueueRunner

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """One whose threads have ended when the test has."""
    made = Coordinator()
    yield made
    made.request_stop()
    until(lambda: not any(thread.is_alive() for thread in made._threads), 60)


def numbers(name: str, count: int = 0, capacity: int = 100) -> tfnb.FIFOQueue:
    """A queue; with a count it is closed, and holds 0, 1, 2, ..."""
    queue = tfnb.FIFOQueue(capacity, torch.float32, (), name=name)
    if count:
        queue.enqueue_many(torch.arange(float(count)))
        queue.close()
    return queue


def carried(source: Any, target: Any, offset: float = 0.0) -> Any:
    with tfnb.record():
        return target.enqueue(source.dequeue() + offset)


def test_two_runners_close_the_queue_after_the_second_and_lose_nothing(coordinator: Coordinator) -> None:
    short, long, target = numbers("short", 3), numbers("long", 30), numbers("target", capacity=2)
    ops = [carried(short, target, 100.0), carried(long, target)]
    runner = QueueRunner(target, ops, coordinator=coordinator)
    assert "not started" in repr(runner) and not runner.threads
    found = sorted(x.item() for x in target)  # the first wait starts it
    assert found == sorted([100.0, 101.0, 102.0, *map(float, range(30))])
    coordinator.join()
    assert "0 of 2 run" in repr(runner) and "0 of 2 elements, closed" in repr(runner)


def test_starting_twice_is_starting_once(coordinator: Coordinator) -> None:
    source, target = numbers("source", 5), numbers("target")
    runner = QueueRunner(target, [carried(source, target)], coordinator=coordinator)
    assert runner.start() is runner.start() and len(runner.threads) == 1
    coordinator.join()
    assert target.dequeue_many(5).tolist() == [0, 1, 2, 3, 4]


def test_a_wait_in_a_graph_starts_a_runner(coordinator: Coordinator) -> None:
    source, target = numbers("source", 6), numbers("target")
    QueueRunner(target, [carried(source, target)], coordinator=coordinator)
    with tfnb.record():
        total = target.dequeue_many(3).sum()
    assert tfnb.run(total, timeout=60) == 3 and tfnb.run(total, timeout=60) == 12
    with pytest.raises(OutOfRange):
        tfnb.run(total, timeout=60)


def test_the_first_error_of_a_runner_is_raised_with_its_line_and_ends_who_waits(coordinator: Coordinator) -> None:
    source, target = numbers("source"), numbers("target")
    source.enqueue(4.0)
    with tfnb.record():
        put = target.enqueue(torch.linalg.cholesky(source.dequeue().reshape(1, 1))[0, 0])
    QueueRunner(target, [put], coordinator=coordinator)
    source.enqueue(-1.0)
    taken = iter(target)
    assert next(taken) == 2
    with pytest.raises(Exception, match=r"positive") as seen:
        next(taken)
    with pytest.raises(Exception, match=r"test_runners.py line \d+.*:  put = target") as raised:
        coordinator.join()
    assert raised.value is seen.value
    assert any("_loop" in frame.name for frame in traceback.extract_tb(raised.value.__traceback__))
    with pytest.raises(OutOfRange) as end:
        target.dequeue()
    assert end.value.__cause__ is raised.value


def test_a_stop_cancels_what_waits_for_room_and_keeps_what_is_there(coordinator: Coordinator) -> None:
    target = numbers("target", capacity=2)
    with tfnb.record():
        put = target.enqueue(1.0)
    runner = QueueRunner(target, [put, put], coordinator=coordinator)
    runner.start()
    until(lambda: len(target.machine.lines["enqueue"]) == 2, 60)
    coordinator.request_stop()
    coordinator.join()
    assert not any(thread.is_alive() for thread in runner.threads)
    assert target.dequeue_up_to(9).tolist() == [1, 1]


def test_a_runner_that_starts_after_the_stop_ends_at_once(coordinator: Coordinator) -> None:
    target = numbers("target")
    with tfnb.record():
        runner = QueueRunner(target, [target.enqueue(1.0)], coordinator=coordinator)
    coordinator.request_stop()
    with pytest.raises(OutOfRange):
        target.dequeue(timeout=60)
    coordinator.join(runner.threads)


def test_a_runner_stops_while_its_source_waits_for_room_in_another_queue(coordinator: Coordinator) -> None:
    source, full, other = tfnb.Source([1.0] * 9), numbers("full", capacity=1), numbers("other")
    QueueRunner(full, source, coordinator=coordinator).start()
    until(lambda: full.level.enqueues == 1, 60)
    mine = Coordinator()
    QueueRunner(other, source, coordinator=mine).start()
    thread, found = in_thread(other.dequeue)
    mine.request_stop()
    mine.join(stop_grace_period_secs=5)
    thread.join(5)
    assert isinstance(found[0], OutOfRange) and full.dequeue_many(3).tolist() == [1, 1, 1]


def test_a_runner_without_work_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="runner of queue q "):
        QueueRunner(numbers("q"), [])
    with pytest.raises(InvalidArgument, match=r"runner of queue q .* was given 3"):
        QueueRunner(numbers("q"), [3])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="a runner fills a queue"):
        QueueRunner("q", [])  # type: ignore[arg-type]
    queue = numbers("q")
    QueueRunner(queue, tfnb.Source([1.0, 2.0]))
    assert [float(number) for number in queue] == [1.0, 2.0]


# -- the coordinator --------------------------------------------------------------------------------------------------


def test_the_first_request_counts() -> None:
    coordinator = Coordinator()
    assert not coordinator.should_stop() and not coordinator.wait_for_stop(0.01)
    coordinator.request_stop(KeyError("first"))
    coordinator.request_stop(ValueError("second"))
    assert coordinator.should_stop() and coordinator.wait_for_stop(0)
    with pytest.raises(KeyError, match="first"):
        coordinator.join()
    clean = Coordinator()
    clean.request_stop()
    clean.request_stop(ValueError("too late"))
    clean.join()


def test_the_end_of_the_input_is_a_clean_end() -> None:
    coordinator = Coordinator()
    with coordinator.stop_on_exception():
        raise OutOfRange("no more")
    assert coordinator.should_stop()
    coordinator.join()


def test_join_waits_for_all_threads() -> None:
    coordinator, ended = Coordinator(), list[int]()

    def work(number: int) -> None:
        while not coordinator.wait_for_stop(0.01):
            pass
        ended.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    joined, found = in_thread(lambda: coordinator.join(threads))
    assert not found
    coordinator.request_stop()
    joined.join(60)
    assert found == [None] and sorted(ended) == [0, 1, 2, 3]


def test_who_does_not_stop_is_named_with_what_it_waits_for() -> None:
    queue, coordinator = numbers("empty"), Coordinator()
    thread = threading.Thread(target=queue.dequeue, name="consumer")
    thread.start()
    until(lambda: queue.machine is not None and bool(queue.machine.lines["dequeue"]), 60)
    coordinator.request_stop()
    begin = time.monotonic()
    end = time.monotonic() + 60
    message = ""
    while "waits for" not in message:  # the thread says what it waits for once it does
        assert time.monotonic() < end
        with pytest.raises(FailedPrecondition, match=r"consumer did not stop within 0.05 s") as raised:
            coordinator.join([thread], stop_grace_period_secs=0.05)
        message = str(raised.value)
    assert "an element of queue empty" in message and time.monotonic() - begin >= 0.05
    queue.enqueue(1.0)
    thread.join(60)
    coordinator.join([thread])
