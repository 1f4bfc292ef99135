"""A DataLoader feeds `fit` on a cluster, by way of a source with a position: the local values, the local position."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tfnb


@pytest.fixture
def recorded():
    """A data set of 20 rows, a model, its feeds and its step."""
    data = TensorDataset(torch.randn(20, 3).double(), torch.randn(20, 1).double())
    model = torch.nn.Linear(3, 1).double()
    with tfnb.record("loader"):
        x, y = tfnb.placeholder(data[:4][0], name="x"), tfnb.placeholder(data[:4][1], name="y")
        step = tfnb.train.Momentum(0.1).minimize((model(x) - y).square().mean())
    return data, model, (x, y), step


def test_a_loader_trains_there_as_here(connect, recorded):
    data, model, feeds, step = recorded
    start = {v: v.value() for v in step.graph.variables}
    found = []
    for number in range(2):
        for v, value in start.items():
            v.assign(value)
        cluster = connect(2) if number else None
        source = tfnb.Source(DataLoader(data, 6, shuffle=True), name=f"train {number}", seed=3)
        assert tfnb.fit(step, source, feeds=feeds, epochs=2, steps=6).steps == 6
        if cluster is not None:
            cluster.close()
        found.append((model.weight.detach().clone(), source.position))
    (here, place), (there, place_there) = found
    torch.testing.assert_close(there, here, rtol=1e-10, atol=1e-12)
    assert place == place_there == {"epoch": 1, "count": 2}


class Rows(IterableDataset):
    """The rows of a data set, without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in range(20))


class Unsized:
    """Batches of a generator, with a ``len`` that raises."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        return (self.data[i : i + 6] for i in range(0, 20, 6))


def test_data_without_a_length_trains_there_as_here(connect, recorded):
    data, model, feeds, step = recorded
    forms = {
        "loader": lambda: DataLoader(Rows(data), 6),
        "loader with a worker process": lambda: DataLoader(Rows(data), 6, num_workers=1, timeout=60),
        "iterator of a loader": lambda: iter(DataLoader(Rows(data), 6)),
        "len raises": lambda: Unsized(data),
    }
    start, found = {v: v.value() for v in step.graph.variables}, []
    for is_there in (False, True):
        cluster = connect(2) if is_there else None
        for name, form in forms.items():
            for options in ({"epochs": 1 if "iterator" in name else 2}, {"steps": 3}):
                for v, value in start.items():
                    v.assign(value)
                done = tfnb.fit(step, form(), feeds=feeds, timeout=120, **options)
                assert done.steps == options.get("steps", 4 * options.get("epochs", 0))
                if cluster is not None:
                    cluster.pull()
                found.append(model.weight.detach().clone())
    here, there = found[: len(found) // 2], found[len(found) // 2 :]
    torch.testing.assert_close(there, here, rtol=1e-10, atol=1e-12)


def test_a_pass_begins_there_when_validation_and_callbacks_of_the_one_before_are_over(connect, recorded):
    data, model, _, _ = recorded
    with tfnb.record("passes"):
        x, y = tfnb.placeholder(data[:4][0], name="x"), tfnb.placeholder(data[:4][1], name="y")
        loss = (model(x) - y).square().mean()
        step = tfnb.train.SGD(0.1).minimize(loss)
    log = []

    class Logged(DataLoader):
        def __iter__(self):
            log.append("pass" if self is loader else "validation")
            return super().__iter__()

    loader, held = Logged(data, 6), Logged(data, 6)
    connect(2)
    tfnb.fit(
        step, loader, feeds=(x, y), epochs=2, watch={"loss": loss}, validation=held,
        callbacks=lambda progress: log.append(progress.epoch),
    )  # fmt: skip
    assert log == ["pass", "validation", 1, "pass", "validation", 2]


@pytest.mark.parametrize("form", ["arrays", "loader"])
def test_an_epoch_that_a_training_there_stopped_behind_has_its_end(connect, recorded, form):
    data, _, (x, y), step = recorded
    rows, labels = data.tensors
    given = {"arrays": ({x: rows, y: labels}, {"batch_size": 10}), "loader": (DataLoader(data, 10), {"feeds": (x, y)})}
    seen = []

    class Ends:
        is_stopped = False

        def on_step(self, progress):
            if not self.is_stopped:
                self.is_stopped = True
                progress.stop()  # tasks stand at the end of the epoch by then, or soon

        def on_epoch(self, progress):
            seen.append((progress.epoch, progress.step))

    connect(2)
    ends, (passed, options) = Ends(), given[form]
    for resume in (False, True):
        tfnb.fit(step, passed, epochs=2, callbacks=ends, resume=resume, **options)
    assert seen == [(1, 2), (2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["interrupt", "callback"])
def test_a_source_stands_behind_the_last_step_that_servers_applied(connect, recorded, ends):
    """Tasks are ahead of what is told, and more was drawn: what was not applied is drawn again."""
    data, model, feeds, step = recorded
    start = {v: v.value() for v in step.graph.variables}
    loader = DataLoader(data, 6, shuffle=True)
    tfnb.fit(step, tfnb.Source(loader, name="whole", seed=3), feeds=feeds, epochs=25)
    expected = model.weight.detach().clone()
    for v, value in start.items():
        v.assign(value)

    class Stop:
        def on_step(self, progress):
            if progress.step == self.at and ends == "callback":
                progress.stop()
            elif progress.step == self.at:
                raise KeyboardInterrupt

    cluster, source, stop, chance = connect(2), tfnb.Source(loader, name="parts", seed=3), Stop(), random.Random(4)
    before, places = cluster.step, []
    while cluster.step < before + 100:
        stop.at = chance.randint(1, 30)
        with contextlib.suppress(KeyboardInterrupt):
            tfnb.fit(step, source, feeds=feeds, steps=before + 100 - cluster.step, callbacks=[stop])
        done = cluster.step - before
        places.append((source.position["epoch"] * 4 + source.position["count"], done))
    cluster.close()
    assert [place for place, _ in places] == [done for _, done in places] and len(places) > 3
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-10, atol=1e-12)
