"""One recording of a training step against the plain torch loop: outputs, loss, all gradients, Adam, buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tfnb

ROWS = (4, 3, 5)  # recorded at the first, run at all
RATE = 1e-3
RELATIVE = 1e-4  # of each element
ROUNDING = 1e-6  # besides, where sums run in another order: of a tensor's largest element, or of FLOOR
FLOOR = 0.1
NOISE = 1e-5  # of the largest gradient of the model: what is smaller may be nothing but rounding

Objective = Callable[..., tuple[Any, torch.Tensor]]  # (model, *inputs) -> (outputs, loss)
Draw = Callable[[int], tuple[torch.Tensor, ...]]  # rows -> inputs, rows on axis 0


def check(model: nn.Module, objective: Objective, draw: Draw, *, training: bool, exact: bool) -> None:
    """Record loss, gradients and one step of Adam at 4 rows; three steps at 4, 3 and 5 rows equal those of torch.

    Torch's Adam is the fused one, whose kernel tfnb calls too: torch's other forms differ from it in the last bit.
    exact: every element of every output, gradient, parameter and buffer within 1e-4 of itself; as these recordings call
    the kernels that torch calls, in its order, they are in fact bitwise equal. Other models have a sum in another order
    somewhere, an embedding's rows or a gradient's formula, so that an element that nearly cancels is a few roundings of
    the largest one off. Where a gradient is zero but for rounding (the bias of the keys of attention), Adam makes a
    whole step of its sign: such an element of a parameter is held to the length of the steps only, and where it is a
    bias before a batch norm, whose running mean shows the step, the epsilon is 1e-4 in place of Adam's own.
    """
    model.train(training)
    twin = copy.deepcopy(model)
    parameters, wanted = dict(model.named_parameters()), dict(twin.named_parameters())
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    eps = 1e-4 if training and normed and not exact else 1e-8
    optimizer = torch.optim.Adam(twin.parameters(), lr=RATE, eps=eps, fused=True)
    loose = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in wanted.items()}
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(sample, shape=("B", *sample.shape[1:])) for sample in draw(ROWS[0])]
        outputs, loss = objective(model, *fed)
        grads = tfnb.gradients(loss, list(parameters.values()))
        step = tfnb.train.Adam(RATE, eps=eps).minimize(loss)
    fetched = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    given = [grad is not None for grad in grads]
    with tfnb.Session(graph) as session:
        for rows in ROWS:
            batch = draw(rows)
            fetches = [fetched, loss, [grad for grad in grads if grad is not None], step]
            got, got_loss, got_grads, _ = session.run(fetches, dict(zip(fed, batch, strict=True)))
            optimizer.zero_grad()
            expected, expected_loss = objective(twin, *batch)
            expected_loss.backward()
            leaves = [leaf for leaf in tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
            same(dict(enumerate(got)), dict(enumerate(leaves)), f"output, {rows} rows", exact=exact)
            same({"loss": got_loss}, {"loss": expected_loss}, f"{rows} rows", exact=exact)
            assert given == [p.grad is not None for p in wanted.values()]
            flowing = [name for name, flows in zip(parameters, given, strict=True) if flows]
            got_grads = [g.to_dense() if isinstance(g, tfnb.IndexedSlices) else g for g in got_grads]
            want_grads = {name: wanted[name].grad for name in flowing}
            same(dict(zip(flowing, got_grads, strict=True)), want_grads, f"grad, {rows} rows", exact=exact)
            optimizer.step()
            if not exact:
                largest = max(float(grad.abs().max()) for grad in want_grads.values())
                for (name, grad), mine in zip(want_grads.items(), got_grads, strict=True):
                    loose[name] |= (grad != mine) & (grad.abs() < NOISE * largest)
                held = {name: torch.where(loose[name], p, parameters[name]) for name, p in wanted.items()}
                bounded(parameters, wanted)
            same(parameters if exact else held, wanted, f"parameter after {rows} rows", exact=exact)
            same(dict(model.named_buffers()), dict(twin.named_buffers()), f"buffer after {rows} rows", exact=exact)


def bounded(parameters: dict[str, torch.Tensor], wanted: dict[str, Any]) -> None:
    """No element further apart than steps in opposite directions take it."""
    for name, p in parameters.items():
        assert float((p - wanted[name]).detach().abs().max()) <= 2 * RATE * len(ROWS), name


def same(got: dict[Any, torch.Tensor], expected: dict[Any, Any], what: str, *, exact: bool = False) -> None:
    """Every element equal within the tolerance, also where it is not finite; integers exactly."""
    assert got.keys() == expected.keys(), what
    for name, value in got.items():
        value, reference = value.detach(), expected[name].detach()
        assert value.shape == reference.shape and value.dtype == reference.dtype, f"{what}: {name}"
        finite = reference[reference.isfinite()].abs()
        largest = max(float(finite.max()) if finite.numel() else 0.0, FLOOR)
        relative = RELATIVE if reference.is_floating_point() else 0.0
        absolute = 0.0 if exact else ROUNDING * largest * bool(relative)
        where = f"{what}: {name}"
        torch.testing.assert_close(
            value, reference, rtol=relative, atol=absolute, equal_nan=True, msg=lambda text, at=where: f"{at} {text}"
        )
