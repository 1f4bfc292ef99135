"""Image models as plain torch modules: the exact sizes by argument, small ones for quick tests.

Nothing of tfnb. Inputs are [B, C, H, W]; classifiers return logits [B, classes].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

# -- residual networks ---------------------------------------------------------------------------------------------


class Shortcut(nn.Module):
    """What a residual block adds: the input, projected where width or resolution change."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.change: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.change = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(x)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, as in ResNet-18 and 34."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = Shortcut(channels, width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions, as in ResNet-50."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.BatchNorm2d(out)
        self.shortcut = Shortcut(channels, out, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm3(self.conv3(self.relu(self.norm2(self.conv2(out)))))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Stem, four stages that double the width and halve the resolution, mean over the image, one linear layer."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], *, width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        channels, stages = width, []
        for stage, depth in enumerate(depths):
            blocks = []
            for place in range(depth):
                blocks.append(block(channels, width << stage, 2 if stage and not place else 1))
                channels = (width << stage) * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool, self.out = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.flatten(self.pool(self.stages(self.stem(x))), 1))


def resnet18(*, width: int = 64, classes: int = 1000) -> ResNet:
    """ResNet-18."""
    return ResNet(BasicBlock, (2, 2, 2, 2), width=width, classes=classes)


def resnet50(*, width: int = 64, classes: int = 1000) -> ResNet:
    """ResNet-50: 25.6 million parameters at the default width."""
    return ResNet(Bottleneck, (3, 4, 6, 3), width=width, classes=classes)


# -- plain stacks --------------------------------------------------------------------------------------------------


class VGG(nn.Module):
    """VGG-A (configuration of 11 layers): 3x3 convolutions, five poolings, three linear layers with dropout."""

    def __init__(
        self, *, width: int = 64, classes: int = 1000, grid: int = 7, hidden: int = 4096, dropout: float = 0.5
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for factor in (1, 0, 2, 0, 4, 4, 0, 8, 8, 0, 8, 8, 0):
            if factor:
                layers += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = factor * width
            else:
                layers.append(nn.MaxPool2d(2, 2))
        self.features, self.pool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(grid)
        self.classifier = nn.Sequential(
            nn.Linear(channels * grid * grid, hidden), nn.ReLU(True), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.ReLU(True), nn.Dropout(dropout), nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.features(x))
        return self.classifier(x.view(x.size(0), -1))


class DenseLayer(nn.Module):
    """Norm, relu, convolution; its result is appended to its input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class DenseNet(nn.Module):
    """Densely connected blocks with halving transitions between them."""

    def __init__(self, *, depths: Sequence[int] = (6, 12, 24, 16), growth: int = 32, classes: int = 1000) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for stage, depth in enumerate(depths):
            if stage:
                layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
            for _ in range(depth):
                layers.append(DenseLayer(channels, growth))
                channels += growth
        self.features, self.out = nn.Sequential(*layers), nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.features(x).relu().mean((2, 3)))


# -- inception -----------------------------------------------------------------------------------------------------


def _conv(channels: int, out: int, size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, size, padding=size // 2, bias=False), nn.BatchNorm2d(out, eps=0.001), nn.ReLU(True)
    )


class Inception(nn.Module):
    """Four branches side by side: 1x1, 3x3, 5x5 and a pooling."""

    def __init__(self, channels: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.one = _conv(channels, one, 1)
        self.three = nn.Sequential(_conv(channels, three[0], 1), _conv(three[0], three[1], 3))
        self.five = nn.Sequential(_conv(channels, five[0], 1), _conv(five[0], five[1], 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), _conv(channels, pool, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in (self.one, self.three, self.five, self.pool)], 1)


class GoogLeNet(nn.Module):
    """Inception blocks with an auxiliary head, which only training uses."""

    def __init__(self, *, width: int = 16, classes: int = 1000, dropout: float = 0.2) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(
            _conv(3, 4 * w, 3), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, ceil_mode=True), _conv(4 * w, 12 * w, 3)
        )
        self.mixed1 = Inception(12 * w, 4 * w, (6 * w, 8 * w), (w, 2 * w), 2 * w)
        self.down = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.mixed2 = Inception(16 * w, 8 * w, (8 * w, 12 * w), (2 * w, 6 * w), 4 * w)
        self.mixed3 = Inception(30 * w, 12 * w, (6 * w, 13 * w), (w, 3 * w), 4 * w)
        self.aux = nn.Sequential(
            nn.AdaptiveAvgPool2d((4, 4)), _conv(30 * w, 8 * w, 1), nn.Flatten(), nn.Linear(128 * w, 64 * w), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(64 * w, classes),
        )  # fmt: skip
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(32 * w, classes)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.mixed2(self.down(self.mixed1(self.stem(x))))
        aux = self.aux(x) if self.training else None
        x = F.adaptive_avg_pool2d(self.mixed3(x), (1, 1))
        return self.out(self.dropout(torch.flatten(x, 1))), aux


# -- small and mobile ----------------------------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    """Channels weighted by what the whole image says."""

    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, reduced, 1), nn.Conv2d(reduced, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class InvertedResidual(nn.Module):
    """Expand, depthwise convolution, squeeze and excite, project; added to the input where shapes allow."""

    def __init__(self, channels: int, out: int, stride: int, expand: int, activation: type[nn.Module]) -> None:
        super().__init__()
        wide = channels * expand
        self.keeps = stride == 1 and channels == out
        self.layers = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), activation(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            activation(inplace=True), SqueezeExcite(wide, max(wide // 4, 1)),
            nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.keeps else self.layers(x)


class MobileNet(nn.Module):
    """MobileNet-style: depthwise convolutions, ReLU6 and hard swish, squeeze and excite."""

    def __init__(
        self, *, widths: Sequence[int] = (16, 24, 24, 40, 40, 80, 96), classes: int = 1000, dropout: float = 0.2
    ) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for place, (channels, out) in enumerate(pairwise(widths)):
            activation = nn.ReLU6 if place < len(widths) // 2 else nn.Hardswish
            blocks.append(InvertedResidual(channels, out, 2 if channels != out else 1, 4, activation))
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.Hardswish()
        )
        self.blocks = nn.Sequential(*blocks)
        self.out = nn.Sequential(nn.Dropout(dropout), nn.Linear(widths[-1], classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(self.stem(x)).mean([2, 3]))


# -- image to image ------------------------------------------------------------------------------------------------


def _double(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(True),
        nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(True),
    )  # fmt: skip


class UNet(nn.Module):
    """Down, up, and the skips between; sizes that do not halve evenly are padded."""

    def __init__(
        self, *, channels: int = 3, width: int = 64, depth: int = 4, classes: int = 2, bilinear: bool = False
    ) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.start = _double(channels, width)
        self.downs = nn.ModuleList(_double(a, b) for a, b in pairwise(widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.ups = nn.ModuleList(
            nn.Sequential(up, nn.Conv2d(a, b, 1)) if bilinear else nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs
        )
        self.merges = nn.ModuleList(_double(2 * b, b) for _, b in pairs)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [self.start(x)]
        for down in self.downs:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(self.ups, self.merges, strict=True):
            x, skip = up(x), skips.pop()
            dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = merge(torch.cat([skip, F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])], dim=1))
        return self.out(x)


class AutoEncoder(nn.Module):
    """Strided convolutions to a code, transposed ones back; group and instance norm."""

    def __init__(self, *, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(channels, width, 3, 2, 1), nn.GroupNorm(4, width), nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.InstanceNorm2d(2 * width, affine=True), nn.ELU(),
        )  # fmt: skip
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 3, 2, 1, output_padding=1), nn.GroupNorm(2, width), nn.PReLU(width),
            nn.ConvTranspose2d(width, channels, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))
