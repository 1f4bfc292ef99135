"""Control flow of cells on recorded tensors: what is staged, what the margin says, and whose lines tracebacks show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

import tfnb
from tests.magics.programs import cells
from tfnb.errors import BranchChanged, FeedError, InvalidArgument, ShapeError


def margin(ran: Any) -> list[str]:
    """The notes under a cell."""
    shown = (bundle["text/plain"] for bundle in ran.shown)
    return [text.removeprefix("note: ") for text in shown if text.startswith("note: ")]


def test_a_cell_stages_its_own_statements(notebook: Any) -> None:
    ran = notebook.ok(
        "%%tfgraph g\n"
        "x = tfnb.placeholder(torch.ones(3), name='x')\n"
        "n = 0\n"
        "if x.sum() > 0:\n"
        "    y = x * 2\n"
        "else:\n"
        "    y = -x\n"
        "while y.sum() < 50:\n"
        "    y = y * 2\n"
        "    n += 1\n"
        "total = 0.0\n"
        "for row in x:\n"
        "    if row < 0:\n"
        "        continue\n"
        "    total += row\n"
        "y, n, total"
    )
    assert margin(ran) == ["staged: line 4 `if`, line 8 `while`, line 12 `for`, line 13 `if`"]
    for fed in (torch.ones(3), torch.tensor([-1.0, -2.0, 5.0, -9.0]), torch.full((2,), 40.0)):
        y, n = (fed * 2 if fed.sum() > 0 else -fed), 0
        while y.sum() < 50:
            y, n = y * 2, n + 1
        found = tfnb.run([notebook.names[name] for name in ("y", "n", "total")], {"x": fed})
        torch.testing.assert_close(found, [y, torch.tensor(n), fed[fed >= 0].sum()], rtol=0, atol=0)


def test_no_autograph_leaves_a_guard_and_a_warning(notebook: Any) -> None:
    body = "x = tfnb.placeholder(torch.ones(3), name='x')\ny = x * 2 if x.sum() > 0 else -x"
    with pytest.warns(UserWarning, match="Python took the True branch"):
        ran = notebook.ok(f"%%tfgraph g --no-autograph\n{body}")
    assert margin(ran) == []
    assert [node.op for node in tfnb.graph("g").nodes].count("tfnb.guard") == 1


def test_no_execute_shows_what_the_cell_is_made_into_and_runs_nothing(notebook: Any) -> None:
    ran = notebook.ok(
        "%%tfgraph g -N\ndef h(v):\n    return v if v.sum() > 0 else -v\nx = tfnb.placeholder(torch.ones(3))\n"
        "while h(x).sum() < 3:\n    x = x * 2\nasync def other(): pass\nx"
    )
    (text,) = (bundle["text/plain"] for bundle in ran.shown)
    for part in ("def h(v):", "ag__.if_exp(", "ag__.while_stmt(", "async def other", "ag__.fn(tfnb.placeholder)"):
        assert part in text
    assert "g" not in tfnb.graphs()
    assert "x" not in notebook.names
    assert "SyntaxError" in notebook.run("%%tfgraph g -N\nif x.sum( > 0:\n    y = 1").out


@pytest.mark.parametrize(
    ("statement", "line"),
    [
        ("if x.sum() > 0:\n    y = x.reshape(7, 7)", 5),
        ("while x.sum() < 9:\n    x = x + 1\n    raise KeyError('user')", 6),
        ("for row in x:\n    z = row.nothing", 5),
        ("y = x.reshape(7, 7) if x.sum() > 0 else x", 4),
    ],
)
def test_errors_show_the_lines_of_the_cell_and_no_others(notebook: Any, statement: str, line: int) -> None:
    ran = notebook.run(f"%%tfgraph g\nx = tfnb.placeholder(torch.ones(3, 2), name='x')\nn = 0\n{statement}\nlast = 1")
    assert ran.error is not None
    assert [frame for frame in ran.frames if "line 1" not in frame] == [f"Cell In[{notebook.count - 1}], line {line}"]
    text = statement.splitlines()[line - 4]
    assert f"----> {line} {text}" in ran.out


def test_an_error_in_a_function_of_another_cell_shows_its_lines(notebook: Any) -> None:
    notebook.ok("def helper(v):\n    if v.sum() > 0:\n        return v.reshape(7, 7)\n    return v")
    ran = notebook.run("%%tfgraph g\nx = tfnb.placeholder(torch.ones(3, 2), name='x')\ny = helper(x)")
    at = notebook.count
    assert ran.frames[-2:] == [f"Cell In[{at - 1}], line 3", f"Cell In[{at - 2}], line 3, in helper()"]


@pytest.mark.parametrize(
    "options", ["compile='off'", pytest.param("compile='now'", marks=pytest.mark.slow), "executor='dataflow'"]
)
def test_a_run_that_fails_in_a_function_of_another_cell_shows_its_line(notebook: Any, options: str) -> None:
    notebook.ok(
        "def rows(v, at):\n    total = v.sum() * 0\n    for i in at:\n        total = total + v[i]\n    return total"
    )
    notebook.ok(
        "%%tfgraph g\nx = tfnb.placeholder(torch.ones(3), name='x')\n"
        "at = tfnb.placeholder(torch.tensor([0, 1]), name='at')\ny = rows(x, at)"
    )  # fmt: skip
    ran = notebook.run(f"tfnb.Session('g', {options}).run(y, {{x: torch.ones(3), at: [0, 7]}})")
    here = notebook.count
    assert f"  at In[{here - 2}] line 4:  y = rows(x, at)\n  in In[{here - 3}] line 4: total = total + v[i]" in ran.out
    assert "inputs as recorded: float32[B]" in ran.out and ran.error.line == 4


def test_a_block_in_a_cell_has_the_name_of_the_cell_while_the_extension_is_loaded(notebook: Any) -> None:
    block = "with tfnb.record() as g:\n    x = tfnb.placeholder(torch.ones(3))\ng.nodes[0].source.label"
    assert notebook.ok(block).result == f"In[{notebook.count - 1}]"
    notebook.ok("%unload_ext tfnb")
    assert not notebook.ok(block).result.startswith("In[")
    notebook.ok("%load_ext tfnb")
    assert notebook.ok(block).result == f"In[{notebook.count - 1}]"


RERUN = (
    "x = tfnb.placeholder(torch.ones(3, 2), name='x')\n"
    "s = torch.zeros(2)\n"
    "for row in x:\n"
    "    half = row / 2\n"
    "    s = s + half\n"
    "if s.sum() > 0:\n"
    "    big = s * 2\n"
    "n = 0\n"
    "while s.sum() < 20:\n"
    "    n += 1\n"
    "    s = s * 2\n"
    "s, n"
)


@pytest.mark.slow
@pytest.mark.parametrize("cell_id", ["one", None])
def test_a_cell_run_again_begins_anew_whatever_its_names_hold(notebook: Any, cell_id: str | None) -> None:
    notebook.ok("row, half, n = 'text', torch.ones(7), torch.ones(2)")
    for _ in range(3):
        notebook.ok(f"%%tfgraph g\n{RERUN}", cell_id=cell_id)
        fed = torch.tensor([[1.0, 3.0], [2.0, 4.0]])
        s, n = tfnb.run([notebook.names["s"], notebook.names["n"]], {"x": fed})
        assert (s.tolist(), n.item()) == ([6.0, 14.0], 2)
    assert "big" not in notebook.names  # only some runs have it


@pytest.mark.slow
def test_a_name_that_the_samples_do_not_set_is_refused_by_name_and_line(notebook: Any) -> None:
    cell = "%%tfgraph g\nx = tfnb.placeholder(torch.ones(3), name='x')\nif x.sum() > 50:\n    y = x * 2\n"
    for use in ("y + 1", "torch.exp(y)", "z = y\nz", "y.sum()", "print(y)"):
        ran = notebook.run(cell + use)
        assert isinstance(ran.error, InvalidArgument)
        assert "`y` has no value here: it is set in one branch of line 3 only; give it one before" in str(ran.error)
        assert ran.frames[-1] == f"Cell In[{notebook.count - 1}], line 5"
    notebook.ok(cell)
    assert "y" not in notebook.names


FED = [torch.tensor(rows) for rows in (
    [[0.5, 0.25, 0.125], [0.25, 0.5, 0.75]],
    [[-0.5, -2.0, 0.25], [-1.0, 0.5, -0.75], [0.5, 0.25, -0.25]],
    [[4.0, 1.0, 2.0], [-1.0, 2.0, 0.5], [3.0, 0.25, -0.5], [0.5, 0.5, 1.5]],
    [[0.25, -0.125, 0.0625]],
)]  # fmt: skip
ITERATIONS = [3, 0, 6, 1]


@pytest.mark.filterwarnings("ignore:.*Python took the", "ignore:.*became the constant")
@pytest.mark.parametrize(  # every fifth quickly
    ("name", "kind", "source"),
    [pytest.param(*cell, id=cell[0], marks=[pytest.mark.slow] * (n % 5 > 0)) for n, cell in enumerate(cells())],
)
def test_a_staged_cell_gives_what_python_gives(notebook: Any, name: str, kind: str, source: str) -> None:
    head = "x = tfnb.placeholder(sample, name='x')\nn = tfnb.placeholder(torch.tensor(3), name='n')\n"
    notebook.names["sample"] = FED[0]
    ran = notebook.ok(f"%%tfgraph g --no-show\n{head}{source}")
    notes = margin(ran)
    out = notebook.names["out"]
    if kind == "staged":
        assert not any("stays Python" in note for note in notes), notes
    for fed, iterations in zip(FED[1:], ITERATIONS[1:], strict=True):
        names = {"x": fed, "n": torch.tensor(iterations), "torch": torch, "nn": torch.nn}
        exec(source, names)
        leaves, form = tree_flatten(out)
        fetched = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        try:
            found = iter(tfnb.run(fetched, {"x": fed, "n": torch.tensor(iterations)}))
        except (BranchChanged, ShapeError, FeedError):
            assert kind == "python"
            continue
        wanted, wanted_form = tree_flatten(names["out"])
        assert form == wanted_form
        for leaf, value in zip(leaves, wanted, strict=True):
            got = next(found) if isinstance(leaf, torch.Tensor) else leaf
            torch.testing.assert_close(torch.as_tensor(got).double(), torch.as_tensor(value).double())


@pytest.mark.parametrize(
    ("target", "items", "is_said"),
    [
        ("x, y", "loader", True),
        ("k, (x, y)", "enumerate(loader)", True),
        ("(x, y), k", "zip(loader, range(3))", True),
        ("x, y", "[*loader][:1]", False),
        ("x, y", "[(p, p) for p in model.parameters()]", False),
    ],
    ids=["loader", "enumerate", "zip", "list", "parameters"],
)
def test_a_loader_that_a_cell_unrolls_is_said_with_what_to_write(
    notebook: Any, target: str, items: str, is_said: bool
) -> None:  # fmt: skip
    notebook.ok(
        "from torch.utils.data import DataLoader, TensorDataset\nmodel = nn.Linear(4, 4)\n"
        "loader = DataLoader(TensorDataset(torch.rand(9, 4), torch.rand(9, 4)), batch_size=3)"
    )
    cell = f"%%tfgraph\ntotal = 0.0\nfor {target} in {items}:\n    total = total + (model(x) - y).square().sum()"
    notes = [shown["text/plain"] for shown in notebook.ok(cell).shown if "was unrolled" in shown["text/plain"]]
    assert len(notes) == is_said
    for note in notes:
        assert note.startswith("note: line 3: this `for` over a DataLoader was unrolled: 3 batches are ")
        assert "feeds=(x, y)" in note


def test_a_name_of_a_loop_that_nobody_reads_hinders_no_run(notebook: Any) -> None:
    loop = "y = x * 2\nfor i in range(int(y[0])):\n    y = y + i\nout = y"
    notebook.ok(f"%%tfgraph loop\nx = tfnb.placeholder(torch.ones(2))\n{loop}")
    names, fed = notebook.names, torch.full((2,), 0.1)
    assert tfnb.run(names["out"], {names["x"]: fed}).tolist() == pytest.approx([0.2, 0.2])
    with pytest.raises(BranchChanged, match=r"`i` has no value: it is first set in the loop of .*, which took no turn"):
        tfnb.run(names["i"], {names["x"]: fed})
