"""Values computed again for the backward pass: the same gradients and draws, and no value of the region kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tfnb
from tests.gradients.reference import compare
from tfnb.graph import Graph


def region_values(g: Graph) -> set[int]:
    """Nodes of regions that a second run would repeat, and whose values stay inside."""
    outer = {n.id: t.split("/")[0] for n in g.nodes for t in n.tags if t.startswith("recompute:")}
    forward = [n for n in g.nodes if "gradient" not in n.tags]
    outputs = {v.node for n in forward for v in n.inputs if outer.get(n.id) != outer.get(v.node)}
    kept = {n.id for n in g.nodes if n.stream is not None or n.op == "tfnb.read"}
    return outer.keys() - outputs - kept


def assert_not_kept(g: Graph) -> None:
    """No gradient node takes a value from inside a region."""
    hidden = region_values(g)
    assert hidden
    for node in g.select(tag="gradient"):
        assert not {v.node for v in node.inputs} & hidden, node
    assert g.select(tag="recomputed")


def body(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.exp()).tanh() * x


def nested(x: torch.Tensor) -> torch.Tensor:
    return tfnb.recompute(lambda z: tfnb.recompute(body)(z.cos()).exp().sin())(x).sin()


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "recompute": lambda x: tfnb.recompute(body)(x).sin(),
    "twice": lambda x: tfnb.recompute(body)(tfnb.recompute(body)(x)).sin(),
    "nested": nested,
    "checkpoint": lambda x: checkpoint(body, x, use_reentrant=False).sin(),
    "sequential": lambda x: checkpoint_sequential([body, torch.sin, torch.exp], 2, x, use_reentrant=False).sin(),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_same_and_no_value_is_kept(way: str) -> None:
    g = compare(WAYS[way], [torch.randn(4, 3, dtype=torch.float64, requires_grad=True)])
    assert_not_kept(g)


def test_the_reentrant_checkpoint() -> None:
    data = torch.randn(4, 3, dtype=torch.float64)
    leaf = data.clone().requires_grad_()
    want = torch.autograd.grad(body(leaf).sin().sum(), leaf)[0]
    for way in (
        lambda x: checkpoint(body, x, use_reentrant=True).sin(),
        lambda x: checkpoint_sequential([body, torch.sin], 2, x, use_reentrant=True),
    ):
        with tfnb.record() as g:
            x = tfnb.placeholder(data)
            with pytest.warns(UserWarning, match=r"no input of checkpoint\(use_reentrant=True\) requires a gradient"):
                y = way(x)
            dx = tfnb.gradients(y.sum(), x)[0]
        torch.testing.assert_close(dx.sample, want)
        assert_not_kept(g)


def test_draws_are_kept() -> None:
    data = torch.ones(64, 3)
    with tfnb.record() as g:
        x = tfnb.placeholder(data)
        y = tfnb.recompute(lambda z: F.dropout(z.exp(), 0.5).sin())(x)
        dx = tfnb.gradients(y.sum(), x)[0]
    got, dgot = tfnb.run([y, dx], {x: data})
    e = torch.e * 2
    torch.testing.assert_close(dgot, torch.where(got == 0, 0.0, e * torch.cos(torch.tensor(e))))
    assert len([n for n in g.nodes if n.stream is not None]) == 1
    assert_not_kept(g)


def test_modules_with_parameters_and_running_statistics() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    data = torch.randn(16, 3)
    want = torch.autograd.grad(model(data).square().sum(), list(model.parameters()))
    with tfnb.record() as g:
        x = tfnb.placeholder(data)
        loss = tfnb.recompute(model)(x).square().sum()
        grads = tfnb.gradients(loss, list(model.parameters()))
    torch.testing.assert_close(tfnb.run(grads, {x: data}), list(want), rtol=1e-4, atol=1e-5)
    assert_not_kept(g)
    assert len([n for n in g.nodes if n.op == "tfnb.assign"]) == 3  # written once: mean, variance, batches


def test_a_long_region_needs_no_recursion() -> None:
    def long(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1500):
            x = x.sin()
        return x

    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, dtype=torch.float64))
        dx = tfnb.gradients(tfnb.recompute(long)(x), x)[0]
    assert len(g.select(tag="recomputed")) == 1499
    leaf = x.sample.clone().requires_grad_()
    torch.testing.assert_close(dx.sample, torch.autograd.grad(long(leaf).sum(), leaf)[0])


def test_outside_of_a_recording_it_is_torchs_checkpoint() -> None:
    x = torch.randn(3, requires_grad=True)
    want = torch.autograd.grad(body(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(tfnb.recompute(body)(x).sum(), x), want)


def test_a_function_with_its_own_backward_inside() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return 5 * ctx.saved_tensors[0] * dy

    compare(lambda x: tfnb.recompute(lambda z: Twice.apply(z.sin()).exp())(x),
            [torch.randn(4, 3, dtype=torch.float64, requires_grad=True)])  # fmt: skip


def test_a_rule_that_is_a_decomposition() -> None:
    g = compare(lambda x: tfnb.recompute(lambda z: F.cross_entropy(torch.logit(z.sigmoid()), z.softmax(-1)))(x),
                [torch.randn(4, 3, dtype=torch.float64, requires_grad=True)])  # fmt: skip
    assert_not_kept(g)


def test_copies_stand_on_the_device_of_what_they_copy() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3))
        with tfnb.device("/task:1"):
            y = tfnb.recompute(body)(x)
        tfnb.gradients(y.sum(), x)
    assert {n.device for n in g.select(tag="recomputed")} == {"/task:1"}


def test_regions_of_two_recordings_are_two_regions() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3, dtype=torch.float64))
        y = tfnb.recompute(body)(x)
    with tfnb.record(g):
        z = tfnb.recompute(body)(y).sin()
        tfnb.gradients(z.sum(), x)
    assert len({t for n in g.nodes for t in n.tags if t.startswith("recompute:")}) == 2
    assert_not_kept(g)
