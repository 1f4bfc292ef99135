"""torch.autograd.Function in a recording: its own backward, against the same Function under torch autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

import tfnb
from tests.gradients.reference import compare
from tfnb.graph import Graph


class Sign(torch.autograd.Function):
    """Straight-through sign: its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, dy):
        return dy


class Reversed(torch.autograd.Function):
    """Gradient reversal, with a plain argument and an argument of the newer style."""

    @staticmethod
    def forward(x, scale):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, dy):
        return -ctx.scale * dy, None


class Clipped(torch.autograd.Function):
    """The identity, whose gradient is clipped."""

    @staticmethod
    def forward(ctx, x, limit=0.5):
        ctx.limit = limit
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy.clamp(-ctx.limit, ctx.limit), None


class Exp(torch.autograd.Function):
    """Saves its own output, through which the second order flows."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return 3 * dy * y  # not the derivative: so that the forward's cannot pass the test


class Cube(torch.autograd.Function):
    """Keeps its output as an attribute, and an input."""

    @staticmethod
    def forward(ctx, x):
        ctx.square = x * x
        ctx.save_for_backward(x, None)
        ctx.out = ctx.square * x
        return ctx.out

    @staticmethod
    def backward(ctx, dy):
        x, nothing = ctx.saved_tensors
        assert nothing is None
        return dy * (2 * x * x + ctx.out / x)


class Scaled(torch.autograd.Function):
    """Two inputs, needs_input_grad."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = 2 * dy * w if ctx.needs_input_grad[0] else None
        dw = 5 * dy * x if ctx.needs_input_grad[1] else None
        return dx, dw


class Covariance(torch.autograd.Function):
    """A forward that refuses arguments which need a gradient."""

    @staticmethod
    def forward(ctx, x, w):
        assert not ctx.needs_input_grad[0] and not x.requires_grad
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return None, dy * x


def test_a_forward_is_told_that_constants_need_no_gradient():
    w = torch.nn.Parameter(torch.ones(3))
    with tfnb.record():
        y = Covariance.apply(torch.arange(3.0) / 2, w)
        (dw,) = tfnb.gradients(y.sum(), [w])
    assert tfnb.run(dw).tolist() == [0.0, 0.5, 1.0]


class SortedTwo(torch.autograd.Function):
    """Several outputs, one of them not differentiable, and an input that gets no gradient."""

    @staticmethod
    def forward(ctx, x, other):
        values, places = x.sort(-1)
        rounded = x.round()
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places, rounded)
        return values, places, rounded, x.sin()

    @staticmethod
    def backward(ctx, dvalues, dplaces, drounded, dsin):
        (places,) = ctx.saved_tensors
        return torch.zeros_like(dvalues).scatter(-1, places, dvalues) * 7 + dsin + drounded, None


made_before_the_recording = Exp.apply


class Bare(torch.autograd.Function):
    """Missing cotangents stay None."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, da, db):
        assert db is None
        return da * 11


class Doubled(torch.autograd.Function):
    """Writes its input and says so."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return 13 * dy


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Uses the written handle, and not what apply returned."""
    a = x * 1.0
    Doubled.apply(a)
    return a.sin()


def written_later(x: torch.Tensor) -> torch.Tensor:
    """A saved tensor that is written after the call: torch raises, so the oracle works on a copy."""
    a = x * 1.0
    y = Scaled.apply(a.clone(), x)
    return a.mul_(3) * y


class Quadratic(torch.autograd.Function):
    """Its backward is a Function again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return Scaled.apply(dy, x)


CASES: dict[str, Callable[..., Any]] = {
    "straight-through": lambda x: Sign.apply(x * 2) * x,
    "reversal": lambda x: Reversed.apply(x.sin(), 0.3) * x,
    "clipped": lambda x: Clipped.apply(x, 0.7) * x * x,
    "clipped by default": lambda x: Clipped.apply(x * 2),
    "output saved": lambda x: Exp.apply(x) * x,
    "bound long before": lambda x: made_before_the_recording(x) * x,
    "output kept as attribute": lambda x: Cube.apply(x) * x,
    "two inputs": lambda x: Scaled.apply(x, x.cos()),
    "a constant input": lambda x: Scaled.apply(x, torch.full((3,), 2.0, dtype=torch.float64)),
    "the same input twice": lambda x: Scaled.apply(x, x),
    "several outputs": lambda x: SortedTwo.apply(x, x * 2),
    "not materialized": lambda x: Bare.apply(x * x)[0],
    "written input": doubled,
    "written later": written_later,
    "nested": lambda x: Quadratic.apply(Exp.apply(x)),
    "under no_grad": lambda x: x * torch.no_grad()(Exp.apply)(x),
}


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_order_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    compare(CASES[name], [torch.randn(4, 3, dtype=torch.float64, requires_grad=True)])


@pytest.mark.parametrize("name", CASES)
def test_it_runs_on_other_data(name: str) -> None:
    torch.manual_seed(0)
    data = torch.randn(5, 3, dtype=torch.float64)
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3, dtype=torch.float64))
        ys = CASES[name](x)
        y = sum(part.sum() for part in (ys if isinstance(ys, tuple) else (ys,)) if part.is_floating_point())
        dx = tfnb.gradients(y, x)[0]
    want_x = data.clone().requires_grad_()
    wants = CASES[name](want_x)
    want = sum(part.sum() for part in (wants if isinstance(wants, tuple) else (wants,)) if part.is_floating_point())
    got, got_dx = tfnb.run([y, dx], {x: data})
    torch.testing.assert_close(got, want.detach())
    torch.testing.assert_close(got_dx, torch.autograd.grad(want, want_x)[0])


def test_the_forward_is_no_path_for_gradients() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor([0.5, -2.0]))
        dx = tfnb.gradients(Exp.apply(x).sum(), x)[0]
    assert torch.allclose(dx.sample, 3 * x.sample.exp())
    assert [n.op for n in g.select(op="tfnb.with_gradient")] == ["tfnb.with_gradient"]


def test_a_parameter_as_argument() -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([3.0, 4.0]), shape=(2,))
        dw = tfnb.gradients(Scaled.apply(x, w).sum(), w)[0]
    assert dw.sample.tolist() == [15.0, 20.0]


def test_gradients_taken_after_the_recording() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([0.5, -2.0]))
        y = Cube.apply(x).sum()
    dx = tfnb.gradients(y, x)[0]
    assert torch.allclose(tfnb.run(dx, {x: torch.tensor([1.0, 2.0])}), torch.tensor([3.0, 12.0]))


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * dy


def test_once_differentiable_has_one_order_and_says_so() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([0.5, -2.0]))
        dx = tfnb.gradients(Once.apply(x).sum(), x)[0]
        assert dx.sample.tolist() == [1.0, -4.0]
        with pytest.raises(tfnb.errors.NoGradient, match=r"Once .*once_differentiable: it has no second derivative"):
            tfnb.gradients(dx.sum(), x)


def failing(backward: Callable[..., Any]) -> Any:
    return type("Failing", (torch.autograd.Function,), {"forward": staticmethod(lambda ctx, x: x * 2),
                                                        "backward": staticmethod(backward)})  # fmt: skip


@pytest.mark.parametrize(
    ("backward", "says"),
    [
        (lambda ctx, dy: torch.from_numpy(dy.numpy() * 2), r"takes a value out of the graph with numpy\(\)"),
        (lambda ctx, dy: dy * dy.norm().item(), r"takes a value out of the graph with item\(\)"),
        (lambda ctx, dy: dy.data_ptr(), "no memory of its own"),
        (lambda ctx, dy: dy[:, :5] @ dy, "Failing"),
    ],
    ids=["numpy", "item", "data_ptr", "bug"],
)
def test_a_backward_that_cannot_be_recorded_is_refused(backward: Callable[..., Any], says: str) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(2, 3))
        y = failing(backward).apply(x).sum()
        with pytest.raises(tfnb.errors.NoGradient, match=says) as caught:
            tfnb.gradients(y, x)
    assert "test_functions.py line" in str(caught.value)


def test_a_forward_in_numpy_is_refused() -> None:
    class Numpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.numpy() ** 2)

        @staticmethod
        def backward(ctx, dy):
            return dy

    with tfnb.record():
        x = tfnb.placeholder(torch.randn(2, 3))
        with pytest.raises(tfnb.errors.Unsupported, match=r"forward of .*Numpy .*custom_op"):
            Numpy.apply(x)


class _Filling(torch.autograd.Function):
    """Its backward computes its layer again, and adds to the .grad of the layer's parameters by itself."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x).tanh()

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).tanh().backward(dy)
        return x.grad, None


def _filled(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _Filling.apply(x * layer.weight[0], layer).square().sum()


def test_gradients_that_a_backward_hands_to_parameters_are_not_lost() -> None:
    layer = torch.nn.Linear(3, 3).double()
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3, dtype=torch.float64))
        loss = _filled(layer, x)
        with pytest.raises(tfnb.errors.NoGradient, match=r"_Filling.backward(.|\n)*backward\(\) of its own"):
            tfnb.gradients(loss, list(layer.parameters()))
        loss.backward()
        got = [p.grad for p in layer.parameters()]
    data = torch.randn(5, 3, dtype=torch.float64)
    found = tfnb.run(got, {x: data})
    _filled(layer, data).backward()
    torch.testing.assert_close(found, [p.grad for p in layer.parameters()])


def test_mistakes_of_a_backward_name_it() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(2, 3))
        y = failing(lambda ctx, dy: (dy, dy)).apply(x)
        with pytest.raises(tfnb.errors.InvalidArgument, match=r"Num gradients 2 of Failing do not match num inputs 1"):
            tfnb.gradients(y, x)
        y = failing(lambda ctx, dy: dy[:, :2]).apply(x)
        with pytest.raises(tfnb.errors.ShapeError, match=r"shape \[B, 2\] for an input of shape \[B, 3\]\n  rule: "):
            tfnb.gradients(y, x)


def test_a_file_holds_the_values_and_refuses_the_gradient(tmp_path: Any) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor([0.5, -2.0]), name="x")
        y = Sign.apply(x)
        tfnb.recording.group(y, name="keep")
    g.save(tmp_path / "sign.json")
    loaded = Graph.load(tmp_path / "sign.json")
    assert tfnb.Session(loaded).run("y", {"x": torch.tensor([3.0, -1.0])}).tolist() == [1, -1]
    with pytest.raises(tfnb.errors.NoGradient, match="session that recorded it"):
        tfnb.gradients(_handle(loaded, "y"), _handle(loaded, "x"))


def _handle(graph: Graph, name: str) -> Any:
    with tfnb.recording.reopen(graph) as recorder:
        return recorder.tensor(graph.value(name))


def test_views_text_and_partial_runs_know_the_node() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.tensor([0.5, -2.0]), name="x")
        unused = tfnb.placeholder(torch.tensor([0.5, -2.0]), name="unused")
        y = SecondUnused.apply(x, unused)
    assert "tfnb.with_gradient(" in g.text()
    assert "<svg" in g._repr_html_() or g._repr_html_()
    assert tfnb.run(y, {x: torch.tensor([1.0, 2.0])}).tolist() == [2, 4]  # args are for differentiation only
    assert tfnb.run(y, {y: torch.tensor([1.0, 2.0])}).tolist() == [1, 2]


class SecondUnused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, unused):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy, dy


def test_a_cell_that_runs_again_takes_its_rules_along() -> None:
    def cell(factor: float) -> Any:
        names: dict[str, Any] = {}
        with tfnb.recording.record_cell("cells", owner="cell:1", label="In[1]", filename="x", namespace=names) as g:
            names["x"] = tfnb.placeholder(torch.tensor([0.5, -2.0, 1.0]))
            names["y"] = Reversed.apply(names["x"], factor)
        return g, names["x"], names["y"]

    g, x, y = cell(2.0)
    g, x_again, y_again = cell(3.0)
    assert len(g.attached["workspace"].rules) == 1
    assert tfnb.gradients(y_again, x_again)[0].sample.tolist() == [-3.0] * 3
    with pytest.raises(tfnb.errors.StaleNode):
        tfnb.gradients(y, x)
    tfnb.recording.forget("cells")


def test_recordings_in_two_threads_each_keep_backwards() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with tfnb.record():
            entered.set()
            left.wait(30)

    with tfnb.record():
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(30)
    left.set()
    thread.join()
    applied = torch.autograd.Function.apply
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([0.5, -2.0, 1.0]))
        assert tfnb.gradients(Sign.apply(x), x)[0].sample.tolist() == [1.0] * 3
    assert torch.autograd.Function.apply == applied
    leaf = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(Exp.apply(leaf).sum(), leaf)[0].tolist() == pytest.approx([3 * torch.e] * 2)
