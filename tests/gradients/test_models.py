"""Gradients with a symbolic batch: recorded at 3 rows, run at 1 and 5, against torch autograd in float64.

Each row is ordinary torch code on a batch; what it needs of parameters it makes itself. Second order is the gradient
of the squared gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tfnb

Function = Callable[..., torch.Tensor]
BATCHES = (1, 5)


@pytest.fixture(autouse=True)
def double() -> Any:
    """Float64 parameters and inputs; torch's attention by its differentiable kernel."""
    torch.set_default_dtype(torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.set_default_dtype(torch.float32)


def features(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randn(rows, *shape)


def labels(count: int, *shape: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randint(0, count, (rows, *shape))


def _check(function: Function, params: list[Any], inputs: list[Callable[[int], torch.Tensor]], *, second: bool) -> None:
    """Record at 3 rows; at 1 and 5 rows compare the gradients by parameters and floating inputs."""
    samples = [draw(3) for draw in inputs]
    with tfnb.record() as g:
        fed = [tfnb.placeholder(s, shape=("B", *s.shape[1:])) for s in samples]
        xs = [*params, *(f for f in fed if f.is_floating_point())]
        grads = _dense(tfnb.gradients(function(*fed), xs, unconnected="zero"))
        if second:
            grads += _dense(tfnb.gradients(_square(grads), xs, unconnected="zero"))
    assert [str(guard) for guard in g.guards] == []
    for rows in BATCHES:
        batch = [draw(rows) for draw in inputs]
        got = tfnb.run(grads, dict(zip(fed, batch, strict=True)))
        for dx, expected in zip(got, _expected(function, params, batch, second), strict=True):
            torch.testing.assert_close(dx, expected, rtol=1e-6, atol=1e-8)


def _dense(grads: list[Any]) -> list[Any]:
    return [dx.to_dense() if isinstance(dx, tfnb.IndexedSlices) else dx for dx in grads]


def _square(grads: Any) -> torch.Tensor:
    parts = [(dx * dx).sum() for dx in grads]
    return sum(parts[1:], parts[0])


def _expected(function: Function, params: list[Any], batch: list[torch.Tensor], second: bool) -> list[torch.Tensor]:
    batch = [b.clone().requires_grad_() if b.is_floating_point() else b for b in batch]
    xs = [*params, *(b for b in batch if b.is_floating_point())]

    def grad(y: torch.Tensor, create: bool) -> list[torch.Tensor]:
        found = torch.autograd.grad(y, xs, create_graph=create, allow_unused=True)
        return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(xs, found, strict=True)]

    first = grad(function(*batch), second)
    again = grad(_square(first), False) if second else []
    return [dx.detach() for dx in (*first, *again)]


# -- models --------------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.out = nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        return self.out(F.adaptive_avg_pool2d(F.relu(self.conv2(x)), 1).flatten(1))


class Block(nn.Module):
    """A transformer block: attention and a gelu layer, each behind a layer norm."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, steps, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, steps, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, steps, width))
        return x + self.mlp(self.norm2(x))


class Tokens(nn.Module):
    """Embedded tokens through a recurrent layer to one logit row."""

    def __init__(self, layer: type[nn.Module], **kwargs: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=0)
        self.layer = layer(5, 4, batch_first=True, **kwargs)
        self.out = nn.Linear(8 if kwargs.get("bidirectional") else 4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(self.embedding(tokens))
        return self.out(states[:, -1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, bool]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), features(6), True),
    "convolution net": (ConvNet, features(1, 9, 9), True),
    "transformer block": (lambda: nn.Sequential(Block(), nn.Flatten(), nn.Linear(32, 3)), features(4, 8), True),
    "embedding, lstm": (lambda: Tokens(nn.LSTM), labels(7, 6), False),
    "embedding, deep gru": (
        lambda: Tokens(nn.GRU, num_layers=2, bidirectional=True, bias=False),
        labels(7, 4),
        False,
    ),
    "embedding, rnn": (lambda: Tokens(nn.RNN, nonlinearity="relu"), labels(7, 6), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    make, draw, second = MODELS[name]
    model = make()
    params = list(model.parameters())
    _check(lambda x, y: F.cross_entropy(model(x), y), params, [draw, labels(3)], second=second)


def test_model_in_evaluation_mode() -> None:
    model = ConvNet().eval()
    _check(lambda x: model(x).square().sum(), list(model.parameters()), [features(1, 9, 9)], second=True)


@pytest.mark.filterwarnings("ignore:size T became the constant")
def test_recurrent_layers_twice_fix_the_number_of_steps() -> None:
    net = nn.LSTM(3, 2, batch_first=True)
    _check(lambda x: net(x)[0].square().sum(), list(net.parameters()), [features(4, 3)], second=True)


# -- one row per family ----------------------------------------------------------------------------------------------

W = 6
SMOOTH = (F.gelu, F.silu, F.mish, F.softplus, F.elu, F.selu, F.logsigmoid, F.glu)


def _weight(*shape: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).reshape(shape)


FAMILIES: dict[str, tuple[Function, list[Any]]] = {
    "attention with a mask": (
        lambda x: F.scaled_dot_product_attention(x, x * 2, x.sin(), _weight(4, 4) > -0.5).square().sum(),
        [features(2, 4, 3)],
    ),
    "average pools": (
        lambda x: F.avg_pool2d(x, 3, 2, 1).square().sum() + F.avg_pool1d(x[:, 0], 2).exp().sum(), [features(2, 6, 6)],
    ),
    "batched products": (lambda x: (torch.einsum("bij,bkj->bik", x, x.cos()) @ x).square().sum(), [features(3, 4)]),
    "binary losses": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid())
        + F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        [features(W), features(W)],
    ),
    "convolutions of other ranks": (
        lambda x: F.conv1d(x, _weight(4, 2, 3), padding=1).square().sum()
        + F.conv_transpose1d(x, _weight(2, 3, 2), stride=2).square().sum()
        + F.conv3d(x.reshape(-1, 1, 2, 2, 3), _weight(2, 1, 1, 2, 2)).square().sum(),
        [features(2, 6)],
    ),
    "distances": (
        lambda x, y: F.mse_loss(x, y) + F.l1_loss(x, y) + F.smooth_l1_loss(x, y) + F.huber_loss(x, y, delta=0.5)
        + F.cosine_similarity(x, y).sum(), [features(W), features(W)],
    ),
    "gather, scatter": (
        lambda x: x.gather(1, x.argsort(1)[:, :2]).square().sum()
        + torch.zeros_like(x).scatter_add(1, x.argsort(1), x.square()).cos().sum(), [features(W)],
    ),
    "group and instance norm": (
        lambda x: (F.group_norm(x, 2) * x).square().sum() + F.instance_norm(x).pow(3).sum(), [features(4, 5)],
    ),
    "hinges": (
        lambda x, y: F.hinge_embedding_loss(x, y) + F.margin_ranking_loss(x, y, (x > 0).double() * 2 - 1, 0.1)
        + F.triplet_margin_loss(x, y, y.flip(1)), [features(W), features(W)],
    ),
    "index, index_put": (
        lambda x: x[:, [0, 2, 2]].square().sum() + x.index_put((torch.tensor([0]),), torch.tensor(2.0)).exp().sum()
        + x.index_select(1, torch.tensor([1, 1])).cos().sum(), [features(W)],
    ),
    "in-place writes": (lambda x: _written(x).square().sum(), [features(W)]),
    "joins and parts": (
        lambda x: torch.cat([x, x.square()]).sin().sum() + torch.stack([x, x.exp()], 1)[:, 0, 1:5:2].square().sum()
        + sum(p.prod(1).sum() for p in x.split([1, 2, 3], 1)) + x.unfold(1, 3, 2).square().sum(), [features(W)],
    ),
    "labels": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, ignore_index=1) + F.nll_loss(F.log_softmax(x, 1), y)
        + F.kl_div(F.log_softmax(x, 1), F.softmax(x * 2, 1), reduction="batchmean"),
        [features(4), labels(4)],
    ),
    "linear solves": (
        lambda x: torch.linalg.solve(x @ x.mT + 4 * torch.eye(3), x).sum()
        + torch.linalg.cholesky(x @ x.mT + 4 * torch.eye(3)).square().sum()
        + torch.linalg.inv(x + 9 * torch.eye(3)).sum(),
        [features(3, 3)],
    ),
    "masks": (
        lambda x: torch.where(x > 0, x.square(), x * 3).sum() + x.masked_fill(x < -1, 2.0).exp().sum(), [features(W)],
    ),
    "max pools": (
        lambda x: F.max_pool2d(x, 2).square().sum() + F.adaptive_max_pool2d(x, 3).exp().sum(), [features(2, 6, 6)],
    ),
    "norms": (
        lambda x: F.normalize(x).pow(3).sum() + x.norm(dim=0).sum() + F.rms_norm(x, (W,)).exp().sum()
        + F.layer_norm(x, (W,)).pow(3).sum(), [features(W)],
    ),
    "pads": (
        lambda x: F.pad(x, (1, 2)).square().sum() + F.pad(x, (2, 1), mode="reflect").pow(3).sum()
        + F.pad(x, (1, 1), mode="replicate").exp().sum() + F.pad(x, (1, 1), mode="circular").cos().sum(),
        [features(2, W)],
    ),
    "reductions": (
        lambda x: x.var(0, correction=0).sum() + x.std(1).sum() + x.logsumexp(0).sum() + x.amax(1).square().sum()
        + x.cumsum(0).square().sum() + x.prod(1).sum() + x.mean() ** 2 + x.max(0).values.exp().sum(), [features(W)],
    ),
    "repeats and order": (
        lambda x: x.repeat(2, 3).square().sum() + x.flip(0).mul(x).sum() + x.roll(1, 0).mul(x).sum()
        + x.sort(1).values.mul(_weight(W)).square().sum() + x.topk(2, 1).values.exp().sum()
        + x.repeat_interleave(2, 1).cos().sum(), [features(W)],
    ),
    "resizes": (
        lambda x: F.interpolate(x, scale_factor=2).square().sum()
        + F.interpolate(x, size=(5, 7), mode="bilinear").pow(3).sum(), [features(2, 3, 4)],
    ),
    "smooth activations": (
        lambda x: sum(f(x).square().sum() for f in SMOOTH), [features(W)],
    ),
    "softmax": (lambda x: F.softmax(x, 1).square().sum() + F.log_softmax(x, 0).exp().pow(2).sum(), [features(W)]),
}  # fmt: skip


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, 1] = x[:, 0].square()
    y[:, 2:4] += 1
    y.mul_(x)
    return y


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_family(name: str) -> None:
    function, inputs = FAMILIES[name]
    _check(function, [], inputs, second=True)


# -- what draws numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [F.dropout, F.dropout1d, F.alpha_dropout])
def test_dropout_gives_back_through_the_same_mask(drop: Any) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3, 8))
        y = drop(x, 0.5, True)
        (dx,) = tfnb.gradients(y, [x])
    y, dx = tfnb.run([y, dx], {x: torch.ones(6, 3, 8)})
    kept = dx != 0
    assert 0 < kept.sum() < kept.numel()
    assert y[kept].unique().numel() == 1
    assert dx[kept].unique().numel() == 1
    if drop is not F.alpha_dropout:  # which also shifts
        assert torch.equal(y, dx)


def test_attention_dropout_gives_back_through_the_same_mask() -> None:
    with tfnb.record():
        q, k, v = (tfnb.placeholder(torch.randn(2, 3, 4, 5), shape=("B", 3, 4, 5)) for _ in range(3))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        (dv,) = tfnb.gradients(y, [v])
    y, dv, value = tfnb.run([y, dv, v], {t: torch.randn(2, 3, 4, 5) for t in (q, k, v)})
    torch.testing.assert_close((dv * value).sum(), y.sum())  # y is linear in v
