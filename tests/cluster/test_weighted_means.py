"""Losses that are weighted means, divided over real tasks: the oracle is one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.over_tasks import on
from tests.weighted_losses import BATCH, LOSSES, Trained, assert_same, data
from tfnb.cluster.tasks.collectives import Bucket
from tfnb.errors import NonFiniteGradient
from tfnb.graph import Spec
from tfnb.passes.flow.merges import Weight

FEW = ("ignored and a penalty", "smoothed classes", "mask", "clamped mask", "index", "padding", "sum")


@pytest.mark.parametrize(("tasks", "mode", "names"), [(2, "sync", LOSSES), (3, "sync", FEW), (2, "allreduce", FEW)])
def test_tasks_train_as_one_process(connect: Callable[..., Any], tasks: int, mode: str, names: Any) -> None:
    expected = {name: Trained(*LOSSES[name], "Adam") for name in names}
    connect(tasks)
    for name, one in expected.items():
        assert_same(Trained(*LOSSES[name], "Adam", mode=mode), one)


def test_a_spare_task_and_tasks_on_their_own_take_the_same_steps(connect: Callable[..., Any]) -> None:
    expected = Trained(*LOSSES["mask"])
    connect(3)
    assert_same(Trained(*LOSSES["mask"], backup=1), expected)
    assert all(torch.isfinite(p).all() for p in Trained(*LOSSES["ignored"], mode="async").state)


def test_a_pipeline_weights_its_microbatches(connect: Callable[..., Any]) -> None:
    def trained(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(4)
        first, second, rows = nn.Linear(3, 5, dtype=torch.float64), nn.Linear(5, 4, dtype=torch.float64), data()
        with tfnb.record("staged"):
            x, z = tfnb.placeholder(rows["x"][:4], name="x"), tfnb.placeholder(rows["z"][:4], name="z")
            with on(0):
                h = torch.tanh(first(x))
            with on(1):
                loss = F.cross_entropy(second(h), z)
            train = tfnb.train.Adam(0.05).minimize(loss)
        about = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "watch": {"loss": loss}, "timeout": 240}
        told = tfnb.fit(train, {x: rows["x"], z: rows["z"]}, **{**about, **options})
        losses = torch.tensor([float(point["loss"]) for point in told.curve], dtype=torch.float64)
        return [losses, *(p.detach().clone() for p in (*first.parameters(), *second.parameters()))]

    whole = trained()
    connect(2)
    for schedule in ("1f1b", "gpipe"):
        found = trained(mode="pipeline", microbatches=3, schedule=schedule)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["sync", "allreduce"])
def test_a_batch_that_counts_nothing_changes_nothing(connect: Callable[..., Any], mode: str) -> None:
    """Gradients of 0 / 0 are an error, as all that is not finite; zeros are those of torch."""
    rows = data()
    x, none = rows["x"][:8], torch.full((8,), -100)
    connect(2)
    for is_nan in (False, True):
        model = nn.Linear(3, 4, dtype=torch.float64)
        before = model.weight.detach().clone()
        with tfnb.record("nothing"):
            a, z = tfnb.placeholder(x[:4]), tfnb.placeholder(none[:4])
            each = F.cross_entropy(model(a), z.clamp(min=0), reduction="none") * (z >= 0)
            loss = each.sum() / (z >= 0).sum() if is_nan else F.cross_entropy(model(a), z)
            train = tfnb.train.SGD(1.0).minimize(loss)
        if is_nan:
            with pytest.raises(NonFiniteGradient):
                tfnb.fit(train, {a: x, z: none}, batch_size=8, epochs=1, mode=mode, exact=False)
        else:
            tfnb.fit(train, {a: x, z: none}, batch_size=8, epochs=1, mode=mode, exact=False)
        torch.testing.assert_close(model.weight.detach(), before)


def test_a_bucket_sums_weights_along_and_takes_nothing_of_a_rank_without_any() -> None:
    specs = [Spec(torch.float32, (2,)), Spec(torch.float64, ())]
    brought = ([1.0, 2.0], 3.0), ([torch.nan, torch.nan], 0.0), ([5.0, 6.0], 1.0)
    buckets = [Bucket(["grad", "weight"], specs, [Weight(1), Weight()]) for _ in brought]
    for bucket, (gradient, weight) in zip(buckets, brought, strict=True):
        bucket.fill([torch.tensor(gradient), torch.tensor(weight, dtype=torch.float64)], 1 / 3, is_first=True)
    first = buckets[0]
    for other in buckets[1:]:
        for dtype, flat in first.flats.items():
            flat += other.flats[dtype]
    assert len(first.flats) == 1 and first.is_ready(3)
    torch.testing.assert_close(first.values()[0], torch.tensor([2.0, 3.0]))
    (lost,) = (bucket for bucket in [buckets[1]])
    with pytest.raises(NonFiniteGradient, match="nothing counts"):
        lost.values()
