"""Kernels give the same for tensors of any strides: in a graph nobody copies them before, as torch's functions do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import tfnb
from tests.coverage.checks import entries
from tfnb.graph.op_facts import facts, kernel

QUICK = [
    "linalg.det", "nn.functional.embedding_bag", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.adaptive_max_pool3d", "nn.functional.group_norm",
    "nn.functional.layer_norm", "nn.functional.nll_loss", "nn.functional.pdist",
    "nn.functional.scaled_dot_product_attention",
]  # fmt: skip
# Factors that are not unique, memory that is not written; what gives no values, random ones, or makes strides.
UNCHECKED = [
    "_linalg_det", "_linalg_slogdet", "_linalg_check_errors", "_ctc_loss", "bernoulli", "binomial", "cauchy", "clone",
    "copy", "dropout", "empty", "exponential", "geometric", "log_normal", "multinomial", "normal", "poisson", "rand",
    "resize", "set_", "uniform", "_to_copy",
]  # fmt: skip
SAMPLES, CALLS = 4, 8


def gaps(x: torch.Tensor) -> torch.Tensor:
    other = torch.full_like(x, 77) if x.is_floating_point() or x.is_complex() else torch.zeros_like(x)
    return torch.stack([x, other], -1)[..., 0]


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1) if x.dim() > 1 else x


def channels_last(x: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def is_strided(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided


def equal(a: Any, b: Any) -> bool:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    tensors = [(x, y) for x, y in pairs if is_strided(x)]
    return all(
        x.shape == y.shape and torch.allclose(x.to(torch.complex128), y.to(torch.complex128), 1e-4, 1e-5, True)
        for x, y in tensors
    )


class Kernels(TorchDispatchMode):
    """Calls each kernel again, with every tensor, and with one after the other, laid out in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.wrong: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        plain = self._checked(func) and tree_map(lambda x: x.detach().clone() if is_strided(x) else x, given)
        out = func(*given[0], **given[1])
        if plain:
            self._check(func, *plain)
        return out

    def _checked(self, func: Any) -> bool:
        name, own = str(func).split(".")[1], facts(func)
        self.calls[name] = self.calls.get(name, 0) + 1
        skipped = own.writes or own.is_view or own.is_random or any(word in name for word in UNCHECKED)
        return not skipped and self.calls[name] <= CALLS

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        places = [i for i, x in enumerate(leaves) if is_strided(x) and x.dim() > 0 and x.numel() > 1]
        try:
            want = kernel(func)(*tree_map(_contiguous, args), **tree_map(_contiguous, kwargs))
        except (RuntimeError, NotImplementedError):
            return
        for layout in (gaps, turned, channels_last):
            for chosen in (places, *([place] for place in places[:6])):
                counter = iter(range(len(leaves)))

                def laid_out(x: Any) -> Any:
                    return layout(x) if next(counter) in chosen else x  # noqa: B023  called in this turn

                given = tree_map(laid_out, (args, kwargs))
                try:
                    is_equal = equal(kernel(func)(*given[0], **given[1]), want)
                except RuntimeError as error:
                    self.wrong.add(f"{func}: {layout.__name__} of {chosen} raises {error}")
                else:
                    if not is_equal:
                        self.wrong.add(f"{func}: {layout.__name__} of {chosen}")


def _contiguous(x: Any) -> Any:
    return x.contiguous() if is_strided(x) else x


def runs(entry: Any, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    flows = dtype.is_floating_point or dtype.is_complex
    # not entry.sample_inputs, which walks the whole stack for each list of samples
    samples = entry.sample_inputs_func(entry, "cpu", dtype, flows and entry.supports_autograd)
    for _, sample in zip(range(SAMPLES), samples, strict=False):
        yield lambda sample=sample: entry(sample.input, *sample.args, **sample.kwargs)


def checked(entries: Any, dtypes: Any) -> set[str]:
    mode = Kernels()
    for entry in entries:
        for dtype in dtypes:
            for run in runs(entry, dtype) if dtype in entry.supported_dtypes("cpu") else ():
                try:
                    with mode:
                        outs = [x for x in tree_leaves(run()) if isinstance(x, torch.Tensor) and x.requires_grad]
                        torch.autograd.backward([x.abs().sum() for x in outs]) if outs else None
                except (RuntimeError, NotImplementedError, ValueError, TypeError):
                    continue  # an entry that takes no modes, or a sample that is not differentiable
    assert mode.calls
    return mode.wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_kernels_take_tensors_of_any_strides(name: str) -> None:
    assert not checked([entry for entry in entries().values() if entry.name == name], [torch.float32, torch.float64])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(4))
def test_all_kernels_take_tensors_of_any_strides(part: int) -> None:
    found = [entry for entry in entries().values() if not entry.name.startswith("jiterator")]  # of CUDA
    assert not checked(found[part::4], [torch.float32, torch.complex64, torch.int64])


class Mixer(nn.Module):
    """Pixels are turned into tokens and back, so that group norms stand between other layouts, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.project, self.end = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8), nn.Conv2d(8, 4, 1)
        self.before, self.after = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)

    def forward(self, x: Any) -> Any:
        x = self.start(x)
        tokens = self.project(self.before(x).flatten(2).transpose(1, 2))
        x = tokens.transpose(1, 2).reshape(x.shape) + x
        return self.end(x.sigmoid() * self.after(x))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("last", [False, True])
def test_group_norm_differentiates_whatever_the_strides(last: bool, rows: int) -> None:
    model = Mixer().double()
    if last:
        model = model.to(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    sample, fed = torch.randn(2, 3, 4, 4).double(), torch.randn(rows, 3, 4, 4).double()
    with tfnb.record():
        x = tfnb.placeholder(sample, name="x")
        loss = model(x).square().sum()
        found = tfnb.gradients(loss, list(model.parameters()))
    want = torch.autograd.grad(other(fed).square().sum(), list(other.parameters()))
    for value in (fed, fed.contiguous(memory_format=torch.channels_last)):
        torch.testing.assert_close(tfnb.run(found, {x: value}), list(want))


@pytest.mark.parametrize("strides", [(128, 16, 4, 1), (128, 1, 32, 8), (1, 1, 32, 8), (1, 16, 4, 1), (256, 32, 8, 2)])
def test_a_run_lays_tensors_out_for_the_kernel(strides: tuple[int, ...]) -> None:
    """`as_strided` in the graph makes the strides; the kernel is met in generated code, not here."""
    norm = nn.GroupNorm(2, 8)
    source = torch.randn(600)
    with tfnb.record():
        x = tfnb.placeholder(source, name="x", shape=[600])
        y = norm(x.as_strided((1, 8, 4, 4), strides))
        found = [y, *tfnb.gradients((y * y.cos()).sum(), [norm.weight, norm.bias, x])]
    fed = torch.randn(600).requires_grad_()
    y = norm(fed.as_strided((1, 8, 4, 4), strides))
    want = [y, *torch.autograd.grad((y * y.cos()).sum(), [norm.weight, norm.bias, fed])]
    torch.testing.assert_close(tfnb.run(found, {x: fed.detach()}), want)
