"""The tree of boxes: what is grouped, merged, repeated and cut."""

from __future__ import annotations

import torch
from hypothesis import given

import tfnb
from tests.graph.build import Builder
from tests.graph.strategies import graphs
from tfnb.graph import Contents, Dim, Graph, Ref, SourceLine, Spec, Value
from tfnb.view.box import Box
from tfnb.view.tree import LEVEL, tree

ROW = Spec(torch.float32, (Dim("B"), 3))


def titles(box: Box) -> list[str]:
    return [child.title for child in box.children]


def find(root: Box, *path: str) -> Box:
    """The box under these titles."""
    for title in path:
        root = next(child for child in root.children if child.title == title)
    return root


def chain(ops: list[tuple[str, tuple[str, ...], int]]) -> Contents:
    """Ops one after the other: (op, scope, line)."""
    b = Builder()
    value = b.placeholder("x", ("B", 3))
    for op, scope, line in ops:
        source = SourceLine("In[1]", line, f"line {line}")
        value = b.node(
            op, f"aten.{op}.default", (ROW,), inputs=(value,), attrs={"self": Ref(0)}, scope=scope, source=source
        )
    return b.contents()


def test_lines_modules_and_functions_are_boxes(digits: Graph) -> None:
    root = tree(digits.contents)
    assert titles(root)[:4] == ["x", "y", "model", "cross_entropy"]
    model = find(root, "model")
    assert [(box.title, box.detail) for box in model.children] == [
        ("0", "conv2d"), ("1", "relu"), ("2", "flatten"), ("3", "linear"),
    ]  # fmt: skip
    assert model.code == "logits = model(x)"
    assert find(root, "cross_entropy").code == "loss = F.cross_entropy(logits, y)"


def test_aten_nodes_and_variables_are_inside_their_function(digits: Graph) -> None:
    conv = find(tree(digits.contents), "model", "0")
    assert [box.node.op for box in conv.children] == ["tfnb.read", "tfnb.read", "aten.convolution.default"]


def test_gradients_are_grouped_like_the_forward_pass(digits: Graph) -> None:
    line = tree(digits.contents).children[-1]
    assert titles(line)[0] == "gradients"
    assert titles(find(line, "gradients", "model")) == ["3", "2", "1", "0"]


def test_updates_of_all_variables_are_one_box(digits: Graph) -> None:
    adam = tree(digits.contents).children[-1].children[1]
    assert adam.title == "Adam"
    assert (adam.children[0].times, adam.children[0].detail) == (4, "adam")
    assert titles(adam.children[0]) == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_equal_layers_are_one_box(gpt: Graph) -> None:
    root = tree(gpt.contents)
    layers = find(root, "model", "h")
    assert (layers.times, len(layers.children)) == (12, 12)
    gradients = find(root.children[-1], "gradients", "model", "h")
    assert max(box.times for box in (gradients, *gradients.children)) >= 10


def test_stages_of_a_residual_net_fold_their_equal_blocks(resnet: Graph) -> None:
    model = find(tree(resnet.contents), "model")
    assert len(model.children) <= 12
    assert [box.times for box in find(model, "layer3").children] == [1, 5]
    assert len(find(model, "layer1", "0").children) <= 12


def test_repeated_lines_of_a_loop_fold() -> None:
    root = tree(chain([("relu", ("relu",), 1), ("tanh", ("tanh",), 2)] * 5))
    assert [(box.title, box.times) for box in root.children] == [("x", 1), ("relu, tanh", 5)]
    assert titles(root.children[1].children[0]) == ["relu", "tanh"]


def test_two_equal_blocks_stay_apart() -> None:
    root = tree(
        chain([("relu", ("a", "f"), 1), ("tanh", ("a", "f"), 1), ("relu", ("b", "f"), 1), ("tanh", ("b", "f"), 1)])
    )
    assert [box.times for box in root.walk()] == [1] * len(list(root.walk()))


def test_nested_scopes_with_one_child_are_merged() -> None:
    root = tree(chain([("relu", ("net", "body", "relu"), 1)]))
    assert [(box.title, box.detail, box.code) for box in root.children[1:]] == [("net/body", "relu", "line 1")]


def test_a_long_level_is_cut_into_parts() -> None:
    ops = ["relu", "tanh", "sin", "neg", "abs"]
    root = tree(chain([(ops[(i * i) % 5], (), 1) for i in range(500)]))
    assert all(len(box.children) <= LEVEL for box in root.walk())
    assert len(root.nodes) == 501


def test_other_cells_are_one_box_each() -> None:
    b = Builder()
    x = b.placeholder("x", ("B", 3))
    for cell, op in (("In[1]", "relu"), ("In[1]", "tanh"), ("In[2]", "sin"), ("In[2]", "neg")):
        source = SourceLine(cell, 1 + len(b.nodes), op)
        x = b.node(op, f"aten.{op}.default", (ROW,), inputs=(x,), attrs={"self": Ref(0)}, source=source)
    root = tree(b.contents(), cell="In[2]")
    assert [(box.kind, box.title, len(box.nodes)) for box in root.children[1:]] == [
        ("cell", "In[1]", 2), ("op", "sin", 1), ("op", "neg", 1),
    ]  # fmt: skip


@given(graphs(size=30))
def test_every_node_is_in_exactly_one_box(contents: Contents) -> None:
    leaves = [box.node.id for box in tree(contents).walk() if not box.children and box.nodes]
    assert sorted(leaves) == sorted(node.id for node in contents.nodes)


@given(graphs(size=30))
def test_boxes_of_a_level_never_use_later_ones(contents: Contents) -> None:
    from tfnb.view.wiring import Wiring

    root = tree(contents)
    wiring = Wiring(contents, root)
    for box in root.walk():
        for edge in wiring.edges(box) if box.children else ():
            if edge.values and isinstance(edge.tail, int) and isinstance(edge.head, int):
                assert edge.tail < edge.head


def test_a_value_of_an_unknown_node_is_left_out() -> None:
    b = Builder()
    b.node("lost", "aten.relu.default", (ROW,), inputs=(Value(10**9),), attrs={"self": Ref(0)})
    assert titles(tree(b.contents())) == ["relu"]


def test_gradients_of_two_lines_stay_in_their_lines() -> None:
    model = torch.nn.Linear(4, 3)
    with tfnb.record("two") as graph:
        h = model(tfnb.placeholder(torch.rand(8, 4)))
        h = h + torch.relu(h)  # the gradient of the first h is a sum
        loss = (h * h).sum()
        tfnb.gradients(loss, [model.weight])
        step = tfnb.train.SGD(0.1).minimize(loss)
    root = tree(graph.contents)
    assert [box.code or box.title for box in root.children[-2:]] == [
        "tfnb.gradients(loss, [model.weight])",
        "step = tfnb.train.SGD(0.1).minimize(loss)",
    ]
    assert [box.kind for box in root.children[-1].children] == ["pass", "pass"]
    assert titles(root.children[-1])[0] == "gradients"
    assert not any("gradients_1" in box.title for box in root.walk())


def test_a_batch_norm_is_called_so_though_it_counts_its_batches():
    with tfnb.record("norm") as g:
        x = tfnb.placeholder(torch.ones(2, 4), name="x")
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
        y = net(x)
    found = find(tfnb.view.Drawing(g).root, "net")
    assert [(child.title, child.detail) for child in found.children[:3]] == [
        ("0", "linear"), ("1", "batch_norm"), ("2", "relu"),
    ]  # fmt: skip
