"""Forms without a picture: the listing, DOT for files, and small reprs with equal facts."""

from __future__ import annotations

import torch

import tfnb
from tests.graph.build import dense
from tfnb.graph import Graph, Variable
from tfnb.view import graph_dot, tensor_html, text_tree, variable_html
from tfnb.view.reprs import health, tensor_facts, variable_facts

LISTING = """\
net: 5 nodes · 2 variables · 15 parameters
  x = tfnb.placeholder() -> f32[B, 4]
  y = fc(x).relu() -> f32[B, 3]   # In[3]:2
    fc linear -> f32[B, 3]
      addmm = aten.addmm.default(fc.bias, x, fc.weight) -> f32[B, 3]
    relu = aten.relu.default(fc/addmm) -> f32[B, 3]"""


def test_the_listing_shows_the_same_boxes() -> None:
    assert text_tree(Graph("net", dense())) == LISTING


def test_dot_has_a_cluster_for_each_unfolded_box(digits: Graph) -> None:
    source = graph_dot(digits)
    assert source.startswith("digraph digits {")
    assert "subgraph cluster_n2 {" in source and "id=cluster_n2" in source
    assert "n0 -> n2_0" in source


def test_the_repr_of_a_variable_carries_its_facts() -> None:
    variable = Variable(torch.arange(100.0), name="w")
    html = variable_html(variable)
    assert all(name in html and fact in html for name, fact in variable_facts(variable))
    assert "<script" not in html and "36 more" in html


def test_a_value_that_lives_elsewhere_is_not_fetched() -> None:
    class Home:
        def value(self, variable: Variable) -> torch.Tensor:
            raise AssertionError("a repr fetched")

        def __str__(self) -> str:
            return "server 0"

    variable = Variable(torch.zeros(3), name="w")
    variable.home = Home()  # type: ignore[assignment]
    assert "server 0" in variable_html(variable) and "not fetched" in variable_html(variable)


def test_the_repr_of_a_recorded_tensor_carries_its_facts() -> None:
    with tfnb.record("reprs"):
        x = tfnb.placeholder(torch.rand(4, 3))
        y = x.relu()
        loss = y.sum()
    html = tensor_html(y)
    assert all(name in html for name, _ in tensor_facts(y))
    assert f"{loss.sample.item():.4g}" in tensor_html(loss).partition("</summary>")[0]
    assert "float32[B, 3]" in html and "aten.relu.default" in html and "sample" in html and "<svg" in html


def test_health_counts_what_is_not_finite() -> None:
    assert health(torch.tensor([1.0, float("nan"), float("inf")])) == "1 NaN, 1 infinite"
    assert health(torch.tensor([1.0, 3.0])) == "ok, 1 to 3"
    assert health(torch.zeros(0)) == "empty"


def test_a_shorter_axis_reads_as_a_difference():
    with tfnb.record("shifted") as g:
        x = tfnb.placeholder(torch.ones(2, 5, 4), shape=(None, "T", 4), name="x")
        y = (x[:, 1:] - x[:, :-1]).mean()
    shown = tfnb.view.graph_html(g) + tfnb.view.text_tree(g) + tfnb.view.graph_svg(g)
    assert "[B, T-1, 4]" in shown and "max(0" not in shown
