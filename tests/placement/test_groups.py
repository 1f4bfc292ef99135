"""The groups of a step: nodes that are placed as a whole, and the requests that they have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.graph import Node
from tfnb.passes import step_graph
from tfnb.passes.flow.places import Place
from tfnb.placement.costs import PlacementCosts, Roofline
from tfnb.placement.groups import GroupedStep, grouped

COSTS = PlacementCosts(Roofline(1e-6, 1e9, 1e9))


def groups_of(fetches: list[Any], feeds: list[Any], tasks: int = 2) -> GroupedStep:
    graph = fetches[0].graph
    step = step_graph(graph, [fetch.value for fetch in fetches], [feed.value for feed in feeds])
    return grouped(step, tasks)


def together(found: GroupedStep, *nodes: Node) -> bool:
    return len({found.group_of[node.id] for node in nodes}) == 1


@pytest.fixture
def net() -> Any:
    """Two layers with dropout, and a step of Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(5, 2, 2), name="x")
        loss = (model(x.view(-1, 4)) * torch.full((3,), 2.0)).pow(2).mean()
        train = tfnb.train.Adam(0.1).minimize(loss)
    return graph, x, loss, train


def test_a_layer_is_one_group_with_its_gradients_its_variables_and_their_updates(net: Any) -> None:
    graph, x, loss, train = net
    found = groups_of([loss, train], [x])
    nodes, layers = graph.contents.by_id, [node for node in graph.nodes if node.op == "aten.addmm.default"]
    assert len(layers) == 2 and not together(found, *layers)
    for node in found.nodes:
        if node.forward in found.group_of:
            assert together(found, node, nodes[node.forward])
    for layer in layers:
        operands = [nodes[value.node] for value in layer.inputs]
        views = [node for node in operands if node.op == "aten.t.default"]
        weights = {view.inputs[0].node for view in views}
        updates = [node for node in graph.nodes if node.op == "tfnb.adam.default" and node.inputs[0].node in weights]
        reads = [node for each in (layer, *views, *updates) for node in _reads(graph, each)]
        assert len(updates) == 1 and len(reads) == 6, "bias, weight, and what an update of the weight reads"
        assert together(found, layer, *views, *updates, *reads)
        assert found.free.isdisjoint({update.id for update in updates}), "an update follows its Variable"


def _reads(graph: tfnb.Graph, node: Node) -> list[Node]:
    makers = [graph.contents.by_id[value.node] for value in node.inputs]
    return [maker for maker in makers if maker.op == "tfnb.read"]


def test_feeds_constants_and_filled_tensors_are_wherever_they_are_wanted(net: Any) -> None:
    graph, x, loss, train = net
    found = groups_of([loss, train], [x])
    assert [node.op for node in graph.nodes].count("aten.full.default") == 1
    assert {node.op for node in found.nodes}.isdisjoint(
        {"tfnb.placeholder", "tfnb.constant", "tfnb.assign", "tfnb.group", "aten.full.default"}
    )


def test_what_takes_nothing_goes_with_its_only_user_and_a_view_with_its_operand() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 4), name="x")
        noise, shared = torch.rand(4), torch.rand(4)
        h, k = (x + noise).exp(), (x * shared).exp()
        turned = h.t()
        y = (turned @ k + shared).sum()
    found = groups_of([y], [x])
    by_id = {node.id: node for node in found.nodes}
    assert together(found, noise.node, by_id[h.node.inputs[0].node])
    assert together(found, h.node, turned.node)
    assert not together(found, shared.node, by_id[k.node.inputs[0].node]), "it has two users"


def test_requests_that_contradict_keep_groups_apart_and_one_request_is_of_all() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 4), name="x")
        with tfnb.device("task:1"):
            h = x.exp()
        with tfnb.device("task:0"):
            turned = h.t()
        k = (x * 2).t()
        with tfnb.device("task:2"):
            m = x.tanh()
        y = turned.sum() + k.sum() + m.t().sum()
    found = groups_of([y], [x], tasks=3)
    at = {node.name: found.groups[found.group_of[node.id]] for node in found.nodes}
    assert at["h"].places == (Place(1),) and at["turned"].places == (Place(0),)
    assert at["k"].places == (Place(0), Place(1), Place(2)) and at["k"].asked is None
    assert at["m"].places == (Place(2),) and at["m"].asked is m.node
    views = [node for node in found.nodes if node.op == "aten.t.default" and node.inputs[0].node == m.node.id]
    assert views and found.group_of[views[0].id] == found.group_of[m.node.id]


def test_values_of_a_step_as_ops_and_bytes(net: Any) -> None:
    _, x, loss, train = net
    found = groups_of([loss, train], [x])
    costs = PlacementCosts(COSTS.roofline, sizes={"B": 5})
    made = found.problem(lambda node: costs.seconds(node, loss.graph.contents), costs.size)
    names = [node.name for node in found.nodes]
    weights = [value for value in made.stored if made.values[value].bytes == 4 * 6 * 4]
    assert len(made.stored) == 4 * 4 and len(weights) == 3, "a weight, and its two averages"
    assert made.values[next(v for v, each in enumerate(made.values) if names[each.maker] == "loss")].bytes == 4
    gradients = {value for op, node in enumerate(found.nodes) if "update" in node.tags for value in made.takes[op]}
    assert made.staged == gradients - made.stored <= made.kept and len(made.staged) == 4
    here = found.problem(lambda node: 1.0, costs.size, has_server=False)
    assert here.kept == made.kept and not here.staged
    assert all(made.values[value].maker < op for op, taken in enumerate(made.takes) for value in taken)
