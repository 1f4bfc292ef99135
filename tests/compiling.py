"""For tests of compiled steps: compile them at once."""

from __future__ import annotations

import pytest

from tfnb.execution.tiers import tiered


def compile_soon(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
    """Compile steps after so many seconds of computing, whether or not that is predicted to pay."""
    monkeypatch.setattr(tiered, "WORTH_COMPILING", seconds)
    monkeypatch.setattr(tiered, "worth", lambda *_, **__: "now")
