"""Nodes that ask for a task of the cluster, and what errors and warnings of a cluster say."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch

import tfnb
from tests.cluster.conftest import stop
from tfnb.errors import FeedError, InvalidArgument, NonFiniteGradient, ParameterServerLost, Unimplemented


def asking(*texts):
    with tfnb.record("asks"):
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = x
        for text in texts:
            with tfnb.device(text):
                y = y + 1
    return x, y


def test_a_step_runs_on_the_task_that_it_asks_for(connect):
    cluster = connect(2)
    ran = []
    call = cluster._engine.single._run_on

    async def run_on(number, task, *args):
        ran.append(task)
        return await call(number, task, *args)

    cluster._engine.single._run_on = run_on
    for task in (1, 0, 1):
        x, y = asking(f"task:{task}", "cpu", f"/task:{task}/device:CPU:0")
        assert tfnb.run(y, {x: torch.ones(3)}).tolist() == [4, 4, 4]
    assert ran == [1, 0, 1]


def test_a_task_that_is_not_there_is_named(connect):
    connect(2)
    for text in ("task:99", "cuda:0", "/job:nobody"):
        x, y = asking(text)
        with pytest.raises(InvalidArgument, match=f"explicit device specification '{text}' of node y"):
            tfnb.run(y, {x: torch.ones(3)})
    x, y = asking("task:7")
    with pytest.raises(InvalidArgument, match="there are task:0, task:1"):
        tfnb.run(y, {x: torch.ones(3)})
    x, y = asking("task:0", "task:1")
    assert tfnb.run(y, {x: torch.ones(3)}).tolist() == [3, 3, 3], "a part on each"


def test_variables_and_their_updates_are_on_the_servers_that_they_ask_for(connect):
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        made, steps = [], []
        for shard in (1, 1, 0, 1):
            with tfnb.device(f"ps:{shard}"):
                made.append(tfnb.Variable(torch.zeros(3), name="v"))
        for v in made[:2]:
            steps.append(v.assign_add(x * 2))
        w = tfnb.Variable(torch.zeros(3), name="w")
        with tfnb.device("ps:1"):
            steps.append(w.assign_add(x))
        steps += [made[2].assign(x), made[3].assign_sub(x)]
    connect(2)
    for _ in range(2):
        tfnb.run(steps, {x: torch.ones(3)})
    assert [v.device.partition(" ")[0] for v in (*made, w)] == ["ps:1", "ps:1", "ps:0", "ps:1", "ps:1"]
    assert [float(v.value()[0]) for v in (*made, w)] == [4, 4, 1, -2, 2]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("product", "'ps:0' of node .*: a server computes updates of the Variables"),
        ("loop", "'ps:0' of node .*: loops and branches, and what is inside of them"),
        ("elsewhere", "'ps:0' of node new: it is done where the Variable lies that it updates, at ps:1"),
        ("fetched late", "'ps:0' of node mul: a server computes updates of the Variables"),
        ("updated", "'ps:0' of node .*: one task does all of the step: .* depends on the update, and on the size"),
        ("not there", "'ps:7' of node new: there are task:0, task:1, ps:0, ps:1: connect with ps=8"),
    ],
)
def test_what_a_server_cannot_do_is_refused_with_the_reason(connect, what, why):
    v = tfnb.Variable(torch.zeros(3, 3), name="v")
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 3), shape=(3, 3), name="x")
        fetches, old = [], v.read()
        with tfnb.device("ps:7" if what == "not there" else "ps:0"):
            match what:
                case "product":
                    new = x @ x
                case "loop":
                    new = tfnb.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 2), (0, x))[1]
                case "fetched late":
                    train = tfnb.train.SGD(0.1).minimize((v * x).sum())
                    with tfnb.control_dependencies([train]):
                        fetches = [train, v.read() * 2]
                case "updated":
                    rows, total = tfnb.placeholder(torch.ones(2, 3), name="rows"), tfnb.Variable(torch.zeros(3))
                    with tfnb.device(None):
                        train = tfnb.train.SGD(0.1).minimize((rows @ v).mean())
                    fetches = [tfnb.group(train, total.assign(v.read()[0].expand(rows.shape[0], 3).sum(0)))]
                case _:
                    new = old + x
        with tfnb.device("ps:1" if what == "elsewhere" else "ps:0"):
            fetches = fetches or [v.assign(new)]
    connect(2)
    with pytest.raises((InvalidArgument, Unimplemented), match=why):
        tfnb.run(fetches, {x: torch.ones(3, 3)} | ({rows: torch.ones(2, 3)} if what == "updated" else {}))


def test_a_soft_request_for_a_server_asks_for_nothing_that_is_not_there(connect):
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        with tfnb.device("ps:9", soft=True):
            v = tfnb.Variable(torch.zeros(3), name="v")
            y = x.exp() + v
        with tfnb.device("ps:0", soft=True):
            step = v.assign(y.exp())
    connect(2)
    tfnb.run(step, {x: torch.zeros(3)})
    assert torch.equal(v.value(), torch.ones(3).exp())


def test_training_stays_on_the_task_that_the_graph_asks_for(connect, problem):
    cluster = connect(2)
    w = tfnb.Variable(torch.zeros(()), name="w")
    with tfnb.record("pinned"):
        x = tfnb.placeholder(torch.ones(4), name="x")
        with tfnb.device("task:1"):
            loss = (x * w.read()).mean()
        train = tfnb.train.SGD(1.0).minimize(loss)
    stop(cluster._engine.tasks[0].info["pid"])
    try:
        for mode in ("sync", "async"):
            assert tfnb.fit(train, {x: torch.ones(8)}, batch_size=4, mode=mode).steps == 2
    finally:
        os.kill(cluster._engine.tasks[0].info["pid"], signal.SIGCONT)
    assert w.value() == -4


@pytest.mark.parametrize("clip", [True, False])
def test_a_gradient_that_is_not_finite_names_its_variable_and_worker(connect, clip):
    first, second = (tfnb.Variable(torch.ones(3), name=name) for name in ("first", "second"))
    with tfnb.record("bad"):
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        loss = (x * first.read()).mean() + (x * second.read()).sqrt().mean() * 1.0
        optimizer = tfnb.train.SGD(0.1, momentum=0.9)
        pairs = optimizer.compute_gradients(loss)
        if clip:
            grads, _ = tfnb.clip_by_global_norm([grad for grad, _ in pairs], 1.0)
            pairs = [(grad, v) for grad, (_, v) in zip(grads, pairs, strict=True)]
        train = optimizer.apply_gradients(pairs)
    cluster = connect(2)
    data = torch.ones(8, 3)
    data[5, 1] = 0.0  # the derivative of a root at 0
    text = r"gradient of variable second, float32\[3\], that task:1 computed holds NaN or infinity.*at step \d+: take"
    with pytest.raises(NonFiniteGradient, match=text) as caught:
        tfnb.fit(train, {x: data}, batch_size=8, shuffle=False)
    assert caught.value.task == "task:1" and cluster.step == 0
    located = r"(?s)Computed again there: .* made .*inf.* of finite numbers.*loss = \(x \* first"
    assert re.search(located, caught.value.message) and caught.value.op, "the op and the line are named"
    with pytest.raises(NonFiniteGradient, match=located):
        tfnb.run(train, {x: data})
    assert first.value().tolist() == second.value().tolist() == [1, 1, 1]


def test_a_feed_of_another_graph_of_the_same_name_is_said_as_such():
    x, _ = asking("cpu")
    _, y = asking("cpu")
    with pytest.raises(FeedError, match="in graph asks, another graph of the same name"):
        tfnb.run(y, {x: torch.ones(3)})


def test_after_a_lost_server_the_next_run_says_that_it_is_here(connect, problem):
    p = problem()
    cluster = connect(2)
    feeds = dict(zip(p.feeds, (p.data, p.labels), strict=True))
    tfnb.run(p.train, feeds)
    cluster.pull()
    os.kill(cluster._engine.servers[0].info["pid"], signal.SIGKILL)
    with pytest.raises(ParameterServerLost):
        tfnb.run(p.train, feeds)
    with pytest.warns(UserWarning, match="cluster was lost: runs are here now, with the values of its step 1"):
        tfnb.run(p.train, feeds)
    tfnb.run(p.train, feeds)


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_a_synchronous_step_moves_the_bytes_of_the_closed_form(connect, tasks):
    """Each task sends the gradients and receives the Variables: 2 W; each of P servers has 2 N W / P of it."""
    cluster = connect(tasks)
    servers = len(cluster._engine.servers)
    weights = [tfnb.Variable(torch.ones(500), name=f"w{i}") for i in range(6)]
    with tfnb.record("moved"):
        x = tfnb.placeholder(torch.ones(4), name="x")
        train = tfnb.train.SGD(0.1).minimize(sum((x * w.square().mean()).mean() for w in weights))

    def moved(steps):
        tfnb.fit(train, {x: torch.ones(4 * steps)}, batch_size=4, mode="sync", timeout=60)
        facts = cluster._do("facts", 60, cluster._engine.task_facts, 60.0)
        return [count for task in facts.values() for count in task["traffic"].values()]

    first, second, third = moved(5), moved(10), moved(30)
    whole = 6 * 500 * 4
    per_step = [(c - b - (b - a)) / 20 for a, b, c in zip(first, second, third, strict=True)]
    assert per_step == [2 * whole / servers] * (tasks * servers)
