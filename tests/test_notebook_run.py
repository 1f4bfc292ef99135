"""``tfnb run``: notebooks from the shell, in kernels of their own."""

from __future__ import annotations

import ast
import io
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfnb.__main__ import main
from tfnb.errors import InvalidArgument
from tfnb.notebook_run import NotebookRun, ProgressLines, Terminal, assigned_names, parameter, with_parameters

ROOT = Path(__file__).parent.parent


def written(path: Path, *cells: str, tagged: str | None = None) -> Path:
    """A notebook of these cells, the first of which is ``tagged``, saved with outputs of an earlier run."""
    stale = nbformat.v4.new_output("stream", text="of an earlier run")
    made = [nbformat.v4.new_code_cell(cell, execution_count=7, outputs=[stale]) for cell in cells]
    if tagged is not None:
        made[0].metadata["tags"] = [tagged]
    nbformat.write(nbformat.v4.new_notebook(cells=made), path)
    return path


def printed(path: Path) -> list[str]:
    """What each cell printed to its standard output."""
    cells = nbformat.read(path, as_version=4).cells
    return ["".join(each.text for each in cell.outputs if each.output_type == "stream") for cell in cells]


def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfnb", "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)


GRAPH = """%%tfgraph scaled
x = tfnb.placeholder(torch.ones(4, 3))
total = x.sum() * scale
total"""


def test_a_graph_runs_with_parameters_and_its_outputs_are_kept(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.ipynb", "scale = 1.0\nlabel = 'none'", "%load_ext tfnb\nimport torch, tfnb", "", GRAPH,
        "print(label, tfnb.run(total, {x: torch.ones(2, 3)}).item())", tagged="parameters",
    )  # fmt: skip
    done = ran(path, "-p", "scale", "2.5", "-p", "label", "it's")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "a.run.ipynb"
    first, injected, *_, graph, _ = nbformat.read(out, as_version=4).cells
    assert first.outputs == [] and injected.metadata.tags == ["injected-parameters"]
    assert injected.source == '# Parameters\nscale = 2.5\nlabel = "it\'s"'
    assert {"image/svg+xml", "text/html", "text/plain"} <= graph.outputs[-1].data.keys()
    assert graph.execution_count == 4 and printed(out)[-1] == "it's 15.0\n"
    assert f"{out}: 5 cells ran" in done.stderr
    again = ran(out, "-p", "scale", "-1e1", "-o", out)  # in place: the injected cell is replaced
    assert again.returncode == 0, again.stderr
    assert printed(out)[-1] == "none -60.0\n" and len(printed(out)) == 6


def test_an_error_names_cell_and_line_and_keeps_what_ran(tmp_path: Path) -> None:
    path = written(tmp_path / "bad.ipynb", "print('one')", "a = 1\n\nprint('two')\na / 0", "print('three')")
    done = ran(path, "-o", tmp_path / "out.ipynb")
    assert done.returncode == 1
    assert f"{path}: cell 2 of 3, line 4: ZeroDivisionError: division by zero\n" in done.stderr
    assert "----> 4 a / 0" in done.stderr and "\x1b" not in done.stderr
    assert printed(tmp_path / "out.ipynb") == ["one\n", "two\n", ""]
    failed = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[1]
    assert [output.output_type for output in failed.outputs] == ["stream", "error"]


def test_the_line_is_one_of_the_cell_that_failed(tmp_path: Path) -> None:
    path = written(tmp_path / "far.ipynb", "def f(a):\n\n\n    return a / 0", "a = 1\nf(a)")
    done = ran(path)
    assert done.returncode == 1 and f"{path}: cell 2 of 2, line 2: ZeroDivisionError" in done.stderr
    assert "Cell In[1], line 4" in done.stderr


def test_a_notebook_without_code_is_written(tmp_path: Path) -> None:
    path = tmp_path / "words.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("words")]), path)
    said = io.StringIO()
    assert NotebookRun(path, stream=said).run() == 0 and "0 cells ran" in said.getvalue()
    assert nbformat.read(tmp_path / "words.run.ipynb", as_version=4).cells[0].source == "words"


def test_a_kernel_that_is_killed_is_told(tmp_path: Path) -> None:
    path = written(tmp_path / "dead.ipynb", "print(1)", "import os\nos.kill(os.getpid(), 9)")
    done = ran(path)
    assert done.returncode == 1 and f"{path}: cell 2 of 2: Kernel died" in done.stderr
    assert printed(tmp_path / "dead.run.ipynb") == ["1\n", ""]


ENDLESS = """import os, pathlib, signal, time
print('begun', flush=True)
{more}
pathlib.Path('pid').write_text(str(os.getpid()))
while True: time.sleep(0.1)"""


@pytest.mark.parametrize(
    ("more", "signals", "told"),
    [
        ("", [signal.SIGINT], "line 5: stopped\n"),
        ("", [signal.SIGTERM], "line 5: stopped\n"),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)", [signal.SIGINT] * 2, "stopped, and killed"),
    ],
    ids=["ctrl-c", "sigterm", "twice"],
)
def test_a_signal_ends_the_kernel_and_keeps_what_ran(tmp_path: Path, more: str, signals: list[int], told: str) -> None:
    path = written(tmp_path / "endless.ipynb", "print('one')", ENDLESS.format(more=more), "print('never')")
    command = [sys.executable, "-m", "tfnb", "run", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as running:
        pid = _number_in(tmp_path / "pid")
        for number in signals:
            running.send_signal(number)
            time.sleep(0.5)  # two signals that are pending at once are one
        assert told in running.communicate(timeout=60)[1]
    assert running.returncode == 1 and not psutil.pid_exists(pid)
    assert printed(tmp_path / "endless.run.ipynb") == ["one\n", "begun\n", ""]


def _number_in(path: Path) -> int:
    until = time.monotonic() + 100
    while time.monotonic() < until:
        if path.exists() and (text := path.read_text()):
            return int(text)
        time.sleep(0.05)
    raise TimeoutError(path)


def test_a_cell_may_take_no_longer_than_its_timeout(tmp_path: Path) -> None:
    path = written(tmp_path / "long.ipynb", "print('one')", "import time\ntime.sleep(1000)")
    done = ran(path, "--timeout", "3")
    assert done.returncode == 1 and "cell 2 of 2, line 2: stopped after 3 s (--timeout)" in done.stderr


@pytest.mark.slow
def test_the_session_is_connected_before_the_first_cell(tmp_path: Path) -> None:
    path = written(
        tmp_path / "there.ipynb", "import tfnb, torch\nprint(tfnb.session.connected().status().title)",
        "with tfnb.record('g'):\n    x = tfnb.placeholder(torch.ones(4))\n    y = x.sum()\n"
        "print(tfnb.run(y, {x: torch.ones(3)}))",
        "import os, psutil\nprint(*(child.pid for child in psutil.Process().children(recursive=True)))",
    )  # fmt: skip
    done = ran(path, "--cluster", "1")
    assert done.returncode == 0, done.stderr
    first, second, processes = printed(tmp_path / "there.run.ipynb")
    assert first.startswith("Dask cluster, connected") and second == "tensor(3.)\n"
    assert nbformat.read(tmp_path / "there.run.ipynb", as_version=4).cells[0].execution_count == 1
    children = [psutil.Process(pid) for pid in map(int, processes.split()) if psutil.pid_exists(pid)]
    assert processes and not psutil.wait_procs(children, timeout=30)[1]


def test_a_cluster_that_cannot_be_had_is_told_before_a_cell_runs(tmp_path: Path) -> None:
    path = written(tmp_path / "there.ipynb", "open('ran', 'w')")
    done = ran(path, "--cluster", "http://nowhere:1")
    assert done.returncode == 2 and "--cluster http://nowhere:1: " in done.stderr and "No cell ran" in done.stderr
    assert "Traceback" not in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["there.ipynb"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none.ipynb"], "none.ipynb: No such file or directory"),
        (["text.ipynb"], "text.ipynb is no notebook"),
        (["julia.ipynb"], "is a notebook of julia"),
        (["a.ipynb", "-o", "none/b.ipynb"], "there is no folder none"),
        (["a.ipynb", "--timeout", "0"], "--timeout 0.0"),
        (["a.ipynb", "--timeout", "nan"], "--timeout nan"),
        (["a.ipynb", "-p", "rate", "1"], "-p rate: not assigned in the cell tagged parameters, which has lr, a, b"),
        (["plain.ipynb", "-p", "lr", "1"], "no cell of the notebook has the tag parameters"),
        (["magic.ipynb", "-p", "lr", "1"], "is a %%tfgraph cell"),
        (["broken.ipynb", "-p", "lr", "1"], "line 2 of the cell tagged parameters"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_told_before_a_kernel_starts(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("a.ipynb"), "%load_ext tfnb\nlr = 1\na, b = 1, 2", tagged="parameters")
    written(Path("plain.ipynb"), "lr = 1")
    written(Path("magic.ipynb"), "%%tfgraph g\nlr = 1", tagged="parameters")
    written(Path("broken.ipynb"), "lr = 1\nlr = = 2", tagged="parameters")
    Path("text.ipynb").write_text("lr = 1")
    julia = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "j", "display_name": "j", "language": "julia"}})
    nbformat.write(julia, "julia.ipynb")
    before = sorted(tmp_path.iterdir())
    assert main(["run", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_without_nbclient_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nbclient", None)
    assert main(["run", str(written(tmp_path / "a.ipynb", "1"))]) == 2
    assert capsys.readouterr().err == "nbclient is not installed: pip install 'tfnb[run]'\n"


def test_the_kernel_is_this_python_in_the_folder_of_the_notebook(tmp_path: Path) -> None:
    path = written(tmp_path / "a.ipynb", "import os, sys\nprint(sys.executable, os.getcwd())")
    said = io.StringIO()
    assert NotebookRun(path, stream=said).run() == 0
    assert printed(tmp_path / "a.run.ipynb") == [f"{sys.executable} {os.path.realpath(tmp_path)}\n"]


# -- parameters ---------------------------------------------------------------------------------------------------


@given(st.one_of(st.text(max_size=8), st.floats().map(str), st.integers().map(str), st.sampled_from(["True", "None"])))
def test_an_injected_value_is_the_value_of_its_text(text: str) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("a = 1", metadata={"tags": ["parameters"]})])
    with_parameters(notebook, {"a": parameter(text)})
    names: dict[str, Any] = {}
    exec(notebook.cells[1].source, names)
    wanted = _by_trial(text)
    assert type(names["a"]) is type(wanted)
    assert names["a"] == wanted or (math.isnan(names["a"]) and math.isnan(wanted))


def _by_trial(text: str) -> Any:
    """The type that papermill gives to a text."""
    if text in ("True", "False", "None"):
        return ast.literal_eval(text)
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def test_names_of_a_parameters_cell() -> None:
    assert assigned_names("%load_ext tfnb\na = 1\nb: int = 2\nc, (d, *e) = 1, (2, 3)\nf = g = 0\n!ls\nprint(a)") == (
        "a", "b", "c", "d", "e", "f", "g",
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match="%%time"):
        assigned_names("\n%%time\na = 1")


# -- progress -----------------------------------------------------------------------------------------------------


@given(st.floats(0, 1e5), st.integers(1, 200))
def test_a_log_gets_few_lines_of_progress(seconds: float, cells: int) -> None:
    progress = ProgressLines(cells, 0.0)
    lines = []
    for tick in range(int(min(seconds, 3000) * 4)):
        progress.begin(1 + tick % cells, tick / 4)
        lines.append(progress.line(tick / 4))
    assert sum(line is not None for line in lines) <= 6 + seconds / 60
    assert not any(lines[:8])


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_of_progress() -> None:
    screen, log = _Screen(), io.StringIO()
    for stream in (screen, log):
        terminal = Terminal(stream)
        for line in ("cell 1", "cell 2"):
            terminal.progress(line)
        terminal.say("done")
    assert screen.getvalue() == "\r\x1b[Kcell 1\r\x1b[Kcell 2\r\x1b[Kdone\n"
    assert log.getvalue() == "cell 1\ncell 2\ndone\n"
