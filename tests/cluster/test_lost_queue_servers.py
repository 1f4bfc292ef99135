"""A server that holds queues is killed: everyone who waits is told which queue and which server, in time."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import tfnb
from tests.cluster.test_queues_on_servers import _waiting, fifo, until
from tests.state.test_queues import in_thread
from tfnb.errors import ParameterServerLost

pytestmark = pytest.mark.filterwarnings("ignore:still waiting", "ignore:.* was lost")


@pytest.mark.slow
def test_who_waits_for_a_lost_server_is_told_which_queue_and_server(connect, monkeypatch) -> None:
    monkeypatch.setattr("tfnb.cluster.engine.peers.MISSES", 1 << 40)  # no ping tells: the scheduler's word is enough
    queue, full = fifo("held"), fifo("full", 1)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor(1.0), name="x")
        with tfnb.device("/job:worker/task:0"):
            step = queue.dequeue(sample=torch.tensor(0.0)) + x
    session = tfnb.Session(graph)
    cluster = connect(2)
    full.enqueue(1.0)
    calls: list[Any] = [
        lambda: queue.dequeue(timeout=100),
        lambda: queue.dequeue_many(2, timeout=100),
        lambda: full.enqueue(2.0, timeout=100),
        lambda: session.run(step, {x: 1.0}, timeout=100),
    ]
    threads = [in_thread(call) for call in calls]
    until(lambda: _waiting(cluster) == 4)
    for server in cluster._engine.servers:
        os.kill(server.info["pid"], signal.SIGKILL)
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
