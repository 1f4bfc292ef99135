"""Cells run again: what other cells computed from them follows, or says that it is gone; nothing is of two minds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfnb
from tests.recording.test_cells import Notebook
from tfnb.errors import FailedPrecondition, StaleNode

X = "x = tfnb.placeholder(torch.tensor([[1., 2.], [3., 4.], [5., 6.]]), {shape}name='x')"
FED = torch.tensor([[2.0, 3.0], [5.0, 7.0]])


def started(request: Any, *cells: str, shape: str = "") -> Notebook:
    """A notebook whose cells 1, 2 ... ran once below the placeholder of cell 0."""
    notebook = Notebook(request.node.name.replace("[", "-").replace("]", ""))
    for number, cell in enumerate([X.format(shape=shape), *cells]):
        notebook.run(str(number), cell)
    return notebook


def fetched(notebook: Notebook, name: str) -> list[Any]:
    return tfnb.run(notebook.names[name], {"x": FED}).tolist()


EDITS = {
    "another op": "y = (x * 3).sum()",
    "another factor inside": "y = (x * x * 2).sum()",
    "another way": "y = (x * x + x).sum()",
    "a way less": "y = (x * x.detach()).sum()",
    "without gradient": "with torch.no_grad():\n    y = (x * x).sum()",
    "the order of two": "y = (x * x).exp().sum()",
}


@pytest.mark.parametrize("shape", ["", "shape=(3, 2), "])
@pytest.mark.parametrize("edit", EDITS)
def test_a_gradient_of_what_another_cell_has_changed_is_gone_and_said_so(request: Any, edit: str, shape: str) -> None:
    notebook = started(request, "y = (x * x).sum()", "g, = tfnb.gradients(y, [x])\nh = g + 1", shape=shape)
    notebook.run("1", EDITS[edit])
    for name in ("g", "h"):
        with pytest.raises(StaleNode, match=r"In\[2\] was dropped because .* In\[1\] ran again; run In\[2\] again"):
            fetched(notebook, name)
    with pytest.raises(StaleNode, match=r"In\[3\] line 1(.|\n)*run In\[2\] again"):
        notebook.run("3", "k = h + 1")


def test_a_gradient_of_a_sum_and_a_constant_goes_with_it(request: Any) -> None:
    """Its nodes do not use the sum at all."""
    notebook = started(request, "y = (x + 3).sum()", "g, = tfnb.gradients(y, [x])", shape="shape=(3, 2), ")
    notebook.run("1", "y = (x * 3).sum()")
    with pytest.raises(StaleNode, match=r"run In\[2\] again"):
        fetched(notebook, "g")
    notebook.run("2", "g, = tfnb.gradients(y, [x])")
    assert tfnb.run(notebook.names["g"], {"x": torch.ones(3, 2)}).tolist() == [[3.0, 3.0]] * 3


@pytest.mark.parametrize("times", [1, 3])
def test_the_same_cell_again_keeps_gradients_of_other_cells(request: Any, times: int) -> None:
    notebook = started(
        request, "h = x * 2\ny = (h * x).sum()", "g, = tfnb.gradients(y, [x])\nk, = tfnb.gradients(y, [h])"
    )
    for _ in range(times):
        notebook.run("1", "h = x * 2\ny = (h * x).sum()")
        notebook.run("0", X.format(shape=""))
    assert fetched(notebook, "g") == (4 * FED).tolist() and fetched(notebook, "k") == FED.tolist()


def test_a_gradient_beside_what_was_changed_stays(request: Any) -> None:
    notebook = started(
        request, "d = x * 2", "w = tfnb.Variable([3., 4.])", "y = (d * w).sum()\ng, = tfnb.gradients(y, [w])"
    )
    notebook.run("1", "d = x * 5")
    assert fetched(notebook, "g") == (5 * FED).sum(0).tolist()


def test_another_model_takes_its_training_cell_along(request: Any) -> None:
    notebook = started(request)
    notebook.run("1", "model = torch.nn.Linear(2, 1)")
    notebook.run("2", "loss = model(x).sum()")
    notebook.run("3", "train = tfnb.train.SGD(0.1).minimize(loss)")
    first, before = notebook.names["model"], notebook.names["model"].weight.detach().clone()
    notebook.run("2", "loss = model(x).sum()")
    tfnb.run(notebook.names["train"], {"x": FED})
    torch.testing.assert_close(first.weight.detach(), before - 0.1 * FED.sum(0))
    notebook.names["model"] = torch.nn.Linear(2, 1)
    notebook.run("2", "loss = model(x).sum()")
    with pytest.raises(StaleNode, match=r"In\[2\] ran again; run In\[3\] again"):
        tfnb.run(notebook.names["train"], {"x": FED})


def test_a_gradient_rule_of_your_own_counts_as_changed(request: Any) -> None:
    cell = "f = tfnb.custom_gradient(lambda a: (a * 2, lambda dy: dy * {}))\ny = f(x).sum()"
    notebook = started(request, cell.format(7), "g, = tfnb.gradients(y, [x])")
    assert fetched(notebook, "g") == [[7.0, 7.0]] * 2
    notebook.run("1", cell.format(8))
    with pytest.raises(StaleNode, match=r"run In\[2\] again"):
        fetched(notebook, "g")


def test_samples_follow_a_cell_run_again(request: Any) -> None:
    notebook = started(request, "h = x * 2\nrow = h[0]", "y = h.sum(1)\nv = y[1:]")
    notebook.run("1", "h = x * 5\nrow = h[0]")
    assert notebook.names["y"].sample.tolist() == [15, 35, 55] and notebook.names["v"].sample.tolist() == [35, 55]
    assert "35" in repr(notebook.names["v"])
    notebook.run("3", "z = y * 2")
    assert notebook.names["z"].sample.tolist() == [30, 70, 110]


def test_another_sample_of_another_length_reaches_every_cell(request: Any) -> None:
    notebook = started(request, "h = x * 2\nv = h[1:]", "y = h.sum(1)\nflat = y.view(-1, 1)\ntail = y[1:]")
    notebook.run("0", "x = tfnb.placeholder(torch.ones(5, 2), name='x')")
    assert notebook.names["flat"].sample.tolist() == [[4.0]] * 5
    notebook.run("3", "z = y * h.sum(1) + x[:, 0]\nk = flat + v.sum() + tail.sum()")
    assert notebook.names["z"].sample.tolist() == [17.0] * 5
    assert tfnb.run(notebook.names["k"], {"x": FED}).tolist() == [[10 + 24.0 + 24], [24 + 24.0 + 24]]


def test_a_cell_that_uses_what_stands_on_its_own_earlier_run_is_refused(request: Any) -> None:
    notebook = started(request, "k = x * 2", "z = k + 1")
    before = tfnb.graph(notebook.graph).text()
    with pytest.raises(StaleNode, match=r"In\[1\] now uses what In\[2\] recorded, and z of In\[2\] is computed from k"):
        notebook.run("1", "k = x * 2\nq = z + 1")
    assert tfnb.graph(notebook.graph).text() == before


def test_a_cell_that_fails_when_it_runs_again_changes_nothing(request: Any) -> None:
    notebook = started(request, "h = x * 2\nrow = h[0]", "k = row + 1", "z = h * 3")
    before = fetched(notebook, "h"), fetched(notebook, "row"), tfnb.graph(notebook.graph).text()
    for cell in ("1", "2", "3"):
        held = dict(notebook.names)
        with pytest.raises(ZeroDivisionError):
            notebook.run(cell, "h = x * 7\nrow = h[1]\nrow.add_(1)\n1 / 0")
        notebook.names.update(held)
        assert (fetched(notebook, "h"), fetched(notebook, "row"), tfnb.graph(notebook.graph).text()) == before


def test_a_name_rebound_by_its_own_cell_says_what_to_do(request: Any) -> None:
    notebook = started(request, "h = x * 2", "h = h + 1")
    with pytest.raises(StaleNode, match=r"h(.|\n)*earlier run of this cell(.|\n)*another name"):
        notebook.run("2", "h = h + 1")


def test_what_a_failed_cell_made_says_so(request: Any) -> None:
    notebook = started(request)
    with pytest.raises(ZeroDivisionError):
        notebook.run("1", "h = x * 2\n1 / 0")
    with pytest.raises(StaleNode, match=r"In\[1\] failed, and what it had recorded was taken back"):
        fetched(notebook, "h")
    with pytest.raises(StaleNode, match=r"In\[2\] line 1(.|\n)*In\[1\] failed"):
        notebook.run("2", "k = h + 1")


def test_a_constant_that_nothing_uses_is_kept_while_it_has_a_name(request: Any) -> None:
    notebook = started(request, "c = tfnb.constant([1., 2.])\nd = torch.tensor([3., 4.])")
    assert fetched(notebook, "c") == [1, 2] and fetched(notebook, "d") == [3, 4]
    notebook.run("2", "k = c + 1")
    assert fetched(notebook, "k") == [2, 3]


def test_a_tensor_of_an_open_recording_says_so() -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2)) * 2
        with pytest.raises(FailedPrecondition, match=r"not finished\. Run it in a cell below the block"):
            tfnb.Session(graph).run(x)
