"""A real browser for tests: the distribution's Chromium through selenium, network off. Nothing to import without it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

QUIET = (  # nothing of its own is asked of the network
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


# A page with two places for views of a widget. % its style, and JSON of its script and state.
MODEL = """
<style>%s</style><div id="one"></div><div id="two"></div>
<script type="application/json" id="data">%s</script>
<script type="module">
window.model = {  // what anywidget gives a module; what it sends waits until the test's Python answers
  state: JSON.parse(document.getElementById("data").textContent).state, heard: {}, sent: [], saved: 0,
  get(name) { return this.state[name]; },
  set(name, value) { this.state[name] = value; this.emit(`change:${name}`); },
  save_changes() { this.saved += 1; },
  on(kind, call) { (this.heard[kind] ||= []).push(call); },
  off(kind, call) { this.heard[kind] = (this.heard[kind] || []).filter((each) => each !== call); },
  emit(kind, ...args) { for (const call of this.heard[kind] || []) call(...args); },
  send(message) { this.sent.push(message); },
};
const esm = JSON.parse(document.getElementById("data").textContent).esm;
const module = await import(URL.createObjectURL(new Blob([esm], { type: "text/javascript" })));
window.view = (place) => module.default.render({ model: window.model, el: document.getElementById(place) });
window.cleanup = view("one");
window.ready = true;
</script>"""


def unpacked(text: str) -> Any:
    """What a page unpacks."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


@contextmanager
def browser(*, dark: bool = False, size: str = "1000,900") -> Iterator[Any]:
    """A headless Chromium without network; where there is none the test is skipped."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("no Chromium with its driver (Debian: chromium, chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    service = pytest.importorskip("selenium.webdriver.chrome.service")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = ["--headless=new", "--hide-scrollbars", "--disable-dev-shm-usage", f"--window-size={size}", *QUIET]
    for flag in flags + (["--no-sandbox"] if os.geteuid() == 0 else []):  # a container's root has no sandbox
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=service.Service(DRIVER))
    try:
        driver.execute_cdp_cmd("Network.enable", {})
        driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["http://*", "https://*", "ws://*", "wss://*"]})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


class Page:
    """A page with one drawing, and the hands of a user."""

    def __init__(self, driver: Any, folder: Path, body: str, *, name: str = "page") -> None:
        path = folder / f"{name}.html"
        path.write_text(f'<!doctype html><meta charset="utf-8"><body>{body}', encoding="utf-8")
        self.driver = driver
        driver.get(path.as_uri())
        self.wait("[...document.querySelectorAll('.tfnb-page')].every(({ dataset }) => dataset.on !== '')")  # unpacked

    def js(self, code: str, *args: Any) -> Any:
        """What the body of a function returns."""
        return self.driver.execute_script(code, *args)

    def box(self, key: str) -> Any:
        """The element of a box, or None."""
        return self.js("return document.querySelector(`.box[data-key='${arguments[0]}']`)", key)

    def key(self, title: str) -> str:
        """The key of the first box whose label starts so."""
        boxes = "[...document.querySelectorAll('.box')]"
        found = self.js(f"return {boxes}.find(b => b.getAttribute('aria-label').startsWith(arguments[0]))", title)
        return str(found.get_attribute("data-key"))

    def click(self, key: str) -> None:
        """Click the title of a box, brought into view."""
        self.js("document.querySelector('button[aria-label=\"Show the whole graph\"]').click()")
        text = self.js("return document.querySelector(`.box[data-key='${arguments[0]}'] > .face > text`)", key)
        self.hands().move_to_element(text).click().perform()

    def hands(self) -> Any:
        """Selenium's chain of pointer and key actions."""
        from selenium.webdriver import ActionChains

        return ActionChains(self.driver, duration=20)

    def keys(self, *keys: str) -> None:
        """Type."""
        self.hands().send_keys(*keys).perform()

    def view(self) -> list[float]:
        """The visible part of the drawing: x, y, width, height."""
        return [float(v) for v in self.js("return document.querySelector('svg.tfnb').getAttribute('viewBox')").split()]

    def wait(self, code: str) -> Any:
        """The first true value of an expression, within five seconds."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 5, poll_frequency=0.02).until(lambda _: self.js(f"return {code}"))

    def errors(self) -> list[str]:
        """What the page logged as an error."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
