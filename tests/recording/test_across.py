"""Tensors of other cells: no cell writes into them, and a view of a Variable is of the Variable in every cell."""

from __future__ import annotations

import contextlib

import pytest
import torch

import tfnb
from tests.recording.test_cells import Notebook
from tfnb.errors import InvalidArgument, TfnbError, Unsupported

FIRST = """
x = tfnb.placeholder(torch.arange(12.0).view(4, 3), name='x')
y = x * 2
v, flat = y[0], y.view(-1)
n = y + table + layer.weight[0, 0]
w = layer.weight[0]
"""
WRITES = {
    "its memory": "y.add_(1)",
    "a placeholder's": "x += 1",
    "through a view of that cell": "v.mul_(3)",
    "through a view of this cell": "y[1:].relu_()",
    "an item": "flat[2] = 7",
    "out=": "torch.sub(x, 1, out=y)",
    "several": "torch._foreach_add_([x * 1, y], 1)",
    "detached": "y.detach().zero_()",
    "its data": "y.data = y * 2",
    "its shape": "y.t_()",
    "in a loop": "with torch.no_grad():\n    tfnb.while_loop(lambda i: i < 2, lambda i: (i + 1, y.add_(1))[:1], (0,))",
    "a view of a parameter": "with torch.no_grad():\n    w.fill_(5)",
    "a plain tensor that the cell uses": "table += 1",
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_into_what_another_cell_recorded_is_refused_and_changes_nothing(how: str) -> None:
    notebook = Notebook(f"across-{how}")
    notebook.names |= {"layer": torch.nn.Linear(3, 2), "table": torch.ones(3)}
    graph = notebook.run("1", FIRST)
    before, text = tfnb.run([notebook.names[name] for name in "yvnw"], {"x": torch.ones(4, 3)}), graph.text()
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"(another cell|made outside)(.|\n)*In\[2\] line \d"):
            notebook.run("2", f"z = y + 1\n{WRITES[how]}")
    assert graph.text() == text
    torch.testing.assert_close(tfnb.run([notebook.names[name] for name in "yvnw"], {"x": torch.ones(4, 3)}), before)
    notebook.run("2", "y = y.clone()\ny.add_(1)\nz = y.sum()")
    assert tfnb.run(notebook.names["z"], {"x": torch.ones(4, 3)}) == 36


def test_a_plain_tensor_that_a_cell_writes_is_of_no_other_cell() -> None:
    notebook = Notebook("plain-written")
    notebook.names["table"] = torch.ones(3)
    assert any(
        "does not write into a plain tensor" in note for note in notebook.run("1", "table += 1\ns = table * 1").notes
    )
    with pytest.raises(Unsupported, match=r"another cell writes into(.|\n)*tfnb.Variable"):
        notebook.run("2", "k = table[1:] * 2")
    notebook.run("1", "s = table * 1")
    notebook.run("2", "k = table[1:] * 2")
    assert tfnb.run(notebook.names["k"]).tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:.*took the sample")
def test_a_view_shown_within_the_cell_is_of_now() -> None:
    with tfnb.record():
        y = tfnb.placeholder(torch.ones(3)) * 2
        v = y[:2]
        y.add_(1)
        assert v.sample.tolist() == [3, 3] and v.tolist() == [3, 3] and "[3., 3.]" in repr(v)


def test_a_view_of_a_parameter_is_of_the_parameter_in_every_cell() -> None:
    notebook = Notebook("parameter-view")
    layer = notebook.names["layer"] = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    notebook.run("1", "w = layer.weight[0]\nu = w * 2")
    notebook.run("2", "with torch.no_grad():\n    layer.weight.fill_(7)\nshown = repr(w)\nq = w + 0")
    names = notebook.names
    assert "7., 7., 7." in names["shown"] and names["q"].sample.tolist() == [7, 7, 7]
    assert torch.equal(tfnb.run(names["u"]), before[0] * 2) and torch.equal(layer.weight, before)
    notebook.run("3", "r = w * 1")
    assert torch.equal(names["r"].sample, before[0]) and torch.equal(tfnb.run(names["r"]), before[0])
    assert tfnb.run(names["q"]).tolist() == [7, 7, 7] and layer.weight.min() == 7
    assert tfnb.run(names["r"]).tolist() == [7, 7, 7]


UPDATE = (
    "loss = ((p - x.mean(0)) ** 2).sum()\np.grad = None\nloss.backward()\n"
    "with torch.no_grad():\n    p -= 0.25 * p.grad\n"
)


@pytest.mark.parametrize("by", ["parameter", "group", "line below", "loss", "another cell"])
def test_an_update_by_hand_happens_where_it_is_said_to(by: str) -> None:
    notebook = Notebook(f"hand-{by}")
    p = notebook.names["p"] = torch.nn.Parameter(torch.ones(3))
    notebook.run("1", "x = tfnb.placeholder(torch.ones(2, 3), name='x')")
    group = "step = tfnb.group(p)" if by == "group" else ""
    notes = notebook.run("2", f"{UPDATE}after = p.sum()\n{group}").notes
    assert [note for note in notes if "written by hand: p; a run does it when" in note] == list(notes)
    assert len(notes) == (0 if by == "group" else 1)
    notebook.run("3", "there = p.sum()")
    names = notebook.names
    fetch = {"parameter": p, "group": names.get("step"), "line below": names["after"], "loss": names["loss"]}
    for _ in range(2):
        tfnb.run(fetch.get(by, names["there"]), {"x": torch.zeros(2, 3)} if by != "another cell" else None)
    assert p.tolist() == [1.0 if by in ("loss", "another cell") else 0.25] * 3


def test_a_tensor_of_another_graph_is_a_constant_with_the_numbers_of_its_sample_as_sizes():
    with tfnb.record("other"):
        x = tfnb.placeholder(torch.rand(4, 3))
    with tfnb.record("this") as g:
        z = tfnb.placeholder(torch.rand(6, 3))
        y = z.sum() * x.shape[0] + torch.zeros(x.shape[0], 3).numel() + len(x.flatten(1))
        w = torch.nn.functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64)) * z.sum()
    ones = torch.ones(2, 3)
    assert tfnb.Session(g).run(y, {z: ones}) == 6 * 4 + 12 + 4  # both graphs call the size of their rows B
    expected = 6 * torch.nn.functional.cross_entropy(x.sample, torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(tfnb.Session(g).run(w, {z: ones}), expected)


@pytest.mark.filterwarnings("ignore:.*does not write into a plain tensor")
def test_facts_of_another_graphs_tensor_want_no_sample_and_out_does_not_write_into_it():
    with tfnb.record("other"):
        x = tfnb.placeholder(torch.rand(4, 3))
        unknown = tfnb.placeholder(shape=(None, 2), dtype=torch.float64)
    before = x.sample.clone()
    with tfnb.record("this"):
        z = tfnb.placeholder(torch.rand(4, 3))
        assert (unknown.dtype, unknown.ndim, unknown.device.type) == (torch.float64, 2, "cpu")
        with pytest.raises(InvalidArgument, match="has no value while recording"):
            _ = unknown.shape[0] + 1
        with contextlib.suppress(TfnbError):
            torch.add(z, z, out=x)
    assert torch.equal(x.sample, before)
