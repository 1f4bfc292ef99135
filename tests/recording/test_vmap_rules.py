"""`torch.vmap` over a batch that varies: a recording with one number of rows runs at any other as torch does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, vmap

import tfnb

ROWS = (3, 2, 5, 1)
INDEX = torch.tensor([0, 2, 0])

SCALARS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: (x[:2] ** 2).sum(),
    "narrow": lambda x: x.narrow(0, 1, 2).pow(2).sum(),
    "step": lambda x: x[::2].pow(3).sum(),
    "norm": lambda x: x.norm(),
    "normalize": lambda x: F.normalize(x, dim=0)[0],
    "cross entropy": lambda x: F.cross_entropy(x, torch.tensor(1)),
    "cross entropy of a row": lambda x: F.cross_entropy(x[None], torch.tensor([1]), label_smoothing=0.1),
    "nll": lambda x: F.nll_loss(F.log_softmax(x, 0), torch.tensor(1)),
    "index_select": lambda x: torch.index_select(x, -1, INDEX).pow(2).sum(),
    "index_select of rows": lambda x: torch.index_select(x.view(2, 2), 0, torch.tensor([1, 1])).pow(2).sum(),
    "gather": lambda x: (x.gather(0, torch.tensor([1])) ** 3).sum(),
    "scatter": lambda x: x.scatter(0, torch.tensor([1]), x[:1] * 2).pow(2).sum(),
    "scatter_add": lambda x: x.new_zeros(3).scatter_add(0, torch.tensor([1, 0, 1, 2]), x).pow(2).sum(),
    "index_add": lambda x: x.new_zeros(3).index_add(0, torch.tensor([1, 0, 1, 2]), x, alpha=2).pow(2).sum(),
    "stack": lambda x: torch.stack([x.sum(), x.mean()]).prod(),
    "cat": lambda x: torch.cat([x, x * 2, torch.ones(1), torch.ones(0)]).pow(2).sum(),
    "cat of columns": lambda x: torch.cat([x.view(2, 2), torch.ones(2, 1)], dim=-1).pow(3).sum(),
    "chunk": lambda x: (x.chunk(2)[0] ** 2).sum(),
    "split": lambda x: x.split([1, 3])[1].pow(2).sum(),
    "diagonal": lambda x: x.view(2, 2).diagonal().prod(),
    "max": lambda x: x.max(0).values,
    "topk": lambda x: x.topk(2).values.pow(2).sum(),
    "layer norm": lambda x: F.layer_norm(x, (4,)).pow(3).sum(),
    "layer norm of rows": lambda x: F.layer_norm(x.view(2, 2), (2,), x.new_tensor([1, 2])).pow(3).sum(),
    "max pool": lambda x: F.max_pool1d(x[None], 2).pow(2).sum(),
    "max pool of an image": lambda x: F.max_pool2d(x.view(1, 1, 2, 2), 2).pow(2).sum(),
    "avg pool": lambda x: F.avg_pool2d(x.view(1, 2, 2), 2).pow(2).sum(),
}


def _assert_varies(function: Callable[..., Any], *samples: torch.Tensor) -> None:
    """The function equals torch's at every number of rows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*became the constant")
        with tfnb.record() as g:
            feeds = [tfnb.placeholder(sample) for sample in samples]
            out = function(*feeds)
    session = tfnb.Session(g)
    for rows in ROWS:
        values = [
            torch.randn(rows, *s.shape[1:], dtype=s.dtype) if s.is_floating_point() else torch.arange(rows) % 3
            for s in samples
        ]
        torch.testing.assert_close(
            session.run(out, dict(zip(feeds, values, strict=True))), function(*values), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("kind", SCALARS)
def test_gradients_of_each_row_vary_in_the_batch(kind: str) -> None:
    _assert_varies(vmap(grad_and_value(SCALARS[kind])), torch.randn(3, 4, dtype=torch.float64))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1, bias=False),
        nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3),
    )  # fmt: skip


def test_gradients_per_sample_of_a_convolutional_network() -> None:
    net = _net()
    parameters = {name: each.detach() for name, each in net.named_parameters()}

    def loss(given: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(net, given, (x[None],)), y[None])

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    _assert_varies(lambda x, y: per_sample(parameters, x, y), torch.randn(3, 2, 4, 4), torch.tensor([0, 2, 1]))


def test_convolution_with_a_weight_for_each_row() -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose1d(F.conv1d(x, weight, stride=2), weight, bias=x[0, 0, :1]).pow(2).sum()

    _assert_varies(vmap(grad(loss, argnums=(0, 1))), torch.randn(3, 2, 1, 6), torch.randn(3, 1, 1, 2))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode
def test_vmap_in_vmap_and_higher_derivatives() -> None:
    cubes = torch.randn(3, 2, 4, dtype=torch.float64)
    _assert_varies(vmap(vmap(grad(SCALARS["cross entropy"]))), cubes)
    _assert_varies(vmap(hessian(SCALARS["index_select"])), cubes[:, 0])
    _assert_varies(vmap(jacrev(lambda x: torch.cat([x[:2] ** 2, x.norm()[None]]))), cubes[:, 0])


def test_the_gradient_in_a_cell_of_a_vmapped_loss() -> None:
    def step(x: torch.Tensor) -> Any:
        w = torch.ones(4, dtype=x.dtype, requires_grad=True)
        loss = vmap(lambda row: F.cross_entropy(torch.cat([row * w, row[:1]]), torch.tensor(2)))(x).mean()
        return torch.autograd.grad(loss, w)[0]

    _assert_varies(step, torch.randn(3, 4, dtype=torch.float64))
