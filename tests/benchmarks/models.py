"""Models that several benchmarks and tests use: plain torch, nothing of tfnb."""

from __future__ import annotations

from torch import nn


def mlp() -> nn.Module:
    """784-128-10, the network of the step benchmark."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def conv20(width: int = 16) -> nn.Module:
    """Twenty convolutions with batch norm, three poolings, one linear layer; input [B, 3, 32, 32]."""
    layers: list[nn.Module] = []
    channels = 3
    for place in range(20):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if place in (4, 9, 14) else []
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
