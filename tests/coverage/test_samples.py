"""Every sample of every entry records and replays, but for what `known.py` lists; what it lists fails."""

from __future__ import annotations

import pytest

from tests.coverage import checks
from tests.coverage.sweep import failures, surprises

COLUMNS = ("records", "replays", "complex")


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize_by("name", checks.entries)
def test_all_samples_run(name: str) -> None:
    found = failures(checks.entries()[name], frozenset(COLUMNS), asked=COLUMNS)
    assert surprises(name, found, COLUMNS) == []
