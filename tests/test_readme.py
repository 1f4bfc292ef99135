"""The blocks of Python of README and of the pages, in order, as the cells of one notebook each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
END = """%tfcluster --close
float((model(data.images).argmax(1) == data.labels).float().mean())"""
SEED = "import torch; torch.manual_seed(0); torch.set_num_threads(1)"
KILLED = """import os, signal
class Killed(tfnb.Session):
    def run(self, *given, **options):
        if rows.position == {"epoch": 1, "count": 15}:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(*given, **options)
tfnb.Session = Killed"""
LAST = 'torch.save({**model.state_dict(), "state": opt.state_dict()["state"]}, "end.pt")'


def blocks(page: str) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_the_blocks_of_the_readme_train_the_network(tmp_path: Path) -> None:
    sources = blocks("README.md")
    assert len(sources) > 6
    book = _executed([*sources, END], tmp_path)
    (accuracy,) = (output["data"]["text/plain"] for output in book.cells[-1].outputs if "data" in output)
    assert float(accuracy) > 0.95


@pytest.mark.slow
def test_the_blocks_of_the_page_on_queues_run(tmp_path: Path) -> None:
    sources = blocks("notebooks/queues.md")
    assert len(sources) > 4
    _executed(sources, tmp_path)


@pytest.mark.slow
def test_the_loop_of_the_readme_that_is_killed_ends_with_the_weights_of_one_that_is_not(tmp_path: Path) -> None:
    pytest.importorskip("nbformat")
    torch = pytest.importorskip("torch")
    sources = blocks("README.md")
    first = next(place for place, block in enumerate(sources) if "opt = " in block)
    (loop,) = (block for block in sources if "session.reads(rows)" in block)
    cells = [SEED, *sources[:2], *sources[first : first + 2]]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert _ran([*cells, loop, LAST], whole) == 0
    assert _ran([*cells, KILLED, loop, LAST], cut) == -signal.SIGKILL
    assert (cut / "own.safetensors").exists() and not (cut / "end.pt").exists()
    assert _ran([*cells, loop, LAST], cut) == 0
    ends = [torch.load(folder / "end.pt") for folder in (whole, cut)]
    assert set(ends[0]) == {"0.weight", "0.bias", "3.weight", "3.bias", "state"}
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def _executed(sources: list[str], folder: Path) -> Any:
    """The notebook of these cells after a kernel has run it; nothing is written to its standard error."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    assert "".join(output["text"] for output in outputs if output.get("name") == "stderr") == ""
    return book


def _ran(sources: list[str], folder: Path) -> int:
    """The exit status of a process that runs these cells one after the other in a folder."""
    import nbformat

    folder.mkdir(exist_ok=True)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbformat.write(book, folder / "book.ipynb")
    command = [sys.executable, "-m", "IPython", "--no-banner", "--colors=nocolor", "book.ipynb"]
    environment = {**os.environ, "TFNB_COMPILE": "off"}
    return subprocess.run(command, cwd=folder, env=environment, timeout=240, capture_output=True).returncode
