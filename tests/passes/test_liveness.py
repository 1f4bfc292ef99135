"""The predicted peak is the measured one, and moving nodes lowers it without changing a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

import tfnb
from tests.graph.build import evaluate
from tests.graph.strategies import graphs
from tests.passes.test_pipeline import all_values
from tfnb.execution import lower
from tfnb.graph import Graph, Value
from tfnb.graph.check import check
from tfnb.passes import order, peak, prune, split


def trained(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[Graph, list[Any], dict[Any, torch.Tensor]]:
    with tfnb.record() as g:
        fed = {tfnb.placeholder(x, shape=tuple(x.shape)): x, tfnb.placeholder(y, shape=tuple(y.shape)): y}
        a, b = fed
        loss = nn.functional.mse_loss(net(a), b)
        step = tfnb.train.SGD(0.1).minimize(loss)
    return g, [loss, step], fed


def network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Large activations in front, large weights behind."""
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(8, 256, 8), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 4),
    )  # fmt: skip
    return net, torch.randn(64, 1, 32, 32), torch.randn(64, 4)


def bits(values: Any) -> list[bytes]:
    return [v.detach().numpy().tobytes() for v in values]


def test_large_weights_gradients_come_last() -> None:
    torch.manual_seed(0)
    net, x, y = network()
    g, (loss, step), fed = trained(net, x, y)
    fetches, keys = [loss.value, step.value], [key.value for key in fed]
    before = prune(g, fetches, keys)
    after = lower(g, fetches, keys).graph
    assert peak(after, fetches, keys) < 0.9 * peak(before, fetches, keys)
    masks = [n.attrs["output_mask"] for n in after.nodes if n.op == "aten.convolution_backward.default"]
    assert masks == [[True, False, False], [False, True, True], [False, True, True]]
    start = [p.detach().clone() for p in net.parameters()]
    tfnb.run(step, fed)
    got = bits(net.parameters())
    with torch.no_grad():
        for p, old in zip(net.parameters(), start, strict=True):
            p.copy_(old)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=True)
    nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
    for p, mine in zip(net.parameters(), got, strict=True):
        torch.testing.assert_close(torch.frombuffer(bytearray(mine), dtype=p.dtype).view(p.shape), p.detach())


@pytest.mark.parametrize("width", [64, 700])
def test_the_predicted_peak_is_the_measured_one(width: int) -> None:
    net = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Sigmoid(), nn.Linear(width, 4))
    g, (loss, step), fed = trained(net, torch.randn(16, 32), torch.randn(16, 4))
    session = tfnb.Session(g, compile="off")
    session.run([loss, step], fed, trace=True)
    assert session.trace is not None
    fetches, keys = [loss.value, step.value], [key.value for key in fed]
    assert peak(lower(g, fetches, keys).graph, fetches, keys) == pytest.approx(session.trace.peak, rel=0.02)


def test_partial_gradients_are_added_as_they_come() -> None:
    w = nn.Parameter(torch.randn(200, 200, dtype=torch.float64) / 15)
    with tfnb.record() as g:
        h = x = tfnb.placeholder(torch.randn(2, 200, dtype=torch.float64), shape=(2, 200))
        for _ in range(20):
            h = torch.tanh(h @ w)
        (dw,) = tfnb.gradients(h.sum(), [w])
    ask = [dw.value], [x.value]
    before = prune(g, *ask)  # later passes would make one product of it
    after = order(before, *ask)
    assert peak(after, *ask) < 0.35 * peak(before, *ask)
    h = data = torch.randn(2, 200, dtype=torch.float64)
    for _ in range(20):
        h = torch.tanh(h @ w)
    torch.testing.assert_close(tfnb.run(dw, {x: data}), torch.autograd.grad(h.sum(), w)[0])


@given(contents=graphs())
def test_moved_nodes_compute_the_same(contents: Any) -> None:
    graph = Graph("g", contents)
    values = all_values(contents)
    after = order(split(graph, values[-1:]), values[-1:], [])
    check(after.contents)
    feed = {"x": torch.randn(2, 3)}
    want, got = evaluate(contents, feed), evaluate(after.contents, feed)
    for value in values:
        torch.testing.assert_close(got[value], want[value], equal_nan=True, rtol=0, atol=0)


def test_sizes_by_name_change_the_prediction() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 10))
        y = x.exp().sin()
    name = next(iter(g.nodes[0].outputs[0].symbols))
    ask = ([y.value], [Value(x.value.node)])
    assert peak(g, *ask, {name: 1000}) == 2 * 1000 * 10 * 4
    assert peak(g, *ask) == 2 * 32 * 10 * 4
