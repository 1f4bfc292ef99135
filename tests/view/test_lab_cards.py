"""Cards of objects, runs and clusters in JupyterLab, in outputs 520 pixels wide: seen, opened by keys, never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.view.browser import browser
from tests.view.test_lab import Lab
from tests.view.test_notebook import lab

pytestmark = pytest.mark.browser

EVIL = "<img src=x onerror='window.ran=1'></table>"
SETUP = f"""
%load_ext tfnb
import torch, tfnb
evil = {EVIL!r}
weight = tfnb.Variable(torch.ones(3, 1), name=evil)
queue = tfnb.FIFOQueue(4, [torch.float32], [()], name=evil)
with tfnb.record("net") as graph:  # a graph's name is one word: no markup gets into it
    x = tfnb.placeholder(torch.ones(4, 3), name="x")
    loss = (x @ weight - 2).square().mean()
    train = tfnb.train.SGD(0.01).minimize(loss)
session, rows = tfnb.Session(graph), torch.ones(64, 3)
"""
OBJECTS = {  # a card that opens, and a word in it
    "weight": "trainable",
    "loss": "health",
    "train": "inputs",
    "loss.spec": "float32",
    "session": "runs",
    "queue": "element",
    "session.save('card.safetensors')": "graph_hash",
}
RUNS = {  # cells in order, and what stands below each
    "%tfwatch loss\ntfnb.fit(train, {x: rows}, steps=8, watch=[loss])": "8 steps",
    "%tfcache on\n%tfcache": "bytes",
    "%tfcache off\n%tfbreak loss if value > 0": "loss if value > 0",
    "tfnb.run(train, {x: rows})": "BreakpointReached",
    "%tfbreak --off\nstopped": "float32",
    "%%tfcompare train -w loss -f x=rows --seeds 2\nsmall = {'batch_size': 8}\nlarge = {'batch_size': 32}": "large",
    "%tfcluster 1 --ps 1 --live": "parameter servers",
    "%tfcluster": "parameter servers",
}
OPENED = OBJECTS | {"%tfcluster": "restarts left"}
CELLS = [SETUP, *OBJECTS, *RUNS, "tfnb.fit(train, {x: rows}, batch_size=8, epochs=4).steps", "%tfcluster --close"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """All cells, run; the window is narrow, and the side bar closed."""
    nbformat = pytest.importorskip("nbformat")
    folder = tmp_path_factory.mktemp("cards")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip("\n")) for source in CELLS])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(book, folder / "cards.ipynb")
    with lab(folder, "--LabApp.expose_app_in_browser=True") as address, browser(size="700,1000") as driver:
        driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        driver.get(f"{address}/lab/tree/cards.ipynb?reset")
        page = Lab(driver, folder)
        page.wait("app?.shell.currentWidget?.sessionContext?.session?.kernel?.connectionStatus === 'connected'")
        page.command("application:toggle-left-area")
        page.js(  # all cells are in the page, also those out of sight
            "(app.shell.currentWidget.content.notebookConfig = "
            "{...app.shell.currentWidget.content.notebookConfig, windowingMode: 'none'}, true)"
        )
        driver.execute_script(
            "const style = document.createElement('style');"
            "style.textContent = '.jp-OutputArea-output { max-width: 520px !important }';"
            "document.head.append(style)"
        )
        for place in range(len(CELLS)):
            page.run(place)
            page.ran(place)
        yield page


def outputs(page: Lab, place: int, rest: str) -> Any:
    """Something of the output area of a cell."""
    return page.js(f"cells[arguments[0]].node.querySelector('.jp-Cell-outputArea'){rest}", place)


@pytest.mark.parametrize("source", OPENED)
def test_a_card_is_opened_by_a_key(opened: Lab, source: str) -> None:
    place = CELLS.index(source)
    summary = outputs(opened, place, ".querySelector('details > summary')")
    opened.js("(arguments[0].focus(), true)", summary)
    summary.send_keys("\ue007")
    assert outputs(opened, place, ".querySelector('details').open") is True
    assert OPENED[source] in opened.text(place)
    assert EVIL in opened.text(place) or source in ("loss.spec", "loss", "train", "session", "%tfcluster")


@pytest.mark.parametrize("source", RUNS)
def test_what_a_run_says_stands_below_its_cell(opened: Lab, source: str) -> None:
    place = CELLS.index(source)
    assert RUNS[source] in opened.text(place), opened.shot("run")


def test_a_live_card_follows_a_training_and_its_end(opened: Lab) -> None:
    place = next(place for place, source in enumerate(CELLS) if "--live" in source)
    assert "32" in opened.text(len(CELLS) - 2)
    opened.wait("cells[arguments[0]].node.innerText.includes('step: 32') || "
                "/step\\s+32/.test(cells[arguments[0]].node.innerText)", place)  # fmt: skip
    opened.wait("/closed|not connected/.test(cells[arguments[0]].node.innerText)", place)


def test_outputs_fit_a_narrow_page_and_no_name_runs(opened: Lab) -> None:
    wide = opened.js(
        "cells.flatMap((cell, place) => [...cell.node.querySelectorAll('.jp-OutputArea-output')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => [place, e.scrollWidth, e.clientWidth]))"
    )
    assert wide == [], opened.shot("narrow")
    assert opened.js("window.ran === undefined && !document.querySelector('img[src=\"x\"]')")
