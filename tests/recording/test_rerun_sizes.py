"""Cells run again whose sizes are joined or derived: the sizes match up to renaming and keep their letters."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

import tfnb
from tests.recording.test_cells import Notebook
from tfnb.errors import StaleNode

TWO = "x = tfnb.placeholder(torch.ones(32, 3))\ny = tfnb.placeholder(torch.ones(32))"
THREE = TWO + "\nw = tfnb.placeholder(torch.ones(32))"
FED = {"x": torch.full((5, 3), 2.0), "y": torch.full((5,), 3.0), "w": torch.full((5,), 7.0)}


def fed(graph: tfnb.Graph) -> dict[str, torch.Tensor]:
    return {node.name: FED[node.name] for node in graph.placeholders}


JOINS = {
    "two": f"{TWO}\nl = x.sum(1) * y",
    "a chain of three": f"{THREE}\nl = x.sum(1) * y * w",
    "a chain the other way": f"{THREE}\nl = w * (y * x.sum(1))",
    "two pairs": f"{THREE}\nk = y * w\nl = k + x.sum(1)",
    "letters of the user": "x = tfnb.placeholder(torch.ones(32, 3), shape=('T', 3))\n"
    "y = tfnb.placeholder(torch.ones(32), shape=('U',))\nl = x.sum(1) * y",
    "one letter of the user": "x = tfnb.placeholder(torch.ones(32, 3))\n"
    "y = tfnb.placeholder(torch.ones(32), shape=('U',))\nl = x.sum(1) * y",
    "doubled": f"{TWO}\nl = torch.cat([x, x]).sum(1) * torch.cat([y, y])",
    "and one more": f"{TWO}\nl = torch.cat([x, x[:1]]).sum(1) * torch.cat([y[:1], y])",
    "none": f"{TWO}\nl = x.sum(1)",
    "of data": f"{TWO}\nl = x[x[:, 0] > 0].sum(1)",
    "of two data": f"{TWO}\na, b = x[x[:, 0] > 0], y[y > 0]\nl = torch.cat([a.sum(1), b])",
}


@pytest.mark.parametrize("join", JOINS)
def test_cells_below_follow_a_cell_that_runs_again_unchanged(request: pytest.FixtureRequest, join: str) -> None:
    notebook = Notebook(request.node.name)
    graph = notebook.run("A", JOINS[join])
    notebook.run("B", "z = x + 1\nq = l * 2\nr = torch.cat([y, l])")
    first, expected = graph.text(), tfnb.run([notebook.names[name] for name in "zqr"], fed(graph))
    for _ in range(3):
        notebook.run("A", JOINS[join])
        assert graph.text() == first
        found = tfnb.run([notebook.names[name] for name in "zqr"], fed(graph))
        assert all(map(torch.equal, found, expected))
    notebook.run("C", "s = z.sum() + q.sum() + l.sum()")  # handles of B are of the sizes that A has now
    assert tfnb.run(notebook.names["s"], fed(graph)) == expected[0].sum() + 1.5 * expected[1].sum()


@pytest.mark.parametrize("order", list(permutations("ABC")))
def test_cells_in_any_order_give_one_graph(request: pytest.FixtureRequest, order: tuple[str, ...]) -> None:
    cells = {"A": JOINS["two"], "B": "v = tfnb.placeholder(torch.ones(32))\nm = l + v", "C": "n = m * v + y"}
    notebook = Notebook(request.node.name)
    for cell, source in cells.items():
        graph = notebook.run(cell, source)
    feeds = {"x": FED["x"], "y": FED["y"], "v": FED["w"]}
    first, expected = graph.text(), tfnb.run("n", {notebook.names[n]: v for n, v in feeds.items()})
    for _ in range(2):
        for cell in order:
            notebook.run(cell, cells[cell])
        assert graph.text() == first
        assert torch.equal(tfnb.run(notebook.names["n"], feeds), expected)


EDITS = {
    "a placeholder above": ("w = tfnb.placeholder(torch.ones(9))\n" + JOINS["two"], "zqr"),
    "the other one first": (
        "y = tfnb.placeholder(torch.ones(32))\nx = tfnb.placeholder(torch.ones(32, 3))\nl = x.sum(1) * y", "zqr",
    ),
    "another function": (f"{TWO}\nl = (x * x).sum(1) * y", "zqr"),
    "a letter": (JOINS["letters of the user"], "zqr"),
    "a third": (f"{THREE}\nl = x.sum(1) * y * w", "zqr"),
    "another width": (JOINS["two"].replace("32, 3", "32, 4"), "qr"),
    "no join": (f"{TWO}\nl = x.sum(1)", "zq"),
    "half of it": (f"{TWO}\nl = (x.sum(1) * y)[::2]", "z"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_cells_below_follow_an_edited_cell_or_say_what_to_run(request: pytest.FixtureRequest, edit: str) -> None:
    source, follow = EDITS[edit]
    notebook, fresh = Notebook(request.node.name), Notebook(request.node.name + "fresh")
    notebook.run("A", JOINS["two"])
    below = "z = x + 1\nq = l * 2\nr = torch.cat([y, l])"
    notebook.run("B", below)
    graph = notebook.run("A", source)
    fresh.run("A", source)
    fresh.run("B", below)
    feeds = {**fed(graph), "x": torch.full((5, notebook.names["x"].shape[1]), 2.0)}
    for name in follow:
        assert torch.equal(tfnb.run(notebook.names[name], feeds), tfnb.run(fresh.names[name], feeds)), name
    for name in set("zqr") - set(follow):
        with pytest.raises(StaleNode, match=r"In\[B\] was dropped .*run In\[B\] again"):
            tfnb.run(notebook.names[name], feeds)
    notebook.run("B", below)
    notebook.run("A", source)
    assert torch.equal(tfnb.run(notebook.names["r"], feeds), tfnb.run(fresh.names["r"], feeds))


def test_what_was_two_sizes_and_becomes_one_follows(request: pytest.FixtureRequest) -> None:
    notebook = Notebook(request.node.name)
    notebook.run("A", TWO)
    notebook.run("B", "m = y * 2\nk = x.sum(1)")
    graph = notebook.run("A", JOINS["two"])
    assert len({*graph["m"].outputs[0].symbols, *graph["x"].outputs[0].symbols}) == 1
    assert tfnb.run(notebook.names["m"], {"y": FED["y"]}).tolist() == [6.0] * 5
    notebook.run("C", "n = m + k")
    assert not graph.guards and tfnb.run(notebook.names["n"], fed(graph)).tolist() == [12.0] * 5


def test_what_a_dropped_cell_leaves_behind_is_gone(request: pytest.FixtureRequest) -> None:
    notebook = Notebook(request.node.name)
    notebook.run("A", "x = tfnb.placeholder(torch.ones(4, 3))\nh = x * 2")
    notebook.run("0", "layer = torch.nn.Linear(3, 2)\nw = tfnb.Variable([1.0, 2.0])")
    notebook.run("B", "z = layer(h) * torch.ones(2)\nkept = w * 3")
    graph = notebook.run("A", "x = tfnb.placeholder(torch.ones(4, 3))\ng = x * 2")
    assert [node.name for node in graph.nodes] == ["x", "g", "Variable", "kept"]
    assert tfnb.run(notebook.names["kept"]).tolist() == [3.0, 6.0]
    with pytest.raises(StaleNode, match=r"run In\[B\] again"):
        tfnb.run(notebook.names["z"], {"x": torch.ones(2, 3)})
