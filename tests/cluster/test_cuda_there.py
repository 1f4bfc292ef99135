"""Tasks that share a CUDA device: values equal, those of the graph on the device, nothing left of them there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
ROWS = 48


def trained(model, optimizer):
    """Keys, what to fetch, and data of a small classifier on the device, in float64."""
    torch.manual_seed(0)
    data, labels = torch.randn(ROWS, 6, dtype=torch.float64), torch.randint(3, (ROWS,))
    with tfnb.record(device="cuda") as g:
        x, y = tfnb.placeholder(data[:4], name="x"), tfnb.placeholder(labels[:4], name="y")
        loss = F.cross_entropy(model(x), y)
        train = optimizer.minimize(loss)
    return g, [train, loss], {x: data, y: labels}


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double().cuda()


def bytes_there():
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0


@pytest.mark.parametrize("optimizer", [lambda: tfnb.train.Adam(0.01), lambda: tfnb.train.SGD(0.1, momentum=0.9)])
def test_runs_and_trainings_equal_those_of_one_process(connect, dask, optimizer):
    mine = net()
    theirs = copy.deepcopy(mine)
    here, there = trained(mine, optimizer()), trained(theirs, optimizer())
    session = tfnb.Session(here[0], compile="off")
    wanted = [session.run(here[1], here[2])[1] for _ in range(3)]
    wanted_fit = tfnb.fit(here[1][0], here[2], batch_size=16, epochs=2, watch=[here[1][1]])
    cluster = connect(2)
    got = [tfnb.run(there[1], there[2])[1] for _ in range(3)]
    assert [str(loss.device) for loss in got] == ["cpu"] * 3 or [loss.is_cuda for loss in got] == [True] * 3
    torch.testing.assert_close([loss.cpu() for loss in got], [loss.cpu() for loss in wanted], rtol=1e-12, atol=0)
    got_fit = tfnb.fit(there[1][0], there[2], batch_size=16, epochs=2, watch=[there[1][1]], mode="sync")
    assert got_fit.steps == wanted_fit.steps == 6
    cluster.close()
    assert {str(p.device) for p in theirs.parameters()} == {"cuda:0"}
    for a, b in zip(theirs.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_asynchronous_tasks_train_and_leave_nothing_on_the_device(connect, dask):
    left = []
    for _ in range(2):
        _, (train, loss), feeds = trained(net(), tfnb.train.SGD(0.1))
        cluster = connect(2)
        first = float(tfnb.run(loss, feeds))
        assert tfnb.fit(train, feeds, batch_size=8, epochs=4, mode="async").steps == 24
        assert float(tfnb.run(loss, feeds)) < first
        assert all("cuda:0" in task.info["devices"] for task in cluster._engine.tasks)
        cluster.close()
        left.append(dask.run(bytes_there))
    assert left[1] == left[0]  # workspaces of libraries stay, in the processes that were tasks


def test_a_tensor_of_the_device_is_fed_and_comes_back(connect):
    with tfnb.record(device="cuda"):
        x = tfnb.placeholder(torch.ones(1000, 64), name="x")
        y = (x * 2).sum(1)
    connect(1)
    fed = torch.rand(1000, 64, device="cuda")
    torch.testing.assert_close(tfnb.run(y, {x: fed}).cpu(), (fed * 2).sum(1).cpu())
