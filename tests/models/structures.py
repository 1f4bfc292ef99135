"""Models of unusual structure as plain torch modules: bags, samples, tied and normed weights, graphs, two players.

Nothing of tfnb.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations


class Bags(nn.Module):
    """Embedding bags: rows of ids, or a flat list with offsets, possibly weighted."""

    def __init__(self, mode: str, *, vocabulary: int = 20, width: int = 6, classes: int = 3, **kwargs: Any) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(vocabulary, width, mode=mode, **kwargs), nn.Linear(width, classes)

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.out(self.bag(ids, offsets, per_sample_weights=weights))


class Recommender(nn.Module):
    """Wide and deep: factors of users and items, their product, and a small network."""

    def __init__(self, *, users: int = 12, items: int = 15, width: int = 5) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width, max_norm=None)
        self.bias = nn.Embedding(items, 1)
        self.deep = nn.Sequential(nn.Linear(2 * width, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        u, i = self.users(user), self.items(item)
        return (u * i).sum(-1) + self.bias(item).squeeze(-1) + self.deep(torch.cat([u, i], -1)).squeeze(-1)


class VAE(nn.Module):
    """Variational autoencoder: mean and log variance, a sample by reparameterisation, both terms of the loss."""

    def __init__(self, *, inputs: int = 12, hidden: int = 10, code: int = 4) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh())
        self.mean, self.logvar = nn.Linear(hidden, code), nn.Linear(hidden, code)
        self.decode = nn.Sequential(nn.Linear(code, hidden), nn.Tanh(), nn.Linear(hidden, inputs))

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        h = self.encode(x)
        mean, logvar = self.mean(h), self.logvar(h)
        std = torch.exp(0.5 * logvar)
        code = mean + std * (torch.randn_like(std) if noise is None else noise)
        return self.decode(code), mean, logvar

    @staticmethod
    def loss(x: torch.Tensor, out: torch.Tensor, mean: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
        likelihood = F.binary_cross_entropy_with_logits(out, x.sigmoid(), reduction="sum")
        divergence = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
        return (likelihood + divergence) / x.shape[0]


class GAN(nn.Module):
    """A generator and a discriminator."""

    def __init__(self, *, noise: int = 4, hidden: int = 12, data: int = 6) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(noise, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, data))
        self.judge = nn.Sequential(nn.Linear(data, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1))


class GraphConvolution(nn.Module):
    """Messages along edges, summed at their ends by index_add, with degrees by scatter_add."""

    def __init__(self, *, inputs: int = 5, hidden: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)

    @staticmethod
    def spread(x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        degree = torch.zeros(x.size(0)).scatter_add(0, target, torch.ones(target.size(0))) + 1
        scale = degree.rsqrt()
        messages = x[source] * (scale[source] * scale[target]).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, target, messages) + x / degree.unsqueeze(-1)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.spread(self.first(x), source, target))
        return self.second(self.spread(x, source, target))


class Siamese(nn.Module):
    """One network on two inputs; the distance of what it says."""

    def __init__(self, *, inputs: int = 6, width: int = 5) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, width))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.pairwise_distance(self.net(a), self.net(b))


class TiedAutoEncoder(nn.Module):
    """The decoder uses the encoder's weight, transposed."""

    def __init__(self, *, inputs: int = 6, width: int = 4) -> None:
        super().__init__()
        self.encode, self.bias = nn.Linear(inputs, width), nn.Parameter(torch.zeros(inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.encode(x)), self.encode.weight.t(), self.bias)


def normed_weights(*, inputs: int = 6, hidden: int = 8, classes: int = 3) -> nn.Module:
    """Spectral, weight and orthogonal parametrisations by torch."""
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(inputs, hidden)), nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(hidden, hidden)), nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(hidden, classes), orthogonal_map="matrix_exp"),
    )  # fmt: skip


def householder(*, inputs: int = 6, hidden: int = 4, classes: int = 3) -> nn.Module:
    """An orthogonal weight as a product of reflections."""
    return nn.Sequential(
        parametrizations.orthogonal(nn.Linear(inputs, hidden), orthogonal_map="householder"), nn.Tanh(),
        nn.Linear(hidden, classes),
    )  # fmt: skip


def cumulative_norms(*, channels: int = 2, width: int = 4, classes: int = 3) -> nn.Module:
    """Batch norms whose statistics are the mean of all batches so far; layers sized by their first input."""
    net = nn.Sequential(
        nn.BatchNorm2d(channels, momentum=None), nn.Flatten(), nn.LazyLinear(width),
        nn.LazyBatchNorm1d(momentum=None), nn.ReLU(), nn.LazyLinear(classes),
    )  # fmt: skip
    net(torch.randn(2, channels, 4, 4))
    return net


class Mixture(nn.Module):
    """Experts on every row, mixed by a gate with the two best kept."""

    def __init__(self, *, inputs: int = 6, experts: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, classes)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, chosen = self.gate(x).topk(2, dim=-1)
        weights = torch.zeros(x.shape[0], len(self.experts)).scatter(1, chosen, best.softmax(-1))
        outs = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("be,bec->bc", weights, outs)


class Norms(nn.Module):
    """Every normalisation layer once, on [B, C, T]."""

    def __init__(self, *, channels: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, padding="same", padding_mode="circular")
        self.norms = nn.Sequential(
            nn.GroupNorm(2, channels), nn.InstanceNorm1d(channels, affine=True, track_running_stats=True),
            nn.LocalResponseNorm(3), nn.BatchNorm1d(channels, affine=False), nn.Softplus(),
        )  # fmt: skip
        self.layer, self.rms = nn.LayerNorm(channels), nn.RMSNorm(channels)
        self.out = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms(self.conv(x)).transpose(1, 2)
        return self.out(self.rms(self.layer(x)).amax(1))
