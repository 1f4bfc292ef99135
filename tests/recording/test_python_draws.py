"""What Python drew while a block was recorded, and clocks: a note where runs repeat it, and none where they do not."""

from __future__ import annotations

import ast
import builtins
import itertools
import linecache
import random
import threading
import time
import warnings
from random import random as plain_random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfnb
from tfnb.recording import record_cell

numbers = itertools.count()


class LayerDrop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in (2.0, 3.0, 5.0):
            if random.random() < 0.5:
                continue
            x = x * factor
        return x


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.scale = random.uniform(1, 2)  # drawn once, also in eager torch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        y = x * self.scale
        self.seconds += time.perf_counter() - began
        return y


class Cutout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = int(self.rng.integers(0, 3))
        x = x.clone()
        x[:, at] = 0
        return x


def mixed(x: torch.Tensor) -> torch.Tensor:
    share = np.random.beta(0.4, 0.4)
    share = max(share, 1 - share)
    return share * x + (1 - share) * x.flip(0)


def projected(x: torch.Tensor) -> torch.Tensor:
    rng, own = np.random.default_rng(0), random.Random(3)  # the same numbers at every call
    return x @ torch.from_numpy(rng.standard_normal((3, 2))).float() * own.random()


def batch(rows: int = 4) -> Any:
    return np.random.rand(rows, 3).astype("float32")


def names() -> dict[str, Any]:
    found = {"torch": torch, "tfnb": tfnb, "np": np, "random": random, "time": time, "nn": nn, "F": nn.functional}
    found |= {
        "mixed": mixed,
        "projected": projected,
        "batch": batch,
        "layers": LayerDrop(),
        "Timed": Timed,
        "cutout": Cutout(),
    }
    found |= {"rng": np.random.default_rng(0), "old": np.random.RandomState(0), "own": random.Random(0)}
    found["__builtins__"] = builtins
    return {**found, "plain_random": plain_random, "uniform": random.uniform, "randn": np.random.randn}


def notes(code: str, *, is_cell: bool = True) -> list[str]:
    """The notes on draws and clocks of a cell, or of a block that is recorded as it stands."""
    filename = f"<draws {next(numbers)}>"
    text = (
        f"%%tfgraph\n{code}"
        if is_cell
        else f"with tfnb.record():\n{''.join(f'    {r}' for r in code.splitlines(True))}"
    )
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    space = names()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # also of sizes that become constants
        if not is_cell:
            exec(compile(text, filename, "exec"), space)
            found = [str(each.message) for each in caught]
        else:
            tree = ast.increment_lineno(ast.parse(code))
            with record_cell(filename, owner="cell:1", label="In[7]", filename=filename, namespace=space) as graph:
                tfnb.control_flow.Cell(tree.body, None, filename).run(space)
            found = list(graph.notes)
    return [note for note in found if "drew in Python" in note or "clock" in note]


X = "x = tfnb.placeholder(torch.ones(4, 3))\n"
REPEATED = {
    "branch": ("if random.random() < 0.5:\n    y = x * 2\nelse:\n    y = x * 3", "random.random", "torch.rand"),
    "a branch that computes nothing": ("y = x\nif random.random() < 2:\n    y = x", "random.random", "torch.rand"),
    "beta": ("lam = np.random.beta(0.4, 0.4)\ny = lam * x + (1 - lam) * x.flip(0)", "np.random.beta", "Beta"),
    "in a function": ("y = mixed(x)", "np.random.beta", "Beta"),
    "permutation": ("i = torch.from_numpy(np.random.permutation(3))\ny = x[:, i]", "permutation", "randperm"),
    "crop": ("i = random.randint(0, 1)\ny = x[:, i : i + 2] * 1", "random.randint", "torch.randint"),
    "choice": ("f = random.choice([torch.sin, torch.cos])\ny = f(x)", "random.choice", "torch.randint"),
    "shuffle": (
        "fs = [lambda v: v * 2, lambda v: v + 1]\nrandom.shuffle(fs)\ny = fs[1](fs[0](x))", "shuffle", "randperm"),
    "append": (
        "fs = []\nif random.random() < 2:\n    fs.append(torch.sin)\ny = x\nfor f in fs:\n    y = f(y)",
        "random", "rand"),
    "layer drop": ("y = layers(x)", "random.random", "torch.rand"),
    "a sequence of modules": ("y = nn.Sequential(nn.Linear(3, 3), layers)(x)", "random.random", "torch.rand"),
    "in place": ("y = x.clone()\ny.mul_(random.random())", "random.random", "torch.rand"),
    "item": ("y = x.clone()\ny[:, random.randrange(3)] = 0", "random.randrange", "torch.randint"),
    "noise": (
        "noise = np.random.randn(4, 3).astype('float32')\ny = x + torch.from_numpy(noise)", "randn", "torch.randn"),
    "sample and noise": (
        "a = batch()\nz = tfnb.placeholder(a)\ny = z + torch.from_numpy(batch())", "np.random.rand", "rand"),
    "nothing is fed": ("y = torch.ones(3) * random.random()", "random.random", "torch.rand"),
    "clock": ("y = x * (time.time() % 10)", "time.time", "same in each run"),
}  # fmt: skip
BY_OTHER_NAMES = {
    "Generator": ("y = x * float(rng.random())", "Generator.random", "torch.rand"),
    "RandomState": ("y = x * float(old.normal())", "RandomState.normal", "torch.randn"),
    "Random": ("y = x * own.gauss(0, 1)", "Random.gauss", "torch.randn"),
    "imported": ("y = x * plain_random()", "random.random", "torch.rand"),
    "imported method": ("y = x * uniform(1, 2)", "random.uniform", "torch.rand"),
    "imported of NumPy": ("y = x * float(randn())", "np.random.randn", "torch.randn"),
    "Generator of a module": ("y = cutout(x)", "Generator.integers", "torch.randint"),
}
SILENT = {
    "sample": "x = tfnb.placeholder(np.random.rand(4, 3).astype('float32'))\ny = x * 2",
    "sample by a name":
        "a = np.random.randn(9, 3)\nb = a[:4] * 2\nx = tfnb.placeholder(b.astype('float32'))\n"
        "y = x.sum()",
    "sample of a function": "x = tfnb.placeholder(batch())\ny = x.sum()",
    "sample by its own name": "x = batch()\nx = tfnb.placeholder(x)\ny = x * 2",
    "sample as a tensor": "a = torch.tensor(np.random.randn(4, 3)) * 2\nx = tfnb.placeholder(a)\ny = x.sum()",
    "a package that draws": "from sklearn.model_selection import train_test_split\n"
    "a, b = train_test_split(batch(8), test_size=0.5)\nx = tfnb.placeholder(a)\ny = x * 2",
    "rows of a sample": "n = random.randint(3, 5)\nx = tfnb.placeholder(torch.rand(n, 3))\ny = x * 2",
    "data and labels":
        "w = np.random.randn(3)\na = batch(9)\nb = a @ w + np.random.randn(9)\n"
        "x = tfnb.placeholder(a[:4])\n"
                       "z = tfnb.placeholder(b[:4])\nloss = (x.sum(1) - z).square().mean()",
    "list of samples": "rows = []\nfor i in range(4):\n    rows.append([random.random()] * 3)\n"
                       "x = tfnb.placeholder(torch.tensor(rows))\ny = x * 2",
    "parameter": f"{X}w = nn.Parameter(torch.from_numpy(np.random.randn(3)).float())\ny = x @ w",
    "Variable": f"{X}w = tfnb.Variable(torch.tensor(random.random()))\ny = x * w",
    "module": f"{X}m = Timed()\ny = m(x)",
    "a function that seeds": f"{X}y = projected(x)",
    "seeds": f"{X}random.seed(0)\nnp.random.seed(0)\ng = np.random.default_rng(0)\nnp.random.get_state()\ny = x * 2",
    "timing": f"{X}began = time.time()\ny = x * 2\nprint(f'took {{time.time() - began:.0f}} s')",
    "text": f"{X}y = x * 2\nif random.random() < 2:\n    print('now and then')",
    "loader":
        "d = torch.utils.data.TensorDataset(torch.randn(8, 3))\n"
        "l = torch.utils.data.DataLoader(d, 4, shuffle=True)\n"
              "x = tfnb.placeholder(next(iter(l))[0])\ny = x * 2",
    "drawn by torch": f"{X}y = x * torch.rand(()) + nn.functional.dropout(x, 0.5)",
}  # fmt: skip


def named(cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(*case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize(("code", "called", "instead"), named({**REPEATED, **BY_OTHER_NAMES}))
def test_a_draw_that_runs_repeat_is_noted_in_a_cell(code: str, called: str, instead: str) -> None:
    (note,) = notes(X + code)
    assert called in note and instead in note and " line " in note


@pytest.mark.parametrize(("code", "called", "instead"), named(REPEATED))
def test_a_draw_that_runs_repeat_is_noted_in_a_block(code: str, called: str, instead: str) -> None:
    (note,) = notes(X + code, is_cell=False)
    assert called in note and instead in note and " line " in note


@pytest.mark.parametrize(("code", "called", "instead"), named(BY_OTHER_NAMES))
def test_generators_that_a_block_has_names_for_are_noted_by_their_state(code: str, called: str, instead: str) -> None:
    found = notes(X + code, is_cell=False)
    assert len(found) == 1 and called.partition(".")[0] in found[0]


def test_a_generator_that_only_makes_samples_is_not_noted_in_a_block() -> None:
    code = "a = rng.random((4, 3))\nx = tfnb.placeholder(a)\ny = x * float(plain_random() > -1 and 2)"
    assert len(notes(code, is_cell=False)) == 1
    assert notes(code.partition("* float")[0] + "* 2", is_cell=False) == []


@pytest.mark.parametrize("code", SILENT.values(), ids=SILENT)
@pytest.mark.parametrize("is_cell", [True, False], ids=["cell", "block"])
def test_a_draw_that_no_run_repeats_is_not_noted(code: str, is_cell: bool) -> None:
    assert notes(code, is_cell=is_cell) == []


def test_a_note_names_the_line_once_however_often_it_draws() -> None:
    code = f"{X}y = x\nfor i in range(3):\n    y = y + random.random()\nz = y * random.random()"
    assert [note.partition(":")[0].partition(" line ")[2] for note in notes(code)] == ["5", "6"]


def test_the_draw_of_torch_that_the_note_names_differs_from_run_to_run() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3))
        y = x * torch.rand(())
    assert len({float(tfnb.run(y, {x: torch.ones(3)})[0]) for _ in range(4)}) == 4


def test_other_threads_draw_unnoted_and_modules_are_left_as_they_were() -> None:
    before = random.random, np.random.rand, time.time, vars(random.Random).get("random")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3))
        thread = threading.Thread(target=mixed, args=(torch.ones(3),))
        thread.start()
        thread.join()
        y = x * 2
    assert y.graph.notes == graph.notes == ()
    assert before == (random.random, np.random.rand, time.time, vars(random.Random).get("random"))


def test_a_clock_that_tfnb_reads_for_a_deadline_of_its_own_is_not_noted() -> None:
    grads = tfnb.ConditionalAccumulator(torch.float32, (2,), name="grads")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2))
        applied, mean = grads.apply_grad(x, 0), grads.take_grad(2)
    assert applied.graph is mean.graph and graph.notes == ()


def test_recording_leaves_pythons_streams_as_the_program_drew_them() -> None:
    random.seed(3)
    want = [random.random(), random.uniform(1, 2), random.randint(0, 9)]
    random.seed(3)
    with pytest.warns(UserWarning, match="drew in Python"), tfnb.record():
        x = tfnb.placeholder(torch.ones(3))
        got = [random.random(), random.uniform(1, 2), random.randint(0, 9)]
        _ = x * got[0] + got[1] + got[2]
    assert got == want
