"""The predicted peak of a step is within a tenth of what the allocator sees, and a step holds no more than eager's."""

from __future__ import annotations

import pytest

from tests.benchmarks.bench_memory import measured
from tests.benchmarks.rows import ROWS


@pytest.mark.parametrize(("name", "most"), [
    ("mlp-32", 1.0), pytest.param("gpt-6", 0.9, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_prediction_is_what_the_allocator_sees(name: str, most: float) -> None:
    found = measured(ROWS[name])
    assert found["error"] == pytest.approx(1, rel=0.1) and found["ratio"] <= most
