"""Variables in pieces on several servers: bitwise as here, written and read as a whole, dropped without a rest."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch

import tfnb
import tfnb.placement.shards as shards_module
from tests.cluster.conftest import close_to, one_by_one, stats
from tfnb.errors import AlreadyExists, InvalidArgument


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Variables of more than 100 bytes are large."""
    monkeypatch.setattr(shards_module, "LARGE", 100)


def divided(cluster):
    return [pieces for pieces in cluster._variables.held.homes.values() if pieces[0].rows is not None]


@pytest.mark.parametrize("tasks", [2, 1])
def test_run_is_bitwise_equal_to_local(connect, problem, tasks):
    p = problem(tfnb.train.Adam(1e-2))
    states, losses = p.local(4)
    cluster = connect(tasks)
    for i, batch in enumerate(p.batches(4)):
        _, loss = tfnb.run([p.train, p.loss], dict(zip(p.feeds, batch.tensors, strict=True)))
        assert float(loss) == losses[i]
    assert len(divided(cluster)) == 6, "two weights and their slots"
    assert {piece.shard for pieces in divided(cluster) for piece in pieces} == set(range(4 - tasks))
    cluster.pull()
    assert all(map(torch.equal, p.values(), states[-1]))


def test_sync_on_two_tasks_equals_the_local_run_and_async_trains(connect, problem):
    p = problem(tfnb.train.SGD(0.1, momentum=0.9))
    states, losses = p.local(6)
    cluster = connect(2)
    seen = [float(values[1]) for _, values in one_by_one(cluster, p.program, p.batches(6))]
    assert divided(cluster) and close_to(p.values(), states[-1], 1e-12)
    assert seen == pytest.approx(losses, rel=1e-12)
    list(cluster.train(p.program, p.batches(20), mode="async"))
    assert sum(s["applied"] for s in stats(cluster)) >= 40, "every batch on both servers"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_task_loses_and_doubles_nothing(connect, problem, mode):
    p = problem(tfnb.train.SGD(0.1))
    states, _ = p.local(20)
    cluster = connect(2)
    steps = one_by_one(cluster, p.program, p.batches(20), mode=mode)
    seen = [next(steps)[0] for _ in range(4)]
    os.kill(cluster._engine.tasks[0].info["pid"], signal.SIGKILL)
    seen += [step for step, _ in steps]
    assert seen == list(range(1, 21)) and divided(cluster)
    assert [s["version"] for s in stats(cluster)] == [21, 21], "made once, and each step written once on both"
    if mode == "sync":
        assert close_to(p.values(), states[-1], 1e-12)


def test_a_divided_variable_is_read_written_and_dropped_as_a_whole(connect, problem):
    p = problem(tfnb.train.Adam(1e-2))
    cluster = connect(2)
    feeds = dict(zip(p.feeds, p.batch(0, 12), strict=True))
    tfnb.run(p.train, feeds)
    weight = next(v for v in p.graph.variables if len(v.shape) == 2 and v.trainable)
    assert weight.value().shape == weight.shape and str(weight.home).count("ps:") == 2
    new = torch.randn(weight.shape, dtype=torch.float64)
    weight.assign(new)
    assert torch.equal(weight.value(), new)
    cluster.pull()
    weight.storage.mul_(2)
    tfnb.run(p.loss, feeds)
    assert torch.equal(weight.value(), 2 * new), "what was written here went to both servers"
    here = {v.name: v.storage.clone() for v in p.graph.variables}
    cluster.close()
    assert torch.equal(weight.storage, 2 * new) and weight.home is None
    assert all(torch.equal(v.storage, here[v.name]) for v in p.graph.variables)


@pytest.mark.slow
def test_nothing_is_left_of_what_nobody_can_reach(connect):
    cluster = connect(2)
    for _ in range(2):
        v = tfnb.Variable(torch.ones(40, 3), name="v")
        with tfnb.record("gone"):
            total = v.read().sum()
        assert tfnb.run(total) == 120 and len(divided(cluster)) == 1
        del v, total
        with tfnb.record("gone"):
            tfnb.constant(1.0)
        gc.collect()
        cluster.status()
        assert [s["variables"] for s in stats(cluster)] == [0, 0]


def test_a_step_that_needs_all_rows_runs_whole_and_the_values_are_right(connect, problem):
    p = problem(tfnb.train.SGD(0.5))
    cluster = connect(2)
    tfnb.run(p.loss, dict(zip(p.feeds, p.batch(0, 12), strict=True)))
    assert divided(cluster)
    weight = next(v for v in p.graph.variables if len(v.shape) == 2)
    with tfnb.record("norm"):
        turned = weight.assign(weight.read().flip(0) / weight.read().norm())
    want = weight.value().flip(0) / weight.value().norm()
    assert torch.equal(tfnb.run(turned), want) and torch.equal(weight.value(), want)


def test_where_one_piece_cannot_be_made_nothing_is(connect):
    cluster = connect(2)
    v = tfnb.Variable(torch.ones(40, 3), name="v")
    with tfnb.record("two"):
        total = v.read().sum()
    taken = {f"{v.key}@1": torch.zeros(1)}
    cluster._do("create", 60, cluster._engine.create, 1, taken)
    with pytest.raises(AlreadyExists):
        tfnb.run(total)
    assert v.home is None and [s["variables"] for s in stats(cluster)] == [0, 1]
    cluster._do("drop", 60, cluster._engine.drop, {1: list(taken)})
    assert tfnb.run(total) == 120


@pytest.mark.parametrize("said", [{"partitions": 2}, {"partitions": "auto"}, {"partition_bytes": 100}])
def test_a_declared_division_holds_and_files_have_the_whole(connect, monkeypatch, tmp_path, said):
    monkeypatch.setattr(shards_module, "LARGE", 64 << 20)
    monkeypatch.setattr(shards_module, "SMALL", 50)
    table = tfnb.Variable(torch.arange(36.0).view(12, 3), name="table", **said)
    whole = tfnb.Variable(torch.ones(12, 3), name="whole")
    with tfnb.record("declared") as graph:
        x = tfnb.placeholder(torch.ones(4, 12), name="x")
        train = tfnb.train.Adam(0.1).minimize((x @ (table * whole)).square().mean())
    start, session = table.value(), tfnb.Session(graph)
    session.run(train, {x: torch.ones(4, 12)})
    wanted = table.value()
    session.save(tmp_path / "one")
    for v in graph.variables:
        v.assign(torch.zeros(v.shape))
    table.assign(start), whole.assign(torch.ones(12, 3))
    cluster = connect(2)
    session.run(train, {x: torch.ones(4, 12)})
    assert len(cluster._variables.held.homes[table.key]) == 2 and len(cluster._variables.held.homes[whole.key]) == 1
    assert torch.equal(table.value(), wanted)
    session.save(tmp_path / "two")
    table.assign(start)
    session.restore(tmp_path / "one")
    assert torch.equal(table.value(), wanted)
    cluster.close()
    table.divide(partitions=1)
    table.assign(start)
    session.restore(tmp_path / "two")
    assert torch.equal(table.value(), wanted)


@pytest.mark.parametrize("said", [{"partitions": 13}, {"partitions": 0}, {"partition_bytes": True},
                                  {"partitions": 2, "partition_bytes": 9}])  # fmt: skip
def test_a_division_that_cannot_be_is_refused(said):
    with pytest.raises(InvalidArgument, match="variable table"):
        tfnb.Variable(torch.ones(12, 3), name="table", **said)
