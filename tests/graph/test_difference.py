"""What two graphs do not have in common: what is new, gone and changed, between recordings and between passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.graph import Graph
from tfnb.view import Drawing
from tfnb.view.colours import marks, union


def recorded(layers: Any, name: str = "net") -> Graph:
    with tfnb.record(name) as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        layers(x)
    return graph


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


def test_what_is_new_gone_and_changed() -> None:
    before = recorded(lambda x: (x.relu() * 2).sum())
    after = recorded(lambda x: (x.tanh() * 3).sum() + 1)
    found = before.diff(after)
    assert names(found.added) == ["tanh", "add"] and names(found.removed) == ["relu"]
    assert names(found.changed) == ["mul"]  # sum takes what mul gives, as before
    assert found.counts == "2 added, 1 removed, 1 changed"
    assert "-    %1 = aten.relu(%x)   f32[B, 3]" in found.splitlines()
    assert repr(found).startswith("<Difference: 2 added, 1 removed, 1 changed>\n--- net")


@pytest.mark.parametrize(
    ("layers", "other"),
    [
        (lambda x: x + torch.ones(3), lambda x: x + torch.zeros(3)),  # the values of a constant
        (lambda x: x.sum(0), lambda x: x.sum(1)),  # an argument, and with it a shape
        (lambda x: x - x.exp(), lambda x: x.exp() - x),  # the order of inputs
        (
            lambda x: tfnb.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x),
            lambda x: tfnb.while_loop(lambda y: y.sum() < 9, lambda y: y + 2, x),
        ),  # inside of a loop
    ],
)
def test_a_node_that_takes_or_gives_something_else_is_changed(layers: Any, other: Any) -> None:
    found = recorded(layers).diff(recorded(other))
    assert found.changed and not recorded(layers).diff(recorded(layers)).changed


def test_equal_graphs_have_an_empty_difference_whatever_they_are_called() -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    a, b = (recorded(layers, name) for name in ("a", "b"))
    found = a.diff(b)
    assert found == "" and not (found.added or found.removed or found.changed)
    assert repr(found) == "<Difference: 0 added, 0 removed, 0 changed>"


def test_both_graphs_are_drawn_as_one() -> None:
    before = recorded(lambda x: x.relu().exp().neg().sin())
    after = recorded(lambda x: x.relu().neg().tanh())
    found = before.diff(after)
    whole = union(found)
    assert names(whole.nodes) == ["x", "relu", "exp", "neg", "sin", "tanh"]
    gone = whole["sin"]  # it takes what neg gives now
    assert gone.inputs == (whole["neg"].value(),)
    drawing = Drawing(whole, marks=marks(found))
    tones = {box.node.name: drawing.painter.tone(box) for box in drawing.root.walk() if not box.children}
    assert tones == {
        "x": "plain", "relu": "plain", "exp": "failing", "neg": "variable", "sin": "failing", "tanh": "update",
    }  # fmt: skip
    html = found._repr_html_()
    assert all(f"</span>{word}</span>" in html for word in ("added", "removed", "changed"))


def test_a_name_that_both_have_for_different_nodes_is_there_twice() -> None:
    with tfnb.record("net") as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        (x * 1 + 0).exp()
    rest = graph.derive(type(graph.contents)((*graph.nodes[:1],)))
    with tfnb.record(rest):
        x.exp()
    found = graph.diff(rest)
    assert len(set(names(union(found).nodes))) == len(union(found).nodes)


def test_passes_show_what_each_of_them_does_to_nodes_bytes_and_peak() -> None:
    with tfnb.record("net") as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        y = (x.t().t() * 1).exp()
        x.sin()  # nobody asks for it
    found = tfnb.Session(graph).passes(y, [x], sizes={"B": 1000})
    first, last = found[0], found[-1]
    assert [stage.name for stage in found] == ["prune", "simplify", "prune"]
    assert (first.nodes, last.nodes) == (5, 2) and (first.bytes, last.bytes) == (24_000, 12_000)
    assert first.peak == 24_000 and last.peak == 12_000
    assert names(found.diff().removed) == ["t", "t_1", "mul"] and names(found.diff().changed) == ["y"]
    assert first.graph.diff(found[1].graph).changed
    assert "predicted peak" in repr(found) and "removed" in found._repr_html_()


def test_passes_of_what_is_not_there() -> None:
    graph = recorded(lambda x: x.relu())
    with pytest.raises(tfnb.errors.NotFound, match="no node 'loss'"):
        tfnb.Session(graph).passes("loss")


def test_a_node_that_gives_more_values_than_its_namesake_is_gone_and_drawn() -> None:
    graphs = []
    for count in (3, 1):
        with tfnb.record() as graph:
            x = tfnb.placeholder(torch.ones(3), shape=(3,))
            found = tfnb.while_loop(lambda *v: v[0].sum() < 9, lambda *v: tuple(each + 1 for each in v), (x,) * count)
            found[-1].exp() if count == 3 else found[-1].sin()
        graphs.append(graph)
    for before, after in (graphs, graphs[::-1]):
        found = before.diff(after)
        assert "<svg" in found._repr_html_()
        assert "tfnb.while" in [node.op for node in found.removed]


@pytest.mark.parametrize("more", [torch.tanh, lambda value: (value * 2).exp()])
def test_what_is_put_around_a_named_value_is_what_is_added(more: Any) -> None:
    def edited(wrap: Any) -> Graph:
        with tfnb.record("net") as graph:
            x = tfnb.placeholder(torch.ones(2, 3), name="x")
            out = wrap(x.relu() + 1)
        return graph

    plain, wrapped = edited(lambda value: value), edited(more)
    found, back = plain.diff(wrapped), wrapped.diff(plain)
    new = wrapped.nodes[len(plain.nodes) :]
    assert found.added == new and not found.removed and not found.changed
    assert back.removed == new and not back.added and not back.changed


def test_of_equal_nodes_those_with_equal_names_belong_together() -> None:
    def placed(*letters: str) -> Graph:
        with tfnb.record("net") as graph:
            for letter in letters:
                tfnb.placeholder(torch.ones(2), shape=[2], name=letter)
        return graph

    found = placed("a", "b", "c").diff(placed("b", "c"))
    assert names(found.removed) == ["a"] and not found.added and not found.changed
