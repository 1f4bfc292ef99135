"""An hour in JupyterLab: run all, look, edit, interrupt, save, come back without a kernel; screenshots are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser import browser
from tests.view.test_notebook import lab

pytestmark = pytest.mark.browser

CELLS = (
    "%load_ext tfnb\nimport time, torch, tfnb\nfrom torch import nn\nmodel = nn.Sequential(nn.Linear(3, 4), nn.ReLU())",
    "%%tfgraph net --live\nx = tfnb.placeholder(torch.ones(2, 3), name='x')\ny = model(x).sum()\ny",
    "tfnb.run(y, {x: torch.ones(5, 3)}).shape",
    "z = 0\nfor z in range(600):\n    time.sleep(0.1)\n    tfnb.run(y, {x: torch.ones(2, 3)})",
    "%tfgraph net export exported.html",
)
WAIT = 90  # seconds for one thing to happen; a busy machine needs many


class Lab:
    """JupyterLab with one notebook open, and what a hand or an eye does there."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def js(self, code: str, *args: Any) -> Any:
        """What an expression gives; ``app`` and ``cells`` are JupyterLab's own."""
        known = "const app = window.jupyterapp, cells = app?.shell.currentWidget?.content?.widgets;"
        return self.driver.execute_script(f"{known} return {code}", *args)

    def wait(self, code: str, *args: Any) -> Any:
        """The first true value of an expression."""
        until = time.monotonic() + WAIT
        while not (found := self.js(code, *args)):
            assert time.monotonic() < until, f"{code}: not within {WAIT} s; {self.shot('failed')}"
            time.sleep(0.1)
        return found

    def command(self, name: str) -> None:
        """Run one of JupyterLab's commands, as its menus do."""
        self.js("void app.commands.execute(arguments[0])", name)

    def run(self, place: int, source: str | None = None) -> None:
        """Write and run one cell."""
        if source is not None:
            self.js("cells[arguments[0]].model.sharedModel.setSource(arguments[1])", place, source)
        self.js("(app.shell.currentWidget.content.activeCellIndex = arguments[0], true)", place)
        self.command("notebook:run-cell")

    def ran(self, place: int) -> None:
        """Wait until a cell has run."""
        self.wait(
            "cells?.[arguments[0]]?.model.executionState === 'idle' && cells[arguments[0]].model.executionCount", place
        )

    def text(self, place: int) -> str:
        """What stands below a cell."""
        return str(self.js("cells[arguments[0]].node.querySelector('.jp-Cell-outputArea')?.innerText || ''", place))

    def enter(self, box: str) -> None:
        """Press Enter on a box; where the picture was replaced under the key, once more."""
        from selenium.common.exceptions import WebDriverException

        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            self.js(f"({box}.focus(), true)")
            try:
                self.driver.switch_to.active_element.send_keys("\ue007")
                return
            except WebDriverException:
                time.sleep(0.1)
        raise AssertionError(f"no key reached {box}")

    def hand(self, box: str, until: str, *, click: bool = False) -> None:
        """Point at a box, or click it, until something is so; the kernel's answer may replace it meanwhile."""
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver import ActionChains

        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            self.js(f"({box}.scrollIntoView({{block: 'center'}}), true)")
            try:
                at = ActionChains(self.driver).move_to_element(self.js(f"{box}.querySelector(':scope > .face > text')"))
                (at.click() if click else at).perform()
            except WebDriverException:  # it was replaced under the hand
                continue
            for _ in range(20):
                time.sleep(0.1)
                if self.js(until):
                    return
        raise AssertionError(f"{until}: not within {WAIT} s; {self.shot('failed')}")

    def shot(self, name: str) -> Path:
        """A screenshot."""
        path = self.folder / f"{name}.png"
        self.driver.save_screenshot(str(path))
        return path


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Callable[[], None]]]:
    nbformat = pytest.importorskip("nbformat")
    folder = tmp_path_factory.mktemp("lab")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(book, folder / "hour.ipynb")
    with lab(folder, "--LabApp.expose_app_in_browser=True") as address, browser(size="1200,1100") as driver:
        driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})

        def visit() -> None:
            driver.get(f"{address}/lab/tree/hour.ipynb?reset")

        visit()
        yield Lab(driver, folder), visit


LIVE = "document.querySelector('.jp-OutputArea-output .tfnb-page:not([data-tfnb])')"
BOX = "[...{at}.querySelectorAll('.box')].find(b => (b.getAttribute('aria-label') || '').startsWith('{word}'))"


def test_an_hour_in_jupyterlab(opened: tuple[Lab, Callable[[], None]]) -> None:
    page, visit = opened
    page.wait(
        "app?.shell.currentWidget?.sessionContext?.session?.kernel?.connectionStatus === 'connected' && cells.length"
    )

    # run all, of which the fourth is stopped by a hand
    page.command("notebook:run-all-cells")
    page.wait(
        f"{LIVE}?.querySelector('.tfnb-tools') && {LIVE}.querySelector('svg').getBoundingClientRect().height > 100"
    )
    page.wait("cells[2].model.executionCount && cells[3].model.executionState === 'running'")
    page.shot("1-run-all")
    began = time.monotonic()
    page.js("void app.shell.currentWidget.sessionContext.session.kernel.interrupt()")
    page.wait("cells[3].node.innerText.includes('KeyboardInterrupt')")
    assert time.monotonic() - began < 20
    page.shot("2-interrupted")
    page.run(4)
    page.ran(4)
    assert (page.folder / "exported.html").read_text(encoding="utf-8").startswith('<div class="tfnb-page"')

    # the static drawing stands aside for the live one; fold, search, hover, click a value
    assert page.js("getComputedStyle(document.querySelector('.tfnb-page[data-tfnb]')).display") == "none"
    model = BOX.format(at=LIVE, word="model")
    assert page.js(f"{model}.getAttribute('aria-expanded')") == "true"
    page.enter(model)
    page.wait(f"{model}.getAttribute('aria-expanded') === 'false'")
    page.enter(model)
    page.wait(f"{model}.getAttribute('aria-expanded') === 'true'")
    search = page.js(f"{LIVE}.querySelector('input[type=search]')")
    search.send_keys("addmm")
    page.wait(f"{LIVE}.querySelector('.tfnb-tally').textContent.endsWith('found')")
    search.send_keys("\ue00c")
    sum_box = BOX.format(at=LIVE, word="y\\n")
    tip, told = (f"{LIVE}.querySelector('{at}')" for at in (".tfnb-tip", ".tfnb-value"))
    page.hand(sum_box, f"!{tip}.hidden && {tip}.textContent.includes('aten.sum')")
    page.shot("3-hover")
    page.hand(sum_box, f"{told}.textContent.includes('float32[]')", click=True)
    value = page.js(f"{told}.textContent")
    assert value.startswith("y\nfloat32[]: ok, ")
    page.shot("4-value")

    # edit and rerun: the difference
    page.run(1, CELLS[1].replace(".sum()", ".mean()").replace("\ny\n", "\n"))
    page.wait("cells[1].node.innerText.includes('1 changed (y)')")
    page.wait(f"{LIVE}?.querySelectorAll('.badge').length > 0")
    page.shot("5-edited")
    save = f"[...{LIVE}.querySelectorAll('button')].find(b => b.textContent === 'SVG')"
    page.js(f"({save}.click(), true)")
    until = time.monotonic() + WAIT
    while not (page.folder / "graph.svg").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    assert "<svg" in (page.folder / "graph.svg").read_text(encoding="utf-8")

    # save, and come back without a kernel
    page.command("docmanager:save")
    page.wait("app.shell.currentWidget.context.model.dirty === false")
    nbformat, sign = pytest.importorskip("nbformat"), pytest.importorskip("nbformat.sign")
    page.js("void app.shell.currentWidget.sessionContext.shutdown()")
    saved = nbformat.read(page.folder / "hour.ipynb", 4)
    saved.metadata["kernelspec"] = {"name": "none", "display_name": "none"}
    sign.NotebookNotary().sign(saved)
    nbformat.write(saved, page.folder / "hour.ipynb")
    visit()
    still = "document.querySelector('.tfnb-page[data-tfnb]')"
    page.wait(
        f"{still}?.querySelector('.tfnb-tools') && {still}.querySelector('svg').getBoundingClientRect().height > 100"
    )
    model = BOX.format(at=still, word="model")
    page.enter(model)
    page.wait(f"{model}.getAttribute('aria-expanded') === 'false'")
    page.shot("6-without-a-kernel")
