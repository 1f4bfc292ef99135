"""Tasks are killed while steps of a queue runner move elements from queue to queue: none is lost or doubled."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import tfnb
from tests.state.saved_queues import fifo
from tests.state.test_queues import in_thread, until
from tfnb.errors import WorkerLost

pytestmark = pytest.mark.filterwarnings("ignore:still waiting", "ignore:.* was lost")


@pytest.mark.slow
def test_a_task_that_is_killed_in_a_step_of_a_runner_loses_no_element(connect) -> None:
    """A step that put nothing yet is taken again by another task; of one that did, the error says what it put."""
    a, b = fifo("a"), fifo("b")
    with tfnb.record() as graph:
        number = a.dequeue(sample=torch.tensor(1))
        for _ in range(3):
            number = number + (torch.rand(700, 700) @ torch.rand(700, 700)).sum().long() * 0
        move = b.enqueue(number)
    session = tfnb.Session(graph)
    cluster = connect(3)
    a.enqueue_many(torch.arange(60))
    a.close()
    runner = tfnb.QueueRunner(b, [move, move], session=session)
    runner.start()
    until(lambda: b.size() > 0, 60)
    for _ in range(2):
        time.sleep(0.5)
        victim = next(member for member in cluster._engine.tasks if member.is_there)
        os.kill(victim.info["pid"], signal.SIGKILL)
    try:
        runner.coordinator.join()
        left = []
    except WorkerLost as error:
        assert "1 into queue b), what it took is taken" in str(error)
        left = a.dequeue_many(a.size()).tolist()
    got = b.dequeue_many(b.size()).tolist()
    assert sorted(got + left) == [*range(60)]


def test_a_step_that_put_something_says_what_when_its_task_is_killed(connect) -> None:
    a, b, c = fifo("a"), fifo("b"), fifo("c")
    with tfnb.record() as graph:
        number = a.dequeue(sample=torch.tensor(1))
        put = b.enqueue(number)
        with tfnb.device("/job:worker/task:0"):
            rest = number + c.dequeue(sample=torch.tensor(1))
    session = tfnb.Session(graph)
    cluster = connect(2)
    a.enqueue_many([1, 2])
    thread, found = in_thread(lambda: session.run([put, rest], timeout=60))
    until(lambda: b.size() == 1, 60)
    os.kill(cluster._engine.tasks[0].info["pid"], signal.SIGKILL)
    thread.join(60)
    assert isinstance(found[0], WorkerLost) and "(1 into queue b), what it took is taken" in str(found[0])
    assert (a.size(), int(b.dequeue())) == (1, 1)
