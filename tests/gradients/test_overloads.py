"""Overloads that OpInfo's samples do not meet, with a rule or by autograd's formula: first and second order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tests.gradients.reference import compare

aten, prims = torch.ops.aten, torch.ops.prims


def r(*shape: int) -> torch.Tensor:
    """A random input to be differentiated."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def one(op: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """``op`` on its first argument, the others fixed."""
    return lambda x: op(x, *args, **kwargs)


def _fractional(op: Any, size: Any, out: Any, d: int) -> Callable[..., Any]:
    return lambda x: op(x, size, out, torch.full((2, 3, d), 0.3, dtype=torch.float64))[0]


def _batch_norm(x: Any, w: Any, b: Any) -> Any:
    return F.batch_norm(x, None, None, w, b, True, 0.1, 1e-5)


def _statistics() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(-1, 1, 3, dtype=torch.float64), torch.linspace(0.5, 2, 3, dtype=torch.float64)


def _batch_norm_eval(x: Any, w: Any, b: Any) -> Any:
    return F.batch_norm(x, *_statistics(), w, b, False, 0.1, 1e-5)


def _spatial_labels(x: Any) -> Any:
    return F.cross_entropy(x, torch.tensor([[0, 1, 2, 0], [2, 2, 1, 1]]), ignore_index=1)


def _pad3d(mode: str) -> Callable[..., Any]:
    return lambda x: F.pad(x, (1, 0, 1, 2, 0, 1), mode=mode).square()


# overload -> (function, inputs, the function that torch differentiates if it is another)
ROWS: dict[str, tuple[Any, ...]] = {
    "aten.prod.default": (lambda x: x.prod(), lambda: (r(2, 3),)),
    "aten.prod.dim_int": (lambda x: x.prod(1), lambda: (r(2, 3),)),
    "aten._batch_norm_no_update.default": (
        lambda x, w, b: aten._batch_norm_no_update(x, w, b, *_statistics(), 0.1, 1e-5)[0],
        lambda: (r(4, 3, 2), r(3), r(3)), _batch_norm_eval,
    ),
    "aten._batch_norm_with_update_functional.default": (
        lambda x, w, b: aten._batch_norm_with_update_functional(x, w, b, *_statistics(), 0.1, 1e-5)[0],
        lambda: (r(4, 3, 2), r(3), r(3)), _batch_norm,
    ),
    "aten._native_batch_norm_legit.no_stats": (
        lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)[0],
        lambda: (r(4, 3, 2), r(3), r(3)), _batch_norm,
    ),
    "aten._native_batch_norm_legit_no_training.default": (
        lambda x, w, b: aten._native_batch_norm_legit_no_training(x, w, b, *_statistics(), 0.1, 1e-5)[0],
        lambda: (r(4, 3, 2), r(3), r(3)), _batch_norm_eval,
    ),
    "aten._ctc_loss.default": (
        lambda x: aten._ctc_loss(x.log_softmax(2), torch.tensor([[1, 2, 3], [3, 1, 0]]), [5, 5], [3, 2])[0],
        lambda: (r(5, 2, 4),),
    ),
    "aten._reshape_alias.default": (one(aten._reshape_alias, [6], [1]), lambda: (r(2, 3),), one(torch.reshape, [6])),
    "aten._unsafe_index_put.default": (
        lambda x, v: aten._unsafe_index_put(x, [torch.tensor([0, 2])], v), lambda: (r(3, 2), r(2, 2)),
    ),
    "aten._upsample_bicubic2d_aa_backward.default": (
        one(F.interpolate, size=(3, 4), mode="bicubic", antialias=True), lambda: (r(2, 3, 6, 7),),
    ),
    "aten.fractional_max_pool3d_backward.default": (
        lambda x: _fractional(aten.fractional_max_pool3d, [2, 2, 2], [3, 3, 3], 3)(x * x), lambda: (r(2, 3, 5, 5, 5),),
    ),
    "aten.nll_loss2d_forward.default": (_spatial_labels, lambda: (r(2, 3, 4),)),
    "aten.norm.ScalarOpt_dtype": (lambda x: aten.norm.ScalarOpt_dtype(x, 2, dtype=torch.float64), lambda: (r(4, 3),)),
    "aten.reflection_pad3d_backward.default": (_pad3d("reflect"), lambda: (r(1, 2, 3, 3, 3),)),
    "aten.rrelu_with_noise_functional.default": (
        lambda x: aten.rrelu_with_noise_functional(x, torch.ones(5, dtype=torch.float64), 0.1, 0.3, False)[0],
        lambda: (r(5),), one(F.leaky_relu, 0.2),
    ),
    "aten.squeeze_copy.dims": (one(aten.squeeze_copy.dims, [0, 2]), lambda: (r(1, 3, 1),)),
    "aten.unsafe_split_with_sizes.default": (one(aten.unsafe_split_with_sizes, [1, 2], 0), lambda: (r(3, 2),)),
    "prims.convert_element_type.default": (
        one(prims.convert_element_type, torch.float32), lambda: (r(5),), lambda x: x.to(torch.float32),
    ),
    "prims.view_of.default": (one(prims.view_of), lambda: (r(5),), lambda x: x * 1),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ROWS))
def test_overload_equals_autograd(name: str) -> None:
    function, inputs, *oracle = ROWS[name]
    g = compare(function, inputs(), oracle=oracle[0] if oracle else None)
    assert name in {node.op for node in g.nodes}, "the row does not reach its overload"


def test_as_strided_scatter_overwrites() -> None:
    """torch gives the overwritten element a gradient (2.13); its place in the result is taken, so there is none."""
    compare(
        lambda x, v: torch.as_strided_scatter(x, v, (2,), (2,), 1), (r(6), r(2)),
        oracle=lambda x, v: torch.cat([x[:1], v[:1], x[2:3], v[1:], x[4:]]),
    )  # fmt: skip


@pytest.mark.parametrize(
    "a, b", [((12, 16), (3, 16, 8)), ((8, 12), (12, 8)), ((3, 8, 16), (16, 12)), ((3, 4, 8), (3, 8, 4))]
)
def test_grouped_products(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """In float32, which the kernel takes; of no group, of an empty one, and of other groups than were recorded."""

    def products(x: Any, y: Any, ends: Any) -> Any:
        return aten._grouped_mm(x, y, None if x.dim() == y.dim() == 3 else ends)

    data = [torch.randn(a), torch.randn(b)]
    with tfnb.record():
        x, y = (tfnb.placeholder(item, shape=item.shape) for item in data)
        ends = tfnb.placeholder(torch.tensor([2, 2, 12], dtype=torch.int32), shape=(3,))
        out = products(x, y, ends)
        grads = tfnb.gradients((out * out.detach()).sum(), [x, y])
    for splits in ([2, 2, 12], [4, 8, 12]):
        fed = [*(torch.randn_like(item).requires_grad_() for item in data), torch.tensor(splits, dtype=torch.int32)]
        expected = products(*fed)
        wanted = torch.autograd.grad((expected * expected.detach()).sum(), fed[:2])
        got = tfnb.run([out, *grads], dict(zip((x, y, ends), map(torch.Tensor.detach, fed), strict=True)))
        torch.testing.assert_close(got, [expected.detach(), *wanted])


def test_rrelu_in_training_keeps_the_slopes_it_drew() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(5, dtype=torch.float64))
        y = F.rrelu(x, training=True)
        (dx,) = tfnb.gradients(y, [x])
        (again,) = tfnb.gradients((dx * dx).sum() + (x * x).sum(), [x])
    torch.testing.assert_close(dx.sample, y.sample / x.sample)
    torch.testing.assert_close(again.sample, 2 * x.sample)


SPREADS = {
    "var": lambda x: torch.var(x, 0), "std": lambda x: x.std(0), "of all": lambda x: x.var() + x.std(),
    "var_mean": lambda x: sum(torch.var_mean(x, 0)), "std_mean": lambda x: sum(torch.std_mean(x, (0, 1), keepdim=True)),
    "correction": lambda x: x.var(0, correction=2) + x.std(0, correction=0),
    "other axis": lambda x: x.var(-1, keepdim=True) * x.std(1)[:, None],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
@pytest.mark.parametrize("of", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SPREADS)
def test_variances_of_few_rows_have_the_gradients_of_autograd(name: str, of: torch.dtype) -> None:
    """One row, as of a last batch, has no degree of freedom: NaN and infinity as there, and no error."""
    spread = SPREADS[name]
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(6, 3, dtype=of))
        loss = (spread(x) * 3).sum().abs()
        (dx,) = tfnb.gradients(loss, [x])
        if of == torch.float64:
            (again,) = tfnb.gradients(dx.square().sum(), [x])
    for rows in (5, 2, 1):
        fed = torch.randn(rows, 3, dtype=of).requires_grad_()
        wanted = (spread(fed) * 3).sum().abs()
        (first,) = torch.autograd.grad(wanted, fed, create_graph=True)
        torch.testing.assert_close(
            tfnb.run([loss, dx], {x: fed.detach()}), [wanted.detach(), first.detach()], equal_nan=True
        )
        if of == torch.float64 and rows > 2:
            (second,) = torch.autograd.grad(first.square().sum(), fed)
            torch.testing.assert_close(tfnb.run(again, {x: fed.detach()}), second)
