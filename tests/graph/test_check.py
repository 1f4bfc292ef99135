"""The checker: every rule of its table fires, says why, and the whole is quick."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.graph.build import Builder, dense
from tests.graph.strategies import graphs
from tfnb.errors import GraphCycleError, InvalidArgument
from tfnb.graph import Contents, Dim, Graph, Guard, Node, Ref, SourceLine, Spec, Value
from tfnb.graph.check import RULES, check
from tfnb.graph.graph import new_id

ROW = Spec(torch.float32, (3,))


def broken(place: int, **fields: Any) -> Contents:
    """`dense` with fields of one node replaced: 0 x, 1 w, 2 b, 3 addmm, 4 relu."""
    nodes = list(dense().nodes)
    nodes[place] = replace(nodes[place], **fields)
    return Contents(tuple(nodes))


@given(graphs())
def test_random_well_formed_graphs_pass(contents: Contents) -> None:
    check(contents)


def test_empty_graph_passes() -> None:
    check(Contents())


@pytest.mark.parametrize("name", ["", "_x", "a b", "a\n", "é", "<script>", '"', "a:0", "-a", "/a"])
def test_bad_name_is_refused_with_the_pattern(name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"names match \^\[A-Za-z0-9.\]") as caught:
        check(broken(4, name=name))
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["a", "0.weight", "fc/addmm_1", "a.b-c>d\\e", ".x", "In_7"])
def test_good_name_passes(name: str) -> None:
    check(broken(4, name=name))


def test_name_that_is_taken_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"'x'.*name of node number 0"):
        check(broken(4, name="x"))


def test_id_that_is_taken_is_refused() -> None:
    nodes = dense().nodes
    with pytest.raises(InvalidArgument, match=r"id .* of another node"):
        check(Contents((*nodes, replace(nodes[4], name="again"))))


def test_input_that_is_not_in_the_graph_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not in the graph; re-run the cell") as caught:
        check(broken(4, inputs=(Value(new_id()),)))
    assert "In[3] line 2:  y = fc(x).relu()" in str(caught.value)
    assert (caught.value.node, caught.value.op) == ("y", "aten.relu.default")
    assert (caught.value.cell, caught.value.line) == ("In[3]", 2)


@pytest.mark.parametrize("index", [1, -1])
def test_output_that_a_node_does_not_have_is_refused(index: int) -> None:
    contents = dense()
    nodes = (*contents.nodes[:4], replace(contents.nodes[4], inputs=(Value(contents.nodes[3].id, index),)))
    with pytest.raises(InvalidArgument, match=f"takes output {index} of node fc/addmm, which has 1 outputs"):
        check(Contents(nodes))


def test_input_from_a_node_without_outputs_is_refused() -> None:
    b = Builder()
    done = b.node("group", "tfnb.group")
    b.op("aten.relu.default", ROW, self=done)
    with pytest.raises(InvalidArgument, match="node group, which has 0 outputs"):
        check(b.contents())


def test_later_input_is_refused() -> None:
    nodes = dense().nodes
    with pytest.raises(InvalidArgument, match="needs node fc/addmm, which comes later") as caught:
        check(Contents((*nodes[:3], nodes[4], nodes[3])))
    assert not isinstance(caught.value, GraphCycleError)


def test_cycle_is_named_with_its_path() -> None:
    b = Builder()
    ids = [new_id() for _ in range(3)]
    for place, number in enumerate(ids):
        before = Value(ids[place - 1])
        b.nodes.append(
            Node(
                id=number, name=f"n{place}", op="aten.relu.default", inputs=(before,), outputs=(ROW,),
                attrs={"self": Ref(0)},
            )
        )  # fmt: skip
    with pytest.raises(GraphCycleError, match="n0 depends on itself: n0 -> n2 -> n1 -> n0"):
        check(b.contents())


def test_node_that_takes_itself_is_a_cycle() -> None:
    contents = dense()
    last = contents.nodes[4]
    nodes = (*contents.nodes[:4], replace(last, inputs=(Value(last.id),)))
    with pytest.raises(GraphCycleError, match="y -> y"):
        check(Contents(nodes))


def test_cycle_through_control_inputs_is_found() -> None:
    contents = dense()
    nodes = list(contents.nodes)
    nodes[3] = replace(nodes[3], control=(nodes[4].id,))
    with pytest.raises(GraphCycleError, match="fc/addmm -> y -> fc/addmm"):
        check(Contents(tuple(nodes)))


def test_long_cycle_is_found_quickly_and_shortened_in_the_message() -> None:
    ids = [new_id() for _ in range(10_000)]
    nodes = tuple(
        Node(
            id=number, name=f"n{place}", op="aten.relu.default", inputs=(Value(ids[place - 1]),), outputs=(ROW,),
            attrs={"self": Ref(0)},
        )
        for place, number in enumerate(ids)
    )  # fmt: skip
    start = time.perf_counter()
    with pytest.raises(GraphCycleError) as caught:
        check(Contents(nodes))
    assert time.perf_counter() - start < 10
    assert len(str(caught.value)) < 400
    assert len(caught.value.peers) == 10_001


def test_unknown_control_input_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="waits for node id"):
        check(broken(4, control=(new_id(),)))


def test_later_control_input_is_refused() -> None:
    nodes = list(dense().nodes)
    nodes[0] = replace(nodes[0], control=(nodes[1].id,))
    with pytest.raises(InvalidArgument, match=r"needs node read, which comes later"):
        check(Contents(tuple(nodes)))


def test_ref_outside_of_the_inputs_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="refers to input 1 in its attrs, but has 1 inputs"):
        check(broken(4, attrs={"self": Ref(0), "other": [(Ref(1),)]}))


def test_input_that_no_attr_names_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"has 3 inputs, but its attrs name only \[0, 2\]"):
        check(broken(3, attrs={"self": Ref(0), "mat1": Ref(2)}))


def test_placeholder_with_an_input_is_refused() -> None:
    nodes = list(dense().nodes)
    nodes[4] = replace(nodes[4], op="tfnb.placeholder")
    with pytest.raises(InvalidArgument, match="is a placeholder with 1 inputs"):
        check(Contents(tuple(nodes)))


@pytest.mark.parametrize(
    "fields", [{"outputs": (Spec(torch.float32, (Dim("2*T"),)),)}, {"attrs": {"self": Ref(0), "size": [Dim("T+1")]}}]
)
def test_size_that_nothing_binds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="no value has an axis T"):
        check(broken(4, **fields))


def test_size_bound_by_an_output_passes() -> None:
    check(broken(4, outputs=(Spec(torch.float32, (Dim("u0"),)),)))


def test_guard_on_an_unbound_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"guard T > 2  \(In\[1\] line 3\) uses T"):
        check(Contents(dense().nodes, (Guard("T > 2", SourceLine("In[1]", 3)),)))


@pytest.mark.parametrize("index", [1, -1])
def test_alias_of_nothing_is_refused(index: int) -> None:
    contents = dense()
    with pytest.raises(InvalidArgument, match="the name 'loss' stands for"):
        check(Contents(contents.nodes, bindings={"loss": (Value(contents.nodes[4].id, index),)}))
    with pytest.raises(InvalidArgument, match="the name 'loss' stands for"):
        check(Contents(contents.nodes, bindings={"loss": (Value(new_id()),)}))


def test_every_rule_has_a_name() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_commit_of_a_bad_graph_changes_nothing() -> None:
    g = Graph("g", dense())
    before = g.contents
    with pytest.raises(InvalidArgument):
        g.commit(broken(4, name="a b"))
    assert g.contents is before
    assert g.version == 0


def test_three_thousand_nodes_take_20_ms() -> None:
    b = Builder()
    x = b.placeholder("x", ("B", 3))
    spec = b.spec(x)
    for i in range(3000):
        attrs = {"self": Ref(0), "other": Ref(1), "size": [Dim("4*B"), 3]}
        node = Node(
            id=new_id(), name=f"fc/add_{i}", op="aten.add.Tensor", inputs=(b.nodes[-1].value(), x), outputs=(spec,),
            attrs=attrs,
        )  # fmt: skip
        b.nodes.append(node)
    seconds = []
    for _ in range(5):
        contents = b.contents()
        start = time.perf_counter()
        check(contents)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2  # 0.02 on an idle core; what is quadratic takes far longer
