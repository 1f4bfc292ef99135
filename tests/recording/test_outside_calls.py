"""Calls of torch on recorded tensors outside of a recording: on the samples, and they stay, in our words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb.errors import FailedPrecondition, InvalidArgument, TfnbError

SAMPLE = torch.arange(12.0).reshape(4, 3)


def recorded(sample: torch.Tensor = SAMPLE) -> Any:
    with tfnb.record():
        return tfnb.placeholder(sample, name="x")


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("call", [
    lambda w, x: F.mse_loss(w[0], x), lambda w, x: F.smooth_l1_loss(w[:1], x), lambda w, x: torch.cat([w, x]).sum(),
    lambda w, x: torch.stack([x, w]).square().mean(), lambda w, x: (w.reshape(x.shape) @ x.T).sum(),
    lambda w, x: (w[: x.shape[0] // 2] * x.shape[1]).sum(), lambda w, x: (torch.zeros(x.size()) + w * x).sum(),
    lambda w, x: F.cross_entropy(w * 2, x.argmax(1)), lambda w, x: torch.vmap(torch.dot)(w, x).sum(),
])  # fmt: skip
def test_a_recorded_tensor_stands_for_its_sample(call: Callable[..., torch.Tensor]) -> None:
    w, twin = (torch.full((4, 3), 0.5, requires_grad=True) for _ in range(2))
    loss = call(w, recorded())
    loss.backward()
    call(twin, SAMPLE).backward()
    assert type(loss) is torch.Tensor and torch.equal(w.grad, twin.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("call", "error", "asked"), [
    (lambda x: x @ torch.ones(5, 5), FailedPrecondition, "matmul"),
    (lambda x: x.view(7), FailedPrecondition, "view"),
    (lambda x: nn.Linear(4, 2)(x), FailedPrecondition, "linear"),
    (lambda x: torch.cat([x, torch.ones(2, 2)]), FailedPrecondition, "cat"),
    (lambda x: F.binary_cross_entropy(x, torch.ones(3)), InvalidArgument, "binary_cross_entropy"),
])  # fmt: skip
def test_what_torch_refuses_says_what_was_asked_and_what_to_do(
    call: Callable[[Any], Any], error: type[TfnbError], asked: str
) -> None:
    text = rf"(?s){asked} outside of a recording failed: .*x: float32\[B, 3\].*calls\.py line .*into a cell.*tfnb\.run"
    with pytest.raises(error, match=text):
        call(recorded())


@pytest.mark.parametrize("write", [
    lambda x: x.add_(1), lambda x: x.__setitem__(0, 7.0), lambda x: nn.ReLU(inplace=True)(x),
    lambda x: torch.add(SAMPLE, 1, out=x), lambda x: torch._foreach_mul_([x], 2.0),
    lambda x: x.requires_grad_(), lambda x: setattr(x, "data", SAMPLE), lambda x: setattr(x, "requires_grad", True),
])  # fmt: skip
def test_nothing_changes_a_sample(write: Callable[[Any], Any]) -> None:
    data = -SAMPLE
    x = recorded(data)
    assert x.shape == (4, 3) and x.shape[0] * x[:1].sum() == -12
    with pytest.raises(FailedPrecondition, match=r"(?s)would change the sample of x: .*calls\.py line .*clone"):
        write(x)
    assert torch.equal(data, -SAMPLE) and torch.equal(x.sample, -SAMPLE)


def test_protocols_of_python_keep_their_errors() -> None:
    x = recorded()
    with pytest.raises(IndexError):
        x[9]
    with pytest.raises(TypeError, match="unsupported operand"):
        x + object()
    assert len(list(x)) == 4


def test_without_a_sample_sizes_vary_and_values_are_missing() -> None:
    with tfnb.record():
        x = tfnb.placeholder(shape=(None, 3), dtype=torch.float32)
    assert isinstance(x.shape[0], torch.SymInt) and x.shape[1] == 3 and x.dtype is torch.float32
    with pytest.raises(InvalidArgument, match="no value while recording"):
        x * 2


@pytest.mark.parametrize("call", [
    lambda x, w: F.linear(x, w), lambda x, w: torch.cat([x, w]), lambda x, w: torch.cdist(x, w),
    lambda x, w: torch.einsum("ij,kj->ik", x, w), lambda x, w: F.embedding(x.long()[0], w),
    lambda x, w: torch.where(x[:1] > 0, w, x[:1]), lambda x, w: torch.addmm(w[0, :3], x, w.T), lambda x, w: x @ w.T,
], ids=["linear", "cat", "cdist", "einsum", "embedding", "where", "addmm", "@"])  # fmt: skip
@pytest.mark.parametrize("inside", [True, False])
def test_a_recorded_tensor_and_a_variable_go_together_in_every_call(call: Any, inside: bool) -> None:
    plain, weights = torch.tensor([[0.0, 1.0, 2.0, 1.0], [2.0, 0.0, 1.0, 2.0]]), torch.rand(3, 4)
    weight = tfnb.Variable(weights, name="w")
    with tfnb.record("together"):
        x = tfnb.placeholder(plain, name="x")
        y = call(x, weight) if inside else x + 0
    found = tfnb.run(y, {x: plain}) if inside else call(x, weight)
    assert torch.equal(torch.as_tensor(found), call(plain, weights))
