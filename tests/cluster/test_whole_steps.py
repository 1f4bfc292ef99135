"""Fetches behind the update and of averaged gradients: tasks divide the rows, the values are those of one device."""

from __future__ import annotations

import os
import signal
import warnings

import dask.array as da
import pytest
import torch
from torch import nn

import tfnb

PASSES = {"epochs": 3, "batch_size": 13}


def recorded():
    """A regression whose watched values hang on gradients, on new values of the weights, and on rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    data, target = torch.randn(48, 4, dtype=torch.float64), torch.randn(48, 1, dtype=torch.float64)
    with tfnb.record("norms"):
        x, y = tfnb.placeholder(data[:5], name="x"), tfnb.placeholder(target[:5], name="y")
        loss = (model(x) - y).square().mean()
        optimizer = tfnb.train.Adam(0.05)
        pairs = optimizer.compute_gradients(loss)
        norm = sum(grad.square().sum() for grad, _ in pairs).sqrt()
        train = optimizer.apply_gradients(pairs)
        weights = sum(p.square().sum() for p in model.parameters()).sqrt()
        later = (model(x) - y).square().mean()
        watch = {
            "loss": loss,
            "norm": norm,
            "weights": weights,
            "later": later,
            "mixed": (loss - later) * norm / weights,
        }
    return model, {x: data, y: target}, train, watch


def trained(watched, data=lambda feeds: feeds, **options):
    """History and weights of three passes."""
    model, feeds, train, watch = recorded()
    found = tfnb.fit(train, data(feeds), watch={name: watch[name] for name in watched}, **options)
    assert found.steps == 12
    return found.history, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("watched", ["norm weights", "loss norm weights later mixed"], ids=["numbers", "rows"])
@pytest.mark.parametrize(("mode", "tasks"), [("sync", 2), ("sync", 3), ("allreduce", 2), ("async", 1), ("bounded", 1)])
def test_watched_values_behind_the_update_are_those_of_one_device(connect, mode, tasks, watched):
    here, expected = trained(watched.split(), **PASSES)
    options: dict = {"staleness": 2} if mode == "bounded" else {}
    connect(tasks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no step is taken whole, or one after the other
        there, weights = trained(watched.split(), mode=mode, timeout=120, **PASSES, **options)
    for mine, theirs in zip(there, here, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def in_chunks(feeds):
    """The same rows as arrays of Dask, whose chunks end in the middle of batches."""
    return {key: da.from_array(rows.numpy(), chunks=(7, -1)) for key, rows in feeds.items()}


def in_batches(feeds):
    """The same batches, drawn one by one."""
    starts = [start for _ in range(3) for start in range(0, 48, 13)]
    return ({key: rows[start : start + 13] for key, rows in feeds.items()} for start in starts)


@pytest.mark.parametrize("data", [in_chunks, in_batches])
def test_the_first_task_sees_all_rows_of_whatever_data(connect, data):
    options = {**PASSES, "shuffle": False} if data is in_chunks else {}
    here, _ = trained(["later", "mixed"], data if data is in_batches else dict, **options)
    connect(2)
    there, _ = trained(["later", "mixed"], data, **options, timeout=120)
    assert there[-1] == pytest.approx(here[-1], rel=1e-12)


def test_a_run_fetches_values_behind_the_update_of_one_task(connect):
    found = []
    for is_there in (False, True):
        cluster = connect(2) if is_there else None
        model, feeds, train, watch = recorded()
        values = [value for _ in range(3) for value in tfnb.run([train, *watch.values()], feeds)[1:]]
        if cluster is not None:
            cluster.pull()
        found.append([*values, *(p.detach().clone() for p in model.parameters())])
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))


def test_spare_tasks_take_steps_with_such_values_one_after_the_other(connect):
    here, expected = trained(["norm"], **PASSES)
    connect(2)
    with pytest.warns(UserWarning, match="one step after the other: .* with spare tasks"):
        there, weights = trained(["norm"], **PASSES, backup=1)
    # A task has one thread, this process as many as there are cores: sums of products may differ in the last place.
    assert [epoch["norm"] for epoch in there] == pytest.approx([epoch["norm"] for epoch in here], rel=1e-12)
    for found, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tasks", [1, 2])
def test_what_is_done_with_values_behind_the_update_is_done_there(connect, tasks):
    """A queue that takes the new weights, and a Variable whose new value needs them and the size of the batch."""
    data, found = torch.arange(12.0).reshape(4, 3), []
    for is_there in (False, True):
        if is_there:
            connect(tasks)
        weight, total = tfnb.Variable(torch.ones(3), name="weight"), tfnb.Variable(torch.zeros(3), name="total")
        queue = tfnb.FIFOQueue(5, [torch.float32], shapes=[(3,)])
        with tfnb.record():
            x = tfnb.placeholder(data[:3], name="x")
            step = tfnb.train.SGD(0.1).minimize((x @ weight.read()).mean())
            put = queue.enqueue((weight.read(),))
            moved = total.assign(weight.read().expand(x.shape[0], 3).sum(0))
            queued, sized = tfnb.group(step, put), tfnb.group(step, moved)
            taken = queue.dequeue()
        tfnb.run(queued, {x: data})
        tfnb.run(sized, {x: data[:2]})
        found.append([weight.value(), total.value(), *tfnb.run(taken)])
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "allreduce"])
def test_another_task_computes_them_where_the_first_one_is_killed(connect, mode):
    def fitted(kill, **options):
        model, feeds, train, watch = recorded()
        found = tfnb.fit(train, feeds, epochs=20, batch_size=13, watch=watch, callbacks=[kill], **options)
        return found, [p.detach().clone() for p in model.parameters()]

    here, expected = fitted(lambda progress: None)
    cluster = connect(3)
    pid, killed = cluster._engine.tasks[0].info["pid"], []

    def kill(progress):
        if progress.step >= 8 and not killed:
            killed.append(os.kill(pid, signal.SIGKILL))

    there, weights = fitted(kill, mode=mode, timeout=240)
    assert killed and there.steps == 80 and there.history[-1] == pytest.approx(here.history[-1], rel=1e-11)
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


class StopsAt:
    """A callback that stops a training at a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, progress):
        if progress.step >= self.step:
            progress.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "tasks"), [("async", 2), ("bounded", 2), ("allreduce", 1), ("sync", 2)])
def test_a_step_counts_though_the_training_stops_while_its_late_values_are_computed(connect, mode, tasks):
    """Each step takes 1 from each element of ``w``; the values behind it take long."""
    cluster = connect(tasks)
    for stop in (3, 6, 9):
        w = tfnb.Variable(torch.zeros(300, 300, dtype=torch.float64), name=f"{mode}{stop}")
        rows = torch.ones(400, 1, dtype=torch.float64)
        with tfnb.record(f"stopped_{mode}_{stop}"):
            x = tfnb.placeholder(rows[:4], name="x")
            step = tfnb.train.SGD(1.0).minimize((w * x.mean()).sum())
            late = w * 1.0
            for _ in range(30):
                late = late @ late / (1 + late.abs().max())
            watch = {"late": late.sum() + w[0, 0]}
        options = {"mode": mode, "timeout": 60, "exact": False} | ({"staleness": 2} if mode == "bounded" else {})
        found = tfnb.fit(step, {x: rows}, batch_size=4, watch=watch, callbacks=[StopsAt(stop)], **options)
        cluster.pull()
        assert stop <= found.steps < 100 and set(w.value().unique().tolist()) == {-float(found.steps)}


def test_an_averaged_gradient_of_an_all_reduce_is_kept_when_the_next_is_summed(connect):
    """A watched view of a gradient lies in the memory that the next step sums in."""
    connect(2)
    curves = []
    for mode in ("sync", "allreduce"):
        torch.manual_seed(0)
        layer, rows = nn.Linear(3, 2).double(), torch.randn(64, 3, dtype=torch.float64)
        with tfnb.record(f"views_{mode}"):
            x = tfnb.placeholder(rows[:8], name="x")
            loss = layer(x).square().mean()
            first = tfnb.gradients(loss, [layer.bias])[0][0]
            train = tfnb.train.SGD(0.1).minimize(loss)
        options = {"batch_size": 8, "shuffle": False, "mode": mode, "timeout": 60}
        curves.append([point["first"] for point in tfnb.fit(train, {x: rows}, watch={"first": first}, **options).curve])
    assert len(set(curves[0])) == 8 and curves[1] == pytest.approx(curves[0], rel=1e-12)
