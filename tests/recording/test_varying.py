"""One recording runs at every batch: recorded with 5 rows, run with 1, 2, 7 and 64, values and gradients of torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal, Poisson

import tfnb
from tfnb.errors import BranchChanged, ShapeError

ROWS = (1, 2, 7, 64)
Function = Callable[..., torch.Tensor]


def double(module: nn.Module, *, training: bool = False) -> nn.Module:
    """The module in float64, so that gradients can be compared closely."""
    return module.double().train(training)


def check(
    function: Function,
    *shapes: tuple[Any, ...],
    sizes: Any = None,
    ints: Mapping[int, int] | None = None,
    warned: Literal["error", "ignore"] = "error",
) -> Any:
    """Record ``function`` once, and compare values and gradients with torch's at other sizes.

    shapes: of the inputs; a letter varies. sizes: what the letters are in each run. ints: inputs that are integers
    below a number. warned: what a warning of the recording is.
    """
    ints = ints or {}
    sizes = [{"B": n} for n in ROWS] if sizes is None else sizes
    letters = sorted({a for shape in shapes for a in shape if isinstance(a, str)})
    recorded = dict(zip(letters, (5, 6, 9), strict=False))

    def draw(now: Mapping[str, int]) -> list[torch.Tensor]:
        drawn = []
        for place, shape in enumerate(shapes):
            size = [now[a] if isinstance(a, str) else a for a in shape]
            drawn.append(torch.randint(ints[place], size) if place in ints else torch.randn(size, dtype=torch.float64))
        return drawn

    floats = [i for i in range(len(shapes)) if i not in ints]
    with warnings.catch_warnings():
        warnings.simplefilter(warned)
        with tfnb.record() as graph:
            held = [tfnb.placeholder(x, shape=shape) for x, shape in zip(draw(recorded), shapes, strict=True)]
            out = function(*held)
            dxs = tfnb.gradients(out, [held[i] for i in floats], torch.cos(out.detach())) if floats else []
    for now in sizes:
        data = [x.requires_grad_(i in floats) for i, x in enumerate(draw(now))]
        expected = function(*data)
        starts = [data[i] for i in floats]
        wanted = torch.autograd.grad(expected, starts, torch.cos(expected.detach())) if floats else ()
        got = tfnb.run([out, *dxs], {h: x.detach() for h, x in zip(held, data, strict=True)})
        for value, reference in zip(got, (expected, *wanted), strict=True):
            torch.testing.assert_close(value, reference.detach(), rtol=1e-7, atol=1e-9)
    return graph


ROW: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "reshape(-1)": (lambda x: x.reshape(-1) * 2, ("B", 3, 4)),
    "reshape(-1, 6)": (lambda x: x.reshape(-1, 6).softmax(-1), ("B", 3, 4)),
    "flatten(1)": (lambda x: x.flatten(1).cumsum(1), ("B", 3, 4)),
    "flatten(0, 1)": (lambda x: x.flatten(0, 1).sin(), ("B", 3, 4)),
    "view(x.shape[0], -1)": (lambda x: x.view(x.shape[0], -1).exp(), ("B", 3, 4)),
    "unflatten": (lambda x: x.flatten(0, 1).unflatten(0, (-1, 3)).tanh(), ("B", 3, 4)),
    "arange(x.shape[0])": (lambda x: x * torch.arange(x.shape[0]).unsqueeze(1), ("B", 4)),
    "linspace": (lambda x: x * torch.linspace(0, 1, x.shape[0], dtype=x.dtype).unsqueeze(1), ("B", 4)),
    "tril_indices": (lambda x: (x @ x.T)[tuple(torch.tril_indices(x.shape[0], x.shape[0]))].sin().sum(), ("B", 4)),
    "eye(x.shape[0])": (lambda x: torch.eye(x.shape[0], dtype=x.dtype) @ x, ("B", 4)),
    "one_hot": (lambda x: F.one_hot(torch.arange(x.shape[0]) % 3, 3).to(x.dtype) * x, ("B", 3)),
    "expand": (lambda x: x.mean(0).expand(x.shape[0], -1) * x, ("B", 4)),
    "expand_as": (lambda x: x[:1].expand_as(x) * x, ("B", 4)),
    "repeat": (lambda x: x.repeat(2, 3) * 2, ("B", 4)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 0).cos(), ("B", 4)),
    "tile": (lambda x: x.tile(x.shape[0], 1), ("B", 2)),
    "new_zeros": (lambda x: x + x.new_ones(x.shape[0], 1), ("B", 4)),
    "mean over the batch": (lambda x: x - x.mean(0), ("B", 4)),
    "var over the batch": (lambda x: x * x.var(0, correction=0), ("B", 4)),
    "division by x.shape[0]": (lambda x: x.sum(0) / x.shape[0], ("B", 4)),
    "numel": (lambda x: x.sum() / x.numel(), ("B", 4)),
    "cumsum": (lambda x: x.cumsum(0), ("B", 4)),
    "cumprod": (lambda x: x.cumprod(0), ("B", 4)),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), ("B", 4)),
    "sort": (lambda x: x.sort(0)[0] * torch.arange(x.shape[0]).unsqueeze(1), ("B", 4)),
    "topk": (lambda x: x.topk(1, 0)[0], ("B", 4)),
    "topk of all": (lambda x: x.topk(x.shape[0], 0)[0].cumsum(0), ("B", 4)),
    "argsort and gather": (lambda x: x.gather(0, x.argsort(0)).cumsum(0), ("B", 4)),
    "max": (lambda x: x.max(0)[0] * x, ("B", 4)),
    "logsumexp": (lambda x: x.logsumexp(0), ("B", 4)),
    "softmax over the batch": (lambda x: x.softmax(0), ("B", 4)),
    "norm": (lambda x: x / x.norm(dim=0), ("B", 4)),
    "roll": (lambda x: x.roll(1, 0) * x, ("B", 4)),
    "flip": (lambda x: x.flip(0) * x, ("B", 4)),
    "shifted": (lambda x: x[1:] - x[:-1], ("B", 4)),
    "last row": (lambda x: x[-1] * x, ("B", 4)),
    "first three": (lambda x: x[:3].mean() * x[:3].shape[0], ("B", 4)),
    "first ten": (lambda x: x[:10].mean(0), ("B", 4)),
    "last six": (lambda x: x[-6:].mean(), ("B", 4)),
    "some rows": (lambda x: x[1:6:2].sum(0) + x[:-3].sum(), ("B", 4)),
    "without two": (lambda x: torch.cat([x, x, x])[2:] - torch.cat([x, x, x])[:-2], ("B", 4)),
    "every second row": (lambda x: x[::2].sin(), ("B", 4)),
    "first half": (lambda x: x[: x.shape[0] // 2 + 1].sin(), ("B", 4)),
    "narrow": (lambda x: x.narrow(0, 0, x.shape[0] - x.shape[0] // 2).sin(), ("B", 4)),
    "pad": (lambda x: F.pad(x, (1, 1, 2, 0)).sin(), ("B", 4)),
    "stack with itself": (lambda x: torch.stack([x, x * 2], 1), ("B", 4)),
    "cat with itself": (lambda x: torch.cat([x, x * 2]).cumsum(0), ("B", 4)),
    "x @ x.T": (lambda x: x @ x.T, ("B", 4)),
    "pairwise": (lambda x: ((x[:, None] - x[None]) ** 2).sum(-1), ("B", 4)),
    "cdist": (lambda x: torch.cdist(x, x.detach().flip(0) + 1), ("B", 4)),
    "pdist": (lambda x: F.pdist(x).sum(), ("B", 4)),
    "cov": (lambda x: torch.cov(x.T, correction=0), ("B", 4)),
    "corrcoef": (lambda x: torch.corrcoef(torch.cat([x, -x]).T), ("B", 4)),
    "combinations": (lambda x: torch.combinations(x, 3).prod(1).sum(), ("B",)),
    "diff": (lambda x: torch.diff(x, 2, 0, prepend=x[:1], append=x[:1]), ("B", 4)),
    "multi_dot": (lambda x: torch.linalg.multi_dot([x, x.T, x, x.T, x[:, 0]]), ("B", 4)),
    "matrix norms": (
        lambda x: torch.linalg.matrix_norm(x, 1) + torch.linalg.norm(x, -float("inf"), dim=(1, 2)), ("B", 3, 4),
    ),
    "norm of the batch": (lambda x: torch.linalg.norm(x, float("inf")), ("B", 4)),
    "take_along_dim": (lambda x: torch.take_along_dim(x, x.argsort(0)[:, :1] - 1, 0).cumsum(0), ("B", 4)),
    "hardshrink": (lambda x: F.hardshrink(x, 0.3) + F.softshrink(x, 0.2), ("B", 4)),
    "cosine similarity": (lambda x: F.cosine_similarity(x[:, None], x[None] + 1, dim=-1), ("B", 4)),
    "einsum": (lambda x: torch.einsum("bij,bik->bjk", x, x), ("B", 3, 4)),
    "einsum over the batch": (lambda x: torch.einsum("bij,cij->bc", x, x), ("B", 3, 4)),
    "bmm": (lambda x: torch.bmm(x, x.mT), ("B", 3, 4)),
    "matmul of rank 4": (lambda x: x @ x.mT, ("B", 2, 3, 4)),
    "matmul of vectors": (lambda x: x @ x.flip(0), ("B",)),
    "tensordot": (lambda x: torch.tensordot(x, x, dims=([0], [0])), ("B", 3)),
    "outer": (lambda x: torch.outer(x, x.sin()), ("B",)),
    "inverse": (lambda x: torch.linalg.inv(x @ x.mT + 3 * torch.eye(3, dtype=x.dtype)), ("B", 3, 4)),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + 3 * torch.eye(3, dtype=x.dtype)), ("B", 3, 4)),
    "where": (lambda x: torch.where(x > 0, x, x.new_zeros(x.shape[0], 1)), ("B", 4)),
    "masked_fill": (lambda x: x.masked_fill(torch.arange(x.shape[0]).unsqueeze(1) % 2 == 0, 0.0), ("B", 4)),
    "masked_select": (lambda x: (torch.masked_select(x, x > 0) ** 2).sum(), ("B", 4)),
    "x[x > 0]": (lambda x: x[x > 0] * 3, ("B", 4)),
    "rows that data pick, added as logarithms": (lambda x: x[x[:, 0] > 0].logsumexp(0).exp(), ("B", 4)),
    "rows that data pick, the best so far": (lambda x: x[x[:, 0] > 0].cummax(0).values, ("B", 4)),
    "rows that data pick, the least so far": (lambda x: x[x[:, 0] > 0].cummin(0).values, ("B", 4)),
    "rows that data pick, rolled": (lambda x: x[x[:, 0] > 0].roll(1, 0) ** 2, ("B", 4)),
    "a diagonal, written": (lambda x: _with_diagonal(x, 3.0) * x, ("B", 4)),
    "diagonal_copy": (lambda x: torch.diagonal_copy(x) ** 2, ("B", 4)),
    "diagonal of a part": (lambda x: torch.diag(x[1:]).sum() + x, ("B", 4)),
    "more rows than the sample": (lambda x: F.linear(x, x.new_ones(torch.sym_max(x.shape[0], 5), 4)), ("B", 4)),
    "block_diag": (lambda x: torch.block_diag(x[:1], x[1:], x[0]) ** 2, ("B", 4)),
    "fill_diagonal_": (lambda x: (x @ x.T).fill_diagonal_(0) + (x * 2).fill_diagonal_(3.0).sum(), ("B", 4)),
    "nonzero": (lambda x: x[(x[:, 0] > -9).nonzero().squeeze(1)].sin(), ("B", 4)),
    "causal mask": (lambda x: torch.tril(torch.ones(x.shape[0], x.shape[0], dtype=x.dtype)) @ x, ("B", 4)),
    "causal scores": (
        lambda x: (
            (x @ x.T).masked_fill(torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1), -1e9).softmax(-1) @ x
        ),
        ("B", 4),
    ),
    "diagonal": (lambda x: (x @ x.T).diagonal() * 2, ("B", 4)),
    "written rows": (lambda x: _written(x), ("B", 4)),
    "meshgrid": (lambda x: torch.meshgrid(x, torch.arange(3.0, dtype=x.dtype), indexing="ij")[0].sin(), ("B",)),
    "chunk of features": (lambda x: torch.cat(x.chunk(3, 1)[::-1], 1).sin(), ("B", 6)),
    "split of features": (lambda x: x.split([1, 2, 3], 1)[2].sin(), ("B", 6)),
    "unbind of features": (lambda x: x.unbind(1)[1].sin(), ("B", 6)),
    "std": (lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), ("B", 6)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2, ceil_mode=True), ("B", 3, 7)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), ("B", 3, 8, 7)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2, ceil_mode=True), ("B", 2, 4, 5, 4)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2, ceil_mode=True), ("B", 3, 7)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), ("B", 3, 8, 7)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), ("B", 2, 4, 5, 4)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 3), ("B", 3, 7)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), ("B", 3, 8, 7)),
    "adaptive_avg_pool2d(1)": (lambda x: F.adaptive_avg_pool2d(x, 1), ("B", 3, 8, 7)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)), ("B", 2, 4, 5, 4)),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x, 3), ("B", 3, 7)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (3, 2)), ("B", 3, 8, 7)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, (2, 3, 1)), ("B", 2, 4, 5, 4)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x.abs() + 1, 2, 2), ("B", 3, 6, 6)),
    "interpolate nearest": (lambda x: F.interpolate(x, scale_factor=2), ("B", 3, 4, 5)),
    "interpolate nearest-exact": (lambda x: F.interpolate(x, (7, 8), mode="nearest-exact"), ("B", 3, 4, 5)),
    "interpolate linear": (lambda x: F.interpolate(x, 9, mode="linear"), ("B", 3, 4)),
    "interpolate bilinear": (
        lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=False), ("B", 3, 4, 6),
    ),
    "interpolate bilinear corners": (
        lambda x: F.interpolate(x, (7, 9), mode="bilinear", align_corners=True), ("B", 3, 4, 6),
    ),
    "interpolate bicubic": (lambda x: F.interpolate(x, (7, 9), mode="bicubic"), ("B", 3, 4, 6)),
    "interpolate antialias": (lambda x: F.interpolate(x, (3, 3), mode="bilinear", antialias=True), ("B", 3, 4, 6)),
    "interpolate bicubic antialias": (
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic", antialias=True).sin(), ("B", 3, 4, 6),
    ),
    "interpolate trilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), ("B", 2, 3, 4, 3)),
    "interpolate area": (lambda x: F.interpolate(x, (2, 3), mode="area"), ("B", 3, 4, 6)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2).sin(), ("B", 8, 3, 4)),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), ("B", 2, 5, 6)),
    "fold": (lambda x: F.fold(x, (4, 5), 2), ("B", 8, 12)),
    "reflection pad": (lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect").sin(), ("B", 2, 5, 6)),
    "replication pad": (lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate").sin(), ("B", 2, 5, 6)),
    "circular pad": (lambda x: F.pad(x, (1, 2, 0, 1), mode="circular").sin(), ("B", 2, 5, 6)),
    "grid_sample": (
        lambda x: F.grid_sample(x, torch.tanh(x[:, :2].permute(0, 2, 3, 1)), align_corners=False), ("B", 3, 4, 5),
    ),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), ("B", 4, 5, 5)),
    "normalize": (lambda x: F.normalize(x, dim=1), ("B", 4)),
    "bmm with a broadcast weight": (lambda x: x @ torch.ones(4, 2, dtype=x.dtype), ("B", 3, 4)),
    "unfold of an axis": (lambda x: x.unfold(1, 3, 2).sin(), ("B", 7)),
    "diag_embed": (lambda x: torch.diag_embed(x).cumsum(-1), ("B", 4)),
    "kron": (lambda x: torch.kron(x, torch.ones(2, 2, dtype=x.dtype)), ("B", 3)),
    "swapaxes and reshape": (lambda x: x.transpose(0, 1).reshape(3, -1).sin(), ("B", 3, 4)),
    "searchsorted": (
        lambda x: x * torch.searchsorted(torch.arange(4.0, dtype=x.dtype), x.detach()).to(x.dtype), ("B", 4),
    ),
    "vmap": (lambda x: torch.vmap(lambda row: row.sin().sum())(x), ("B", 4)),
}  # fmt: skip


def _with_diagonal(x: torch.Tensor, value: float) -> torch.Tensor:
    out = x * 2
    out.diagonal().fill_(value)
    return out


def _written(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[:, 0] = 0
    out[0] += 1
    out[-1] = out[-1] * 2
    return out


FIXED = {
    "pdist", "multi_dot", "matrix norms", "norm of the batch", "block_diag", "kron", "linspace", "tril_indices", "cov",
    "corrcoef", "combinations",
}  # fmt: skip
"""Torch asks for numbers there, or a formula of autograd does: which batches run is decided by the sample."""


@pytest.mark.parametrize("name", sorted(ROW.keys() - FIXED))
def test_one_recording_runs_at_every_batch(name: str) -> None:
    function, shape = ROW[name]
    check(function, shape)


@pytest.mark.parametrize("name", sorted(FIXED))
def test_a_fixed_batch_is_said_and_others_are_refused(name: str) -> None:
    function, shape = ROW[name]
    with pytest.raises((UserWarning, ShapeError, BranchChanged), match=r"constant|recorded"):
        check(function, shape)
    check(function, shape, sizes=[{"B": 5}], warned="ignore")


# -- modules ----------------------------------------------------------------------------------------------------

MODULE: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "Linear": (lambda: nn.Linear(4, 3), ("B", 4)),
    "Linear of rank 4": (lambda: nn.Linear(4, 3), ("B", 2, 3, 4)),
    "Bilinear": (lambda: _Twice(nn.Bilinear(4, 4, 3)), ("B", 4)),
    "Conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), ("B", 3, 7)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, 2, 1, groups=2), ("B", 4, 8, 7)),
    "Conv2d, depthwise, same": (lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4), ("B", 4, 6, 6)),
    "Conv2d, circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), ("B", 3, 6, 6)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), ("B", 2, 4, 5, 4)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 4, 3, 2), ("B", 3, 7)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), ("B", 4, 5, 4)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), ("B", 2, 3, 3, 3)),
    "BatchNorm1d, training": (lambda: nn.BatchNorm1d(3), ("B", 3, 5)),
    "BatchNorm2d, training": (lambda: nn.BatchNorm2d(3), ("B", 3, 5, 4)),
    "BatchNorm3d, training": (lambda: nn.BatchNorm3d(3, momentum=None), ("B", 3, 2, 2, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3).eval(), ("B", 3, 5, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True), ("B", 3, 5, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), ("B", 4, 5)),
    "LayerNorm": (lambda: nn.LayerNorm(4), ("B", 3, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), ("B", 3, 4)),
    "MultiheadAttention": (lambda: _Attention(), ("B", 3, 8)),
    "TransformerEncoderLayer": (lambda: _encoder(), ("B", 3, 8)),
    "TransformerEncoderLayer, evaluation": (lambda: _encoder().eval(), ("B", 3, 8)),
    "TransformerDecoderLayer": (
        lambda: _Twice(nn.TransformerDecoderLayer(8, 2, 16, dropout=0, batch_first=True)), ("B", 3, 8),
    ),
    "LSTM": (lambda: _First(nn.LSTM(4, 3, 2, batch_first=True)), ("B", 5, 4)),
    "LSTM, bidirectional": (lambda: _First(nn.LSTM(4, 3, bidirectional=True, batch_first=True)), ("B", 5, 4)),
    "GRU": (lambda: _First(nn.GRU(4, 3, batch_first=True)), ("B", 5, 4)),
    "RNN": (lambda: _First(nn.RNN(4, 3, batch_first=True)), ("B", 5, 4)),
    "LSTMCell": (lambda: _First(nn.LSTMCell(4, 3)), ("B", 4)),
    "GRUCell": (lambda: nn.GRUCell(4, 3), ("B", 4)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), ("B", 3, 4, 5)),
    "PReLU": (lambda: nn.PReLU(3), ("B", 3, 4)),
    "Softmax2d": (lambda: nn.Softmax2d(), ("B", 3, 4, 4)),
}  # fmt: skip


class _Twice(nn.Module):
    """Calls a module that takes two inputs with one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x, x)


class _First(nn.Module):
    """The first of several results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)[0]


class _Attention(nn.Module):
    """Self-attention with a causal mask made from the shape, and the averaged weights."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.time = 1 if batch_first else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = x.shape[self.time]
        mask = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        out, weights = self.inner(x, x, x, attn_mask=mask)
        return out * weights.sum()


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", MODULE)
def test_one_recording_of_a_module_runs_at_every_batch(name: str) -> None:
    make, shape = MODULE[name]
    check(make().double(), shape)


# -- losses -----------------------------------------------------------------------------------------------------

WEIGHTS = torch.tensor([0.2, 1.0, 0.5], dtype=torch.float64)
LOSS: dict[str, tuple[Function, tuple[tuple[Any, ...], ...], dict[int, int]]] = {
    f"cross_entropy {reduction}": (
        lambda x, y, reduction=reduction: F.cross_entropy(x, y, WEIGHTS, reduction=reduction, label_smoothing=0.1),
        (("B", 3), ("B",)), {1: 3},
    )
    for reduction in ("none", "mean", "sum")
} | {
    "cross_entropy of images": (lambda x, y: F.cross_entropy(x, y, WEIGHTS), (("B", 3, 2, 4), ("B", 2, 4)), {1: 3}),
    "cross_entropy, ignored": (lambda x, y: F.cross_entropy(x, y, ignore_index=2), (("B", 3), ("B",)), {}),
    "cross_entropy of probabilities": (lambda x, y: F.cross_entropy(x, y.softmax(1)), (("B", 3), ("B", 3)), {}),
    "nll_loss": (lambda x, y: F.nll_loss(x.log_softmax(1), y, WEIGHTS), (("B", 3), ("B",)), {1: 3}),
    "mse_loss": (F.mse_loss, (("B", 3), ("B", 3)), {}),
    "smooth_l1_loss": (F.smooth_l1_loss, (("B", 3), ("B", 3)), {}),
    "huber_loss": (F.huber_loss, (("B", 3), ("B", 3)), {}),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), (("B", 3), ("B", 3)), {},
    ),
    "binary_cross_entropy_with_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=WEIGHTS), (("B", 3), ("B", 3)), {},
    ),
    "kl_div": (
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), (("B", 3), ("B", 3)), {},
    ),
    "cosine_embedding_loss": (
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(x.shape[0])), (("B", 3), ("B", 3)), {},
    ),
    "triplet_margin_loss": (lambda x, y: F.triplet_margin_loss(x, y, x.flip(0)), (("B", 3), ("B", 3)), {}),
    "multi_margin_loss": (F.multi_margin_loss, (("B", 3), ("B",)), {1: 3}),
    "poisson_nll_loss": (lambda x, y: F.poisson_nll_loss(x, y.exp(), full=True), (("B", 3), ("B", 3)), {}),
    "embedding": (lambda w, i: F.embedding(i, w).sin(), ((6, 3), ("B", 2)), {1: 6}),
    "embedding_bag": (lambda w, i: F.embedding_bag(i, w, mode="mean").sin(), ((6, 3), ("B", 2)), {1: 6}),
    "embedding_bag with offsets": (
        lambda w, i: F.embedding_bag(i, w, torch.arange(i.shape[0] // 2 + 1), mode="sum").sin(), ((6, 3), ("B",)),
        {1: 6},
    ),
    "index_add": (lambda x, i: x.new_zeros(4, 3).index_add(0, i, x).sin(), (("B", 3), ("B",)), {1: 4}),
    "scatter_add": (
        lambda x, i: x.new_zeros(4, 3).scatter_add(0, i[:, None].expand(-1, 3), x).sin(), (("B", 3), ("B",)), {1: 4},
    ),
    "bincount": (lambda x, i: x.sum() * torch.bincount(i, minlength=4), (("B", 3), ("B",)), {1: 4}),
    "bincount, the weights of a loss": (
        lambda x, i: F.cross_entropy(x, i, weight=1 / (torch.bincount(i, minlength=3) + 1).to(x.dtype)),
        (("B", 3), ("B",)), {1: 3},
    ),
    "bincount, weighted": (
        lambda x, i: x * torch.bincount(i, x.detach()[:, 0], minlength=3), (("B", 3), ("B",)), {1: 3},
    ),
    "log_prob": (lambda x, i: Categorical(logits=x).log_prob(i), (("B", 3), ("B",)), {1: 3}),
    "log_prob of counts": (lambda x, i: Poisson(x.exp()).log_prob(i[:, None]), (("B", 3), ("B",)), {1: 3}),
    "log_prob of two axes": (
        lambda x, i: Normal(x, x.exp()).log_prob(i[:, None].expand(-1, 3).to(x.dtype)), (("B", 3), ("B",)), {1: 3},
    ),
    "broadcast_tensors": (lambda x, i: sum(torch.broadcast_tensors(x, i[:, None])), (("B", 3), ("B",)), {1: 3}),
    "x[arange, y]": (lambda x, y: x[torch.arange(x.shape[0]), y].sin(), (("B", 3), ("B",)), {1: 3}),
    "mixup": (lambda x, y: x * y[:, None] + x.flip(0) * (1 - y[:, None]), (("B", 3), ("B",)), {}),
    "baddbmm": (lambda x, y: torch.baddbmm(x, y, y), (("B", 3, 3), ("B", 3, 3)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSS)
def test_one_recording_of_two_inputs_runs_at_every_batch(name: str) -> None:
    function, shapes, ints = LOSS[name]
    if name == "cross_entropy of probabilities" and torch.__version__ < (2, 12):
        pytest.skip("torch's own loss of probabilities divides by a plain number of rows")
    if name == "cross_entropy, ignored":
        shapes, ints = shapes, {1: 2}
    check(function, *shapes, ints=ints)


# -- two axes, and more -----------------------------------------------------------------------------------------

TWO = [{"B": b, "T": t} for b, t in ((1, 7), (2, 1), (7, 2), (3, 3), (16, 32))]


class _Language(nn.Module):
    """A small causal transformer: token and position embeddings, masks from the shape, tied output."""

    def __init__(self, announced: bool | None = True) -> None:
        super().__init__()
        self.announced = announced
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(64, 8)
        self.blocks = nn.TransformerEncoder(_encoder(), 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        steps = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(steps, dtype=torch.float64)
        x = self.tokens(ids) + self.places(torch.arange(steps))
        return F.linear(self.blocks(x, mask=mask, is_causal=self.announced), self.tokens.weight)


class _Everywhere(nn.Module):
    """Layers whose mask lets each row attend to all rows: of one row it is the causal mask, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.TransformerEncoder(_encoder(), 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x, mask=x.new_zeros(x.shape[1], x.shape[1]))


class _Padded(nn.Module):
    """Attention that ignores the padding of each row, whose lengths come from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        padding = torch.arange(x.shape[1]) > lengths[:, None]
        return self.inner(x, x, x, key_padding_mask=padding, need_weights=False)[0].mean(1)


def _own_attention(x: torch.Tensor) -> torch.Tensor:
    """Heads cut by view, a triangular mask, softmax: as small GPTs write it."""
    batch, steps, width = x.shape
    heads = x.view(batch, steps, 2, width // 2).transpose(1, 2)
    scores = heads @ heads.transpose(-2, -1) / (width // 2) ** 0.5
    scores = scores.masked_fill(torch.tril(torch.ones(steps, steps)) == 0, float("-inf"))
    return (scores.softmax(-1) @ heads).transpose(1, 2).contiguous().view(batch, steps, width)


BOTH: dict[str, tuple[Callable[[], Any], tuple[tuple[Any, ...], ...], dict[int, int]]] = {
    "LSTM": (lambda: _First(nn.LSTM(4, 3, 2)).double(), (("T", "B", 4),), {}),
    "GRU": (lambda: _First(nn.GRU(4, 3, bidirectional=True)).double(), (("T", "B", 4),), {}),
    "RNN": (lambda: _First(nn.RNN(4, 3, batch_first=True)).double(), (("B", "T", 4),), {}),
    "language model": (lambda: _Language().double(), (("B", "T"),), {0: 11}),
    "language model, which asks its mask": (lambda: _Language(None).double(), (("B", "T"),), {0: 11}),
    "mask of zeros": (lambda: _Everywhere().double(), (("B", "T", 8),), {}),
    "attention": (lambda: _Attention().double(), (("B", "T", 8),), {}),
    "attention, time first": (lambda: _Attention(batch_first=False).double(), (("T", "B", 8),), {}),
    "padded attention": (lambda: _Padded().double(), (("B", "T", 8), ("B",)), {1: 7}),
    "attention from views": (lambda: _own_attention, (("B", "T", 8),), {}),
    "scaled_dot_product_attention": (
        lambda: lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (("B", 2, "T", 4),), {},
    ),
    "tokens and labels": (
        lambda: lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), (("B", "T", 5), ("B", "T")), {1: 5},
    ),
    "images of any size": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1)).double(),
        ((4, 2, "B", "T"),), {},
    ),
    "pools of any size": (
        lambda: lambda x: F.max_pool2d(F.avg_pool2d(x, 2, 2, ceil_mode=True), 2, 1, 1).mean(), ((4, 2, "B", "T"),), {},
    ),
    "interpolated to a share": (
        lambda: lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear").mean((2, 3)), ((2, 2, "B", "T"),), {},
    ),
    "max_pool1d of any length": (lambda: lambda x: F.max_pool1d(x, 2, 1, 1).mean(), (("B", 2, "T"),), {}),
    "cat of two lengths": (lambda: lambda x, y: torch.cat([x, y]).cumsum(0), (("B", 3), ("T", 3)), {}),
    "products of two lengths": (lambda: lambda x, y: (x @ y.T).softmax(1), (("B", 3), ("T", 3)), {}),
    "cat along time": (lambda: lambda x: torch.cat([x[:, :1], x], 1).cumsum(1), (("B", "T"),), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BOTH)
def test_batch_and_time_vary_at_once(name: str) -> None:
    if name == "pools of any size" and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 asks whether the size is even, and another one is refused")
    make, shapes, ints = BOTH[name]
    check(make(), *shapes, sizes=TWO, ints=ints)


def test_batch_norm_moves_its_averages_by_the_fed_batch() -> None:
    recorded, eager = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(5, 3, dtype=torch.float64))
        step = tfnb.train.SGD(0.0).minimize(recorded(x).sum())
    for rows in (2, 7, 64):
        data = torch.randn(rows, 3, dtype=torch.float64)
        tfnb.run(step, {x: data})
        eager(data)
        torch.testing.assert_close(recorded.running_var, eager.running_var)
        torch.testing.assert_close(recorded.running_mean, eager.running_mean)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: sum(row * row for row in x),
        lambda x: torch.cat([part.flip(0) for part in x.split(2)]),
        lambda x: torch.stack([part.sum() for part in x.chunk(2)]),
        lambda x: torch.stack(x.unbind(0)[::-1]),
        lambda x: x * len(x),
        lambda x: torch.tensor_split(x, 2)[0].sin(),
    ],
    ids=["iterated", "split", "chunk", "unbind", "len", "tensor_split"],
)
def test_what_depends_on_the_number_of_rows_is_right_or_refused(function: Function) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fixed size is said; test_symbols.py tests the words
        with tfnb.record():
            x = tfnb.placeholder(torch.randn(5, 3, dtype=torch.float64))
            y = function(x)
    refused = 0
    for rows in (5, *ROWS):
        data = torch.randn(rows, 3, dtype=torch.float64)
        try:
            got = tfnb.run(y, {x: data})
        except ShapeError:
            assert rows != 5
            refused += 1
        else:
            torch.testing.assert_close(got, function(data))
    assert refused < 5


ONE_ROW: dict[str, Function] = {
    "squeeze": lambda x: x.squeeze().sum(-1),
    "squeeze dim": lambda x: x.squeeze(0).sum(0),
    "squeeze dims": lambda x: x.unsqueeze(1).squeeze((0, 1)).sum(0),
    "squeeze_copy": lambda x: torch.squeeze_copy(x).sum(0),
    "squeeze_": lambda x: x.clone().squeeze_().sum(0),
    "squeeze a sum": lambda x: x.sum(1, keepdim=True).squeeze().cumsum(-1),
    "if one": lambda x: x + 1 if x.shape[0] == 1 else x,
    "if many": lambda x: x + 1 if x.shape[0] > 1 else x,
    "broadcast": lambda x: x + torch.ones(1, 3, dtype=x.dtype),
    "first row": lambda x: x * x[:1],
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.ones(1, 3))[1] + x,
    "expand": lambda x: x[:, None].expand(-1, 4, -1).sum(1),
    "reshape": lambda x: x.t().reshape(3, -1).sum(1),
    "bmm": lambda x: x[:, :, None] @ x[:, None],
    "matmul": lambda x: x @ x.T,
    "contiguous": lambda x: x.t().contiguous().view(-1),
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row_or_none_is_right_or_refused_with_the_line(name: str) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(5, 3, dtype=torch.float64))
        y = ONE_ROW[name](x)
    refused = []
    for rows in (1, 0, 2, 5):
        data = torch.randn(rows, 3, dtype=torch.float64)
        try:
            got = tfnb.run(y, {x: data})
        except ShapeError as error:
            assert "test_varying.py line" in str(error)
            refused.append(rows)
        else:
            torch.testing.assert_close(got, ONE_ROW[name](data))
    assert refused == ([1] if "squeeze" in name else {"if one": [1], "if many": [1, 0]}.get(name, []))


def test_an_axis_that_the_values_decide_is_squeezed_where_it_has_several_rows() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([1.0, -1.0, 2.0]))
        y = (x > 0).nonzero().squeeze() * 2
    assert tfnb.run(y, {x: torch.ones(3)}).tolist() == [0, 2, 4]
    with pytest.raises(tfnb.errors.BranchChanged, match=r"test_varying\.py line"):
        tfnb.run(y, {x: torch.tensor([1.0, -1.0])})
    with pytest.raises(tfnb.errors.Unsupported, match=r"axis 0, whose length only the values"), tfnb.record(lazy=True):
        (tfnb.placeholder(torch.tensor([1.0, -1.0])) > 0).nonzero().squeeze()


@pytest.mark.parametrize("squeeze", [
    lambda x: x.squeeze(), lambda x: x.squeeze(0), lambda x: x.squeeze((0, 2)), lambda x: x.squeeze(-1).squeeze(-2),
], ids=["all", "one", "two", "one by one"])  # fmt: skip
def test_an_axis_that_has_one_row_by_the_values_is_squeezed_in_runs_that_have_one(squeeze: Function) -> None:
    data = torch.tensor([[-1.0, 2.0], [1.0, 3.0]])
    with tfnb.record():
        x = tfnb.placeholder(data)
        y = squeeze(x[x[:, 0] > 0].unsqueeze(-1)) * 2
        (dx,) = tfnb.gradients((y * y).sum(), [x])
    other = torch.tensor([[5.0, -2.0], [-1.0, 3.0], [-4.0, 3.0]])
    expected = squeeze(other[:1].unsqueeze(-1)) * 2
    got, grad = tfnb.run([y, dx], {x: other})
    assert got.shape == expected.shape and torch.equal(got, expected)
    assert torch.equal(grad, 8 * torch.tensor([[5.0, -2.0], [0.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(tfnb.errors.BranchChanged, match=r"test_varying\.py line"):
        tfnb.run(y, {x: other.abs()})


def test_bincount_refuses_a_run_with_values_that_the_recording_had_no_place_for() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([0, 1, 1]))
        counts = torch.bincount(x, minlength=3)
    assert counts.shape == (3,) and tfnb.run(counts, {x: torch.tensor([2, 2])}).tolist() == [0, 0, 2]
    for other in (3, -1):
        with pytest.raises(BranchChanged, match=r"minlength=3.*values from 0 to 2"):
            tfnb.run(counts, {x: torch.tensor([0, other])})
