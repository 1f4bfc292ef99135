"""Comparing recorded gradients with torch autograd, which no rule calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tfnb
from tfnb.graph import Graph
from tfnb.kernels.random import seeded
from tfnb.recording.values.interpret import stream_seed

Function = Callable[..., Any]


def compare(
    function: Function, inputs: Sequence[Any], *, oracle: Function | None = None, second: bool = True,
    first_alone: bool = True,
) -> Graph:  # fmt: skip
    """Differentiate ``function(*inputs)`` by every input that requires grad, twice, and compare with autograd.

    oracle: a function with the same values that torch can differentiate, where it is not ``function`` itself.
    first_alone: a function that torch differentiates only once is compared as far as that.
    """
    wanted = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    samples = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    with tfnb.record() as g:
        held = [placeholder(x) for x in samples]
        recorded = outputs(function(*held))
    plain = [x.detach().clone().requires_grad_() if i in wanted else x for i, x in enumerate(inputs)]
    is_random = any(node.stream is not None for node in g.nodes)
    with SameDraws(g) if is_random else nullcontext():  # in a mode torch hides lazy conjugates from its own pinv
        ys = outputs((oracle or function)(*plain))
    flows = [y.requires_grad for y in ys]
    dys = [torch.randn_like(y) for y in ys]
    starts = [plain[i] for i in wanted]
    expected = autograd(ys, starts, dys, create=second)

    xs = [held[i] for i in wanted]
    recorded = [y for y, flow in zip(recorded, flows, strict=True) if flow]
    if not recorded:
        return g
    got = tfnb.gradients(recorded, xs, [dy for dy, flow in zip(dys, flows, strict=True) if flow])
    assert_same(got, expected)
    some = [dx for dx, e in zip(got, expected, strict=True) if dx is not None and e.requires_grad]
    if second and some:
        with suppress(pytest.skip.Exception) if first_alone else nullcontext():
            again = autograd(expected, starts, [torch.ones_like(e) for e in expected])
            assert_same(tfnb.gradients(some, xs), again)
    return g


class SameDraws(TorchDispatchMode):
    """Inside, torch's random operators draw what the random nodes of a recording drew, one after another."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.seeds = [stream_seed(node, graph.seed, 0) for node in graph.nodes if node.stream is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or not self.seeds:
            return func(*args, **(kwargs or {}))
        return seeded(func, self.seeds.pop(0), torch.device("cpu"), args, kwargs or {})


def outputs(result: Any) -> list[torch.Tensor]:
    """The floating and complex tensors in a result."""
    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    return [t for t in tensors if t.is_floating_point() or t.is_complex()]


def placeholder(x: Any) -> Any:
    """A placeholder of fixed shape for a tensor; anything else unchanged."""
    return tfnb.placeholder(x.detach(), shape=tuple(x.shape)) if isinstance(x, torch.Tensor) else x


def autograd(
    ys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], dys: Sequence[torch.Tensor], *, create: bool = False
) -> list[torch.Tensor]:
    """torch's gradients, zeros where it gives none; skips the test where it cannot."""
    pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in xs]
    try:
        ends, starts = [y for y, _ in pairs], [dy for _, dy in pairs]
        found = torch.autograd.grad(ends, xs, starts, allow_unused=True, create_graph=create)
    except RuntimeError as error:
        pytest.skip(f"torch cannot: {error}")
    return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(xs, found, strict=True)]


def assert_same(got: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor]) -> None:
    """Equal up to the rounding of float64; None counts as zeros."""
    for dx, reference in zip(got, expected, strict=True):
        value = torch.zeros_like(reference) if dx is None else getattr(dx, "sample", dx)
        # the same formulas in another order: float64 leaves 1e-7 after cancellations
        torch.testing.assert_close(value, reference.detach(), rtol=1e-6, atol=1e-7, equal_nan=True)
