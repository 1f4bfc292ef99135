"""Tasks run compiled code as sessions do: where steps take long, as `Session(compile=)` says."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tfnb
from tfnb.cluster.driver import Cluster
from tfnb.execution.tiers.native.call import _KeptTensors


def recorded(net: nn.Module) -> tuple[tfnb.Graph, torch.Tensor, torch.Tensor, tfnb.Operation]:
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(torch.ones(4, 6).double()), tfnb.placeholder(torch.ones(4, 2).double())
        loss = nn.functional.mse_loss(net(x), y)
        train = tfnb.train.Momentum(0.1, 0.9).minimize(loss)
    return graph, x, y, train


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 2)).double()


def kept() -> int:
    """On a worker: values that calls of compiled code hold for the next call."""
    return sum(len(thing.storages) for thing in gc.get_objects() if type(thing) is _KeptTensors)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_tasks_compile_what_they_compute(
    connect: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    here, there = net(), net()
    xs, ys = torch.randn(48, 6).double(), torch.randn(48, 2).double()
    _, x, y, train = recorded(here)
    tfnb.fit(train, {x: xs, y: ys}, batch_size=8, epochs=3, shuffle=False)
    monkeypatch.setenv("TFNB_COMPILE", "now")
    _, x, y, train = recorded(there)
    with connect(2 if mode == "sync" else 1) as cluster:
        tfnb.fit(train, {x: xs, y: ys}, batch_size=8, epochs=3, shuffle=False, mode=mode)
        assert str(cluster.status()).count("compiled; ") == len(cluster.tasks)
        assert not any(cluster.client.run(kept).values()), "the next step is given other tensors"
    for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


def test_a_session_that_compiles_nothing_lets_tasks_compile_nothing(
    connect: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFNB_COMPILE", "now")
    graph, x, y, train = recorded(net())
    with connect(1) as cluster, tfnb.Session(graph, compile="off") as session:
        session.run(train, {x: torch.ones(2, 6).double(), y: torch.ones(2, 2).double()})
        assert "generated code" in str(cluster.status()) and "compiled" not in str(cluster.status())
