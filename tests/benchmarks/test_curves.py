"""Accuracy over time of trainings on a cluster: points of a curve, and the same training in plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import bench_sandblaster
from tests.benchmarks.cluster_local import BATCH, METHODS, AccuracyClock, Point, curve, curve_of_torch, last, reached
from tfnb.train import Progress

CURVE = [Point(1.0, 2.0, 32, 1, 0.8), Point(2.0, 4.0, 64, 2, 0.95), Point(3.0, 6.0, 96, 3, 0.9)]


def test_the_first_point_with_an_accuracy_and_the_last_one_before_an_end() -> None:
    assert reached(CURVE) is CURVE[1] and reached(CURVE, 0.96) is None
    assert [last(CURVE, "seconds", end) for end in (0.5, 1.0, 2.9, 9.0)] == [0.8, 0.8, 0.95, 0.9]
    assert last(CURVE, "rows", 95) == 0.95


def test_a_training_ends_at_an_accuracy() -> None:
    clock = AccuracyClock(0.9, None)
    told = [Progress(step, step, {"val_right": right}, 32 * step) for step, right in enumerate((0.8, 0.9), 1)]
    for progress in told:
        clock.on_epoch(progress)
    assert [progress.stopped for progress in told] == [None, "reached"]
    assert [(point.rows, point.accuracy) for point in clock.points] == [(32, 0.8), (64, 0.9)]


@pytest.mark.parametrize("is_lbfgs", [False, True])
def test_plain_pytorch_learns_and_counts_its_rows(is_lbfgs: bool) -> None:
    def optimizer(given):
        return torch.optim.LBFGS(given, max_iter=1) if is_lbfgs else torch.optim.SGD(given, 0.1)

    points = curve_of_torch(optimizer, 0, 3)
    assert [point.steps for point in points] == [1, 2, 3] and points[-1].accuracy > points[0].accuracy
    rows = 1797 - 400
    assert points[0].rows == rows and points[-1].rows >= 3 * rows and rows > BATCH


@pytest.mark.parametrize("method", [METHODS["sync"], bench_sandblaster.METHODS["Sandblaster"]], ids=["sync", "L-BFGS"])
def test_a_training_in_this_process_learns_and_counts_its_rows(method):
    """A mode of tasks is that of one task here; an iteration of L-BFGS takes all rows at least once."""
    points = curve("curve", method, 0, 3)
    assert [point.steps for point in points] in ([1, 2, 3], [44, 88, 132]) and points[-1].rows >= 3 * (1797 - 400)
    assert points[-1].accuracy > max(0.3, points[0].accuracy - 0.05)
    assert len(curve("again", method, 0, 3, target=points[0].accuracy)) == 1, "it ends where that is reached"
