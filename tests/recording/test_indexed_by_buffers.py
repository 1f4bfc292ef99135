"""A whole number in a module's buffer, as an index: each run takes the number of then, and not that of the sample."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tfnb


class Ring(nn.Module):
    """Six places, and the number of the next one."""

    def __init__(self, use: Callable[[Ring, Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))
        self.register_buffer("places", torch.zeros(6))
        self.weight = nn.Parameter(torch.ones(6))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        with torch.no_grad():
            self.use(self, y)
            self.at += 1
            self.at %= 5
        return (y * self.weight[self.at]).sum()


def set_item(ring: Ring, y: Tensor) -> None:
    ring.places[ring.at] = y.sum()
    ring.places[ring.at] *= 2


def two_axes(ring: Ring, y: Tensor) -> None:
    ring.places.view(2, 3)[ring.at % 2, ring.at % 3] += y.sum()


USES: dict[str, Callable[[Ring, Tensor], object]] = {
    "set": set_item,
    "axes": two_axes,
    "slice": lambda ring, y: ring.places[ring.at : ring.at + 2].add_(y.sum()),
    "first": lambda ring, y: ring.places[: ring.at].add_(y.sum()),
    "narrow": lambda ring, y: ring.places.narrow(0, ring.at, 2).add_(y.sum()),
    "select": lambda ring, y: ring.places.select(0, ring.at).add_(y.sum()),
    "arange": lambda ring, y: ring.places.index_add_(0, torch.arange(ring.at), y[: ring.at]),
    "roll": lambda ring, y: ring.places.add_(torch.roll(y, ring.at)),
    "roll axes": lambda ring, y: ring.places.add_(y.view(2, 3).roll((ring.at, 1), (1, 0)).flatten()),
}


@pytest.mark.parametrize("use", USES)
def test_steps_are_those_of_plain_torch(use: str) -> None:
    torch.manual_seed(0)
    plain, batches = Ring(USES[use]), torch.randn(7, 6)
    net, expected = copy.deepcopy(plain), []
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss = plain(batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    before = copy.deepcopy(net.state_dict())
    with warnings.catch_warnings(), tfnb.record():
        warnings.simplefilter("error")
        x = tfnb.placeholder(batches[0], shape=(6,))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        loss = net(x)
        loss.backward()
        step = optimizer.step()
    net.load_state_dict(before)
    found = [tfnb.run([loss, step], {x: batch})[0].item() for batch in batches]
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(net.state_dict(), plain.state_dict())


def test_a_number_outside_of_the_axis_is_an_error_of_the_run() -> None:
    ring = Ring(set_item)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(6), shape=(6,))
        loss = ring(x)
        written = tfnb.effects()
    ring.at.fill_(9)
    with pytest.raises(tfnb.errors.InvalidArgument, match=r"places|index"):
        tfnb.run([loss, written], {x: torch.ones(6)})


DOORS = {
    "step": lambda x, n: x[::n], "axis": lambda x, n: x.sum(n % 2), "list": lambda x, n: x * n.reshape(1).tolist()[0],
    "number": lambda x, n: x * n.tolist(), "array": lambda x, n: x * float(n.numpy()),
    "sections": lambda x, n: torch.tensor_split(x, n.reshape(1))[0],
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore:.*took the sample")
def test_a_count_that_leaves_by_another_door_is_told(door: str) -> None:
    """The graph has the number of the sample, and each run writes another one."""
    net = nn.Module()
    net.register_buffer("n", torch.tensor(1))
    with pytest.warns(UserWarning, match="Python took the value of n, which this recording writes"), tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        DOORS[door](x, net.n)
        net.n += 1
        tfnb.effects()
