"""Common set-up of all tests: fixed seeds, a leak check, the tested devices, hypothesis profiles, the order.

``TFNB_TEST_DEVICES=cpu,cuda`` names the devices (default ``cpu``); one that is absent fails, it does not skip.
``TFNB_FUZZ=1000`` takes the long random profile of hypothesis instead of the short, repeatable one, and so many
changed files, wrong arguments and attacks (`tests/mutations.py`).
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests.durations import known, long
from tests.scheduling import Scheduling, place
from tfnb.graph import current
from tfnb.recording.cells.block import forget, graphs

os.environ.setdefault("TFNB_COMPILE", "off")  # compiled code differs in the last bits; its tests ask for it
_PACKAGES = None if "TFNB_CACHE_DIR" in os.environ else tempfile.mkdtemp(prefix="tfnb-tests-")
os.environ.setdefault("TFNB_CACHE_DIR", str(_PACKAGES))  # not the user's; all processes of a run share it
QUICK_NOTEBOOKS = ("quickstart",)  # the others, and pages in a browser, are for slow runs
DEVICES = os.environ.get("TFNB_TEST_DEVICES", "cpu").split(",")

hypothesis.settings.register_profile("short", derandomize=True, deadline=None, max_examples=25, database=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=5000)
hypothesis.settings.load_profile("long" if os.environ.get("TFNB_FUZZ") else "short")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C work even if the parent ignores signals (nohup, some CI); processes side by side share the cores."""
    gc.disable()  # what is imported stays
    if any(name.startswith("TFNB_SLOW_") for name in os.environ):
        from tests.selection import Selection  # it reads the table of the rooms, which loads the compiler

        config.pluginmanager.register(Selection())
    if counts := getattr(getattr(config, "failures_db", None), "sock", None):
        # pytest-rerunfailures: else a short test waits for TCP, up to 40 ms
        counts.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that tests start inherit no "ignored"
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # of the processes that tests start


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Has its way before ``--dist``."""
    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Collect garbage from here on; imported objects are moved to the oldest generation."""
    gc.freeze()
    gc.unfreeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest tests first, so that processes side by side end at about the same time."""
    items.sort(key=lambda item: place(item.nodeid))
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


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device under test in turn."""
    torch.empty(0, device=request.param)  # raises where it is absent
    return str(request.param)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state."""
    if DEVICES == ["cpu"]:
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` keeps a stack for each device that may come
    else:
        torch.manual_seed(0)


@pytest.fixture(scope="module")
def own_packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A separate package cache for a file whose tests inspect or clear the cache."""
    from tfnb.execution.compiling.package_cache import packages  # the files that ask for it have loaded the compiler

    with pytest.MonkeyPatch.context() as patch:
        # removed with pytest's folders of later runs: a compiler that was started meanwhile keeps its log there
        patch.setenv("TFNB_CACHE_DIR", str(tmp_path_factory.mktemp("packages")))
        packages.cache_clear()
        yield
    packages.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def own_graphs() -> Iterator[None]:
    """Forget the named graphs of a file at its end: cells of another file would continue a graph of the same name."""
    before = graphs()
    yield
    for name in graphs().keys() - before.keys():
        forget(name)


def _left_open() -> dict[str, object]:
    """Modes of this thread that a recording enters."""
    return {
        "recordings": list(current.stack.open),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "excluded dispatch keys": torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A test leaves no open recording and no torch mode behind, also when it fails."""
    before = _left_open()
    yield
    after = _left_open()
    current.stack.open.clear()
    assert after == before, "the test left a recording or a torch mode open"
