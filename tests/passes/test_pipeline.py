"""Every pass keeps the values, and removes what its text says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

import tfnb
from tests.graph.build import evaluate
from tests.graph.strategies import graphs
from tfnb.errors import InvalidArgument
from tfnb.graph import Contents, Graph, Value
from tfnb.graph.check import check
from tfnb.passes import PIPELINE, fold, merge, optimize, prune, simplify, stages, step_graph


def all_values(contents: Contents) -> list[Value]:
    return [node.value(i) for node in contents.nodes for i in range(len(node.outputs))]


@pytest.mark.parametrize("run", PIPELINE, ids=lambda run: run.__name__)
@given(contents=graphs(stateful=False))
def test_a_pass_keeps_every_value(run: Any, contents: Contents) -> None:
    after = run(Graph("g", contents), [], []).contents
    check(after)
    feed = {"x": torch.randn(2, 3)}
    want, got = evaluate(contents, feed), evaluate(after, feed)
    for value in all_values(contents):
        torch.testing.assert_close(got[value], want[value], equal_nan=True, rtol=0, atol=0)


def recorded(function: Callable[..., Any], *samples: torch.Tensor) -> tuple[Graph, list[Value], list[Value]]:
    with tfnb.record() as g:
        xs = [tfnb.placeholder(sample) for sample in samples]
        ys = function(*xs)
    ys = ys if isinstance(ys, (list, tuple)) else [ys]
    fresh = [torch.randn(5, *sample.shape[1:]) if sample.is_floating_point() else sample for sample in samples]
    with torch.no_grad():
        want = function(*fresh)
    got = tfnb.run(ys, dict(zip(xs, fresh, strict=True)))
    for a, b in zip(got, want if isinstance(want, (list, tuple)) else [want], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return g, [y.value for y in ys], [x.value for x in xs]


def ops(function: Callable[..., Any], *samples: torch.Tensor) -> list[str]:
    """What runs when the function is recorded, checked against torch on other rows."""
    g, ys, xs = recorded(function, *samples)
    return [node.op for node in optimize(g, ys, xs).nodes]


X = torch.randn(4, 3)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: (x.t().mT.t() * 1).exp(), ["aten.t.default", "aten.exp.default"]),
        (lambda x: (x.detach() / 1).sin(), ["aten.sin.default"]),
        (lambda x: x.view(-1, 3, 1).view(-1).sin(), ["aten.view.default", "aten.sin.default"]),
        (lambda x: x[None].permute(1, 0, 2).permute(1, 0, 2).exp(), ["aten.unsqueeze.default", "aten.exp.default"]),
        (lambda x: x.exp() * x.exp(), ["aten.exp.default", "aten.mul.Tensor"]),
        (lambda x: x.clone().exp(), ["aten.exp.default"]),
        (lambda x: x + torch.arange(3).float().exp(), ["tfnb.constant", "aten.add.Tensor"]),
    ],
)
def test_what_is_left(function: Callable[..., Any], left: list[str]) -> None:
    assert ops(function, X) == left


def test_a_sum_of_selected_rows_is_a_stack() -> None:
    w = torch.tensor([1.0, 2.0, 3.0])
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3), shape=(4, 3))
        y = sum((column.square() * w[i] for i, column in enumerate(x.unbind(1))), torch.zeros(()))
        (dx,) = tfnb.gradients(y.sum(), [x])
    left = [node.op for node in optimize(g, [dx.value], [x.value]).nodes]
    assert "aten.stack.default" in left and "aten.select_backward.default" not in left
    data = torch.randn(4, 3)
    torch.testing.assert_close(tfnb.run(dx, {x: data}), 2 * data * w)


def test_a_sum_of_parts_is_a_cat() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 6))
        a, b, c = x.split((1, 2, 3), 1)
        (dx,) = tfnb.gradients([a.exp().sum() + b.sin().sum() + c.square().sum()], [x])
    left = [node.op for node in optimize(g, [dx.value], [x.value]).nodes]
    assert "aten.cat.default" in left and "aten.slice_backward.default" not in left
    data = torch.randn(7, 6)
    want = torch.cat([data[:, :1].exp(), data[:, 1:3].cos(), 2 * data[:, 3:]], 1)
    torch.testing.assert_close(tfnb.run(dx, {x: data}), want)


def test_parts_with_a_gap_stay_a_sum() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 6))
        (dx,) = tfnb.gradients([x[:, :2].exp().sum() + x[:, 3:].sin().sum()], [x])
    assert "aten.cat.default" not in [node.op for node in optimize(g, [dx.value], [x.value]).nodes]
    data = torch.randn(2, 6)
    want = torch.cat([data[:, :2].exp(), torch.zeros(2, 1), data[:, 3:].cos()], 1)
    torch.testing.assert_close(tfnb.run(dx, {x: data}), want)


def test_fed_values_are_not_looked_through() -> None:
    with tfnb.record():
        x = tfnb.placeholder(X)
        t, c = x.t(), torch.ones(3).exp()
        y, z = t.t() + 0, c * 2
    fed = torch.randn(3, 5)
    assert torch.equal(tfnb.run(y, {t: fed}), fed.t())
    assert torch.equal(tfnb.run(z, {c: torch.zeros(3)}), torch.zeros(3))


def test_fetched_values_have_memory_of_their_own() -> None:
    with tfnb.record():
        x = tfnb.placeholder(X)
        a, b, c, d = x.exp(), x.exp(), x.exp().clone(), torch.ones(3)
        e = d * 1
    got = tfnb.run([a, b, c, d, e], {x: X})
    for tensor in got:
        tensor.zero_()
    assert all(torch.equal(t, torch.zeros_like(t)) for t in got)
    again = tfnb.run([a, b, c, d, e], {x: X})
    assert torch.equal(again[0], X.exp()) and torch.equal(again[3], torch.ones(3))
    again[0].zero_()
    assert not torch.equal(again[1], again[0]) and not torch.equal(again[2], again[0])


def test_random_nodes_are_neither_merged_nor_folded() -> None:
    with tfnb.record():
        a, b = torch.rand(100), torch.rand(100)
    first, second = tfnb.run([a, b])
    assert not torch.equal(first, second)
    assert not torch.equal(tfnb.run(a), first)


def test_numbers_of_different_types_are_not_merged() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([1, 2, 3]))
        results = [torch.add(x, other).cos() for other in (1, 1.0, True)]
        kinds = [torch.add(x, other) for other in (1, 1.0, True)]
    got = tfnb.run([*kinds, *results], {x: torch.tensor([1, 2, 3])})
    assert [t.dtype for t in got[:3]] == [torch.int64, torch.float32, torch.int64]


def test_an_op_that_fails_on_constants_fails_in_the_run() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2))
        index = tfnb.constant(torch.tensor([0]))
        table = tfnb.constant(torch.ones(2))
        picked = table.index_select(0, index)
        y = x + picked.sum()
    with pytest.raises(InvalidArgument, match="out of range"):
        tfnb.run(y, {x: torch.ones(2), index: torch.tensor([9])})


def test_large_results_are_not_kept() -> None:
    with tfnb.record() as g:
        y = torch.ones(4_000_000).cumsum(0).sum()
    left = [node.op for node in optimize(g, [y.value], []).nodes]
    assert "aten.cumsum.default" in left  # 16 MB
    assert float(tfnb.run(y)) == pytest.approx(8e12, rel=1e-3)


def test_stages_show_what_each_pass_did() -> None:
    g, ys, xs = recorded(lambda x: (x * 1).exp() + (x / 1).exp(), X)
    told = [(name, len(graph.nodes)) for name, graph in stages(step_graph(g, ys, xs))]
    assert [name for name, _ in told][:3] == ["prune", "simplify", "merge"] and told[-1] == ("prune", 2)
    assert prune(g, ys, xs) and fold(g) is g and merge(simplify(g)) is not g


def test_passes_that_find_nothing_hand_on_the_graph_that_they_were_given() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3))
        y = x.exp()
    seen: list[Graph] = []

    def nothing(given: Graph, *_: Any) -> Graph:
        seen.append(given)
        return given

    *_, (_, last) = stages(step_graph(graph, [y.value], [x.value]), (nothing, nothing))
    assert seen[0] is seen[1] and last.nodes == seen[0].nodes[1:]


def test_recomputed_nodes_are_computed_again() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(X)
        y = tfnb.recompute(lambda x: x.exp().sin())(x).sum()
        (dx,) = tfnb.gradients(y, [x])
    left = [node.op for node in optimize(g, [y.value, dx.value], [x.value]).nodes]
    assert left.count("aten.exp.default") == 2
    torch.testing.assert_close(tfnb.run(dx, {x: X}), X.exp().cos() * X.exp())
