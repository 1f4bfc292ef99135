"""One graph over several tasks of a real cluster: the bits of one task, all of a step or nothing, and kills."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch

import tfnb
from tests.cluster.conftest import stop, until
from tests.over_tasks import MODELS, Model, batch, on, trained
from tfnb.cluster.wire import envelope
from tfnb.errors import Cancelled, DeadlineExceeded, InvalidArgument, TfnbError, WorkerLost
from tfnb.passes.flow.places import Place


def members(cluster: Any) -> list[Any]:
    return [member for member in cluster._engine.tasks if member.alive]


def exchanges(dask: Any) -> list[dict[str, int]]:
    """What each task's exchange holds."""

    def facts(dask_worker: Any) -> list[dict[str, int]]:
        from tfnb.cluster.tasks.task import TaskActor

        return [a.task.exchange.facts for a in dask_worker.state.actors.values() if isinstance(a, TaskActor)]

    found = [fact for facts in dask.run(facts, on_error="ignore").values() if isinstance(facts, list) for fact in facts]
    assert found, "no task was asked"
    return found


def assert_nothing_left(dask: Any) -> None:
    until(lambda: all(not (fact["held"] or fact["rounds"] or fact["lent"]) for fact in exchanges(dask)), 20)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_run_over_three_tasks_gives_the_bits_of_one_process(connect, dask, model: Model, order: int) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 8), shape=("B", 8), name="x")
        y = model(x)
        if order:
            (y,) = tfnb.gradients(y.sum(), [x])
    here = tfnb.Session(g, compile="off")
    fed = [sign * torch.linspace(0.1, 1, rows * 8).reshape(rows, 8) for sign in (1, -1) for rows in (5, 9)]
    wanted = [here.run(y, {x: tensor}) for tensor in fed]
    connect(3)
    found = [tfnb.run(y, {x: tensor}) for tensor in fed]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert_nothing_left(dask)


def losses(rows: tuple[int, ...], connect: Any, tasks: int) -> tuple[list[Any], list[torch.Tensor]]:
    """Losses of steps of the trained model on a cluster of so many tasks, and the Variables then."""
    g, x, y, fetches = trained()
    cluster = connect(tasks)
    found = [tfnb.run(fetches, batch(x, y, count))[0] for count in rows]
    cluster.pull()
    values = [node.attrs["variable"].value().clone() for node in g.nodes if node.op == "tfnb.read"]
    cluster.close()
    return found, values


def test_steps_over_two_tasks_write_what_steps_on_one_task_write(connect, monkeypatch) -> None:
    rows = (5, 6, 7, 6)
    two = losses(rows, connect, 2)
    one = losses(rows, connect, 1)  # the requests are soft: one task does it all
    torch.testing.assert_close(two, one, rtol=0, atol=0)


def test_a_step_is_one_call_for_each_of_its_tasks(connect, dask) -> None:
    _, x, y, fetches = trained()
    cluster = connect(3)
    tfnb.run(fetches, batch(x, y, 6))
    counts: dict[str, int] = {}
    call = cluster._engine.peers.link.call

    async def counted(peer: Any, method: str, *args: Any, **more: Any) -> Any:
        counts[method] = counts.get(method, 0) + 1
        return await call(peer, method, *args, **more)

    cluster._engine.peers.link.call = counted
    for _ in range(5):
        tfnb.run(fetches, batch(x, y, 6))
    cluster._engine.peers.link.call = call
    assert counts["run"] == 5 * 2
    assert_nothing_left(dask)


def test_a_part_is_sent_the_constants_that_it_computes_with(connect) -> None:
    """Each task computes with a table of its own, in a branch or a loop; of the other one it has the sizes."""
    tables = [torch.randn(1000 + task, 64) for task in range(2)]
    shared = torch.randn(1, 64)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3, 64), shape=("B", 64), name="x")
        with on(0):
            y = x + tables[0].sum(0) * shared
            y = tfnb.cond(y.sum() > 0, lambda: y * tables[0].mean(0), lambda: y)
        with on(1):
            _, z = tfnb.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h.tanh() + tables[1][i]), (0, y + shared))
    fed = {x: torch.randn(3, 64)}
    wanted = tfnb.Session(g, compile="off").run(z, fed)
    cluster = connect(2)
    torch.testing.assert_close(tfnb.run(z, fed), wanted, rtol=0, atol=0)
    ((_, placed),) = cluster._steps._placed.values()
    for part in placed.parts:
        sent = {tensor.shape: tensor for tensor in part.plan.tensors}
        assert [sent[table.shape].is_meta for table in tables] == [part.task == 1, part.task == 0]
        assert envelope.size(part.plan.tensors) < 0.6 * envelope.size(tables)


def test_fetches_behind_an_update_and_fetched_variables(connect) -> None:
    v = tfnb.Variable(torch.ones(3), name="v")
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        with on(0):
            h = x * 2
        with on(1):
            new = v.assign_add(h)
            late = new * 10
    connect(2)
    for at in (1, 2):
        found, value = tfnb.run([late, v], {x: torch.ones(3)})
        assert found.tolist() == [10 * (1 + 2 * at)] * 3
        assert value.tolist() == [1 + 2 * at] * 3


def test_a_server_that_needs_no_value_of_the_tasks_writes_with_the_others(connect) -> None:
    """Such as one that holds a count of steps only."""
    with tfnb.record():
        with tfnb.device("ps:0", soft=True):
            w = tfnb.Variable(torch.ones(3), name="w")
        with tfnb.device("ps:1", soft=True):
            count = tfnb.Variable(torch.zeros(()), name="count")
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        with on(0):
            h = x * w
        with on(1):
            step = tfnb.group(w.assign_add(h.sum(0)), count.assign_add(torch.ones(())))
    cluster = connect(2)
    for _ in range(2):
        tfnb.run(step, {x: torch.ones(2, 3)}, timeout=60)
    cluster.pull()
    assert w.value().tolist() == [9.0] * 3 and count.value() == 2


def test_fit_takes_each_batch_over_the_tasks(connect) -> None:
    g, x, y, (loss, step) = trained()
    data = batch(x, y, 24)
    here = tfnb.Session(g, compile="off").run(loss, data)
    cluster = connect(2)
    assert float(tfnb.run(loss, data)) == float(here)
    assert tfnb.fit(step, data, batch_size=6, epochs=2, watch=[loss]).steps == 8
    assert cluster.step == 8
    assert float(tfnb.run(loss, data)) < float(here)


def test_an_error_of_one_part_ends_the_step_and_nothing_is_written(connect, dask) -> None:
    v = tfnb.Variable(torch.zeros(3, 3), name="v")
    with tfnb.record():
        x = tfnb.placeholder(torch.eye(3), shape=(3, 3), name="x")
        with on(0):
            y = x * 2
        with on(1):
            z = torch.linalg.cholesky(y)
        with on(0):
            step = v.assign_add(z @ z)
    connect(2)
    tfnb.run(step, {x: torch.eye(3)})
    with pytest.raises(TfnbError, match="cholesky"):
        tfnb.run(step, {x: -torch.ones(3, 3)})
    tfnb.run(step, {x: torch.eye(3)})
    assert torch.allclose(tfnb.run(v), 4 * torch.eye(3))
    assert_nothing_left(dask)


def long_model() -> tuple[Any, Any, Any]:
    """A loop over two tasks that takes some seconds, and a Variable that is written behind it."""
    v = tfnb.Variable(torch.zeros(64, 64), name="v")
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(64, 64), shape=(64, 64), name="x")

        def body(i: Any, h: torch.Tensor) -> Any:
            with on(0):
                h = torch.tanh(h @ h / 64)
            with on(1):
                return i + 1, h + x

        h = tfnb.while_loop(lambda i, h: i < 10**9, body, (0, x), maximum_iterations=3000)[1]
        with on(1):
            step = v.assign_add(h.sign())
    return v, x, step


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 0.4])
def test_a_task_killed_in_mid_step_is_replaced_and_the_step_is_done_once(connect, dask, who: int, delay: float) -> None:
    v, x, step = long_model()
    cluster = connect(2)
    fed = {x: torch.ones(64, 64)}
    tfnb.run(step, fed)
    pid = members(cluster)[who].info["pid"]
    timer = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
    timer.start()
    tfnb.run(step, fed, timeout=90)
    timer.join()
    assert torch.equal(tfnb.run(v), torch.full((64, 64), 2.0))
    assert_nothing_left(dask)


@pytest.mark.parametrize("who", [0, 1])
def test_without_a_successor_the_error_names_the_task(connect, nobody_joins, who: int) -> None:
    v, x, step = long_model()
    cluster = connect(2)
    fed = {x: torch.ones(64, 64)}
    tfnb.run(step, fed)
    threading.Timer(0.3, os.kill, (members(cluster)[who].info["pid"], signal.SIGKILL)).start()
    with pytest.raises(WorkerLost, match=rf"parts on task:0, task:1, and task:{who} is gone; nothing"):
        tfnb.run(step, fed, timeout=60)
    assert torch.equal(tfnb.run(v), torch.ones(64, 64))


def test_a_paused_task_is_waited_for(connect) -> None:
    v, x, step = long_model()
    cluster = connect(2)
    fed = {x: torch.ones(64, 64)}
    tfnb.run(step, fed)
    pid = members(cluster)[1].info["pid"]
    stop(pid)
    threading.Timer(2.0, os.kill, (pid, signal.SIGCONT)).start()
    tfnb.run(step, fed, timeout=90)
    assert torch.equal(tfnb.run(v), torch.full((64, 64), 2.0))


def test_a_deadline_ends_a_step_over_tasks(connect, dask) -> None:
    v, x, step = long_model()
    connect(2)
    fed = {x: torch.ones(64, 64)}
    tfnb.run(step, fed)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        tfnb.run(step, fed, timeout=0.2)
    assert time.monotonic() - began < 5
    tfnb.run(step, fed)
    assert torch.equal(tfnb.run(v), torch.full((64, 64), 2.0))
    assert_nothing_left(dask)


def test_an_interrupt_ends_a_step_over_tasks(connect, dask) -> None:
    v, x, step = long_model()
    connect(2)
    fed = {x: torch.ones(64, 64)}
    tfnb.run(step, fed)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises((KeyboardInterrupt, Cancelled)):
        tfnb.run(step, fed)
    assert time.monotonic() - began < 5
    assert torch.equal(tfnb.run(v), torch.full((64, 64), 1.0))
    assert_nothing_left(dask)


def test_a_request_for_a_task_that_is_not_there(connect) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        with tfnb.device("task:0"):
            y = x + 1
        with tfnb.device("task:5"):
            z = y + 1
        with tfnb.device("task:5", soft=True):
            w = y + 2
    connect(2)
    with pytest.raises(InvalidArgument, match=re.escape("'task:5' of node")):
        tfnb.run(z, {x: torch.ones(3)})
    assert tfnb.run(w, {x: torch.ones(3)}).tolist() == [4, 4, 4]


def test_two_runs_in_opposite_order_and_a_training_beside_them(connect, dask) -> None:
    w = tfnb.Variable(torch.zeros(()), name="w")
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(64), name="x")
        train = tfnb.train.SGD(0.01).minimize(((x * w - 1) ** 2).mean())
    orders = []
    for first, second in ((0, 1), (1, 0)):
        with tfnb.record():
            y = tfnb.placeholder(torch.ones(8, 8), shape=(8, 8), name="y")
            with on(first):
                z = torch.tanh(y @ y)
            with on(second):
                z = z @ z
            with on(first):
                z = z + y
        orders.append((y, z))
    connect(2)
    wrong: list[Any] = []

    def run(y: Any, z: Any) -> None:
        fed = torch.full((8, 8), 0.1)
        made = torch.tanh(fed @ fed)
        for _ in range(20):
            if not torch.allclose(tfnb.run(z, {y: fed}), made @ made + fed):
                wrong.append(z)

    threads = [threading.Thread(target=run, args=order) for order in orders]
    for thread in threads:
        thread.start()
    assert tfnb.fit(train, {x: torch.ones(64 * 40)}, batch_size=64).steps == 40
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
    assert_nothing_left(dask)


@pytest.mark.slow
def test_a_thousand_steps_leave_nothing_behind(connect, dask) -> None:
    _, x, y, fetches = trained()
    connect(2)
    for _ in range(1000):
        tfnb.run(fetches, batch(x, y, 6))
    assert_nothing_left(dask)


def test_nodes_colocated_with_a_variable_of_another_task_are_done_there(connect, dask) -> None:
    w = tfnb.Variable(torch.linspace(0.5, 1, 8), name="w")
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 8), shape=("B", 8), name="x")
        with on(1):
            h = x * w

        def body(i: Any, c: torch.Tensor) -> Any:
            with tfnb.colocate_with(w):
                c = torch.tanh(c)
            with on(0):
                return i + 1, c * 0.5

        with on(0):
            c = x + 1
        _, c = tfnb.while_loop(lambda i, c: i < 3, body, (0, c))
        with tfnb.colocate_with("w"):
            loss = (c * h).mean()
        step = tfnb.train.SGD(0.1).minimize(loss)
    fed = [{x: torch.linspace(-1, 1, rows * 8).reshape(rows, 8)} for rows in (5, 9, 5)]
    with tfnb.Session(g, compile="off") as here:
        start = w.value().clone()
        wanted = [here.run([loss, step], feed)[0] for feed in fed]
        trained = w.value().clone()
    w.assign(start)
    cluster = connect(2)
    found = [tfnb.run([loss, step], feed)[0] for feed in fed]
    cluster.pull()
    torch.testing.assert_close([*found, w.value()], [*wanted, trained], rtol=0, atol=0)
    trace = tfnb.run(loss, fed[0], trace=True)
    assert trace is not None and g.why(loss).place == Place(1)
    events = cluster_events(g)
    assert {thread for name, thread in events if name.startswith("loss")} == {"task:1"}
    assert_nothing_left(dask)


def cluster_events(graph: tfnb.Graph) -> set[tuple[str, str]]:
    """Names of nodes with the tasks that ran them, in the last traced run."""
    return {(event.node.name, event.thread) for event in graph.attached["trace"].events if event.node is not None}
