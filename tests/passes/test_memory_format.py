"""Channels last where it is asked for: the same values, contiguous results, and graphs that are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument
from tfnb.graph import Graph
from tfnb.passes import LAID_OUT, LAYOUTS, optimize

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="channels last pays with oneDNN")


class Net(nn.Module):
    """Two convolutions, a pooling in two branches, a linear layer."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second, self.third = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)
        self.last = nn.Linear(2 * channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        both = torch.cat([self.second(x), self.third(x)], 1)
        return self.last(nn.functional.max_pool2d(both, 4).flatten(2).mean(2))


def optimized(graph: Graph, fetches: list[Any], x: torch.Tensor) -> Graph:
    return optimize(graph, [y.value for y in fetches], [x.value], LAYOUTS["channels_last"])


@pytest.mark.parametrize("rows", [4, 1, 9])
def test_values_and_gradients_are_torchs(rows: int) -> None:
    net = Net()
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3, 16, 16))
        y = net(x)
        features = net.first(x)
        grads = tfnb.gradients(y.square().sum(), [*net.parameters(), x])
    fetches = [y, features, *grads]
    assert any(LAID_OUT in node.tags for node in optimized(g, fetches, x).nodes)
    data = torch.randn(rows, 3, 16, 16, requires_grad=True)
    got = tfnb.Session(g, layout="channels_last").run(fetches, {x: data.detach()})
    assert all(tensor.is_contiguous() for tensor in got)
    want = net(data)
    wanted = torch.autograd.grad(want.square().sum(), [*net.parameters(), data])
    torch.testing.assert_close(got, [want.detach(), net.first(data).detach(), *wanted], rtol=1e-4, atol=1e-4)


def test_one_copy_enters() -> None:
    net = Net()
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3, 16, 16))
        (dw,) = tfnb.gradients(net(x).square().sum(), [net.first.weight])
    copies = [node for node in optimized(g, [dw], x).nodes if node.op == "aten.clone.default"]
    assert len(copies) == 1 and copies[0].attrs["memory_format"] is torch.channels_last


def test_a_training_step_moves_the_weights_alike() -> None:
    torch.manual_seed(0)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3, 16, 16))
        train = tfnb.train.SGD(0.01, momentum=0.9).minimize(net(x).square().mean())
    optimizer = torch.optim.SGD(twin.parameters(), 0.01, momentum=0.9)
    session = tfnb.Session(g, layout="channels_last")
    for _ in range(3):
        data = torch.randn(4, 3, 16, 16)
        session.run(train, {x: data})
        optimizer.zero_grad()
        twin(data).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(net.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: net.first(x).as_strided((4, 10), (10, 1)),
        lambda net, x: net.double()(x.double()),
        lambda net, x: net.first(x).view(torch.int32),
    ],
    ids=["strides", "double", "bytes"],
)
def test_left_alone(function: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
    net, data = Net().eval(), torch.randn(4, 3, 16, 16)
    want = function(net, data).detach()
    with tfnb.record() as g:
        x = tfnb.placeholder(data, shape=tuple(data.shape))
        y = function(net, x)
    assert not any(LAID_OUT in node.tags for node in optimized(g, [y], x).nodes)
    torch.testing.assert_close(tfnb.Session(g, layout="channels_last").run(y, {x: data}), want)


def test_many_weights_on_small_images_are_left_alone() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 64, 2, 2))
        y = nn.Conv2d(64, 64, 3, padding=1)(x)
    assert not any(LAID_OUT in node.tags for node in optimized(g, [y], x).nodes)


def test_without_being_asked_for_the_layout_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise: a convolution of these sizes adds in another order with channels last."""
    net, data = nn.Conv2d(64, 64, 3, padding=1), torch.randn(4, 64, 28, 28)
    with tfnb.record() as g:
        x = tfnb.placeholder(data)
        y = net(x)
    with torch.no_grad():
        assert torch.equal(tfnb.run(y, {x: data}), net(data))
        other = net(data.contiguous(memory_format=torch.channels_last)).contiguous()
    monkeypatch.setenv("TFNB_LAYOUT", "channels_last")
    assert torch.equal(tfnb.Session(g).run(y, {x: data}), other)
    assert torch.equal(tfnb.Session(g, layout="torch").run(y, {x: data}), net(data).detach())


def test_an_unknown_layout_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="layout is one of 'torch', 'channels_last', not 'nhwc'"):
        tfnb.Session(Graph("g"), layout="nhwc")
