"""Gradients that the user gives: custom_gradient, gradient_override, register_gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tests.gradients.reference import assert_same

aten = torch.ops.aten


@tfnb.custom_gradient
def clipped_log(x: torch.Tensor):
    """log, with a gradient that stays finite; the middle value is what the second order flows through."""
    s = x.sigmoid()
    return x.log(), lambda dy: dy * s * x


def truth(x: torch.Tensor) -> torch.Tensor:
    """The derivative that clipped_log claims, written out."""
    return x.sigmoid() * x


def test_custom_gradient_and_its_second_order() -> None:
    data = torch.rand(4, dtype=torch.float64) + 0.5
    with tfnb.record():
        x = tfnb.placeholder(data)
        y = clipped_log(x)
        (dx,) = tfnb.gradients(y, [x])
        (ddx,) = tfnb.gradients(dx, [x])
    other = torch.rand(7, dtype=torch.float64) + 0.5
    leaf = other.clone().requires_grad_()
    want = truth(leaf)
    torch.testing.assert_close(tfnb.run([y, dx, ddx], {x: other}),
                               [other.log(), want.detach(), torch.autograd.grad(want.sum(), leaf)[0]])  # fmt: skip


def test_custom_gradient_works_outside_of_a_recording() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = clipped_log(x)
    assert torch.equal(y.detach(), x.detach().log())
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], truth(x.detach()))


def test_custom_gradient_takes_any_structure() -> None:
    @tfnb.custom_gradient
    def both(pair, scale, *, shift):
        a, b = pair
        return {"sum": a + b + shift, "scaled": a * scale}, lambda dsum, dscaled: (3 * dsum, None, 5 * dscaled)

    with tfnb.record():
        a, b, c = (tfnb.placeholder(torch.randn(3, 2), shape=(3, 2)) for _ in range(3))
        out = both((a, b), 2, shift=c)
        grads = tfnb.gradients([out["sum"], out["scaled"]], [a, b, c])
    assert_same([grads[0], grads[2]], [torch.full((3, 2), 3.0), torch.full((3, 2), 5.0)])
    assert grads[1] is None


def test_mistakes_of_a_custom_gradient_name_its_line() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(3))
        with pytest.raises(tfnb.errors.InvalidArgument, match=r"returns \(ys, grad_fn\); .*test_custom.py line"):
            tfnb.custom_gradient(lambda x: x)(x)
        y = tfnb.custom_gradient(lambda x: (x * 1, lambda dy: (dy, dy)))(x)
        with pytest.raises(tfnb.errors.InvalidArgument, match=r"Num gradients 2 .* num inputs 1\n  rule: .*test_cus"):
            tfnb.gradients(y, x)
        y = tfnb.custom_gradient(lambda x: (x * 1, lambda dy: dy[:2]))(x)  # a fixed size for one that varies
        with pytest.raises(tfnb.errors.ShapeError, match=r"shape \[min\(2, B\)\] for an input of shape \[B\]"):
            tfnb.gradients(y, x)
        z = tfnb.placeholder(torch.randn(3), shape=(3,))
        y = tfnb.custom_gradient(lambda x: (x * 1, lambda dy: dy[:2]))(z)
        with pytest.raises(tfnb.errors.ShapeError, match=r"shape \[2\] for an input of shape \[3\]\n  rule: .*test"):
            tfnb.gradients(y, z)
        with pytest.raises(tfnb.errors.Unsupported, match="writes into its argument"):
            tfnb.custom_gradient(lambda x: (x.mul_(2), lambda dy: dy))(x)


def test_an_override_holds_inside_its_scope_only_and_has_a_second_order() -> None:
    data = torch.randn(5, dtype=torch.float64)

    def rule(n, dy):
        return 2 * dy * n.inputs[0] ** 2  # so that it has a second derivative

    with tfnb.record() as g:
        x = tfnb.placeholder(data)
        with tfnb.gradient_override({aten.relu: rule}):
            inside = F.relu(x)
        outside = F.relu(x)
        (d_in,) = tfnb.gradients(inside, [x])
        (d_out,) = tfnb.gradients(outside, [x])
        (dd_in,) = tfnb.gradients(d_in, [x])
    assert_same([d_in, d_out, dd_in], [2 * data**2, (data > 0).double(), 4 * data])
    assert [n.op for n in g.select(tag="override")] == ["aten.relu.default"]


@pytest.mark.parametrize("op", ["aten::round", aten.round, aten.round.default, torch.round], ids=type)
def test_an_override_of_an_op_without_gradient_and_in_place(op: object) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 2))
        with tfnb.gradient_override({op: lambda n, dy: 7 * dy}):
            y = (x * 1).round_()
            (dx,) = tfnb.gradients(y, [x])
    assert_same([dx], [torch.full((4, 2), 7.0)])


def test_an_overridden_composite_is_recorded_whole() -> None:
    layer = torch.nn.Linear(3, 2)

    def rule(n, dy):
        assert len(n.inputs) == 3
        return n.inputs[0] * 0 + 1, None, dy.sum(0)

    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3))
        with tfnb.gradient_override({aten.linear: rule}):
            y = layer(x)
        dx, dw, db = tfnb.gradients(y, [x, layer.weight, layer.bias])
    assert "aten.linear.default" in [n.op for n in g.nodes]
    assert dw is None
    assert_same([dx, db], [torch.ones(4, 3), torch.full((2,), 4.0)])
    data = torch.randn(6, 3)
    torch.testing.assert_close(tfnb.run(y, {x: data}), layer(data).detach())


def test_gradients_taken_inside_the_scope_use_the_usual_rules() -> None:
    data = torch.randn(5, dtype=torch.float64)
    with tfnb.record(), tfnb.gradient_override({aten.mul: lambda n, dy: (3 * dy * n.inputs[1], None)}):
        x = tfnb.placeholder(data)
        (dx,) = tfnb.gradients(x * x, [x])
        (ddx,) = tfnb.gradients(dx, [x])
    assert_same([dx, ddx], [3 * data, torch.full((5,), 3.0, dtype=torch.float64)])


def test_mistakes_of_an_override() -> None:
    with pytest.raises(tfnb.errors.FailedPrecondition, match="inside a recording"), tfnb.gradient_override({}):
        pass
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(3))
        with pytest.raises(tfnb.errors.NotFound, match="nosuch"), tfnb.gradient_override({"aten::nosuch": None}):
            pass
        with pytest.raises(tfnb.errors.NotFound, match="not an op"), tfnb.gradient_override({F.relu: None}):
            pass
        with pytest.raises(tfnb.errors.InvalidArgument, match="in place"), tfnb.gradient_override({aten.relu_: None}):
            pass
        with pytest.raises(tfnb.errors.InvalidArgument, match="stat"), tfnb.gradient_override({aten.batch_norm: None}):
            pass
        with tfnb.gradient_override({aten.sin: lambda n, dy: (dy, dy)}):
            y = x.sin()
        with pytest.raises(tfnb.errors.InvalidArgument, match=r"Num gradients 2 .*aten.sin.default.*\n.*test_custom"):
            tfnb.gradients(y, x)
