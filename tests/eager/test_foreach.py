"""torch._foreach_*: recorded and run on other numbers as torch computes them, pure and in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb

LISTS: dict[str, tuple[Any, ...]] = {  # what follows the list itself; T stands for another list of the same shapes
    name: args
    for args, names in {
        (): """abs acos asin atan ceil clone cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 max neg
            norm reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero""",
        ("T",): "add sub mul div clamp_min clamp_max minimum maximum pow copy",
        ("T", "T"): "addcmul addcdiv",
        ("T", 0.25): "lerp",
    }.items()
    for name in names.split()
}
SCALARS = {"add": 2.0, "sub": 2.0, "mul": 3.0, "div": 4.0, "clamp_min": 0.5, "clamp_max": 0.5, "pow": 2.0}
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    f"{name}{ending}{kind}": (getattr(torch, f"_foreach_{name}{ending}"), args)
    for kind, table in (
        ("", LISTS),
        (" by a number", {name: (number,) for name, number in SCALARS.items()}),
        (" by numbers", {name: ([number, 1.5],) for name, number in SCALARS.items()}),
    )
    for name, args in table.items()
    for ending in ("", "_")
    if hasattr(torch, f"_foreach_{name}{ending}")
}


def _start(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator, dtype=torch.float64) * 0.9 + 0.05 for shape in ((3,), (2, 2))]


def _called(function: Callable[..., Any], args: tuple[Any, ...], xs: list[Any], others: list[Any]) -> list[Any]:
    """The results; of a call in place, the lists that it may have written."""
    out = function(xs, *(others if arg == "T" else arg for arg in args))
    return [*xs, *others] if function.__name__.endswith("_") else list(out)


@pytest.mark.parametrize("name", CASES)
def test_as_torch_does(name: str) -> None:
    function, args = CASES[name]
    start = _start(0) + _start(1)
    with tfnb.record():
        held = [tfnb.placeholder(x, shape=tuple(x.shape)) for x in start]
        recorded = _called(function, args, [x * 1 for x in held[:2]], [x * 1 for x in held[2:]])
    expected = _called(function, args, _start(0), _start(1))
    for y, e in zip(recorded, expected, strict=True):
        assert torch.equal(y.sample, e)
    ran = tfnb.run(recorded, dict(zip(held, _start(2) + _start(3), strict=True)))
    for y, e in zip(ran, _called(function, args, _start(2), _start(3)), strict=True):
        torch.testing.assert_close(y, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if "_" not in name.replace("clamp_", "").split()[0]])
def test_gradients_are_torchs(name: str) -> None:
    function, args = CASES[name]
    plain, others = ([x.requires_grad_() for x in _start(seed)] for seed in (0, 1))
    expected = _called(function, args, plain, others)
    with tfnb.record():
        held = [tfnb.placeholder(x.detach(), shape=tuple(x.shape)) for x in (*plain, *others)]
        dxs = tfnb.gradients(_called(function, args, held[:2], held[2:]), held)
    dys = [torch.ones_like(y) for y in expected]
    for dx, e in zip(dxs, _torchs(expected, [*plain, *others], dys), strict=True):
        torch.testing.assert_close(torch.zeros_like(e) if dx is None else dx.sample, e)


@pytest.mark.parametrize("ord", [1, 2, math.inf])
def test_norms_in_another_dtype(ord: float) -> None:
    start = [x.requires_grad_() for x in _start(0)]
    expected = torch._foreach_norm(start, ord, torch.float64)
    with tfnb.record():
        held = [tfnb.placeholder(x.detach(), shape=tuple(x.shape)) for x in start]
        dxs = tfnb.gradients(torch._foreach_norm(held, ord, torch.float64), held)
    for dx, e in zip(dxs, torch.autograd.grad(sum(expected), start), strict=True):
        torch.testing.assert_close(dx.sample, e)


def _torchs(ys: list[torch.Tensor], xs: list[torch.Tensor], dys: list[torch.Tensor]) -> list[torch.Tensor]:
    flows = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
    if not flows:
        return [torch.zeros_like(x) for x in xs]
    found = torch.autograd.grad([y for y, _ in flows], xs, [dy for _, dy in flows], allow_unused=True)
    return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(xs, found, strict=True)]
