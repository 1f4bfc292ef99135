"""Small forms of AlexNet and GoogleNet on generated pictures: `notebooks/evaluation/networks.ipynb`.

A picture has 32 x 32 pixels of noise with one of ten bright shapes on them, of a random size, place and contrast. The
networks are trained from the same weights on the same batches by plain PyTorch, by tfnb, and by tfnb with the network
cut in two parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.over_tasks import on

SIDE, BATCH, RATE = 32, 32, 0.05

Distances = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SHAPES: dict[str, Distances] = {  # from coordinates in units of the shape's size to below one inside of the shape
    "disc": lambda x, y: torch.hypot(x, y),
    "ring": lambda x, y: (torch.hypot(x, y) - 0.75).abs() * 4,
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()),
    "frame": lambda x, y: (torch.maximum(x.abs(), y.abs()) - 0.75).abs() * 4,
    "diamond": lambda x, y: x.abs() + y.abs(),
    "cross": lambda x, y: torch.maximum(torch.minimum(x.abs(), y.abs()) * 4, torch.maximum(x.abs(), y.abs())),
    "saltire": lambda x, y: torch.maximum((x.abs() - y.abs()).abs() * 2.5, torch.maximum(x.abs(), y.abs())),
    "bar": lambda x, y: torch.maximum(x.abs(), y.abs() * 4),
    "post": lambda x, y: torch.maximum(x.abs() * 4, y.abs()),
    "wedge": lambda x, y: torch.maximum(y.abs(), (x.abs() - (y + 1) / 2) + 1),
}


def pictures(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many pictures (count, 1, 32, 32) of float32, and the number of the shape in each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SHAPES), (count,), generator=generator)
    size, contrast = (torch.rand(count, 1, 1, generator=generator) for _ in range(2))
    size = 4 + 8 * size
    middle = 12 + 8 * torch.rand(2, count, 1, 1, generator=generator)
    grid = torch.arange(SIDE, dtype=torch.float32)
    x, y = (grid[None, None, :] - middle[0]) / size, (grid[None, :, None] - middle[1]) / size
    distance = torch.stack([measure(x.expand(-1, SIDE, -1), y.expand(-1, -1, SIDE)) for measure in SHAPES.values()])
    inside = (distance[labels, torch.arange(count)] < 1).float()
    noise = 0.5 * torch.randn(count, SIDE, SIDE, generator=generator)
    return (inside * (0.5 + contrast) + noise)[:, None], labels


class Inception(nn.Module):
    """GoogleNet's block: four paths beside each other."""

    def __init__(self, channels: int, one: int, three: int, five: int, projection: int) -> None:
        super().__init__()
        self.paths = nn.ModuleList([
            nn.Conv2d(channels, one, 1),
            nn.Sequential(nn.Conv2d(channels, three // 2, 1), nn.ReLU(), nn.Conv2d(three // 2, three, 3, padding=1)),
            nn.Sequential(nn.Conv2d(channels, five // 2, 1), nn.ReLU(), nn.Conv2d(five // 2, five, 5, padding=2)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, projection, 1)),
        ])  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.cat([path(x) for path in self.paths], 1))


def _alexnet() -> tuple[nn.Module, nn.Module]:
    first = nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    return first, nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, len(SHAPES)))


def _googlenet() -> tuple[nn.Module, nn.Module]:
    first = nn.Sequential(nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.MaxPool2d(2), Inception(16, 8, 16, 4, 4))
    second = nn.Sequential(Inception(32, 8, 16, 4, 4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, len(SHAPES)))
    return first, second


NETS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "AlexNet, small": _alexnet, "GoogleNet, small": _googlenet,
}  # fmt: skip


class Trained(NamedTuple):
    """Losses of all steps, and the share of the test pictures that are named rightly."""

    losses: list[float]
    accuracy: float


Steps = Callable[[torch.Tensor, torch.Tensor], float]


def _plain(first: nn.Module, second: nn.Module) -> Steps:
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(parameters, RATE, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = F.cross_entropy(second(first(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _ours(executor: str) -> Callable[[nn.Module, nn.Module], Steps]:
    def made(first: nn.Module, second: nn.Module) -> Steps:
        with tfnb.record() as graph:
            x = tfnb.placeholder(torch.randn(BATCH, 1, SIDE, SIDE))
            y = tfnb.placeholder(torch.randint(len(SHAPES), (BATCH,)))
            with on(0):
                hidden = first(x)
            with on(1):
                loss = F.cross_entropy(second(hidden), y)
            train = tfnb.train.Momentum(RATE, 0.9).minimize(loss)
        session = tfnb.Session(graph, compile="off", executor=executor)
        return lambda *batch: float(session.run([loss, train], dict(zip((x, y), batch, strict=True)))[0])

    return made


WAYS: dict[str, Callable[[nn.Module, nn.Module], Steps]] = {
    "PyTorch": _plain, "tfnb": _ours("auto"), "tfnb, in two parts": _ours("parts"),
}  # fmt: skip


def train(net: str, way: str, seed: int, *, count: int, epochs: int) -> Trained:
    """Train a network from the weights of a seed, and look at as many pictures again that it has not seen."""
    torch.manual_seed(seed)
    first, second = NETS[net]()
    step = WAYS[way](first, second)
    x, y = pictures(count, 2 * seed)
    losses = [step(x[rows], y[rows]) for rows in _batches(count, epochs, seed)]
    x, y = pictures(count, 2 * seed + 1)
    with torch.no_grad():
        right = (second(first(x)).argmax(1) == y).double().mean()
    return Trained(losses, float(right))


def _batches(count: int, epochs: int, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        yield from order.split(BATCH)[: math.floor(count / BATCH)]
