"""Gradients of recurrent nets: one forward serves the values and the gradient, for all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tests.gradients.reference import compare

KINDS = (nn.LSTM, nn.GRU, nn.RNN)


def _loss(net: Any, x: torch.Tensor) -> torch.Tensor:
    y, last = net(x)
    return y.square().sum() + (last[1] if isinstance(last, tuple) else last).sin().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_is_computed_once(kind: Any) -> None:
    """It was computed twice: as a whole for the loss, and step by step for the gradient."""
    net = kind(3, 4)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(5, 2, 3), shape=("T", "B", 3))
        loss = _loss(net, x)
        grads = tfnb.gradients(loss, list(net.parameters()))
    nodes = [node.op for node in tfnb.Session(g).passes([loss, *grads], [x])[-1].graph.nodes]
    assert nodes.count("tfnb.recurrent_net.default") == nodes.count("tfnb.recurrent_net_backward.default") == 1
    assert not any(op.endswith(".input") for op in nodes)
    alone = [node.op for node in tfnb.Session(g).passes([loss], [x])[-1].graph.nodes]
    assert "tfnb.recurrent_net.default" not in alone  # nothing is kept where nobody needs it


def test_what_is_to_be_recomputed_keeps_nothing() -> None:
    net, start = nn.GRU(3, 3), torch.randn(1, 2, 3)
    with tfnb.record() as g:
        x, h = tfnb.placeholder(torch.randn(5, 2, 3), shape=("T", 2, 3)), tfnb.placeholder(start, shape=(1, 2, 3))
        loss = tfnb.recompute(lambda x, h: net(x, h)[0])(x, h).square().sum()
        grads = tfnb.gradients(loss, list(net.parameters()))
    nodes = [node.op for node in tfnb.Session(g).passes([loss, *grads], [x, h])[-1].graph.nodes]
    assert nodes.index("aten.gru.input") < nodes.index("aten.sum.default") < nodes.index("tfnb.recurrent_net.default")


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_one_recording_for_all_sizes(kind: Any, options: dict[str, Any], executor: str) -> None:
    net = kind(3, 4, **options)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(5, 2, 3), shape=("T", "B", 3))
        loss = _loss(net, x)
        grads = tfnb.gradients(loss, [x, *net.parameters()])
    with tfnb.Session(g, executor=executor) as session:
        for steps, rows in ((5, 2), (1, 1), (9, 6)):
            batch = torch.randn(steps, rows, 3, requires_grad=True)
            wanted = _loss(net, batch)
            expected = [wanted, *torch.autograd.grad(wanted, [batch, *net.parameters()])]
            torch.testing.assert_close(session.run([loss, *grads], {x: batch.detach()}), [t.detach() for t in expected])


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}])
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_those_of_autograd(kind: Any, options: dict[str, Any]) -> None:
    net = kind(3, 2, dtype=torch.float64, **options)

    def called(x: torch.Tensor, h: torch.Tensor, *weights: torch.Tensor) -> Any:
        named = dict(zip(net._flat_weights_names, weights, strict=True))
        y, last = torch.func.functional_call(net, named, (x, (h, h) if kind is nn.LSTM else h))
        return y, last[1] if isinstance(last, tuple) else last

    count = net.num_layers * (2 if net.bidirectional else 1)
    given = [torch.randn(4, 4, 3), torch.randn(count, 4, 2)]
    inputs = [*(t.double() for t in given), *(w.detach() for w in net._flat_weights)]
    compare(called, [t.requires_grad_() for t in inputs])


def test_a_second_derivative_over_a_packed_sequence_is_refused() -> None:
    net = nn.GRU(3, 2)
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 2, 3), shape=(4, 2, 3))
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]))
        (dx,) = tfnb.gradients(net(packed)[0].data.sin().sum(), [x])
        with pytest.raises(tfnb.errors.NoGradient, match=r"run the net on the padded batch"):
            tfnb.gradients(dx.sum(), [x])


def test_frozen_weights_have_no_gradient() -> None:
    net = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    with tfnb.record() as g:
        loss = _loss(net, tfnb.placeholder(x, shape=("T", "B", 3)))
        grads = tfnb.gradients(loss, [net.weight_hh_l0])
    back = next(node for node in g.nodes if node.op == "tfnb.recurrent_net_backward.default")
    assert len(back.outputs) == 1
    torch.testing.assert_close(grads[0].sample, torch.autograd.grad(_loss(net, x), net.weight_hh_l0)[0])


def test_in_a_loop() -> None:
    net, x = nn.LSTM(3, 3), torch.randn(4, 2, 3)

    def looped(x: torch.Tensor, iterations: int) -> torch.Tensor:
        h = x
        for _ in range(iterations):
            h = net(h)[0] + x
        return h.square().sum()

    with tfnb.record() as g:
        fed, count = tfnb.placeholder(x), tfnb.placeholder(torch.tensor(3), shape=())
        _, h = tfnb.while_loop(lambda i, h: i < count, lambda i, h: (i + 1, net(h)[0] + fed), [torch.tensor(0), fed])
        grads = tfnb.gradients(h.square().sum(), [fed, *net.parameters()])
    for iterations in (3, 1, 5):
        batch = x.clone().requires_grad_()
        expected = torch.autograd.grad(looped(batch, iterations), [batch, *net.parameters()])
        found = tfnb.Session(g).run(grads, {fed: x, count: torch.tensor(iterations)})
        torch.testing.assert_close(found, list(expected))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("ways", [1, 2])
def test_projections_are_taken_apart(ways: int) -> None:
    net, x = nn.LSTM(3, 4, 2, proj_size=2, bidirectional=ways == 2), torch.randn(5, 2, 3)

    def loss(y: torch.Tensor, ends: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return y.square().sum() + ends[0].sin().sum() + ends[1].cos().sum()

    with tfnb.record():
        grads = tfnb.gradients(loss(*net(tfnb.placeholder(x, shape=(5, "B", 3)))), list(net.parameters()))
    expected = torch.autograd.grad(loss(*net(x)), list(net.parameters()))
    torch.testing.assert_close([grad.sample for grad in grads], list(expected))
