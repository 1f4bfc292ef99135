"""README's blocks of Python, in order, as the cells of one notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"
LOADER = "loader = list(zip(data.images.split(64), data.labels.split(64)))"  # the reader's own
END = """%tfcluster --close
float((model(data.images).argmax(1) == data.labels).float().mean())"""


@pytest.mark.slow
def test_the_blocks_of_the_readme_train_the_network(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) > 4
    last = next(place for place, block in enumerate(blocks) if "in loader" in block)
    sources = [*blocks[:last], LOADER, *blocks[last:], END]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert _written(book, "stderr") == ""
    (accuracy,) = (output["data"]["text/plain"] for output in book.cells[-1].outputs if "data" in output)
    assert float(accuracy) > 0.95


def _written(book: Any, stream: str) -> str:
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output.get("name") == stream)
