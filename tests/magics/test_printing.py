"""tfnb.print and tfnb.assert_: what happens in every run, in the output of the cell that runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb

CELL = """%%tfgraph g
x = tfnb.placeholder(torch.ones(8, 4))
y = tfnb.placeholder(torch.zeros(8))
out = model(x)[:, 0]
loss = F.mse_loss(out, y)
tfnb.print("loss", loss, "of", x.shape[0], "largest", out.abs().max())
train = tfnb.train.SGD(0.1).minimize(loss)
"""


@pytest.fixture
def model(notebook: Any) -> Any:
    """A notebook with a graph that prints, and the model of it."""
    torch.manual_seed(0)
    notebook.ok("import torch, torch.nn.functional as F\nmodel = torch.nn.Linear(4, 1)")
    recorded = notebook.ok(CELL, cell_id="c")
    assert "loss tensor" not in recorded.out  # while recording nothing runs
    return notebook.names["model"]


def _said(model: Any, x: torch.Tensor, y: torch.Tensor) -> str:
    out = model(x)[:, 0].detach()
    loss = torch.nn.functional.mse_loss(out, y)
    return f"loss {loss!r} of {torch.tensor(len(x))!r} largest {out.abs().max()!r}\n"


def test_every_run_prints_its_own_values_once(notebook: Any, model: Any) -> None:
    x, y = notebook.names["a"], notebook.names["b"] = torch.randn(5, 4), torch.randn(5)
    for fetches in ("loss", "train", "[train, loss]", "model.weight, loss"):
        said = _said(model, x, y)
        assert notebook.ok(f"_ = tfnb.run(({fetches}), {{x: a, y: b}})").out == said
    assert notebook.ok("_ = tfnb.run(loss, {x: a[:3], y: b[:3]}, trace=True)").out == _said(model, x[:3], y[:3])


def test_nothing_is_fed_or_computed_for_a_print(notebook: Any, model: Any) -> None:
    assert notebook.ok("r = tfnb.run(out, {x: torch.ones(2, 4)})").out == ""
    assert notebook.names["r"].shape == (2,)


def test_fit_prints_each_step_and_a_cell_without_it_no_more(notebook: Any, model: Any) -> None:
    text = "r = tfnb.fit(train, {x: torch.ones(12, 4), y: torch.ones(12)}, epochs=1, batch_size=4, watch=[loss])"
    assert notebook.ok(text).out.count("loss tensor(") == 3
    assert list(notebook.names["r"].history[-1]) == ["epoch", "step", "loss"]
    notebook.ok("\n".join(line for line in CELL.splitlines() if "print" not in line), cell_id="c")
    assert "loss tensor(" not in notebook.ok(text).out


def test_a_fetched_print_prints_and_gives_nothing(notebook: Any, model: Any) -> None:
    notebook.ok("%%tfgraph g\nsaid = tfnb.print('weight', model.weight.sum())\nboth = tfnb.group(said)")
    wanted = f"weight {model.weight.sum().detach()!r}\n"
    assert notebook.ok("assert tfnb.run(said) is None").out == wanted
    assert notebook.ok("tfnb.run(both)").out == wanted


@pytest.mark.filterwarnings("ignore:In")
@pytest.mark.parametrize("head", ["for k in range(n):", "if n > 2:"], ids=["loop", "branch"])
def test_a_loop_or_branch_that_prints_is_pythons_which_is_said(notebook: Any, head: str) -> None:
    cell = f"%%tfgraph r\nn = tfnb.placeholder(torch.tensor(3))\nh = n * 2\n{head}\n    h = h + 1\n    tfnb.print(h)"
    said = "".join(bundle["text/plain"] for bundle in notebook.ok(cell).shown)
    assert "In[3]" in said and "append them to a list, and print those behind it" in said
    assert notebook.ok("_ = tfnb.run(h, {n: 3})").out.startswith("tensor(7)\n")


def test_tensors_in_a_list_are_refused_with_the_line(notebook: Any) -> None:
    ran = notebook.run("%%tfgraph r\nn = tfnb.placeholder(torch.tensor(3))\ntfnb.print([n])")
    assert str(ran.error) == "tfnb.print takes tensors one by one, not in a list\n  at In[3] line 3:  tfnb.print([n])"


def test_a_step_in_parts_is_refused(notebook: Any, model: Any) -> None:
    ran = notebook.run("tfnb.Session('g').step([loss], [x, y])")
    assert isinstance(ran.error, tfnb.errors.Unimplemented) and "take tfnb.print out" in str(ran.error)


def test_outside_of_a_recording_it_is_pythons(capsys: pytest.CaptureFixture[str]) -> None:
    tfnb.print("a", torch.ones(2), 3)
    assert capsys.readouterr().out == "a tensor([1., 1.]) 3\n"
    with pytest.raises(AssertionError, match="no"):
        tfnb.assert_(torch.tensor([True, False]), "no")
    tfnb.assert_(torch.tensor([1, 2]), "no")


def test_an_assert_stops_the_run_with_its_message_and_line(notebook: Any) -> None:
    notebook.ok("import torch\nw = tfnb.Variable(torch.zeros(()))")
    notebook.ok(
        "%%tfgraph checks\n"
        "x = tfnb.placeholder(torch.ones(3))\n"
        "tfnb.assert_(x > 0, 'x must be positive')\n"
        "step = w.assign_add(x.sum())"
    )
    notebook.ok("tfnb.run(step, {x: torch.ones(5)})")
    ran = notebook.run("tfnb.run(step, {x: torch.tensor([1.0, -1.0])})")
    assert isinstance(ran.error, AssertionError) and "x must be positive" in str(ran.error)
    assert ran.error.line == 3 and ran.error.cell == "In[4]"
    assert notebook.names["w"].value() == 5  # nothing was written


def test_an_assert_that_the_sample_fails_is_raised_at_once(notebook: Any) -> None:
    notebook.ok("import torch")
    ran = notebook.run("%%tfgraph\nx = tfnb.placeholder(torch.zeros(3))\n\ntfnb.assert_(x > 0, 'positive')\ny = x + 1")
    assert isinstance(ran.error, AssertionError) and "positive" in str(ran.error) and "line 4" in str(ran.error)


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_an_assert_inside_a_loop_is_of_each_iteration(notebook: Any, executor: str) -> None:
    notebook.ok("import torch")
    notebook.ok(
        "%%tfgraph loops\n"
        "n = tfnb.placeholder(torch.tensor(2))\nh = torch.ones(())\n"
        "for k in range(n):\n    h = h * 2\n    tfnb.assert_(h < 10, 'h grows')\nh"
    )
    h, n = notebook.names["h"], notebook.names["n"]
    session = tfnb.Session("loops", executor=executor)
    assert session.run(h, {n: 3}) == 8
    with pytest.raises(AssertionError, match="h grows"):
        session.run(h, {n: 4})
