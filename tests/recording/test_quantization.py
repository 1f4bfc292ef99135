"""Quantization-aware training: fake quantization and observers, recorded with eager torch's gradients and ranges."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao import quantization

import tfnb
from tfnb.errors import BranchChanged, Unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.ao"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*reduce_range:UserWarning"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.norm, self.head = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(12, 4)

    def forward(self, x):
        return self.leave(self.head(torch.relu(self.norm(self.conv(self.enter(x)))).flatten(1)))


def prepared(backend, version):
    torch.manual_seed(0)
    model = Net().train()
    model.qconfig = quantization.get_default_qat_qconfig(backend, version)
    return quantization.prepare_qat(model)


def recorded(model):
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(torch.randn(3, 2, 4, 4)), tfnb.placeholder(torch.tensor([0, 1, 2]))
        loss = F.cross_entropy(model(x), y)
        step = tfnb.train.Momentum(0.1, 0.9).minimize(loss)
    return tfnb.Session(graph), (x, y), (loss, step)


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_observers_move_in_runs_and_stop_when_they_are_disabled(backend):
    model = prepared(backend, 1)
    model(torch.randn(8, 2, 4, 4))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    session, feeds, fetches = recorded(model)
    for step in range(4):
        if step == 2:
            model.apply(quantization.disable_observer)
            twin.apply(quantization.disable_observer)
        x, y = torch.randn(2 + step, 2, 4, 4) * (1 + step), torch.randint(4, (2 + step,))
        found, _ = session.run(fetches, dict(zip(feeds, (x, y), strict=True)))
        optimizer.zero_grad()
        loss = F.cross_entropy(twin(x), y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_an_observer_of_channels_that_has_seen_no_batch_is_refused_with_the_cure():
    with pytest.raises(Unsupported, match=r"call the prepared model once before recording it.*\n.*model\(x\)"):
        recorded(prepared("fbgemm", 1))


@pytest.mark.filterwarnings("ignore:.*Python took the:UserWarning")
def test_an_observer_in_python_holds_for_as_long_as_it_is_on():
    model = prepared("fbgemm", 0)
    model(torch.randn(8, 2, 4, 4))
    twin = copy.deepcopy(model)
    session, feeds, (loss, _) = recorded(model)
    data = dict(zip(feeds, (torch.randn(5, 2, 4, 4), torch.randint(4, (5,))), strict=True))
    x, y = data.values()
    torch.testing.assert_close(session.run(loss, data), F.cross_entropy(twin(x), y).detach())
    model.apply(quantization.disable_observer)
    with pytest.raises(BranchChanged):
        session.run(loss, data)


@pytest.mark.parametrize("function", [
    lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7),
    lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s[:1].detach(), z[:1].int(), -8, 7),
    lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s.detach(), z.int(), 1, -8, 7),
    lambda x, s, z: torch._fake_quantize_learnable_per_tensor_affine(x, s[:1], z[:1], -8, 7, 0.5),
    lambda x, s, z: torch._fake_quantize_learnable_per_channel_affine(x, s, z, 1, -8, 7, 0.5),
])  # fmt: skip
def test_fake_quantization_has_the_gradients_of_torch(function):
    scale, zero = torch.rand(3) / 5 + 0.05, torch.zeros(3)
    with tfnb.record() as graph:
        given = [tfnb.placeholder(torch.randn(4, 3)), *(tfnb.placeholder(t, shape=(3,)) for t in (scale, zero))]
        grads = tfnb.gradients(function(*given).pow(3).sum(), given, unconnected="zero")
    fed = [torch.randn(7, 3), scale, zero]
    leaves = [tensor.clone().requires_grad_() for tensor in fed]
    wanted = torch.autograd.grad(function(*leaves).pow(3).sum(), leaves, allow_unused=True, materialize_grads=True)
    found = tfnb.Session(graph).run(grads, dict(zip(given, fed, strict=True)))
    torch.testing.assert_close(list(found), list(wanted))
