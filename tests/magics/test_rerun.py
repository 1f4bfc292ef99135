"""A cell that runs again after an edit: what changed, which cells below lost nodes, and how they come back."""

from __future__ import annotations

import re

import pytest
import torch

import tfnb

X = "x = tfnb.placeholder(torch.ones(2, 3), name='x')"


def notes(ran):
    return [bundle["text/plain"] for bundle in ran.shown if bundle["text/plain"].startswith("note: ")]


@pytest.fixture
def cells(notebook):
    """Three cells of one graph, each of which uses the one above."""
    notebook.ok(f"%%tfgraph g\n{X}\nh = torch.relu(x)\nw = h * 2", cell_id="a")
    notebook.ok("%%tfgraph g --no-show\ny = w.sum(1)", cell_id="b")
    notebook.ok("%%tfgraph g --no-show\nz = y + 1", cell_id="c")
    return notebook


def test_what_an_edit_changed_is_said_and_marked(cells):
    ran = cells.ok(f"%%tfgraph g\n{X}\nh = torch.tanh(x)\nk = h - 1\nw = h * 3", cell_id="a")
    assert notes(ran) == ["note: since its last run: 1 added (k), 2 changed (h, w)"]
    (drawn,) = ran.drawings
    assert drawn.count('class="badge"') == 3 and "\nadded" in drawn and "\nchanged" in drawn
    assert "dot: added<" in drawn and "dot: changed<" in drawn  # what a dot means
    value = tfnb.run("z", {"x": torch.full((4, 3), 0.5)})
    torch.testing.assert_close(value, 9 * torch.tanh(torch.full((4,), 0.5)) + 1)  # cells below follow by themselves


def test_what_is_gone_is_said(cells):
    (note,) = notes(cells.ok(f"%%tfgraph g\n{X}\nw = x * 2", cell_id="a"))
    assert note == "note: since its last run: 1 removed (h), 1 changed (w)"


def test_a_cell_run_again_as_it_was_says_nothing(cells):
    ran = cells.ok(f"%%tfgraph g\n{X}\nh = torch.relu(x)\nw = h * 2", cell_id="a")
    assert notes(ran) == [] and 'class="badge"' not in ran.drawings[0]


LOST = f"%%tfgraph g --no-show\n{X}\nw = (x * 2).sum()"  # no axis 1 is left for y


def test_cells_that_lost_nodes_are_named_and_refreshed(cells):
    fixed = f"%%tfgraph g --no-show\n{X}\nw = torch.cat([x, x], 1)"
    said = notes(cells.ok(fixed, cell_id="a"))
    assert any(re.fullmatch(r"note: In\[\d+\] lost y: run it again, or %tfgraph refresh", note) for note in said)
    assert any(re.fullmatch(r"note: In\[\d+\] lost z: run it again, or %tfgraph refresh", note) for note in said)
    assert "y" not in tfnb.graph("g")
    ran = cells.ok("%tfgraph g refresh")
    assert [re.sub(r"\d+", "", note) for note in notes(ran)] == ["note: In[] was recorded again"] * 2
    torch.testing.assert_close(tfnb.run("z", {"x": torch.ones(5, 3)}), torch.full((5,), 7.0))
    (said,) = cells.ok("%tfgraph g refresh").shown
    assert said["text/plain"] == "no cell of graph g lost nodes or read what changed: nothing is recorded again"


def test_of_what_a_cell_lost_the_names_of_the_user_are_told_first(cells):
    cells.ok("%%tfgraph g --no-show\nnet = nn.Linear(1, 1)\nloss = net(y[:, None]).mean()", cell_id="d")
    cells.ok("%%tfgraph g --no-show\nstep = tfnb.train.Adam(0.1).minimize(loss)", cell_id="e")
    said = notes(cells.ok(LOST, cell_id="a"))
    assert any(re.match(r"note: In\[\d+\] lost step, ", note) for note in said), said


def test_a_cell_may_keep_those_below_fresh(cells):
    ran = cells.ok(f"%%tfgraph g --auto --no-show\n{X}\nw = torch.cat([x, x], 1)", cell_id="a")
    assert [note for note in notes(ran) if "recorded again" in note]
    torch.testing.assert_close(tfnb.run("z", {"x": torch.ones(5, 3)}), torch.full((5,), 7.0))


def test_a_cell_that_cannot_be_recorded_again_shows_its_own_line(cells):
    number = cells.count - 2
    ran = cells.run(LOST.replace("--no-show", "--no-show --auto"), cell_id="a")
    assert isinstance(ran.error, (IndexError, tfnb.errors.TfnbError))
    assert ran.frames[-1] == f"Cell In[{number}], line 2"
    assert "w" in tfnb.graph("g") and "z" not in tfnb.graph("g")
    cells.ok(f"%%tfgraph g --no-show --auto\n{X}\nw = torch.cat([x, x], 1)", cell_id="a")
    torch.testing.assert_close(tfnb.run("z", {"x": torch.ones(5, 3)}), torch.full((5,), 7.0))


def test_a_cell_whose_module_changed_is_named_and_refreshed(notebook):
    notebook.ok("net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))\nscale = 2.0")
    notebook.ok(f"%%tfgraph g --no-show\n{X}\ny = net(x) * scale", cell_id="a")
    notebook.ok("tfnb.run(y, {x: torch.ones(2, 3)})\nnet[1].p = 0.0")
    error = notebook.run("tfnb.run(y, {x: torch.ones(2, 3)})").error
    assert isinstance(error, tfnb.errors.StaleNode)
    assert re.search(
        r"attribute p of net.1 \(Dropout\) was 0.5, and is 0.0 now.*In\[\d+\].*%tfgraph refresh", str(error)
    )
    *_, note = notes(notebook.ok("%tfgraph g refresh"))
    assert note.endswith("was recorded again")
    names = notebook.names
    value = notebook.ok("tfnb.run(y, {x: torch.ones(2, 3)})").result
    torch.testing.assert_close(value, names["net"](torch.ones(2, 3)).detach() * 2)


def test_a_number_of_the_notebook_that_a_cell_read_is_said_when_it_changed(notebook):
    notebook.ok("scale = 2.0\nrows = 2\nsteps = 0")
    notebook.ok("%%tfgraph g --no-show\nx = tfnb.placeholder(torch.ones(rows, 3))\ny = x * scale", cell_id="a")
    notebook.ok("rows = 5\ntfnb.run(y, {x: torch.ones(2, 3)})")
    notebook.ok("scale = 3.0")
    with pytest.warns(UserWarning, match=r"scale was 2.0 when In\[\d+\] was recorded, and is 3.0 now"):
        notebook.ok("tfnb.run(y, {x: torch.ones(2, 3)})")
    notebook.ok("tfnb.run(y, {x: torch.ones(2, 3)})")
    (note,) = notes(notebook.ok("%%tfgraph g --no-show\nsteps += 1\nz = x * steps", cell_id="b"))
    assert "steps in Python" in note and "tfnb.Variable" in note


def test_an_op_put_around_a_named_value_is_told_by_its_op(notebook):
    notebook.ok("lin = nn.Linear(4, 4)")
    cell = "%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 4))\nout = {}"
    notebook.ok(cell.format("lin(x)"), cell_id="a")
    ran = notebook.ok(cell.format("torch.tanh(lin(x))"), cell_id="a")
    assert notes(ran) == ["note: since its last run: 1 added (out: tanh)"]
    assert "added" in ran.drawings[0] and "changed" not in ran.drawings[0]
    ran = notebook.ok(cell.format("lin(x)"), cell_id="a")
    assert notes(ran) == ["note: since its last run: 1 removed (out: tanh)"]
