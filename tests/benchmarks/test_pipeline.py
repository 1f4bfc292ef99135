"""The benchmark of pipelines at small sizes: it compares weights before it measures."""

from __future__ import annotations

import pytest

from tests.benchmarks.cluster_pipeline import THEIRS, Sizes, measured, show


@pytest.mark.slow
def test_a_small_pipeline_is_equal_and_measured_beside_one_process_and_beside_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = Sizes(width=16, rows=4, stages=2, microbatches=3)
    rows = measured(sizes, steps=1, turns=1)
    assert rows.keys() == {"one", "idle second", *THEIRS, *(f"torch {name}" for name in THEIRS)}
    assert all(len(each) == 1 for each in rows.values())
    assert rows["idle second"][0].wall >= 1000
    rows["one"] = [row._replace(processors=20.0) for row in rows["one"]]  # so little may be nothing to the clock
    show(sizes, rows)
    said = capsys.readouterr().out
    assert "bubble by the schedule 0.250" in said and '"bench": "cluster pipeline"' in said
