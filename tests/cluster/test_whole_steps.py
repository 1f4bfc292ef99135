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


@pytest.mark.parametrize("tasks", [1, 2])
def test_what_is_done_with_values_behind_the_update_is_done_there(connect, tasks):
    """A queue that takes the new weights, and a Variable whose new value needs them and the size of the batch."""
    data, found = torch.arange(12.0).reshape(4, 3), []
    for is_there in (False, True):
        if is_there:
            connect(tasks)
        weight, total = tfnb.Variable(torch.ones(3), name="weight"), tfnb.Variable(torch.zeros(3), name="total")
        queue = tfnb.FIFOQueue(5, [torch.float32], shapes=[(3,)])
        with tfnb.record():
            x = tfnb.placeholder(data[:3], name="x")
            step = tfnb.train.SGD(0.1).minimize((x @ weight.read()).mean())
            put = queue.enqueue((weight.read(),))
            moved = total.assign(weight.read().expand(x.shape[0], 3).sum(0))
            queued, sized = tfnb.group(step, put), tfnb.group(step, moved)
            taken = queue.dequeue()
        tfnb.run(queued, {x: data})
        tfnb.run(sized, {x: data[:2]})
        found.append([weight.value(), total.value(), *tfnb.run(taken)])
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there)
