"""Recorded graphs to draw: a small convolution net, a residual net, a transformer, with and without training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.graph import Graph


def digits(*, train: bool = True) -> Graph:
    """A convolution net of four modules on 8 x 8 pictures."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    with tfnb.record("digits") as graph:
        x = tfnb.placeholder(torch.rand(8, 1, 8, 8))
        y = tfnb.placeholder(torch.randint(0, 10, (8,)))
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        if train:
            step = tfnb.train.Adam(1e-3).minimize(loss)
    return graph


class Bottleneck(nn.Module):
    """A block of a ResNet-50, eight channels where it has sixty-four."""

    def __init__(self, wide: int, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(wide, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(wide, out, 1, stride), nn.BatchNorm2d(out)) if wide != out else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual sum."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.down is None else self.down(x)
        return self.relu(out)


class ResNet(nn.Module):
    """The shape of torchvision's ResNet-50."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        wide = width
        for stage, count in enumerate(blocks):
            inner, layers = width * 2**stage, []
            for place in range(count):
                layers.append(Bottleneck(wide, inner, 4 * inner, 2 if stage and not place else 1))
                wide = 4 * inner
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(wide, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [B, 10]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet() -> Graph:
    """A ResNet-50 of narrow layers, forward."""
    model = ResNet()
    with tfnb.record("resnet") as graph:
        images = tfnb.placeholder(torch.rand(2, 3, 32, 32))
        logits = model(images)
    return graph


class Block(nn.Module):
    """A transformer block with attention before a feed-forward net."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [B, T, D]."""
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """A small GPT."""

    def __init__(self, layers: int, width: int = 16, words: int = 40, time: int = 8) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(time, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, words]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def gpt(layers: int = 12, *, train: bool = False) -> Graph:
    """A GPT of so many layers."""
    model = GPT(layers)
    with tfnb.record("gpt") as graph:
        tokens = tfnb.placeholder(torch.randint(0, 40, (4, 8)))
        logits = model(tokens)
        if train:
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            step = tfnb.train.AdamW(1e-3).minimize(loss)
    return graph
