"""Drawings in front ends: an exported notebook without network, and JupyterLab on a saved notebook."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import browser
from tfnb.graph import Graph
from tfnb.view import Drawing, graph_html, page, text_tree
from tfnb.widgets import GraphWidget

pytestmark = pytest.mark.browser


def notebook(graph: Graph) -> Any:
    """A saved notebook: a static drawing with its live one below, whose state was not saved."""
    nbformat = pytest.importorskip("nbformat")
    static = {"text/html": graph_html(graph), "text/plain": text_tree(graph)}
    widget = GraphWidget(page.live(Drawing(graph)), text=text_tree(graph))
    bundle = widget._repr_mimebundle_()
    bundles = [static, bundle[0] if isinstance(bundle, tuple) else bundle]
    outputs = [nbformat.v4.new_output("display_data", data=data) for data in bundles]
    made = nbformat.v4.new_notebook()
    made.cells = [nbformat.v4.new_code_cell("graph", outputs=outputs, execution_count=1)]
    made.metadata["kernelspec"] = {"name": "none", "display_name": "none"}
    return made


def test_an_exported_notebook_is_alive_without_network(digits: Graph, tmp_path: Path) -> None:
    nbconvert = pytest.importorskip("nbconvert")
    html, _ = nbconvert.HTMLExporter().from_notebook_node(notebook(digits))
    path = tmp_path / "export.html"
    path.write_text(html, encoding="utf-8")
    with browser() as driver:
        driver.get(path.as_uri())
        assert driver.execute_script("return document.querySelectorAll('.tfnb-page .tfnb-tools').length") == 1
        unfold = "document.querySelector('.box[data-key=\"2.0\"]')"
        driver.execute_script(f"{unfold}.focus()")
        driver.switch_to.active_element.send_keys("\ue007")
        assert driver.execute_script("return !!document.querySelector('.box[data-key=\"2.0.0\"]')")


@contextmanager
def lab(folder: Path, *more: str) -> Iterator[str]:
    """JupyterLab on a folder; gives its address."""
    pytest.importorskip("jupyterlab")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [
        "--no-browser",
        "--allow-root",
        f"--port={port}",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder}",
        *more,
    ]
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], stdout=log, stderr=log, cwd=folder)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=1).close()
                break
            except OSError:  # not up yet
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()  # asked politely, it waits for kernels and confirmations
        server.wait(20)


def test_jupyterlab_shows_a_saved_drawing_without_a_kernel(digits: Graph, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    sign = pytest.importorskip("nbformat.sign")
    saved = notebook(digits)
    saved.metadata["kernelspec"] = {"name": "python3", "display_name": "a new kernel, without the widget"}
    nbformat.write(saved, tmp_path / "saved.ipynb")
    sign.NotebookNotary().sign(nbformat.read(tmp_path / "saved.ipynb", 4))
    support = pytest.importorskip("selenium.webdriver.support.ui")
    with lab(tmp_path) as address, browser() as driver:
        driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        driver.get(f"{address}/lab/tree/saved.ipynb?reset")
        tools = "return document.querySelectorAll('.tfnb-page[data-tfnb] .tfnb-tools').length"
        support.WebDriverWait(driver, 60).until(lambda d: d.execute_script(tools))
        seen = driver.execute_script(
            "return document.querySelector('.tfnb-page[data-tfnb] svg').getBoundingClientRect().height"
        )
        assert seen > 300
        shown = "return document.querySelector('.jp-OutputArea-output').closest('.jp-Notebook').innerText"
        found = "return document.body.textContent.includes('model not found')"  # the front end has given the view up
        support.WebDriverWait(driver, 60).until(lambda d: d.execute_script(found))
        support.WebDriverWait(driver, 10).until(lambda d: "model not found" not in d.execute_script(shown))
