"""Steps that one task must compute whole: they see every row of their batch, and equal the local run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tfnb


def recorded():
    """A regression whose watched value hangs on the gradients."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    data, target = torch.randn(48, 4, dtype=torch.float64), torch.randn(48, 1, dtype=torch.float64)
    with tfnb.record("norms"):
        x, y = tfnb.placeholder(data[:5], name="x"), tfnb.placeholder(target[:5], name="y")
        loss = (model(x) - y).square().mean()
        optimizer = tfnb.train.SGD(0.1)
        pairs = optimizer.compute_gradients(loss)
        norm = sum(grad.square().sum() for grad, _ in pairs).sqrt()
        train = optimizer.apply_gradients(pairs)
    return model, {x: data, y: target}, train, loss, norm


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_watched_norm_of_gradients_trains_as_here(connect, mode):
    model, feeds, train, loss, norm = recorded()
    start = [p.detach().clone() for p in model.parameters()]
    here = tfnb.fit(train, feeds, epochs=3, batch_size=13, watch=[loss, norm])
    expected = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), start, strict=True):
            p.copy_(value)
    connect(2)
    with pytest.warns(UserWarning, match="one task|one step after the other"):
        there = tfnb.fit(train, feeds, epochs=3, batch_size=13, watch=[loss, norm], mode=mode)
    assert there.steps == here.steps == 12
    for mine, theirs in zip(there.history, here.history, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)
    for p, value in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p, value), "one task computes the step: bitwise"
