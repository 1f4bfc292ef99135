"""The programs' functions in torch, and a program or one of the tests' models as a torch module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.benchmarks.peers.programs import FORWARD
from tests.models.sequence import GPT
from tests.models.vision import resnet18

relu, sigmoid, tanh, dense, cross_entropy = torch.relu, torch.sigmoid, torch.tanh, F.linear, F.cross_entropy
pool, images = F.max_pool2d, lambda x: x


def conv(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, stride: int, padding: int) -> torch.Tensor:
    return F.conv2d(x, w, b, stride, padding)


def average(x: torch.Tensor) -> torch.Tensor:
    return x.mean((2, 3))


def flatten(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1)


def concat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts, 1)


def split4(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.chunk(4, 1)


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


def loop(cell: Callable[..., Any], state: Any, xs: torch.Tensor, time: int) -> Any:
    for place in range(time):
        state = cell(state, xs[place])
    return state


class Net(nn.Module):
    """A program as a module: ``net(*data)`` is the loss. ops: other functions than those of this file."""

    def __init__(self, program: str, sizes: dict[str, int], ops: Any = None) -> None:
        super().__init__()
        self.program, self.sizes, self.ops = FORWARD[program], sizes, ops or sys.modules[__name__]
        self.weights = nn.ParameterList()

    def forward(self, *data: torch.Tensor) -> torch.Tensor:
        return self.program(self.ops, list(self.weights), data, **self.sizes)


class Classified(nn.Module):
    """A model with the loss of its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x).flatten(0, -2), labels.flatten())


MODULES: dict[str, Callable[..., nn.Module]] = {
    "gpt": lambda layers, vocabulary, width, heads, time, **_: GPT(
        layers=layers, vocabulary=vocabulary, width=width, heads=heads, time=time
    ),
    "resnet18": lambda **_: resnet18(),
}


def network(task: dict[str, Any], weights: list[np.ndarray], ops: Any = None) -> nn.Module:
    """The task's module with these weights, on the task's device."""
    if task["program"] in FORWARD:
        net = Net(task["program"], task["sizes"], ops)
        net.weights.extend(nn.Parameter(tensor) for tensor in tensors(task, weights))
        return net
    model = MODULES[task["program"]](**task["sizes"])
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(array))
    return Classified(model).to(task["device"])


def tensors(task: dict[str, Any], arrays: list[np.ndarray]) -> list[torch.Tensor]:
    """Copies in memory of torch's own, which is aligned as its kernels like it."""
    return [torch.tensor(array, device=task["device"]) for array in arrays]
