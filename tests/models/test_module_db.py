"""PyTorch's own table of modules: one recording of each equals torch, on other values and other numbers of rows.

Outputs, buffers and the gradients by all inputs and parameters, in float64; the oracle is torch.autograd.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import tfnb
from tests.gradients.reference import SameDraws, autograd
from tfnb.errors import ShapeError

MODULES = {info.name.removeprefix("nn."): info for info in module_db}
FEW, MANY = 1, 8  # samples of a module in a mode: of some there are hundreds
_PARAMETERS = "a size of the sample becomes one of a parameter or a buffer"
_CHUNKS = "how many chunks there are is decided by the sizes"
# modules of which some recording holds to its number of rows although torch takes others, and says so
FIXED = {
    **dict.fromkeys(("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"), _PARAMETERS),
    **dict.fromkeys((f"Lazy{name}{n}d" for name in ("Conv", "ConvTranspose") for n in (1, 2, 3)), _PARAMETERS),
    "LinearCrossEntropyLoss": _CHUNKS,
}

CONSTANT_TARGET = {"SoftMarginLoss"}  # torch does not differentiate by the target
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{said}")  # by torch, of its own samples
    for said in ("enable_nested_tensor", "reduction", "linear_cross_entropy", "input.s size at dim=0")
]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("Transformer")][::3])
def test_a_module_of_pytorchs_table_is_what_it_is_in_torch(name: str) -> None:
    for case in cases(name, FEW):
        case.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_more_samples_of_it_are_what_they_are_in_torch(name: str) -> None:
    fixed = [case.check() for case in cases(name, MANY)]
    assert any(fixed) == (name in FIXED)


def cases(name: str, most: int) -> Iterator[Case]:
    """So many samples of the module, with equal gaps between them, in training mode and, where it differs, in eval."""
    info = MODULES[name]
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        found = info.module_inputs_func(info, "cpu", torch.float64, False, training)
        found = [sample for sample in found if sample.forward_input is not None]
        for place in sorted({i * len(found) // most for i in range(most)}):
            sample, made = found[place], found[place].constructor_input
            module = info.module_cls(*made.args, **made.kwargs).double().train(training)
            leaves, structure = tree_flatten((sample.forward_input.args, sample.forward_input.kwargs))
            real = [i for i, x in enumerate(leaves) if is_real(x)]
            yield Case(module, leaves, structure, real[:1] if name in CONSTANT_TARGET else real)


@dataclass
class Case:
    """A module and the leaves of its arguments."""

    module: nn.Module
    leaves: list[Any]
    structure: Any
    wanted: list[int]  # which leaves to differentiate by

    def check(self) -> bool:
        """Compare; returns whether the recording holds to the number of rows although torch takes others."""
        rows = self.rows
        sizes = [n for n in (rows, rows + 1, 2 * rows + 1) if n == rows or (rows > 1 and self.takes(n))]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with tfnb.record() as graph:
                held = [self.placeholder(x, len(sizes) > 1) for x in self.leaves]
                outputs = floats(self.call(self.module, held))
                wanted = [*(held[i] for i in self.wanted), *trained(self.module)]
                dys = [torch.cos(y) for y in outputs]
                grads = tfnb.gradients(outputs, wanted, dys) if outputs else []
        twin = copy.deepcopy(self.module)  # now: a lazy one has its parameters
        met = {variable.name for variable in graph.variables} if self.module.training else ()
        buffers = [buffer for name, buffer in self.module.named_buffers() if name in met]
        fixed = any("became the constant" in str(w.message) for w in caught)
        for n in sizes:
            leaves = self.at(n)
            feed = {x: y for x, y in zip(held, leaves, strict=True) if isinstance(x, torch.Tensor)}
            fetches = [outputs, [dx for dx in grads if dx is not None], buffers]
            if n != rows and fixed:
                with pytest.raises(ShapeError):
                    tfnb.Session(graph).run(fetches, feed)
                continue
            got, got_grads, _ = tfnb.Session(graph).run(fetches, feed)
            with SameDraws(graph):
                expected, expected_grads = self.in_torch(twin, leaves)
            close(got, expected)
            found = iter(got_grads)
            for dx, reference in zip(grads, expected_grads, strict=True):
                close([torch.zeros_like(reference) if dx is None else dense(next(found))], [reference])
            close(list(self.module.buffers()), list(twin.buffers()))
        return fixed and len(sizes) > 1

    def call(self, module: nn.Module, leaves: list[Any]) -> Any:
        args, kwargs = tree_unflatten([x.clone() if is_real(x) else x for x in leaves], self.structure)
        return module(*args, **kwargs)  # of copies: some write into their arguments

    def in_torch(self, twin: nn.Module, leaves: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs = [leaves[i].requires_grad_() for i in self.wanted]
        outputs = floats(self.call(twin, leaves))
        wanted = [*inputs, *trained(twin)]
        return outputs, autograd(outputs, wanted, [torch.cos(y.detach()) for y in outputs])

    @property
    def rows(self) -> int:
        return next((len(x) for x in self.leaves if isinstance(x, torch.Tensor) and x.dim()), 0)

    def takes(self, rows: int) -> bool:
        """Whether torch takes so many, with results of the same ranks."""
        try:
            ranks = [
                [y.dim() for y in floats(self.call(copy.deepcopy(self.module), self.at(n)))] for n in (rows, self.rows)
            ]
        except (RuntimeError, ValueError, AssertionError):
            return False
        return ranks[0] == ranks[1]

    def at(self, rows: int) -> list[Any]:
        """The leaves with so many rows, their own again and again; real numbers a little smaller."""
        mine = max(self.rows, 1)
        leaves: list[Any] = []
        for x in self.leaves:
            if isinstance(x, torch.Tensor):
                x = x.detach() * 0.9375 if is_real(x) else x.clone()
                if x.dim() and len(x) == self.rows:
                    x = torch.cat([x] * -(-rows // mine))[:rows] if rows else x
            leaves.append(x)
        return leaves

    def placeholder(self, x: Any, varies: bool) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        letter = varies and x.dim() and len(x) == self.rows
        return tfnb.placeholder(x.detach(), shape=("B", *x.shape[1:]) if letter else tuple(x.shape))


def is_real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def floats(result: Any) -> list[torch.Tensor]:
    return [y for y in tree_leaves(result) if is_real(y)]


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def dense(dx: Any) -> torch.Tensor:
    return dx.to_dense() if isinstance(dx, tfnb.IndexedSlices) else dx


def close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Up to the rounding of float64, in sums that run in another order."""
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-7, atol=1e-9, equal_nan=True)
