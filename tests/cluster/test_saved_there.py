"""A file saved while a cluster trains is of one step: values, count of steps, random numbers, place in the data."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.cluster.test_cuts import Counters
from tfnb.session import default_session
from tfnb.state import checkpoint

ROWS, BATCH, EPOCHS = 70, 4, 3
STEPS = EPOCHS * -(-ROWS // BATCH)


class Net:
    """A small network with Adam and noise, whose steps depend on all that came before."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.rows = [torch.randn(ROWS, 3, dtype=torch.float64), torch.randn(ROWS, 1, dtype=torch.float64)]
        with tfnb.record("saved") as self.graph:
            self.x, self.y = (tfnb.placeholder(rows[:BATCH]) for rows in self.rows)
            noise = torch.rand((), dtype=torch.float64)
            self.train = tfnb.train.Adam(1e-2).minimize(F.mse_loss(net(self.x), self.y) * (1 + noise))

    def data(self, kind: str) -> dict[str, Any]:
        if kind == "arrays":
            return {"data": {self.x: self.rows[0], self.y: self.rows[1]}, "batch_size": BATCH, "epochs": EPOCHS}
        batches = list(zip(*(rows.split(BATCH) for rows in self.rows), strict=True))
        return {"data": tfnb.Source(batches, name="rows"), "feeds": (self.x, self.y), "epochs": EPOCHS}

    def fit(self, kind: str, **options: Any) -> Any:
        return tfnb.fit(self.train, **self.data(kind), **options)

    def values(self) -> dict[str, torch.Tensor]:
        return {label: variable.value().clone() for label, variable in self.graph.contents.variables.items()}


class Saves:
    """Saves at random moments, which are not those in which steps end."""

    def __init__(self, graph: Any, folder: Path, often: float) -> None:
        self.session, self.folder, self.often, self.random = default_session(graph), folder, often, random.Random(1)
        self.files: list[Path] = []

    def on_step(self, progress: Any) -> None:
        if self.random.random() < self.often:
            self.files.append(self.folder / f"{progress.step}.json")
            self.session.save(self.files[-1])


@pytest.mark.parametrize("kind", ["source", "arrays"])
def test_a_training_goes_on_from_any_file_as_if_nothing_was(connect, tmp_path: Path, kind: str) -> None:
    whole = Net()
    assert whole.fit(kind).steps == STEPS
    there = Net()
    cluster = connect(1)  # more tasks draw noise of their own
    saves = Saves(there.graph, tmp_path, 0.2)
    there.fit(kind, callbacks=[saves])
    cluster.close()
    assert len(saves.files) > 4
    for path in saves.files:
        again = Net()
        taken = checkpoint.load(path)[1]["training"]["steps"]
        rest = again.fit(kind, resume=path).steps
        assert taken + rest == STEPS
        for label, value in whole.values().items():
            torch.testing.assert_close(again.values()[label], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["async", "bounded", "sync", "allreduce"])
def test_values_and_count_are_of_one_cut(connect, tmp_path: Path, mode: str) -> None:
    options: dict[str, Any] = {"mode": mode, "staleness": 1 if mode == "bounded" else None}
    counters = Counters()
    connect(2)
    saves = Saves(counters.train.graph, tmp_path, 0.05)
    steps = tfnb.fit(counters.train, list(counters.rows(300)), callbacks=[saves], **options).steps
    assert steps == 300 and len(saves.files) > 5
    for path in saves.files:
        values, about = checkpoint.load(path)
        assert [*{float(-value[0]) for value in values.values()}] == [about["training"]["steps"]]


@pytest.mark.parametrize("kind", ["source", "arrays"])
def test_checkpoints_of_fit_there_are_each_of_one_step(connect, tmp_path: Path, kind: str) -> None:
    whole, there = Net(), Net()
    whole.fit(kind)
    cluster = connect(1)
    saver = tfnb.train.Saver(tmp_path, keep=100)
    result = there.fit(kind, checkpoint=saver, checkpoint_every=1e-6)
    cluster.close()
    assert result.checkpoint == tmp_path / f"ckpt-{STEPS}.json" and len(saver.paths) > 2
    for path in saver.paths[:: len(saver.paths) // 3]:
        taken = checkpoint.load(path)[1]["training"]["steps"]
        assert path.name == f"ckpt-{taken}.json"
        again = Net()
        assert taken + again.fit(kind, resume=path).steps == STEPS
        for label, value in whole.values().items():
            torch.testing.assert_close(again.values()[label], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_values_of_a_checkpoint_of_fit_are_of_one_cut(connect, tmp_path: Path, mode: str) -> None:
    counters = Counters()
    connect(2)
    saver = tfnb.train.Saver(tmp_path, keep=1000)
    rows = list(counters.rows(300))
    assert tfnb.fit(counters.train, rows, checkpoint=saver, checkpoint_every=1e-6, mode=mode).steps == 300
    assert len(saver.paths) > 2
    for path in saver.paths:
        values, about = checkpoint.load(path)
        assert [*{float(-value[0]) for value in values.values()}] == [about["training"]["steps"]]
