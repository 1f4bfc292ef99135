"""The walker: what `gradients` promises, whatever the rules (semantics S-109 to S-115, S-207)."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument, NoGradient, ShapeError
from tfnb.gradients.rule_table import RULES, Rule


def point(value: Any = 3.0, **kwargs: Any) -> torch.Tensor:
    return tfnb.placeholder(torch.tensor(value), **kwargs)


def values(grads: Any) -> list[Any]:
    return [None if g is None else g.sample.tolist() for g in grads]


# -- signature ---------------------------------------------------------------------------------------------------


def test_two_ys_sum() -> None:
    with tfnb.record():
        x = point()
        assert values(tfnb.gradients([x * x, 5 * x], [x])) == [11.0]


def test_grad_ys_scale() -> None:
    with tfnb.record():
        x = point([1.0, 2.0], shape=(2,))
        assert values(tfnb.gradients(x * x, [x], [torch.tensor([10.0, 100.0])])) == [[20.0, 400.0]]


def test_y_that_is_the_x() -> None:
    with tfnb.record():
        x = point()
        assert values(tfnb.gradients(x, x)) == [1.0]


def test_intermediate_x_has_total_derivative() -> None:
    with tfnb.record():
        x = point()
        h = x * 2
        assert values(tfnb.gradients(h * h, [x, h])) == [24.0, 12.0]


def test_independent_x_gives_none_or_zeros() -> None:
    with tfnb.record():
        x, z = point(), point([1.0, 2.0])
        assert values(tfnb.gradients(x * x, [x, z])) == [6.0, None]
        assert values(tfnb.gradients(x * x, [x, z], unconnected="zero")) == [6.0, [0.0, 0.0]]


def test_integers_and_bools_are_constants() -> None:
    with tfnb.record():
        x, i = point([1.0, 2.0, 3.0]), tfnb.placeholder(torch.tensor([2, 0]), shape=(2,))
        assert values(tfnb.gradients(x[i].sum() + (x > 1).sum(), [x, i])) == [[1.0, 0.0, 1.0], None]


@pytest.mark.parametrize(
    ("grad", "error", "words"),
    [
        (torch.ones(3), ShapeError, "its y .* is float32"),
        (torch.ones(2, dtype=torch.float64), InvalidArgument, "float64"),
    ],
)
def test_grad_ys_that_do_not_fit_name_the_y(grad: torch.Tensor, error: type[Exception], words: str) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(2), shape=(2,))
        y = x * x
        with pytest.raises(error, match=words):
            tfnb.gradients(y, [x], [grad])


def test_wrong_arguments_are_refused() -> None:
    plain = torch.ones(())
    with tfnb.record():
        x = point()
        for ys, xs in ((x * x, []), (x * x, [3.0]), (plain, [x]), (x * x, [plain])):
            with pytest.raises(InvalidArgument):
                tfnb.gradients(ys, xs)
        with pytest.raises(InvalidArgument, match="unconnected"):
            tfnb.gradients(x * x, [x], unconnected="zeros")


def test_outside_a_recording_appends_to_the_graph() -> None:
    with tfnb.record() as g:
        x = point(name="x")
        y = x * x * x
    before = g.version
    (dx,) = tfnb.gradients(y, [x])
    (ddx,) = tfnb.gradients(dx, [x])
    assert (g.version, dx.graph, values([dx, ddx])) == (before + 2, g, [27.0, 18.0])
    assert tfnb.run([dx, ddx], {x: torch.tensor(2.0)}) == [torch.tensor(12.0), torch.tensor(12.0)]


def test_parameters_variables_and_their_handles_are_the_same_x() -> None:
    layer = nn.Linear(2, 1)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 2))
        loss = layer(x).sum()
        a, b = tfnb.gradients(loss, [layer.weight, tfnb.variable(layer.weight)])
    assert values([a]) == values([b]) == [[[3.0, 3.0]]]


def test_all_reads_of_a_variable_count() -> None:
    v = tfnb.Variable(torch.tensor(3.0), name="v")
    with tfnb.record() as g:
        first = v * 2.0
    with tfnb.record(g):
        second = v * v
        assert values(tfnb.gradients(first + second, [v])) == [8.0]


def test_gradient_passes_through_an_assignment() -> None:
    v = tfnb.Variable(torch.tensor(3.0), name="v")
    with tfnb.record():
        v.assign(v * 2.0)
        assert values(tfnb.gradients(v * v, [v])) == [24.0]


# -- the walk ----------------------------------------------------------------------------------------------------


def test_diamond_calls_each_rule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    rule = RULES["aten.add.Tensor"]

    def counted(n: Any, dy: Any) -> Any:
        calls["add"] += 1
        return rule.function(n, dy)

    monkeypatch.setitem(RULES, "aten.add.Tensor", Rule(counted))
    with tfnb.record():
        x = point(1.0)
        y = x
        for _ in range(30):
            y = y + y
        assert values(tfnb.gradients(y, [x])) == [2.0**30]
    assert calls["add"] == 30


def test_partial_cotangents_are_summed_once() -> None:
    with tfnb.record() as g:
        x = point()
        h = x.sin()
        y = h.exp() + h.cos() + h * 3
        tfnb.gradients(y, [x])
    sums = [n for n in g.nodes if n.op == "aten.add.Tensor" and "gradient" in n.tags]
    assert len(sums) == 2  # three partials of h


def test_nodes_off_the_path_are_not_differentiated() -> None:
    with tfnb.record() as g:
        x, z = point(), point()
        y = x.sin() * z.cos()
        tfnb.gradients(y, [x])
    assert not [n for n in g.nodes if "gradient" in n.tags and "cos_grad" in "/".join(n.scope)]


def test_backward_nodes_link_to_their_forward_node() -> None:
    with tfnb.record() as g:
        x = point()
        y = x.sin().exp()
        tfnb.gradients(y, [x])
    linked = {g.contents.by_id[n.forward].op for n in g.nodes if n.forward is not None}
    assert linked == {"aten.sin.default", "aten.exp.default"}
    assert all(n.scope[0].startswith("gradients") for n in g.nodes if "gradient" in n.tags)


def test_third_order() -> None:
    with tfnb.record():
        x = point(2.0)
        y = x**4
        for expected in (32.0, 48.0, 48.0):
            (y,) = tfnb.gradients(y, [x])
            assert values([y]) == [expected]


def test_broadcasting_is_undone() -> None:
    with tfnb.record():
        row, column, scalar = (tfnb.placeholder(torch.ones(s), shape=s) for s in ((3,), (4, 1), ()))
        got = tfnb.gradients((row * column * scalar).sum(), [row, column, scalar])
    assert [g.sample.shape for g in got] == [(3,), (4, 1), ()]
    assert [g.sample.flatten()[0].item() for g in got] == [4.0, 3.0, 12.0]


def test_promoted_dtypes_are_undone() -> None:
    with tfnb.record():
        x, z = point([1.0, 2.0]), tfnb.placeholder(torch.ones(2, dtype=torch.float64), shape=(2,))
        dx, dz = tfnb.gradients((x[:2] * z).sum(), [x, z])
    assert (dx.dtype, dz.dtype) == (torch.float32, torch.float64)


def test_one_output_of_several() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.arange(6.0).reshape(3, 2), shape=(3, 2))
        _, b, _ = x.unbind(0)
        assert values(tfnb.gradients((b * b).sum(), [x])) == [[[0.0, 0.0], [4.0, 6.0], [0.0, 0.0]]]


def test_symbolic_batch_keeps_no_guard() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with tfnb.record() as g:
        x, y = tfnb.placeholder(torch.randn(3, 5)), tfnb.placeholder(torch.tensor([0, 1, 2]))
        loss = nn.functional.cross_entropy(net(x), y)
        tfnb.gradients(loss, list(net.parameters()))
    assert [str(guard) for guard in g.guards if guard.expr not in ("B == B1", "B1 == B")] == []


# -- what stops a gradient -----------------------------------------------------------------------------------------


def test_stop_gradients_give_partial_derivatives() -> None:
    with tfnb.record():
        a = point(0.0)
        b = 2 * a
        assert values(tfnb.gradients(a + b, [a, b])) == [3.0, 1.0]
        assert values(tfnb.gradients(a + b, [a, b], stop_gradients=[a, b])) == [1.0, 1.0]


@pytest.mark.parametrize(
    "stop", [lambda x: x.detach(), lambda x: x.data, tfnb.stop_gradient], ids=["detach", "data", "stop_gradient"]
)
def test_detached_values_are_constants(stop: Any) -> None:
    with tfnb.record():
        x = point()
        assert values(tfnb.gradients(x * stop(x), [x])) == [3.0]


def test_nodes_recorded_with_grad_mode_off_stop() -> None:
    with tfnb.record():
        x = point()
        with torch.no_grad():
            h = x * x
        assert values(tfnb.gradients(h * x, [x])) == [9.0]


def test_writes_with_grad_mode_off_pass_straight() -> None:
    w = nn.Parameter(torch.tensor([3.0, -3.0]))
    with tfnb.record():
        with torch.no_grad():
            w.clamp_(-1, 1)
        assert values(tfnb.gradients((w * w).sum(), [w])) == [[2.0, -2.0]]


def test_grad_mode_off_around_gradients_does_not_stop_the_second_order() -> None:
    with tfnb.record():
        x = point()
        y = x * x * x
        with torch.no_grad():
            (dx,) = tfnb.gradients(y, [x])
        assert values(tfnb.gradients(dx, [x])) == [18.0]


# -- rules and ops without one ---------------------------------------------------------------------------------------


@pytest.fixture
def library() -> Any:
    """A namespace of custom ops that goes away after the test, with their rules."""
    space = torch.library.Library("tfnb_test", "DEF")
    before = dict(RULES)
    yield space
    space._destroy()
    RULES.clear()
    RULES.update(before)


def _cube(library: Any, key: str = "CompositeExplicitAutograd") -> Any:
    library.define("cube(Tensor x) -> Tensor")
    library.impl("cube", lambda x: x * x * x, key)
    if key != "CompositeImplicitAutograd":
        torch.library.register_fake("tfnb_test::cube", torch.empty_like, lib=library)
    return torch.ops.tfnb_test.cube


def test_op_without_a_rule_names_op_line_and_cure(library: Any) -> None:
    cube = _cube(library)
    with tfnb.record():
        x = point()
        y = cube(x)  # here
        with pytest.raises(NoGradient) as caught:
            tfnb.gradients(y, [x])
    message = str(caught.value)
    assert "tfnb_test.cube.default" in message
    assert "y = cube(x)  # here" in message
    assert "register_gradient('tfnb_test.cube.default')" in message
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("form", ["packet", "overload", "name", "torch name"])
def test_registered_rule_is_used(library: Any, form: str) -> None:
    cube = _cube(library)
    op = {"packet": cube, "overload": cube.default, "name": "tfnb_test.cube.default", "torch name": "tfnb_test::cube"}
    tfnb.register_gradient(op[form])(lambda n, dy: dy * 3 * n.inputs[0] * n.inputs[0])
    with tfnb.record():
        x = point()
        (dx,) = tfnb.gradients(cube(x), [x])
        assert values([dx, *tfnb.gradients(dx, [x])]) == [27.0, 18.0]


def test_op_with_a_decomposition_needs_no_rule(library: Any) -> None:
    cube = _cube(library, "CompositeImplicitAutograd")
    with tfnb.record():
        x = point()
        assert values(tfnb.gradients(cube(x), [x])) == [27.0]


def test_rule_with_a_wrong_count_is_refused(library: Any) -> None:
    cube = _cube(library)
    tfnb.register_gradient(cube)(lambda n, dy: (dy, dy))
    with tfnb.record():
        x = point()
        words = (
            r"Num gradients 2 generated for op tfnb_test.cube.default do not match num inputs 1\n  rule: .*walker.py"
        )
        with pytest.raises(InvalidArgument, match=words):
            tfnb.gradients(cube(x), [x])


def test_rule_with_a_wrong_shape_is_refused(library: Any) -> None:
    cube = _cube(library)
    tfnb.register_gradient(cube)(lambda n, dy: dy[:1])
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), shape=(3,))
        with pytest.raises(ShapeError, match=r"shape \[1\] for an input of shape \[3\]"):
            tfnb.gradients(cube(x), [x])


def test_ops_declared_without_gradient_give_none() -> None:
    with tfnb.record():
        x = point()
        assert values(tfnb.gradients(torch.zeros_like(x), [x])) == [None]
        assert values(tfnb.gradients(x.floor(), [x])) == [0.0]  # flat, as in torch


def test_failed_gradients_leave_the_graph_unchanged(library: Any) -> None:
    cube = _cube(library)
    with tfnb.record() as g:
        x = point()
        y = cube(x)
    before = g.contents
    with pytest.raises(NoGradient):
        tfnb.gradients(y, [x])
    assert g.contents is before


def test_deep_graphs_do_not_recurse() -> None:
    with tfnb.record(lazy=True):
        x = tfnb.placeholder(shape=(2,))
        y = x
        for _ in range(400):
            y = y * 1.01
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(250)
        try:
            (dx,) = tfnb.gradients(y, [x])
        finally:
            sys.setrecursionlimit(limit)
    assert dx is not None


def test_a_gradient_is_that_of_autograd_where_torchs_own_decomposition_is_wrong() -> None:
    x, labels = torch.tensor([0.1, 0.9, -0.4, 0.3], dtype=torch.float64), torch.tensor([3, 0, -1, 2])
    with tfnb.record():
        held, of = tfnb.placeholder(x, shape=["n"]), tfnb.placeholder(labels, shape=["n"])
        (found,) = tfnb.gradients(nn.MultiLabelMarginLoss()(held, of), [held])
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(nn.functional.multilabel_margin_loss(leaf, labels), leaf)
    torch.testing.assert_close(tfnb.run(found, {held: x, of: labels}), wanted)
