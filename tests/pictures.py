"""The drawings on the pages, made by running the cells that they show.

``python -m tests.pictures [FOLDER]`` writes them, by default where the pages have them; `tests/test_pages.py` compares.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
STORED = {
    "loop": ("gallery.ipynb", "figure_eurosys"), "queue": ("gallery.ipynb", "figure_osdi1"),
    "tree": ("tree.ipynb", "tree"),
}  # fmt: skip
"""Drawings that are outputs of notebooks: the notebook, and the graph of the cell."""
RUN = {"digits": ("README.md", "digits"), "tasks": ("tasks.ipynb", "split")}
"""Drawings that are made anew: the page whose first cells are run, up to the one that records the graph."""


def pictures() -> Iterator[tuple[Path, str]]:
    """The path of each drawing below the folder of the notebooks, and the drawing."""
    for name, (notebook, graph) in STORED.items():
        cell = _cells(notebook)[_recorded(notebook, graph)]
        output = next(each["data"] for each in cell["outputs"] if "image/svg+xml" in each.get("data", {}))
        yield Path("pictures", f"{name}.svg"), "".join(output["image/svg+xml"]).strip() + "\n"
    for name, (page, graph) in RUN.items():
        sources = ["".join(cell["source"]) for cell in _cells(page)[: _recorded(page, graph) + 1]]
        yield Path("pictures", f"{name}.svg"), _drawn(sources, graph)


def _cells(page: str) -> list[dict[str, list[str]]]:
    """The cells of code of a notebook, or the blocks of Python of README."""
    if page.endswith(".ipynb"):
        cells = json.loads((NOTEBOOKS / page).read_text(encoding="utf-8"))["cells"]
        return [cell for cell in cells if cell["cell_type"] == "code"]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return [{"source": [block]} for block in blocks]


def _recorded(page: str, graph: str) -> int:
    """The place of the first cell that records a graph."""
    sources = ["".join(cell["source"]) for cell in _cells(page)]
    return next(place for place, source in enumerate(sources) if re.match(rf"%%tfgraph {graph}\b", source))


def _drawn(sources: Sequence[str], graph: str) -> str:
    """The drawing of a graph after the cells of ``sources``, in a shell that counts them from 1."""
    from IPython.core.interactiveshell import InteractiveShell

    import tfnb

    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    for source in sources:
        shell.run_cell(source, store_history=True).raise_error()
    return tfnb.view.graph_svg(tfnb.graph(graph))


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOKS
    for path, text in pictures():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
