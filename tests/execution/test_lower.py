"""The generated program computes what node-by-node evaluation computes, and writes only at the commit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tfnb
from tests.graph.build import evaluate
from tests.graph.strategies import graphs
from tfnb.errors import InvalidArgument
from tfnb.execution import lower
from tfnb.graph import Contents, Graph, Value
from tfnb.graph.check import check
from tfnb.passes import prune


def all_values(contents: Contents) -> list[Value]:
    return [node.value(i) for node in contents.nodes for i in range(len(node.outputs))]


def run(contents: Contents, fetches: list[Value], feed: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Fetched values, and the variables' values after the commit; the variables are left as they were."""
    graph = Graph("g", contents)
    program = lower(graph, fetches, [contents.placeholders[0].value()])
    storages = [v.storage.clone() for v in program.variables]
    before = [s.clone() for s in storages]
    got, pending = program.compute([feed], storages)
    for a, b in zip(before, storages, strict=True):
        assert torch.equal(a, b), "compute wrote into a variable"
    program.commit(pending)
    return got, dict(zip(program.variables, storages, strict=True))


@given(graphs(), st.integers(1, 5))
def test_programs_equal_node_by_node_evaluation(contents: Contents, rows: int) -> None:
    feed = torch.randn(rows, 3)
    values = all_values(contents)
    want = evaluate(contents, {"x": feed})
    got, variables = run(contents, values, feed)
    for value, tensor in zip(values, got, strict=True):
        torch.testing.assert_close(tensor, want[value], equal_nan=True, rtol=0, atol=0)
    last = {n.attrs["variable"]: n.value() for n in contents.nodes if n.op == "tfnb.assign"}
    for variable, value in last.items():
        torch.testing.assert_close(variables[variable], want[value], equal_nan=True, rtol=0, atol=0)


@given(graphs(stateful=False), st.data())
def test_pruning_never_changes_a_fetch(contents: Contents, data: st.DataObject) -> None:
    values = all_values(contents)
    fetch = data.draw(st.sampled_from(values))
    graph = Graph("g", contents)
    feed = torch.randn(2, 3)
    want = evaluate(contents, {"x": feed})[fetch]
    pruned = prune(graph, [fetch], [])
    check(pruned.contents) if contents.placeholders[0] in pruned.nodes else None
    assert len(prune(pruned, [fetch], []).nodes) == len(pruned.nodes)
    torch.testing.assert_close(run(contents, [fetch], feed)[0][0], want, equal_nan=True, rtol=0, atol=0)


def test_updates_fuse_into_one_call_unless_somebody_looks() -> None:
    layer = torch.nn.Linear(3, 2)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3), name="x")
        loss = layer(x).square().mean()
        step = tfnb.train.Adam(1e-2).minimize(loss)
    program = lower(g, [step.value], [x.value])
    assert len(program.updates) == 1 and not program.copies
    update = next(n for n in g.nodes if "update" in n.tags)
    looked = lower(g, [step.value, update.value(0)], [x.value])
    assert looked.copies


def test_a_missing_feed_names_the_placeholder_and_its_line() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3), name="x")
        y = x + 1
    with pytest.raises(InvalidArgument, match=r"placeholder x \(float32\[B, 3\]\) must be fed") as info:
        lower(g, [y.value], [])
    assert info.value.node == "x" and info.value.line


def test_values_are_freed_at_their_last_use() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3), name="x")
        y = x.exp().sin().cos()
    code = lower(g, [y.value], [x.value]).code
    assert code.count("= None") >= 2
