"""Cells own their nodes: running one again replaces them in place, consumers are re-linked or stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import InvalidArgument, StaleNode
from tfnb.recording import record_cell


class Notebook:
    """Runs sources as cells of one graph, as the magic does, without IPython."""

    def __init__(self, graph: str) -> None:
        self.graph = graph
        self.names: dict[str, Any] = {"torch": torch, "tfnb": tfnb}

    def run(self, cell: str, source: str) -> tfnb.Graph:
        filename = f"<cell {cell}>"
        with record_cell(
            self.graph, owner=f"cell:{cell}", label=f"In[{cell}]", filename=filename, namespace=self.names
        ) as graph:
            exec(compile(source, filename, "exec"), self.names)
        return graph


@pytest.fixture
def notebook(request: pytest.FixtureRequest) -> Notebook:
    return Notebook(request.node.name.replace("[", "-").replace("]", ""))


def facts(graph: tfnb.Graph) -> tuple[Any, ...]:
    return graph.text(), [n.name for n in graph.nodes], [v.name for v in graph.variables]


def test_running_a_cell_fifty_times_changes_nothing(notebook: Notebook) -> None:
    notebook.run("0", "layer = torch.nn.Linear(3, 2)")
    source = "x = tfnb.placeholder(torch.ones(4, 3))\nh = layer(x)\nloss = h.sum() + torch.rand(1)\nh2 = torch.relu(h)"
    graph = notebook.run("1", source)
    first = facts(graph)
    for _ in range(50):
        assert notebook.run("1", source) is graph
    assert facts(graph) == first
    assert notebook.names["loss"].name == "loss"


def test_consumers_in_other_cells_are_relinked(notebook: Notebook) -> None:
    notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3), name='x')\nh = x * 2")
    notebook.run("2", "y = h.sum(1)")
    y = notebook.names["y"]
    notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3), name='x')\nh = x * 5")
    graph = tfnb.graph(notebook.graph)
    assert [n.name for n in graph.nodes] == ["x", "h", "y"]
    assert tfnb.run(y, {"x": torch.ones(2, 3)}).tolist() == [15, 15]


LAST_OPS = [
    "h = (x * 2).exp()",
    "h = x.relu().sum(1, keepdim=True) + x",
    "h = torch.where(x > 0, x, x - 1)",
    "h = x / 3",
]


@pytest.mark.parametrize("last", LAST_OPS)
def test_consumers_follow_a_name_that_another_op_gives(notebook: Notebook, last: str) -> None:
    begin = "x = tfnb.placeholder(torch.ones(4, 3), name='x')\n"
    notebook.run("1", begin + "h = x.relu()")
    notebook.run("2", "y = h.sum(1)")
    notebook.run("3", "z = y * 2")
    z = notebook.names["z"]
    notebook.run("1", begin + last)
    data, names = torch.randn(2, 3), {"torch": torch}
    exec(last, names | {"x": data}, names)
    assert torch.equal(tfnb.run(z, {"x": data}), names["h"].sum(1) * 2)
    torch.testing.assert_close(z.sample, notebook.names["h"].sample.sum(1) * 2)


@pytest.mark.parametrize(("first", "then"), [
    ("h = x * 2", "h = x[:2]"), ("h = x * 2", "h = x.sum(0)"), ("h = k = x * 2", "h = x.exp()\nk = x * 2"),
    ("h = x.t()", "h = x.t().exp()"), ("h = x * 2", "h = x.t().contiguous().t()"),
])  # fmt: skip
def test_consumers_do_not_follow_where_it_is_not_known_what_they_took(
    notebook: Notebook, first: str, then: str
) -> None:
    begin = "x = tfnb.placeholder(torch.ones(4, 3), name='x')\n"
    notebook.run("1", begin + first)
    notebook.run("2", "y = h.sum()")
    y = notebook.names["y"]
    notebook.run("1", begin + then)
    with pytest.raises(StaleNode, match=r"run In\[2\] again"):
        tfnb.run(y, {"x": torch.ones(2, 3)})


def test_consumers_of_what_is_gone_are_stale_and_named(notebook: Notebook) -> None:
    notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3), name='x')\nh = x * 2")
    notebook.run("2", "y = h.sum(1)")
    old_h, y = notebook.names["h"], notebook.names["y"]
    graph = notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3), name='x')\nk = x.exp()")
    assert [n.name for n in graph.nodes] == ["x", "k"]
    for tensor, cell in ((old_h, r"In\[1\]"), (y, r"In\[2\]")):
        with pytest.raises(StaleNode, match=cell):
            tfnb.run(tensor, {"x": torch.ones(2, 3)})
    with pytest.raises(StaleNode, match="again"):
        notebook.run("3", "z = h + 1")


def test_a_failing_rerun_keeps_the_old_cell(notebook: Notebook) -> None:
    graph = notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3), name='x')\nh = x * 2")
    before = graph.text()
    h = notebook.names["h"]
    with pytest.raises(ZeroDivisionError):
        notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3), name='x')\nq = x.exp()\n1 / 0")
    assert graph.text() == before
    assert tfnb.run(h, {"x": torch.ones(1, 3)}).tolist() == [[2, 2, 2]]


def test_the_block_keeps_its_place_in_program_order(notebook: Notebook) -> None:
    notebook.run("1", "v = tfnb.Variable(torch.zeros(()), name='v')\na = v.assign_add(1)")
    notebook.run("2", "b = v.assign(v * 10)")
    graph = notebook.run("1", "a = v.assign_add(2)")
    owners = [n.owner.key for n in graph.nodes]
    assert owners == sorted(owners)
    assert tfnb.run([notebook.names["a"], notebook.names["b"]])[1].item() == 20


def test_variables_shared_by_cells_survive_reruns(notebook: Notebook) -> None:
    notebook.run("0", "layer = torch.nn.Linear(3, 2)")
    notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3), name='x')\nout = layer(x)")
    graph = notebook.run("2", "test = layer(x).argmax(1)")
    assert len(graph.variables) == 2
    notebook.run("0", "layer = torch.nn.Linear(3, 5)")
    graph = notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3), name='x')\nout = layer(x)")
    assert notebook.names["out"].shape[1] == 5


def test_source_lines_are_those_of_the_cell(notebook: Notebook) -> None:
    graph = notebook.run("7", "x = tfnb.placeholder(torch.ones(4, 3), name='x')\n\ny = (\n    x.exp()\n)")
    assert (graph["y"].source.label, graph["y"].source.line) == ("In[7]", 4)


def test_an_explicit_name_used_by_two_cells_names_both(notebook: Notebook) -> None:
    notebook.run("1", "x = tfnb.placeholder(torch.ones(3), name='x')")
    with pytest.raises(InvalidArgument, match=r"taken by a node recorded at In\[1\](.|\n)*In\[2\]"):
        notebook.run("2", "x = tfnb.placeholder(torch.ones(3), name='x')")


def test_random_draws_do_not_change_when_another_cell_is_added(notebook: Notebook) -> None:
    notebook.run("1", "a = torch.rand(3)")
    first = tfnb.Session(tfnb.graph(notebook.graph)).run("a")
    notebook.run("2", "b = torch.rand(3)")
    second = tfnb.Session(tfnb.graph(notebook.graph)).run(["a", "b"])
    assert torch.equal(first, second[0]) and not torch.equal(second[0], second[1])


def test_recorded_random_sample_is_the_first_draw() -> None:
    with tfnb.record():
        a = torch.rand(3)
    assert torch.equal(a.sample, tfnb.run(a))
    assert not torch.equal(a.sample, tfnb.run(a))


def test_name_scopes() -> None:
    with tfnb.record() as g:
        with tfnb.name_scope("a"):
            tfnb.placeholder(torch.ones(3)) + 1
        with tfnb.name_scope("a"):
            torch.ones(3) + 2
        with tfnb.name_scope("a/"):
            z = torch.ones(3) + 3
    assert z.node.scope == ("a", "add")
    assert {n.scope[0] for n in g.nodes if n.scope} == {"a"}


@pytest.mark.parametrize("name", ["", "a b", "<script>", "x\ny", "'", "\u202e", "a/../b c"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a node name"), tfnb.record():
        tfnb.placeholder(torch.ones(3), name=name)
