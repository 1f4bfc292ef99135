"""`tfnb.watch` with a cluster: values of the tasks, and Variables from their servers, in run and in fit."""

from __future__ import annotations

import torch
from torch import nn

import tfnb


def test_runs_and_fit_there_are_watched(connect):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with tfnb.record("there"):
        x = tfnb.placeholder(torch.randn(4, 3), name="x")
        loss = model(x).square().mean()
        train = tfnb.train.SGD(0.1).minimize(loss)
    seen = tfnb.watch(loss, "weight:hist", every=1)
    connect(2)
    losses = [float(tfnb.run([train, loss], {x: torch.ones(4, 3)})[1]) for _ in range(3)]
    assert [value for _, value in seen.courses["loss"].points] == losses
    result = tfnb.fit(train, {x: torch.ones(16, 3)}, batch_size=4, watch=loss)
    assert result.steps == 4 and [name for name in result.history[0] if name not in ("epoch", "step")] == ["loss"]
    points = seen.courses["loss"].points
    assert seen.steps == 7 and len(points) == 7
    assert points[0][1] > points[-1][1]
    assert sum(seen.courses["weight"].histogram.counts) == 6
