"""A server that holds queues is killed: everyone who waits is told which queue and which server, in time."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import tfnb
from tests.cluster.conftest import kill, stop
from tests.cluster.test_queues_on_servers import _waiting, fifo, until
from tests.state.test_queues import in_thread
from tfnb.cluster.wire.messages import GIVEN_UP
from tfnb.errors import ParameterServerLost
from tfnb.graph import resources
from tfnb.state.queue_operations import QueueHandle

pytestmark = pytest.mark.filterwarnings("ignore:still waiting", "ignore:.* was lost")


@pytest.fixture(autouse=True)
def no_queue_asks_for_a_server_of_a_later_test() -> Iterator[None]:
    yield
    for queue in resources.all_of(QueueHandle):
        queue.drop("its test is over")


def dequeuing_step(queue: Any) -> Callable[..., Any]:
    """A run of a step on task 0 that waits for an element of the queue; the arguments are those of `Session.run`."""
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        with tfnb.device("/job:worker/task:0"):
            step = queue.dequeue(sample=torch.tensor(0.0)) + x
    return partial(tfnb.Session(graph).run, step, {x: 1.0})


@pytest.mark.slow
def test_who_waits_for_a_lost_server_is_told_which_queue_and_server(connect, monkeypatch) -> None:
    monkeypatch.setattr("tfnb.cluster.engine.peers.MISSES", 1 << 40)  # no ping tells: the scheduler's word is enough
    queue, full = fifo("held"), fifo("full", 1)
    take = dequeuing_step(queue)
    cluster = connect(2)
    full.enqueue(1.0)
    calls: list[Any] = [
        lambda: queue.dequeue(timeout=100),
        lambda: queue.dequeue_many(2, timeout=100),
        lambda: full.enqueue(2.0, timeout=100),
        lambda: take(timeout=100),
    ]
    threads = [in_thread(call) for call in calls]
    until(lambda: _waiting(cluster) == 4)
    for server in cluster._engine.servers:
        kill(server)
    for thread, _ in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread, _ in threads)
    errors = [str(found[0]) for _, found in threads if isinstance(found[0], ParameterServerLost)]
    assert len(errors) == 4 and all("parameter server" in text and "tcp://" in text for text in errors), errors
    acts = ["dequeue on queue held", "dequeue of 2 on queue held", "enqueue on queue full"]
    assert all(f"{act}: its server is lost" in text for act, text in zip(acts, errors, strict=False)), errors
    assert "about 1 elements" in errors[2]
    assert "dequeue on queue held (" in errors[3] and "tfnb.connect(" in errors[3], errors[3]
    queue.enqueue(5.0)
    assert queue.dequeue() == 5 and full.size() == 0, "they are here again, and empty"


def on_server(device: str, *about: Any) -> Any:
    """A queue that lies on that server."""
    with tfnb.record(), tfnb.device(device):
        return fifo(*about)


def waiting_on_a_task(connect: Any) -> tuple[Any, threading.Thread, list[Any], Any, Any]:
    """A cluster of two servers, a step on a task that waits at a queue on the second one, what it ends with, and the
    servers.
    """
    queue = on_server("ps:1", "held")
    take = dequeuing_step(queue)
    cluster = connect(2)
    thread, found = in_thread(lambda: take(timeout=150))
    until(lambda: _waiting(cluster) == 1)
    return cluster, thread, found, *cluster._engine.shards


def told(found: list[Any]) -> bool:
    """Whether a step ended with the loss of a server, and says at what it had waited."""
    return isinstance(found[0], ParameterServerLost) and "dequeue on queue held (" in str(found[0])


@pytest.mark.slow
def test_a_step_that_is_taken_back_from_a_server_that_dies_then_is_told_of_the_loss(connect) -> None:
    """The task learns at once that nobody answers there, and is not taken for one that cannot be stopped."""
    cluster, thread, found, other, home = waiting_on_a_task(connect)
    stop(home.info["pid"])
    kill(other)
    until(lambda: cluster._engine._stopping)
    kill(home)
    thread.join(100)
    assert told(found), found


@pytest.mark.slow
def test_a_lost_server_is_told_to_who_waits_there_while_another_one_is_silent(connect) -> None:
    full = on_server("ps:0", "full", 1)
    cluster, thread, found, other, home = waiting_on_a_task(connect)
    full.enqueue(1.0)
    second, failed = in_thread(lambda: full.enqueue(2.0, timeout=150))
    until(lambda: _waiting(cluster) == 2)
    stop(other.info["pid"])
    try:
        kill(home)
        thread.join(100)
        assert told(found), found
        second.join(100)
        assert isinstance(failed[0], ParameterServerLost) and "enqueue on queue full" in str(failed[0]), failed
        (seconds,) = re.findall(r"did not answer for (\d+) s", other.info["poisoned"])
        assert int(seconds) < GIVEN_UP, "with the other one the cluster is lost, and nobody waits that long"
    finally:
        os.kill(other.info["pid"], signal.SIGCONT)
