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
RELATIVE = 1e-4  # of each element
ROUNDING = 1e-5  # besides, where sums run in another order: of a tensor's largest element, or of FLOOR
FLOOR = 0.1

Objective = Callable[..., tuple[Any, torch.Tensor]]  # (model, *inputs) -> (outputs, loss)
Draw = Callable[[int], tuple[torch.Tensor, ...]]  # rows -> inputs, rows on axis 0


def check(model: nn.Module, objective: Objective, draw: Draw, *, training: bool, exact: bool) -> None:
    """Record loss, gradients and one step of Adam at 4 rows; three steps at 4, 3 and 5 rows equal those of torch.

    Torch's Adam is the fused one, whose kernel tfnb calls too: torch's other forms differ from it in the last bit.
    exact: every element of every output, gradient, parameter and buffer within 1e-4 of itself, with Adam's default
    epsilon; as these recordings call the kernels that torch calls, in its order, they are in fact bitwise equal. Other
    models have a sum in another order somewhere, an embedding's rows or a gradient's formula. That alone is about 1e-7
    of the largest element, but a gradient that is zero but for rounding (a bias before a batch norm, that of the keys
    of attention) then decides the direction of a whole step: for those the epsilon is 1e-4.
    """
    model.train(training)
    twin = copy.deepcopy(model)
    parameters, wanted = dict(model.named_parameters()), dict(twin.named_parameters())
    eps = 1e-8 if exact else 1e-4
    optimizer = torch.optim.Adam(twin.parameters(), lr=1e-3, eps=eps, fused=True)
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(sample, shape=("B", *sample.shape[1:])) for sample in draw(ROWS[0])]
        outputs, loss = objective(model, *fed)
        grads = tfnb.gradients(loss, list(parameters.values()))
        step = tfnb.train.Adam(1e-3, eps=eps).minimize(loss)
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
            same(parameters, wanted, f"parameter after {rows} rows", exact=exact)
            same(dict(model.named_buffers()), dict(twin.named_buffers()), f"buffer after {rows} rows", exact=exact)


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
