"""What each test gets: a share of the cores, fixed seeds, a leak check, the tested devices, hypothesis profiles.

``TFNB_TEST_DEVICES=cpu,cuda`` names the devices (default ``cpu``); one that is absent fails, it does not skip.
``TFNB_FUZZ=1000`` takes the long random profile of hypothesis instead of the short, repeatable one, and so many
changed files, wrong arguments and attacks (`tests/mutations.py`). A plugin of pytest: `tests/conftest.py` loads it in
processes that run tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tfnb.graph import current
from tfnb.recording.cells.block import forget, graphs

DEVICES = os.environ.get("TFNB_TEST_DEVICES", "cpu").split(",")
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

hypothesis.settings.register_profile("short", derandomize=True, deadline=None, max_examples=25, database=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=5000)
hypothesis.settings.load_profile("long" if os.environ.get("TFNB_FUZZ") else "short")
if WORKERS > 1:  # processes side by side share the cores
    torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # of the processes that tests start


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``parametrize_by``: parameters that a function gives, which is called where the run takes the test."""
    expression = str(metafunc.config.getoption("markexpr"))
    is_left_out = any(f"not {mark.name}" in expression for mark in metafunc.definition.iter_markers())
    for mark in metafunc.definition.iter_markers("parametrize_by"):
        name, parameters = mark.args
        metafunc.parametrize(name, [] if is_left_out else list(parameters()))


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
