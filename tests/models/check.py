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
RELATIVE, FLOOR = 1e-4, 1e-2  # of a tensor's largest element; smaller tensors are compared as if they were this large

Objective = Callable[..., tuple[Any, torch.Tensor]]  # (model, *inputs) -> (outputs, loss)
Draw = Callable[[int], tuple[torch.Tensor, ...]]  # rows -> inputs, rows on axis 0


def check(model: nn.Module, objective: Objective, draw: Draw, *, training: bool) -> None:
    """Record loss, gradients and one step of Adam at 4 rows; three steps at 4, 3 and 5 rows equal those of torch.

    The epsilon of Adam is larger than its default: gradients that are zero but for rounding (a bias before a batch
    norm) would otherwise decide the direction of whole steps.
    """
    model.train(training)
    twin = copy.deepcopy(model)
    parameters, wanted = dict(model.named_parameters()), dict(twin.named_parameters())
    optimizer = torch.optim.Adam(twin.parameters(), lr=1e-3, eps=1e-4)
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(sample, shape=("B", *sample.shape[1:])) for sample in draw(ROWS[0])]
        outputs, loss = objective(model, *fed)
        grads = tfnb.gradients(loss, list(parameters.values()))
        step = tfnb.train.Adam(1e-3, eps=1e-4).minimize(loss)
    fetched = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    given = [grad is not None for grad in grads]
    with tfnb.Session(graph) as session:
        for rows in ROWS:
            batch = draw(rows)
            fetches = [fetched, loss, [grad for grad in grads if grad is not None], step]
            got, got_loss, got_grads, _ = session.run(fetches, dict(zip(fed, batch, strict=True)))
            got_grads = [g.to_dense() if isinstance(g, tfnb.IndexedSlices) else g for g in got_grads]
            optimizer.zero_grad()
            expected, expected_loss = objective(twin, *batch)
            expected_loss.backward()
            leaves = [leaf for leaf in tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
            same(dict(enumerate(got)), dict(enumerate(leaves)), f"output, {rows} rows")
            same({"loss": got_loss}, {"loss": expected_loss}, f"{rows} rows")
            assert given == [p.grad is not None for p in wanted.values()]
            flowing = [name for name, flows in zip(parameters, given, strict=True) if flows]
            got_grads = [g.to_dense() if isinstance(g, tfnb.IndexedSlices) else g for g in got_grads]
            same(dict(zip(flowing, got_grads, strict=True)), {n: wanted[n].grad for n in flowing}, f"grad, {rows} rows")
            optimizer.step()
            same(parameters, wanted, f"parameter after {rows} rows")
            same(dict(model.named_buffers()), dict(twin.named_buffers()), f"buffer after {rows} rows")


def same(got: dict[Any, torch.Tensor], expected: dict[Any, Any], what: str) -> None:
    """Every tensor equal within the tolerance; integers exactly."""
    assert got.keys() == expected.keys(), what
    for name, value in got.items():
        reference = expected[name].detach()
        assert value.shape == reference.shape and value.dtype == reference.dtype, f"{what}: {name}"
        if not reference.is_floating_point():
            assert torch.equal(value, reference), f"{what}: {name}"
            continue
        finite = reference.isfinite()
        assert torch.equal(value[~finite], reference[~finite]), f"{what}: {name}"
        difference = (value.detach() - reference)[finite].abs()
        allowed = RELATIVE * max(float(reference[finite].abs().max()) if finite.any() else 0.0, FLOOR)
        worst = float(difference.max()) if difference.numel() else 0.0
        assert worst <= allowed, f"{what}: {name} differs by {worst:.2e}, allowed {allowed:.2e}"
