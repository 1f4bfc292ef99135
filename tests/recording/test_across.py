"""Writes that cross cells: after each cell every tensor, of whichever cell, is what plain torch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tests.recording.test_cells import Notebook
from tfnb.errors import ShapeError

SAMPLE = torch.arange(12.0).view(4, 3) - 3
OTHER = torch.arange(12.0, 0, -1).view(4, 3) - 5


def plain(cells: list[str], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What plain torch gives for the cells run one after another."""
    names: dict[str, Any] = {"torch": torch, "x": x.clone()}
    for cell in cells:
        exec(cell, names)
    return {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}


def recorded(cells: list[str], name: str) -> dict[str, Any]:
    """The same cells recorded; compared with plain torch after each of them."""
    notebook = Notebook(name)
    for done, cell in enumerate(["x = tfnb.placeholder(sample, shape=(4, 3), name='x')", *cells]):
        notebook.names["sample"] = SAMPLE.clone()
        notebook.run(str(done), cell)
        same_as_plain(notebook, cells[:done])
    return notebook.names


def same_as_plain(notebook: Notebook, cells: list[str]) -> None:
    """Samples, values of a run, and what is shown, of every name."""
    want, ran = plain(cells, SAMPLE), plain(cells, OTHER)
    got = {name: notebook.names[name] for name in want}
    fetched = tfnb.Session(tfnb.graph(notebook.graph)).run(got, {"x": OTHER})
    for name, tensor in got.items():
        assert torch.equal(tensor.sample, want[name]), name
        assert torch.equal(fetched[name], ran[name]), name
        assert repr(want[name]) in repr(tensor), name


PROGRAMS = {
    "base written below its views": ["y = x * 2\nv = y[0]\nw = y.view(-1)", "y.add_(1)", "u = v + 1"],
    "view written below its base": ["y = x * 2\nv = y[0]\nw = v[1:]", "v.mul_(3)", "w.zero_()", "k = y + w.sum()"],
    "three cells in turn": ["y = x * 2", "v = y.t()", "v[0].add_(5)", "y[1:].relu_()", "v.mul_(y.t())"],
    "a view of a view of another cell": ["y = x * 2", "v = y[1:]", "w = v[:, 0]", "y += 1", "w -= 7", "z = v * w[0]"],
    "a placeholder's views": ["v = x[0]\nk = x * 1", "x.mul_(2)", "v.add_(1)", "z = x + k"],
    "reshaped in place": ["y = x * 2\nv = y[0]", "y.t_()", "y.add_(1)", "v.mul_(2)"],
    "foreach over cells": ["y = x * 2\nk = x + 1\nv = y[1]", "torch._foreach_add_([y, k], 1)", "v.mul_(2)"],
    "out= of another cell": ["y = x * 2\nv = y[0]", "torch.sub(x, 1, out=y)", "torch.neg(v, out=v)"],
    "written by nothing recorded": ["y = x * 2\nv = y[0]", "y.copy_(torch.full((4, 3), 7.0))", "v.fill_(2)"],
    "split parts": ["y = x * 2\na, b = y.chunk(2)", "a.add_(1)", "b.copy_(a)", "y.neg_()"],
    "detached": ["y = x * 2\nd = y.detach()", "y.add_(1)", "d.mul_(2)"],
    "read below the write in the cell": ["y = x * 2\nv = y[0]", "y.add_(1)\nn = v * 1\ny.add_(n[0])\nm = v * 1"],
    "a view made between writes": ["y = x * 2", "y.add_(1)\nv = y[0]\ny.add_(2)", "y.mul_(v + 1)"],
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_cells_that_write_equal_plain_torch(program: str) -> None:
    recorded(PROGRAMS[program], program)


def test_a_view_shown_within_the_cell_is_of_now() -> None:
    with tfnb.record():
        y = tfnb.placeholder(torch.ones(3)) * 2
        v = y[:2]
        y.add_(1)
        assert v.sample.tolist() == [3, 3] and v.tolist() == [3, 3] and "[3., 3.]" in repr(v)


def test_a_view_that_nobody_holds_adds_no_node() -> None:
    notebook = Notebook("dropped-view")
    notebook.run("1", "x = tfnb.placeholder(torch.ones(4, 3), name='x')\ny = x * 2\nv = y[0]")
    notebook.run("2", "del v\ny.add_(1)")
    assert [node.op for node in tfnb.graph(notebook.graph).nodes if node.source.label == "In[2]"] == ["aten.add.Tensor"]


@pytest.mark.parametrize("error", ["1 / 0", "y @ y"])
def test_a_failing_cell_takes_back_what_views_of_other_cells_show(error: str) -> None:
    notebook = Notebook(f"failing-{error[0]}")
    cells = ["y = x * 2\nv = y[0]\nw = v[1:]"]
    notebook.run("1", f"x = tfnb.placeholder(torch.tensor({SAMPLE.tolist()}), shape=(4, 3), name='x')\n{cells[0]}")
    for _ in range(2):
        with pytest.raises((ZeroDivisionError, ShapeError)):
            notebook.run("2", f"v.add_(1)\nprint(w)\ny.mul_(2)\nz = w + 1\n{error}")
        same_as_plain(notebook, cells)
    notebook.run("2", "y.add_(1)")
    same_as_plain(notebook, [*cells, "y.add_(1)"])


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


def test_a_write_through_a_view_of_a_parameter_of_another_cell_writes_the_parameter() -> None:
    notebook = Notebook("parameter-written")
    layer = notebook.names["layer"] = torch.nn.Linear(3, 2)
    second = layer.weight.detach()[1].clone()
    notebook.run("1", "w = layer.weight[0]")
    for _ in range(2):
        notebook.run("2", "with torch.no_grad():\n    w.fill_(5)\ns = layer.weight.sum(1)")
    assert notebook.names["s"].sample[0] == 15 and notebook.names["w"].sample.tolist() == [5, 5, 5]
    tfnb.run(layer.weight)
    assert layer.weight.detach()[0].tolist() == [5, 5, 5] and torch.equal(layer.weight.detach()[1], second)


UPDATE = "loss = ((p - x.mean(0)) ** 2).sum()\nloss.backward()\nwith torch.no_grad():\n    p -= 0.25 * p.grad\n"


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
