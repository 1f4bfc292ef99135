"""For tests of compiled steps: compile them at once."""

from __future__ import annotations

import pytest

from tfnb.execution.compiling import compiler_process
from tfnb.execution.tiers import tiered


def compile_soon(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
    """Compile steps after so many seconds of computing, whether or not that is predicted to pay, as quick as steps."""
    monkeypatch.setattr(compiler_process, "NICE", 0)
    monkeypatch.setattr(tiered, "WORTH_COMPILING", seconds)
    monkeypatch.setattr(tiered, "worth", lambda *_, **__: "now")
