"""Steps on tasks that wait for each other for ever are told so; who may still be served is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb
from tests.cluster.test_queues_on_servers import _waiting, fifo, until
from tests.state.test_queues import in_thread
from tfnb.cluster.queues import deadlocks
from tfnb.cluster.queues.queues_there import Channels
from tfnb.errors import DeadlineExceeded, DeadlockError

pytestmark = pytest.mark.filterwarnings("ignore:still waiting")


def ring(q: Any, p: Any) -> list[Callable[..., Any]]:
    """Two steps on two tasks: each puts for the other what it makes of what the other puts."""
    with tfnb.record() as graph:
        with tfnb.device("/job:worker/task:0"):
            there = p.enqueue(q.dequeue())
        with tfnb.device("/job:worker/task:1"):
            back = q.enqueue(p.dequeue())
    session = tfnb.Session(graph)
    return [lambda **how: session.run(there, **how), lambda **how: session.run(back, **how)]


def own(q: Any, p: Any) -> list[Callable[..., Any]]:
    """One step that would put into the queue that it waits for."""
    with tfnb.record() as graph:
        taken = q.dequeue()
        put = q.enqueue(taken + 1)
    session = tfnb.Session(graph)
    return [lambda **how: session.run([taken, put], **how)]


def across(q: Any, p: Any) -> list[Callable[..., Any]]:
    """The same with a part on each of two tasks: the second one waits for the first."""
    with tfnb.record() as graph:
        with tfnb.device("task:0"):
            taken = q.dequeue()
        with tfnb.device("task:1"):
            more = taken + 1
            put = p.enqueue(more)
        with tfnb.device("task:0"), tfnb.control_dependencies([put]):
            back = q.enqueue(taken * 2)
    session = tfnb.Session(graph)
    return [lambda **how: session.run([more, back], **how)]


@pytest.mark.parametrize("stuck", [ring, own, across], ids=lambda stuck: stuck.__name__)
def test_everyone_in_a_cycle_is_told_of_it(stuck: Callable[..., Any], connect) -> None:
    q, p = fifo("q", 2), fifo("p", 2)
    calls = stuck(q, p)
    cluster = connect(2)
    threads = [in_thread(call) for call in calls]
    for thread, _ in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread, _ in threads)
    errors = [found[0] for _, found in threads]
    assert all(isinstance(error, DeadlockError) for error in errors), errors
    assert "element of queue q (0 of 2 elements, open, 1 dequeue waits)" in str(errors[0]), errors[0]
    assert errors[0].details.edges and errors[0].details.dot().startswith("digraph {")
    assert _waiting(cluster) == 0
    q.enqueue(1.0)
    assert calls[0](timeout=30) in (None, [1.0, None], [2.0, None]), "the cluster goes on"


@pytest.mark.slow
def test_whoever_may_be_served_is_waited_for(connect) -> None:
    """A call puts an element after two looks; and nobody is known who puts one."""
    q, p = fifo("q", 2), fifo("p", 2)
    there, back = ring(q, p)
    cluster = connect(2)
    waits, done = in_thread(lambda: there(timeout=60))
    until(lambda: _waiting(cluster) == 1)
    time.sleep(2.5)  # two looks
    q.enqueue(3.0)
    waits.join(30)
    assert done == [None]
    with pytest.raises(DeadlineExceeded):
        there(timeout=3)
    thread, found = in_thread(lambda: back(timeout=60))
    thread.join(30)
    assert found == [None] and q.dequeue() == 3, "what another took from p went back to q"


@pytest.mark.slow
def test_a_call_that_put_before_may_put_again(connect) -> None:
    q, p = fifo("q", 2), fifo("p", 2)
    q.enqueue(torch.tensor(1.0)), q.dequeue()
    (call,) = own(q, p)
    connect(2)
    with pytest.raises(DeadlineExceeded):
        call(timeout=2)


def test_steps_that_no_task_has_taken_yet_are_all_at_work() -> None:
    view = deadlocks._View(Channels(None, lambda shard: None), [])
    uses = [deadlocks.QueueUse(()) for _ in range(3)]
    uses[2].round = 0
    assert set(view.runners([], uses).values()) == set(uses)
    assert not any(runner.attempts() for runner in view.runners([[[["c", 1]], [], None]], uses))


@pytest.mark.slow
def test_a_long_wait_on_a_task_is_told_where_the_user_is(connect) -> None:
    q = fifo("q", 2)
    with tfnb.record() as graph:
        taken = q.dequeue() * 2
    connect(1)
    text = r"still waiting:\n.*dequeue.* waits for an element of queue q \(0 of 2 elements"
    with pytest.warns(UserWarning, match=text) as told, pytest.raises(DeadlineExceeded):
        tfnb.Session(graph).run(taken, timeout=6)
    assert len(told) == 1, "once"
