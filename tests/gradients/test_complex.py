"""Gradients of complex tensors against torch autograd: OpInfo's complex samples, and what they do not reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

import tfnb
from tests.coverage.checks import entries
from tests.gradients.reference import compare

SKIPPED = {
    "as_strided_scatter": "torch gives overwritten elements a gradient",
    "as_strided.partial_views": "looks at storage outside of the tensor",
    "sparse.sampled_addmm": "sparse",
    "svd_lowrank": "draws its own numbers",
    "pca_lowrank": "draws its own numbers",
}
FIRST_ORDER = {"linalg.norm.subgradients_at_zero"}  # NaN in torch


def _complex_entries() -> list[str]:
    """Entries that torch differentiates for complex tensors."""
    dtype = torch.complex128
    return [
        n for n, info in entries().items() if info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize_by("name", _complex_entries)
def test_opinfo_samples(name: str) -> None:
    if name in SKIPPED:
        pytest.skip(SKIPPED[name])
    info = entries()[name]
    samples = list(info.sample_inputs("cpu", torch.complex128, requires_grad=True))
    for sample in samples[:: max(1, len(samples) // 2)][:2]:
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))

        def function(*leaves: Any, sample: Any = sample, spec: Any = spec) -> Any:
            first, args, kwargs = tree_unflatten(leaves, spec)
            return sample.output_process_fn_grad(info.op(first, *args, **kwargs))

        compare(function, leaves, second=info.supports_gradgrad and name not in FIRST_ORDER)


def c(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex128, requires_grad=True)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def _written(x: torch.Tensor, write: Any) -> torch.Tensor:
    x = x * 1
    write(x)
    return x * x


_ONES = torch.ones(8, dtype=torch.float64)
ROWS: dict[str, tuple[Any, Any]] = {
    "conv1d": (F.conv1d, lambda: (c(2, 3, 5), c(4, 3, 2), c(4))),
    "conv_transpose2d": (F.conv_transpose2d, lambda: (c(2, 3, 4, 4), c(3, 2, 2, 2))),
    "norm": (lambda x: torch.ops.aten.norm.Scalar(x, 1.5), lambda: (c(3, 2),)),
    "polar": (torch.polar, lambda: (r(3).abs().detach().requires_grad_(), r(3))),
    "power of a number": (lambda x: torch.pow(2.5, x) + torch.pow(-2.5, x) + torch.pow(2 - 1j, x), lambda: (c(4),)),
    "complex number to real powers": (lambda x: torch.pow(1 + 2j, x), lambda: (r(4),)),
    "complex factors": (lambda a, b, d: torch.addmm(a, b, d, alpha=1j, beta=2 - 1j) * (1 + 2j),
                        lambda: (c(3, 3), c(3, 2), c(2, 3))),
    "real and complex": (lambda x, z: (x * z + z.conj() * 2j - x).real.sum() + (z.abs() * x).sum(),
                         lambda: (r(3), c(3))),
    "reflection": (lambda x: F.pad(x, (1, 0, 1, 2, 0, 1), mode="reflect").square(), lambda: (c(1, 2, 3, 3, 3),)),
    "replication": (lambda x: F.pad(x, (1, 0, 1, 2, 0, 1), mode="replicate").square(), lambda: (c(1, 2, 3, 3, 3),)),
    "a row written": (lambda x, y: _written(x, lambda z: z[1].copy_(y)), lambda: (c(3, 2), c(2))),
    "filled by a number": (lambda x, y: _written(x, lambda z: z[:1].fill_(y)), lambda: (c(3, 2), c())),
    "written by strides": (lambda x, y: _written(x, lambda z: z.as_strided((2,), (3,)).mul_(y)),
                           lambda: (c(3, 2), c(2))),
    "a real part written": (lambda x, y: _written(x, lambda z: z.real.mul_(y.abs())), lambda: (c(3, 2), c(2))),
    "cast to real, written and back": (lambda x, y: _written(x.real, lambda z: z.add_(y)).to(x.dtype) * x,
                                       lambda: (c(3, 2), r(2))),
    "parts": (lambda z: z.imag * z.real, lambda: (c(3),)),
    "product of real and complex matrices": (lambda x, z: x.to(z.dtype) @ z, lambda: (r(3, 2), c(2, 3))),
    "eigenvalues of a real matrix": (torch.linalg.eigvals, lambda: (r(4, 4),)),
    "filter": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 - 2j), n=5), lambda: (r(2, 5),)),
    "a branch": (lambda z: tfnb.cond(z.real.sum() > 0, lambda: z * z, lambda: z * 2j), lambda: (c(3),)),
    "a loop": (lambda z, w: tfnb.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * w + z), (0, z))[1],
               lambda: (c(3), c(3))),
    "a function": (tfnb.function(lambda z: z * z.conj() * 2j), lambda: (c(3),)),
    "stft and back": (lambda x: torch.istft(torch.stft(x, 8, return_complex=True, window=_ONES), 8, window=_ONES),
                      lambda: (r(2, 32),)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(ROWS))
def test_equals_autograd(name: str) -> None:
    function, inputs = ROWS[name]
    compare(function, inputs())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", ["not", "and", "or", "xor"])
def test_a_truth_value_in_place_leaves_the_gradient_as_it_was(name: str, dtype: torch.dtype) -> None:
    """Autograd has no formula for it, and passes gradients on to what was there before."""

    def function(x: Any) -> Any:
        y = x * 1
        z = getattr(y, f"logical_{name}_")(*([] if name == "not" else [torch.ones_like(x)]))
        return z * 2 + x * 3

    x = torch.tensor([0.0, 1.0, 2.0], dtype=dtype, requires_grad=True)
    compare(function, (x,))


@pytest.mark.parametrize("make", [r, c])
def test_a_factor_written_after_a_kronecker_product(make: Any) -> None:
    """torch's own reads what was written (2.13)."""

    def function(x: Any, *, before: bool = True) -> Any:
        y = x * 1
        z = torch.kron(y, y) if before else torch.kron(y.clone(), y.clone())
        y.mul_(-1)
        return z, y

    compare(function, (make(3),), oracle=lambda x: function(x, before=False))


@pytest.mark.parametrize("where", ["placeholder", "constant"])
def test_lazily_conjugated_samples(where: str) -> None:
    a, b = (torch.randn(3, dtype=torch.complex128) for _ in range(2))
    lazy = b.conj()
    with tfnb.record() as g:
        x = tfnb.placeholder(a, shape=(3,))
        y = tfnb.placeholder(lazy, shape=(3,)) if where == "placeholder" else lazy
        z = torch.view_as_real(x * y) if where == "constant" else torch.view_as_real(y) * torch.view_as_real(x)
    expected = a * lazy if where == "constant" else torch.complex(lazy.real * a.real, lazy.imag * a.imag)
    torch.testing.assert_close(z.sample, torch.view_as_real(expected.resolve_conj()))
    feeds = {x: a} | ({y: lazy} if where == "placeholder" else {})
    torch.testing.assert_close(tfnb.Session(g).run(z, feeds), z.sample)


def test_writes_through_complex_views() -> None:
    def function(x: Any) -> Any:
        x = x.clone()
        x.conj().mul_(1j)
        x.real[0] = 7.0
        x.imag = x.imag + 1
        torch.view_as_real(x)[:, 1].add_(3)
        torch.view_as_complex(torch.view_as_real(x))[2] = 0
        return x, x.conj().real + x.conj().imag

    a, b = (torch.randn(3, dtype=torch.complex128) for _ in range(2))
    with tfnb.record() as g:
        x = tfnb.placeholder(a, shape=(3,))
        got = function(x)
    for y, now, expected in zip(tfnb.Session(g).run(list(got), {x: b}), got, function(a), strict=True):
        torch.testing.assert_close(now.sample, expected)
        assert y.shape == expected.shape
    for y, expected in zip(tfnb.Session(g).run(list(got), {x: b}), function(b), strict=True):
        torch.testing.assert_close(y, expected)
