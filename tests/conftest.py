"""Common set-up of test runs: the order of tests, which of them are slow, one package cache for all processes.

What each test gets is in `tests/each_test.py`. It loads torch, for which the controller of pytest-xdist has no use.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.durations import known, long
from tests.scheduling import Scheduling, place

os.environ.setdefault("TFNB_COMPILE", "off")  # compiled code differs in the last bits; its tests ask for it
_PACKAGES = None if "TFNB_CACHE_DIR" in os.environ else tempfile.mkdtemp(prefix="tfnb-tests-")
os.environ.setdefault("TFNB_CACHE_DIR", str(_PACKAGES))  # not the user's; all processes of a run share it
QUICK_NOTEBOOKS = ("quickstart",)
"""The other notebooks, and pages in a browser, are for slow runs."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C work even if the parent ignores signals (nohup, some CI)."""
    gc.disable()  # what is imported stays
    is_controller = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    if not is_controller:
        config.pluginmanager.import_plugin("tests.each_test")
    if any(name.startswith("TFNB_SLOW_") for name in os.environ):
        from tests.selection import Selection

        config.pluginmanager.register(Selection())
    if counts := getattr(getattr(config, "failures_db", None), "sock", None):
        # pytest-rerunfailures: else a short test waits for TCP, up to 40 ms
        counts.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that tests start inherit no "ignored"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Has its way before ``--dist``."""
    return Scheduling(config, log)


class BackwardDir(pytest.Dir):
    """A folder that is collected from its end."""

    def collect(self) -> list[Any]:
        return [*super().collect()][::-1]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> BackwardDir | None:
    """Every other process begins at the end. The process that comes first to a file rewrites its assertions and keeps
    them for the others: so processes that begin together do not do all of that twice.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return BackwardDir.from_parent(parent, path=path) if int(worker.removeprefix("gw")) % 2 else None


def pytest_collection_finish() -> None:
    """Collect garbage from here on; imported objects are moved to the oldest generation."""
    gc.freeze()
    gc.unfreeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest tests first, so that processes side by side end at about the same time."""
    items.sort(key=lambda item: (place(item.nodeid), item.nodeid.partition("::")[0].split("/")))  # in each process
    left = long((item.nodeid for item in items if not item.get_closest_marker("slow")), known())
    for item in items:
        is_cell = config.getoption("nbval", None) and item.path.suffix == ".ipynb"
        if is_cell:  # it needs those above it in its kernel
            item.add_marker(pytest.mark.flaky(reruns=0))
        is_slow_cell = is_cell and item.path.stem not in QUICK_NOTEBOOKS
        if is_slow_cell or item.get_closest_marker("browser") or item.nodeid in left:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With ``--reruns``: show how each repeated test failed first. Such a failure is a defect, of the test
    or of tfnb.
    """
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"failed, and was run again: {report.nodeid}", "-")
        terminalreporter.line(report.longreprtext)


def pytest_unconfigure() -> None:
    """Remove the package cache of this run."""
    if _PACKAGES is not None:
        shutil.rmtree(_PACKAGES, ignore_errors=True)
