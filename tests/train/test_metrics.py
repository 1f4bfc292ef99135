"""Means of watched values, by epoch and along the way."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from tfnb.fitting.fit_loop import RunResult
from tfnb.state.step_groups import StepReport
from tfnb.train.metrics import AT_ONCE, POINTS, Metrics


def test_epoch_means_are_weighted_by_rows():
    metrics = Metrics(["a", "b"])
    metrics.add(2, StepReport((1, 1), (3, 1), [torch.tensor([1.0, 5.0]), torch.tensor([[10], [20]])]))
    metrics.add(3, StepReport((2,), (2,), [torch.tensor(7.0), torch.tensor([30])]))
    metrics.read()
    first, second = {"epoch": 1, "step": 2, "a": 2.0, "b": 12.5}, {"epoch": 2, "step": 3, "a": 7.0, "b": 30.0}
    assert metrics.history == [first, second]


def test_means_have_the_same_bits_however_many_steps_are_read_at_a_time():
    """Steps that a cluster tells in groups are read less often than those of one process."""
    values = torch.linspace(0.1, 3.7, 40, dtype=torch.float64) ** 3

    def history(at_once):
        metrics = Metrics(["a"])
        for step, value in enumerate(values, 1):
            metrics.add(step, StepReport((1,), (7,), [value]))
            if step % at_once == 0:
                metrics.read()
        metrics.read()
        return metrics.history

    assert all(history(at_once) == history(1) for at_once in (2, 3, 16, 40))


def test_steps_of_several_epochs_come_in_any_order():
    metrics = Metrics(["a"])
    for step, (rows, value, epoch) in enumerate([(3, 1.0, 1), (3, 8.0, 2), (1, 5.0, 1), (1, 4.0, 2), (3, 0.5, 3)], 1):
        metrics.add(step, StepReport((epoch,), (rows,), [torch.tensor(value)]))
        if step == 2:
            metrics.read()
            assert metrics.means() == {"a": 8.0}
    metrics.add(6, StepReport((3,), (3,)))
    metrics.read()
    assert metrics.history == [
        {"epoch": 1, "step": 3, "a": 2.0, "unknown": 0}, {"epoch": 2, "step": 4, "a": 7.0, "unknown": 0},
        {"epoch": 3, "step": 6, "a": 0.5, "unknown": 1},
    ]  # fmt: skip


def test_values_that_nobody_knows_are_nan_by_name_and_told_in_the_summary():
    metrics = Metrics(["a"])
    lost = StepReport((1, 1), (3, 3))
    assert math.isnan(next(lost.one_by_one()).named(["a"])["a"])
    metrics.add(2, lost)
    assert "unknown" in metrics.history[0] and math.isnan(metrics.history[0]["a"])
    assert "watched values of 2 steps were lost" in RunResult(2, metrics.history, 1.0).summary
    assert Metrics([]).history == []


@pytest.mark.parametrize("steps", [1, POINTS, POINTS + 1, 2 * AT_ONCE + 7, 4 * POINTS + 3])
@pytest.mark.parametrize("group", [1, 64])
def test_curve_is_short_and_ends_with_the_last_step(steps, group):
    metrics = Metrics(["a"])
    for first in range(1, steps + 1, group):
        some = range(first, min(first + group, steps + 1))
        told = StepReport([1] * len(some), [1] * len(some), [torch.tensor([*map(float, some)])])
        metrics.add(some[-1], told)
    metrics.read()
    curve = metrics.curve()
    assert len(curve) <= POINTS and curve[-1]["step"] == steps
    assert metrics.history[0]["a"] == (steps + 1) / 2
    width = curve[0]["step"]
    assert curve[0]["a"] == (width + 1) / 2
    assert {b["step"] - a["step"] for a, b in pairwise(curve[:-1])} <= {width}


def test_first_value_that_is_not_finite_is_kept_by_name():
    metrics = Metrics(["a", "b"])
    for step, b in enumerate([1.0, math.nan, math.inf], 1):
        metrics.add(step, StepReport((1,), (1,), [torch.tensor(1.0), torch.tensor(b)]))
    metrics.read()
    ((name, value, step),) = metrics.bad
    assert (name, math.isnan(value), step) == ("b", True, 2)


def test_nothing_watched_costs_nothing():
    metrics = Metrics([])
    metrics.add(1, StepReport((1,), (1,)))
    metrics.read()
    assert (metrics.history, metrics.curve(), metrics.means()) == ([{"epoch": 1, "step": 1}], [], {})


def test_steps_in_any_order_are_cut_where_a_later_epoch_begins():
    told = StepReport((1, 2, 1, 3), (8, 8, 8, 1), [torch.tensor([0.0, 1.0, 2.0, 3.0])])
    parts = [(part.epochs, part.rows, part.values[0].tolist()) for part in told.by_epoch()]
    assert parts == [((1,), (8,), [0.0]), ((2, 1), (8, 8), [1.0, 2.0]), ((3,), (1,), [3.0])]
    assert [one.values[0].item() for one in told.one_by_one()] == [0.0, 1.0, 2.0, 3.0]
