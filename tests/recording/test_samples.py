"""Samples: those of forward code at once, those of gradients and updates when somebody looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tfnb.errors import InvalidArgument
from tfnb.graph import Value
from tfnb.recording.values.samples import Samples
from tfnb.recording.values.workspace import workspace

CALLS: list[str] = []


@torch.library.custom_op("tfnb_test_samples::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    """Twice ``x``, and a note that it was computed."""
    CALLS.append("noted")
    return x * 2


@noted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@tfnb.custom_gradient
def watched(x: torch.Tensor):
    """The identity, whose gradient notes that it was computed."""
    return x.clone(), lambda dy: noted(dy)


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


def network() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    return (
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)),
        torch.randn(5, 4),
        (torch.arange(5) % 3),
    )


def eager(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


def test_a_gradient_is_computed_when_somebody_looks() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3))
        dx, dh = tfnb.gradients((watched(h := x * 3) ** 2).sum(), [x, h])
    assert CALLS == []
    assert dx.sample.tolist() == [36, 36, 36]
    assert dh.sample.tolist() == [12, 12, 12]
    assert CALLS == ["noted"], "what two gradients have in common is computed once"


def test_a_step_is_recorded_without_its_values() -> None:
    model, x, y = network()
    with tfnb.record() as g:
        loss = F.cross_entropy(model(tfnb.placeholder(x)), tfnb.placeholder(y))
        step = tfnb.train.Adam(1e-3).minimize(loss)
    kept = workspace(g).samples
    steps = [n for n in g.nodes if n.tags & {"gradient", "update"}]
    assert len(steps) > 10 and step.node in g.nodes
    assert [n.name for n in steps if kept.known(n.value()) is not None] == []
    assert torch.equal(loss.sample, F.cross_entropy(model(x), y))


def test_gradients_looked_at_are_those_of_torch() -> None:
    model, x, y = network()
    with tfnb.record():
        loss = F.cross_entropy(model(tfnb.placeholder(x)), tfnb.placeholder(y))
        grads = tfnb.gradients(loss, list(model.parameters()))
    for got, expected in zip(grads, eager(model, x, y), strict=True):
        torch.testing.assert_close(got.sample, expected)


@pytest.mark.filterwarnings("ignore:recording. this cell or block keeps CALLS")
def test_forward_code_on_gradients_has_values_at_once() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3))
        (dx,) = tfnb.gradients((watched(x) ** 3).sum(), [x])
        norm = dx.norm()
        assert CALLS == ["noted"]
        assert f"{norm:.2f}" == f"{6 * 3**0.5:.2f}"
        with pytest.raises(IndexError):
            dx[5]


def test_what_is_looked_at_late_is_of_now_and_never_a_mixture() -> None:
    """A gradient that nobody had looked at, after the weights have changed: all of it of the new weights."""
    model, x, y = network()
    with tfnb.record():
        px, py = tfnb.placeholder(x), tfnb.placeholder(y)
        loss = F.cross_entropy(model(px), py)
        grads = tfnb.gradients(loss, list(model.parameters()))
        train = tfnb.train.SGD(0.5).minimize(loss)
    before = loss.sample
    for _ in range(3):
        tfnb.run(train, {px: x, py: y})
    for got, expected in zip(grads, eager(model, x, y), strict=True):
        torch.testing.assert_close(got.sample, expected)
    assert torch.equal(loss.sample, before), "what was computed while recording stays"


def test_a_gradient_that_was_looked_at_stays() -> None:
    model, x, y = network()
    with tfnb.record():
        loss = F.cross_entropy(model(tfnb.placeholder(x)), tfnb.placeholder(y))
        grads = tfnb.gradients(loss, list(model.parameters()))
    expected = eager(model, x, y)
    grads[0].sample  # noqa: B018
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    for got, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(got.sample, e)


def test_without_a_sample_gradients_have_none() -> None:
    with tfnb.record():
        x = tfnb.placeholder(shape=(None, 3))
        (dx,) = tfnb.gradients((x * x).sum(), [x])
    with pytest.raises(tfnb.errors.InvalidArgument, match="no value while recording"):
        dx.sample  # noqa: B018


def test_one_that_cannot_be_computed_does_not_spoil_the_others() -> None:
    singular = torch.zeros(2, 2)

    @tfnb.custom_gradient
    def odd(x: torch.Tensor):
        return x.clone(), lambda dy: torch.linalg.inv(singular) @ dy

    with tfnb.record():
        x, z = (tfnb.placeholder(torch.ones(2, 2), shape=(2, 2)) for _ in range(2))
        dx, dz = tfnb.gradients((odd(x) + z * z).sum(), [x, z])
    assert dz.sample.tolist() == [[2, 2], [2, 2]]
    with pytest.raises(torch.linalg.LinAlgError):
        dx.sample  # noqa: B018


@pytest.mark.parametrize("what", ["placeholder", "queue"])
def test_what_has_no_sample_is_not_looked_for_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Value] = []
    compute = Samples.compute

    def counted(samples: Samples, value: Value, *more: Any) -> Any:
        looked.append(value)
        return compute(samples, value, *more)

    monkeypatch.setattr(Samples, "compute", counted)
    queue = tfnb.FIFOQueue(-1, torch.float32, (3,))
    with tfnb.record():
        x = tfnb.placeholder(shape=(3,), dtype=torch.float32)
        many = [x + i if what == "placeholder" else queue.dequeue() for i in range(40)]
        total = torch.stack(many).sum()
    assert len(looked) < 5, len(looked)
    with pytest.raises(InvalidArgument, match="has no value while recording"):
        total.sample  # noqa: B018
