"""%%tfgraph runs its body as the cell it is: lines, names, syntax errors, composition with other magics."""

from __future__ import annotations

import re

import pytest

import tfnb
from tfnb.errors import DeadlockError

PLAIN = "%config TfnbMagics.display = 'none'"


def without_colours(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def cells(notebook):
    notebook.ok(PLAIN)
    yield notebook
    notebook.ok("%config TfnbMagics.display = 'static'")


def test_last_expression_is_the_result(cells):
    ran = cells.ok("%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))\nx.sum()")
    assert ran.result.sample == 6.0
    assert cells.names["_"] is ran.result


def test_semicolon_silences(cells):
    ran = cells.ok("%%tfgraph g --show\nx = tfnb.placeholder(torch.ones(2, 3))\nx.sum();  # quiet")
    assert ran.result is None and ran.shown == []


def test_names_flow_both_ways(cells):
    cells.ok("size = 4")
    cells.ok("%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, size))\ndouble = 2 * x")
    assert cells.ok("double.spec.shape[1]").result == 4


def test_braces_and_dollars_are_literal(cells):
    cells.ok("name = 'other'")
    ran = cells.ok("%%tfgraph g\ntext = '{name} $name'\ntext")
    assert ran.result == "{name} $name"
    assert "{name}" in cells.run("%tfgraph {name}").err


@pytest.mark.parametrize("blank", ["", "\n", "\n  \n\n"])
def test_error_names_the_line_of_the_cell(cells, blank):
    body = blank + "a = 1\n\nb = a / 0\n"
    line = 1 + len(blank.splitlines()) + 3
    number = cells.count
    ran = cells.run(f"%%tfgraph g\n{body}")
    assert isinstance(ran.error, ZeroDivisionError)
    assert ran.frames[-1] == f"Cell In[{number}], line {line}"
    assert f"{line} b = a / 0" in ran.out
    assert "tfnb/" not in ran.out and "magics/" not in ran.out


def test_blank_lines_above_the_magic_count_too(cells):
    number = cells.count
    ran = cells.run("\n\n%%tfgraph g\n\n1 / 0")
    assert ran.frames[-1] == f"Cell In[{number}], line 5"


def test_error_inside_recorded_torch_code_ends_at_the_users_line(cells):
    number = cells.count
    ran = cells.run("%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))\nmodel = nn.Linear(4, 1)\ny = model(x)")
    assert isinstance(ran.error, tfnb.errors.ShapeError)
    assert ran.frames[-1] == f"Cell In[{number}], line 4"
    assert "y = model(x)" in str(ran.error)


@pytest.mark.slow
def test_full_tracebacks_can_be_switched_on(cells):
    cells.ok("%config TfnbMagics.full_tracebacks = True")
    ran = cells.run("%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))\ny = nn.Linear(4, 1)(x)")
    cells.ok("%config TfnbMagics.full_tracebacks = False")
    assert "recording" in ran.out


def test_error_of_a_plain_cell_has_no_inner_frames(cells):
    cells.ok("%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))")
    number = cells.count
    ran = cells.run("tfnb.graph('other')")
    assert ran.frames == [f"Cell In[{number}], line 1"]
    assert "no graph named 'other'" in ran.out


def test_a_file_that_is_not_there_has_no_inner_frames(cells):
    cells.ok("%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))")
    number = cells.count
    ran = cells.run("tfnb.Session(tfnb.graph('g')).restore('nothing.safetensors')")
    assert isinstance(ran.error, FileNotFoundError)
    assert ran.frames == [f"Cell In[{number}], line 1"]


def test_function_of_a_graph_cell_that_fails_later_shows_its_source(cells):
    number = cells.count
    cells.ok("%%tfgraph g\n\ndef half(n):\n    return 1 / n\nhalf(2)")
    ran = cells.run("half(0)")
    assert ran.frames[-1] == f"Cell In[{number}], line 4, in half(n)"
    assert "return 1 / n" in ran.out


def test_inspect_finds_the_source_of_a_function_of_a_graph_cell(cells):
    cells.ok("%%tfgraph g\n\ndef half(n):\n    return 1 / n")
    assert cells.ok("import inspect; inspect.getsource(half)").result == "def half(n):\n    return 1 / n\n"


@pytest.mark.parametrize("source, line", [("if a=\n", 3), ("x = 1\n  y = 2\n", 4), ("f(1, 2\n", 3)])
def test_syntax_error_is_one_frame_and_changes_nothing(cells, source, line):
    cells.ok("%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))", cell_id="a")
    before = tfnb.graph("g").text()
    number = cells.count
    ran = cells.run(f"%%tfgraph g\n\n{source}", cell_id="a")
    assert ran.error is not None
    assert ran.out.count("Cell In[") == 1 and f"Cell In[{number}], line {line}" in ran.out
    assert tfnb.graph("g").text() == before


def test_top_level_await_says_what_to_write(cells):
    ran = cells.run("%%tfgraph g\nimport asyncio\nawait asyncio.sleep(0)")
    assert "with tfnb.record():" in ran.out and ran.out.count("Cell In[") == 1


def test_time_above_keeps_value_and_lines(cells):
    ran = cells.ok("%%time\n%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))\nx.sum()")
    assert ran.result.sample == 6.0
    number = cells.count
    ran = cells.run("%%time\n%%tfgraph g\n\n1 / 0")
    assert ran.frames[-1] == f"Cell In[{number}], line 4"


def test_capture_above_leaves_the_graph_unchanged_by_an_error(cells):
    cells.ok("%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))")
    before = tfnb.graph("g").text()
    number = cells.count
    cells.run("%%capture cap\n%%tfgraph g\ny = x + 1\n1 / 0")
    assert f"Cell In[{number}], line 4" in without_colours(cells.names["cap"].stdout)
    assert tfnb.graph("g").text() == before


@pytest.mark.slow
def test_prun_above_records(cells):
    cells.ok("%%prun -q\n%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))\ny = x + 1")
    assert "y" in tfnb.graph("g")


def test_magics_and_commands_work_in_the_body(cells):
    ran = cells.ok("%%tfgraph g\n%time y = 3\nfiles = !echo one\nfiles[0] + str(y)")
    assert ran.result == "one3"


def test_body_is_found_without_history(cells):
    ran = cells.shell.run_cell("%%tfgraph g\n\n3", store_history=False)
    assert ran.result == 3


def test_cell_runs_from_python_code_too(cells):
    assert cells.ok("get_ipython().run_cell_magic('tfgraph', 'g', 'x = 2\\nx + 1')").result == 3


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "ValueError", "GeneratorExit"])
def test_recording_never_outlives_the_cell(cells, error):
    cells.run(f"%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))\nraise {error}")
    assert cells.ok("from tfnb.graph import current\ncurrent.recording() is None").result
    assert cells.ok("type(torch.ones(2) + 1) is torch.Tensor").result
    assert tfnb.graphs() == {}


def test_a_deadlock_is_drawn(cells):
    cells.run("import torch, tfnb\nwaiting = tfnb.FIFOQueue(2, torch.float32, (), name='waiting')")
    cells.run("%%tfgraph g\nx = waiting.dequeue(sample=torch.tensor(0.0))\nput = waiting.enqueue(x)")
    ran = cells.run("tfnb.run([x, put])")
    assert isinstance(ran.error, DeadlockError) and "nothing can make progress" in ran.out
    assert ran.drawings and "waiting" in ran.drawings[0] and 'class="edge"' in ran.drawings[0]


def test_a_value_without_a_sample_is_shown_by_its_spec(notebook):
    """As of an empty queue."""
    notebook.run("import tfnb, torch\nqueue = tfnb.FIFOQueue(3, torch.float32, (2,))")
    ran = notebook.run("%%tfgraph empty\ny = queue.dequeue() * 2\ny")
    assert ran.error is None and "Traceback" not in ran.out + ran.err and "y: float32[2], no sample" in ran.out
    again = notebook.run("y")
    assert again.error is None and "Traceback" not in again.out + again.err


def test_an_op_that_fails_is_one_error_with_one_traceback(notebook):
    ran = notebook.run("%%tfgraph\nx = tfnb.placeholder(torch.ones(2, 3))\nx + torch.ones(5)")
    assert isinstance(ran.error, tfnb.errors.ShapeError)
    assert ran.out.count("Traceback (most recent call last)") == 1 and "direct cause" not in ran.out
