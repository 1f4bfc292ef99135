"""``tfnb demo``: execute the quickstart notebook with progress, write HTML, and sum up in one line of JSON.

There is one main job, the notebook; this only runs it. Needs the extras ``lab``, ``data``. May import tutorials only.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

from tfnb.tutorials import NOTEBOOKS, QUICKSTART

# What the summary says, as expressions over the notebook's names.
SUMMARY = {
    "nodes": "len(tfnb.graph('digits').nodes)",
    "test_accuracy_local": "accuracy_local",
    "test_accuracy_cluster": "accuracy_cluster",
}


def demo(out: Path) -> int:
    """Do the main job; the report goes to the folder ``out``. Returns the exit status: 0, or 1 if a cell failed."""
    book = nbformat.read(NOTEBOOKS / QUICKSTART, as_version=4)
    quiet = ["--log-level=ERROR"]
    client = NotebookClient(book, km=_kernel(), timeout=600, record_timing=True, extra_arguments=quiet)
    print("The quickstart notebook: one network, trained here, then on 2 compute tasks and 1 parameter server.")
    failed, summary = _executed(client)
    report = _written(book, out)
    if failed:
        print(failed)
        return 1
    summary["record_seconds"] = round(sum(map(_seconds, _recordings(book))), 3)
    print(json.dumps({"demo": "digits", **summary, "report": str(report)}))
    return 0


def _kernel() -> AsyncKernelManager:
    """A kernel of this very environment, independent of installed kernels."""
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))


def _executed(client: NotebookClient) -> tuple[str, dict[str, Any]]:
    """Run every cell with a line for each; the error's text if one failed, and the summary's values."""
    cells = [(i, cell) for i, cell in enumerate(client.nb.cells) if cell.cell_type == "code"]
    with client.setup_kernel():
        for number, (index, cell) in enumerate(cells, start=1):
            print(f"  [{number:2}/{len(cells)}] {_title(cell.source):62}", end="", flush=True)
            start = time.monotonic()
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                print(" failed")
                return str(error), {}
            print(f" {time.monotonic() - start:6.1f} s")
        return "", _asked(client)


def _asked(client: NotebookClient) -> dict[str, Any]:
    """The values of `SUMMARY`'s expressions in the notebook."""
    kernel: Any = client.kc
    reply: Any = client.wait_for_reply(kernel.execute("", silent=True, user_expressions=SUMMARY))
    found = reply["content"]["user_expressions"]
    return {name: json.loads(found[name]["data"]["text/plain"]) for name in SUMMARY}


def _title(source: str) -> str:
    """The first line of a cell; the first two under a cell magic."""
    lines = source.splitlines()
    return "  ".join(lines[: 1 + source.startswith("%%")])[:60]


def _recordings(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code" and cell.source.startswith("%%tfgraph")]


def _seconds(cell: Any) -> float:
    """How long the kernel was busy with a cell."""
    times = cell.metadata.execution
    start, end = (datetime.fromisoformat(times[f"iopub.status.{state}"]) for state in ("busy", "idle"))
    return (end - start).total_seconds()


def _written(book: Any, out: Path) -> Path:
    """The executed notebook as HTML that needs no network."""
    exporter = HTMLExporter(mathjax_url="", require_js_url="")
    html, _ = exporter.from_notebook_node(book)
    out.mkdir(parents=True, exist_ok=True)
    report = out / "quickstart.html"
    report.write_text(html, encoding="utf-8")
    return report.resolve()
