"""Gradients that ``.grad`` carries from cell to cell and from turn to turn: noted where runs differ from plain PyTorch.

Each program is cells that are executed in turns, as plain PyTorch and recorded. The notes are right where they stand in
a program whose runs differ, and nowhere else.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tests.recording.test_cells import Notebook

X = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3)
NAMES = {"torch": torch, "nn": nn, "tfnb": tfnb}

STEP = "model(x).square().mean().backward()\nout = opt.step()"
BEGIN = f"opt.zero_grad()\n{STEP}"
END = f"{STEP}\nopt.zero_grad()"
BY_HAND = (
    "model(x).square().mean().backward()\nwith torch.no_grad():\n    for p in model.parameters():\n"
    "        p -= 0.1 * p.grad\nout = tuple(model.parameters())"
)
BRANCH = "tfnb.cond(x.sum() > 10, stepped, lambda: None)\nout = tfnb.effects()"
OTHER_LOSS = "out = model(x).mean()\nout.backward()"
CRITIC = "(critic(model(x).detach()).mean() - critic(x[:, :2]).mean()).backward()\nout = of_critic.step()"
MAKER = "(-critic(model(x)).mean()).backward()\nout = opt.step()"

# Cells, and words of the note of the last cell that has one.
DIFFERENT: dict[str, tuple[list[str], str]] = {
    "never cleared": ([STEP], "nothing in this block clears .grad"),
    "never cleared, by hand": ([BY_HAND], "nothing in this block clears .grad"),
    "two losses in two cells": ([OTHER_LOSS, END], "the .grad that In[1] line 2 leaves"),
    "two losses in two cells, the step first": ([END, OTHER_LOSS], "goes into the update at In[1] line 1"),
    "cleared by one cell only": ([BEGIN, END], "the .grad that In[1] line 2 leaves"),
    "three cells": ([OTHER_LOSS, "out = x * 2", END], "the .grad that In[1] line 2 leaves"),
    "the sum is read": ([BEGIN, f"{OTHER_LOSS}\nout = model.weight.grad.clone()"], "the .grad that In[1] line 2"),
    "clipped": ([STEP.replace("out", "nn.utils.clip_grad_norm_(model.parameters(), 0.1)\nout")], "nothing in this"),
    "cleared in a branch behind the step": (
        ["def stepped():\n    opt.step()\n    opt.zero_grad()\n"
         f"model(x).square().mean().backward()\n{BRANCH}"], "nothing in this block clears .grad"),
    "cleared in a branch above backward": (
        [f"tfnb.cond(x.sum() < 10, opt.zero_grad, lambda: None)\n{STEP}"], "nothing in this block clears .grad"),
    "a critic that its maker's loss reaches": (
        [f"{CRITIC}\nof_critic.zero_grad()", f"{MAKER}\nopt.zero_grad()"], "goes into the update at In[1] line 1"),
}  # fmt: skip

SAME: dict[str, list[str]] = {
    "at the begin": [BEGIN],
    "at the end": [END],
    "at both": [f"{BEGIN}\nopt.zero_grad()"],
    "zeros at the begin": [BEGIN.replace("zero_grad()", "zero_grad(set_to_none=False)")],
    "zeros at the end": [END.replace("zero_grad()", "zero_grad(set_to_none=False)")],
    "of the module": [BEGIN.replace("opt", "model", 1)],
    "of the module at the end": [f"{STEP}\nmodel.zero_grad()"],
    "just above backward": ["loss = model(x).square().mean()\nopt.zero_grad()\nloss.backward()\nout = opt.step()"],
    "None by hand": [f"for p in model.parameters():\n    p.grad = None\n{STEP}"],
    "zeros by hand": [f"for p in model.parameters():\n    if p.grad is not None:\n        p.grad.zero_()\n{STEP}"],
    "update by hand": [f"{BY_HAND}\nfor p in model.parameters():\n    p.grad = None"],
    "zeros after an update by hand": [f"{BY_HAND}\nfor p in model.parameters():\n    p.grad.zero_()"],
    "parts of a batch": [
        "opt.zero_grad()\nfor part in (x, x * 2, x * 3):\n    (model(part).square().mean() / 3).backward()\n"
        "out = opt.step()"],
    "parts of a batch, cleared at the end": [
        "for part in (x, x * 2):\n    (model(part).square().mean() / 2).backward()\nout = opt.step()\nopt.zero_grad()"],
    "several losses": [
        "opt.zero_grad()\nh = model(x)\nh.mean().backward(retain_graph=True)\nh.square().mean().backward()\n"
        "out = opt.step()"],
    "clipped": [BEGIN.replace("out", "nn.utils.clip_grad_norm_(model.parameters(), 0.1)\nout")],
    "two cells that clear at the begin": [BEGIN, BEGIN.replace("square", "abs")],
    "two cells that clear at the end": [END, END.replace("square", "abs")],
    "adversaries": [f"of_critic.zero_grad()\n{CRITIC}", f"opt.zero_grad()\n{MAKER}"],
    "adversaries that clear both": [
        f"{CRITIC}\nof_critic.zero_grad()", f"{MAKER}\nopt.zero_grad()\nof_critic.zero_grad()"],
    "cleared, filled and taken in a branch": [
        "def stepped():\n    opt.zero_grad()\n    model(x).square().mean().backward()\n    opt.step()\n" + BRANCH],
    "cleared at the begin, and in a branch": [
        "def stepped():\n    opt.step()\n    opt.zero_grad()\n"
        f"opt.zero_grad()\nmodel(x).square().mean().backward()\n{BRANCH}"],
    "what nobody takes": [f"opt.zero_grad()\n{OTHER_LOSS}", BEGIN],
    "the gradient is read": [f"opt.zero_grad()\n{OTHER_LOSS}\nout = model.weight.grad.clone()", BEGIN],
    "two steps in turns": [f"{BEGIN}\nopt.zero_grad()\nmodel(x).mean().backward()\nout = [out, opt.step()]"],
}  # fmt: skip


def world() -> dict[str, Any]:
    torch.manual_seed(1)
    model, critic = nn.Linear(3, 2).double(), nn.Linear(2, 1).double()
    of_critic = torch.optim.SGD(critic.parameters(), 0.1)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    return {**NAMES, "model": model, "critic": critic, "opt": opt, "of_critic": of_critic}


def ends(names: dict[str, Any], out: Any) -> list[torch.Tensor]:
    """Parameters, and the last value of a cell where that is a tensor."""
    more = [out.detach()] if isinstance(out, torch.Tensor) else []
    return [p.detach() for name in ("model", "critic") for p in names[name].parameters()] + more


def plain(cells: list[str], turns: int = 3) -> list[torch.Tensor]:
    names = world()
    for turn in range(turns):
        for cell in cells:
            names["x"] = X * (turn + 1)
            exec(cell.replace("tfnb.effects()", "None"), names)
    return ends(names, names["out"])


def recorded(cells: list[str], turns: int = 3) -> tuple[list[torch.Tensor], list[tuple[str, ...]]]:
    """What the runs of cells give, and the notes of each cell."""
    notebook = Notebook(f"carried-{id(cells)}")
    notebook.names |= world()
    notebook.run("0", f"x = tfnb.placeholder(torch.tensor({X.tolist()}, dtype=torch.float64))")
    outs, notes = [], []
    for number, cell in enumerate(cells, 1):
        notes.append(notebook.run(str(number), cell).notes)
        outs.append(notebook.names["out"])
    for turn in range(turns):
        got = [tfnb.run(out, {notebook.names["x"]: X * (turn + 1)}) for out in outs]
    return ends(notebook.names, got[-1]), notes


def is_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.allclose, a, b))


def of_gradients(notes: list[tuple[str, ...]]) -> list[str]:
    return [note for of_cell in notes for note in of_cell if ".grad" in note]


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_gradient_that_runs_do_not_carry_is_noted_once_with_the_line(name: str) -> None:
    cells, words = DIFFERENT[name]
    got, notes = recorded(cells)
    assert not is_same(got, plain(cells))
    (note,) = of_gradients(notes)
    assert words in note and note.startswith("In[") and "opt.zero_grad()" in note and "tfnb.Variable" in note
    assert "weight" in note


@pytest.mark.parametrize("name", SAME)
def test_ordinary_habits_train_as_plain_pytorch_without_a_note(name: str) -> None:
    got, notes = recorded(SAME[name])
    assert is_same(got, plain(SAME[name]))
    assert of_gradients(notes) == []


def test_blocks_of_a_script_warn_and_one_that_is_a_step_by_itself_does_not() -> None:
    found = []
    for way in ("run", "fit"):
        names = world()
        for _ in range(2):  # two graphs are two programs
            with tfnb.record() as graph:
                x = tfnb.placeholder(X)
                names["model"](x).square().mean().backward()
                step = names["opt"].step()
        if way == "run":
            for _ in range(3):
                tfnb.run(step, {x: X})
        else:
            tfnb.fit(step, {x: X}, epochs=3, batch_size=4)
        found.append(ends(names, None))
    assert is_same(*found)
    with (
        pytest.warns(UserWarning, match=r"test_carried_gradients.py line .* leaves .weight, bias."),
        tfnb.record(graph),
    ):
        names["model"](tfnb.placeholder(X)).mean().backward()
        _ = names["opt"].step()


def test_a_gradient_from_outside_of_recordings_is_noted_where_an_update_would_take_it() -> None:
    notebook, twin = Notebook("carried-outside"), world()
    notebook.names |= world()
    for each in (notebook.names, twin):
        each["model"](X).mean().backward()
    notebook.run("0", f"x = tfnb.placeholder(torch.tensor({X.tolist()}, dtype=torch.float64))")
    (note,) = notebook.run("1", END).notes
    assert "In[1] line 1" in note and "there from outside of the recording (weight, bias)" in note
    tfnb.run(notebook.names["out"], {notebook.names["x"]: X})
    exec(END, {**twin, "x": X})
    assert not is_same(ends(notebook.names, None), ends(twin, None))


def test_a_gradient_from_outside_is_not_noted_where_it_is_cleared_or_no_update_takes_it() -> None:
    for cleared in (True, False):
        names = world()
        names["model"](X).mean().backward()
        with tfnb.record() as graph:
            if cleared:
                names["opt"].zero_grad()
            names["model"](tfnb.placeholder(X)).square().mean().backward()
            _ = names["opt"].step() if cleared else names["model"].weight.grad
        assert not [note for note in graph.notes if ".grad" in note]


def test_a_cell_that_is_run_again_or_gone_is_no_other_cell() -> None:
    notebook = Notebook("carried-again")
    notebook.names |= world()
    notebook.run("0", f"x = tfnb.placeholder(torch.tensor({X.tolist()}, dtype=torch.float64))")
    assert not notebook.run("1", OTHER_LOSS).notes
    assert of_gradients([notebook.run("2", END).notes]) != []
    assert not notebook.run("1", f"opt.zero_grad()\n{OTHER_LOSS}\nopt.zero_grad()").notes  # it leaves none now
    for _ in range(2):
        assert not notebook.run("2", END).notes
    names = world()
    for _ in range(2):  # the first graph is gone when the second one is recorded
        with tfnb.record():
            names["model"](tfnb.placeholder(X)).mean().backward()
            _ = names["model"].weight.grad
        gc.collect()


def test_a_sum_in_a_variable_adds_up_the_gradients_of_several_runs() -> None:
    """The cure that the note names."""
    names, twin = world(), world()
    parameters = list(names["model"].parameters())
    totals = [tfnb.Variable(torch.zeros_like(p)) for p in parameters]
    with tfnb.record() as graph:
        x = tfnb.placeholder(X)
        names["opt"].zero_grad()
        (names["model"](x).square().mean() / 2).backward()
        add = tfnb.group(*(total.assign_add(p.grad) for p, total in zip(parameters, totals, strict=True)))
    with tfnb.record(graph):
        for p, total in zip(parameters, totals, strict=True):
            p.grad = total.read()
        update = names["opt"].step()
        for total in totals:
            total.assign(torch.zeros_like(total.read()))
    for turn in range(4):
        tfnb.run(add, {x: X * (turn + 1)})
        (twin["model"](X * (turn + 1)).square().mean() / 2).backward()
        if turn % 2:
            tfnb.run(update)
            twin["opt"].step()
            twin["opt"].zero_grad()
    assert graph.notes == () and is_same(ends(names, None), ends(twin, None))
