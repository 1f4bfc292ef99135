"""Why nodes are done where they are, and a step in parts as a user sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tests import over_tasks
from tests.over_tasks import on
from tfnb.errors import InvalidArgument, NotFound
from tfnb.graph.subgraph import nested
from tfnb.passes.flow.cut import Kind
from tfnb.passes.flow.places import Place


def two() -> tuple[tfnb.Graph, Any, Any, Any]:
    """A value of task 0 that task 1 uses, and what asks for nothing before and behind."""
    with tfnb.record("two") as g:
        x = tfnb.placeholder(torch.ones(2, 3), shape=(2, 3), name="x")
        early = x * 2
        with tfnb.device("task:0"):
            h = early.exp()
        with tfnb.device("task:1"):
            y = h + 1
        late = y.sum()
    return g, early, h, late


def test_each_rule_in_words() -> None:
    g, early, h, late = two()
    assert (g.why(h).place, g.why(h).rule) == (Place(0), "asks for task:0")
    assert (g.why(late).place, g.why(late).rule) == (Place(1), "beside its first operand y")
    assert (g.why(early).place, g.why(early).rule) == (Place(0), "where it is first used, by h")
    assert (g.why("x").place, g.why("x").rule) == (None, "wherever it is wanted")


def test_what_was_asked_and_what_crosses() -> None:
    g, _, h, late = two()
    why = g.why(h)
    assert why.request == "task:0" and "early.exp()" in why.where and why.possible == (Place(0),)
    (crossing,) = why.crossing
    assert (crossing.name, crossing.source, crossing.to) == ("h", Place(0), Place(1))
    assert (crossing.kind, crossing.words) == (Kind.VALUE, "value, 24 bytes")
    assert g.why("y").crossing == (crossing,)
    assert g.why(late).possible == (Place(0), Place(1))
    assert str(why).splitlines()[0] == "h is done at task:0: asks for task:0"


def test_a_graph_without_requests_is_at_the_first_place() -> None:
    with tfnb.record() as g:
        y = tfnb.placeholder(torch.ones(2), name="x") + 1
    assert (g.why(y).place, g.why(y).rule) == (Place(0), "the first place, as nothing beside it has one")
    assert len(tfnb.place(y).parts) == 1


def test_gradients_are_where_their_forward_nodes_are() -> None:
    g, _, _, fetches = over_tasks.trained()
    whys = [g.why(node) for node in g.nodes if "gradient" in node.tags and node.device is not None]
    assert whys and all(why.rule.startswith("its gradient: where ") for why in whys)
    assert {why.place for why in whys} == {Place(0), Place(1)}
    assert tfnb.place(fetches).why("loss").place == Place(1)


def test_a_queue_is_at_one_place() -> None:
    queue = tfnb.FIFOQueue(2, [torch.float32], shapes=[()], name="q")
    with tfnb.record() as g:
        with on(1):
            put = queue.enqueue(tfnb.placeholder(torch.tensor(1.0), name="x"))
        size = queue.size()
    assert g.why(size).place == Place(1) == g.why(put).place
    assert g.why(size).rule == "queue q: all that uses it is done at one place"


@pytest.mark.parametrize("model", over_tasks.MODELS, ids=lambda model: model.__name__)
def test_every_node_has_a_reason_also_inside_of_loops(model: over_tasks.Model) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3, 8), shape=("B", 8), name="x")
        y = model(x)
    for node in (inner for outer in g.nodes for inner in (outer, *nested(outer))):
        if node.op != "tfnb.placeholder" and node.device is not None and node.op not in ("tfnb.cond", "tfnb.while"):
            assert str(g.why(node).place) in str(node.device).replace("/", "") or g.why(node).place is None
        assert g.why(node).rule
    step = tfnb.place(y)
    sends, receives = [{str(e) for p in step.parts for e in getattr(p, how)} for how in ("sends", "receives")]
    assert sends == receives != set()
    for part in step.parts:
        names = [node.name for node in part.graph.nodes]
        assert sum(name.startswith("send ") for name in names) == len(part.sends)
        assert sum(name.startswith("recv ") for name in names) == len(part.receives)
        assert "<svg" in part._repr_html_()


def test_parts_of_a_step_as_table_and_drawing() -> None:
    _, _, _, late = two()
    step = tfnb.place(late)
    assert repr(step).splitlines()[0].split() == ["task", "nodes", "sends", "receives", "feeds", "bytes", "sent"]
    assert [line.split() for line in repr(step).splitlines()[1:]] == [
        ["task:0", "2", "1", "0", "x", "24"], ["task:1", "2", "0", "1", "-", "0"],
    ]  # fmt: skip
    assert "send h -&gt; task:1" in step.parts[0]._repr_html_()
    assert "recv h &lt;- task:0" in step.parts[1]._repr_html_()
    assert step._repr_html_().count("<svg") >= 2


def test_sizes_only_and_sizes_that_vary() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 8), shape=("B", 8), name="x")
        with on(0):
            h = x.exp()
            total = h.sum()
        with on(1):
            y = total + torch.zeros(h.shape[0], 3)
            z = h.sum(0)
    assert [each.words for each in tfnb.place([y, z]).parts[0].sends] == ["value, 32*B bytes", "value, 4 bytes"]


def test_unknown_nodes_are_typed_errors_with_near_names() -> None:
    g, _, h, late = two()
    with pytest.raises(NotFound, match=r"no node 'latte'.*near: late"):
        g.why("latte")
    with pytest.raises(InvalidArgument, match="a Node, a recorded tensor or a name"):
        g.why(3)
    with pytest.raises(InvalidArgument, match="of graph two, not of"):
        tfnb.Graph("other").why(h)
    with pytest.raises(NotFound, match="nothing wanted needs it"):
        tfnb.place(h).why(late)


def test_what_is_inside_of_a_loop_that_is_not_divided_is_where_the_loop_is() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3), shape=(3,), name="x")
        with tfnb.device("task:0"):
            a = x * 2
        with tfnb.device("task:1"):
            _, y = tfnb.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, torch.tanh(h)), (0, a))
        (y + a).sum()
    (loop,) = (node for node in g.nodes if node.op == "tfnb.while")
    (tanh,) = (node for node in nested(loop) if node.op.startswith("aten.tanh"))
    assert str(g.why(tanh).place) == str(g.why(loop).place) == "task:1"
    assert g.why(tanh).rule == f"inside of {loop.name}, which is done there as a whole"
