"""A real shell in this process: cells are run as a front end runs them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import tfnb


@dataclass
class Ran:
    """What one cell did."""

    result: Any
    error: BaseException | None
    out: str
    err: str
    shown: list[dict[str, Any]] = field(default_factory=list)

    @property
    def frames(self) -> list[str]:
        """Headings of the frames of the traceback, outermost first."""
        return re.findall(r"^(?:Cell|File) .*$", self.out, re.MULTILINE)

    @property
    def drawings(self) -> list[str]:
        """The HTML drawings."""
        return [bundle["text/html"] for bundle in self.shown if "<svg" in bundle.get("text/html", "")]


class Notebook:
    """Runs cells in the shell; ``cell_id`` is what a front end sends."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell

    @property
    def names(self) -> dict[str, Any]:
        """The user's namespace."""
        return self.shell.user_ns

    @property
    def count(self) -> int:
        """The n of the next ``In[n]``."""
        return self.shell.execution_count

    def run(self, source: str, *, cell_id: str | None = None) -> Ran:
        """Run one cell and return everything about it."""
        with capture_output() as captured:
            ran = self.shell.run_cell(source, store_history=True, cell_id=cell_id)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", captured.stdout)
        error = ran.error_before_exec or ran.error_in_exec
        return Ran(ran.result, error, plain, captured.stderr, [output.data for output in captured.outputs])

    def ok(self, source: str, *, cell_id: str | None = None) -> Ran:
        """Run a cell that must succeed."""
        ran = self.run(source, cell_id=cell_id)
        assert ran.error is None, ran.out
        return ran


@pytest.fixture(scope="module")
def ipython() -> Iterator[InteractiveShell]:
    """A shell; afterwards the process is no IPython any more, and ``__main__`` is what started it."""
    main, hook = sys.modules["__main__"], sys.excepthook
    config = Config()
    config.HistoryManager.enabled = False
    yield InteractiveShell.instance(config=config)
    InteractiveShell.clear_instance()
    sys.modules["__main__"], sys.excepthook = main, hook


@pytest.fixture
def notebook(ipython: InteractiveShell) -> Iterator[Notebook]:
    """A shell with tfnb loaded and its usual imports; no graph and no name is left over."""
    ipython.user_ns.clear()  # what reset() does, without its slow search for garbage
    ipython.init_user_ns()
    ipython.execution_count = 1
    for name in tfnb.graphs():
        tfnb.recording.forget(name)
    book = Notebook(ipython)
    book.ok("%load_ext tfnb")
    book.ok("import torch, tfnb\nfrom torch import nn")
    yield book
    ipython.run_line_magic("unload_ext", "tfnb")
