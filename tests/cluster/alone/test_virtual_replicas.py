"""Figure 8 of the TensorFlow paper on the virtual clock: what must hold of its shape, and of the model itself."""

from __future__ import annotations

import random
import statistics

import pytest

from tests.cluster.alone.virtual_replicas import (
    PERCENTILES,
    REPLICAS,
    Injected,
    Job,
    SyncReplicas,
    fitted,
)  # fmt: skip

SAMPLES = 4000


def test_the_fitted_times_have_the_papers_percentiles() -> None:
    times, numbers = fitted(PERCENTILES, REPLICAS), random.Random(1)
    largest = [max(times.draw(numbers) for _ in range(REPLICAS)) for _ in range(SAMPLES)]
    tenths = statistics.quantiles(largest, n=10)
    for found, wanted in zip((tenths[0], statistics.median(largest), tenths[8]), PERCENTILES, strict=True):
        assert found == pytest.approx(wanted, abs=0.02)


def test_async_is_above_sync_by_about_the_papers_ten_percent_in_the_median() -> None:
    gaps = [Job(seed=seed, steps=60).gap for seed in range(3)]
    assert min(gaps) > 0.08 and statistics.median(gaps) < 0.12


def test_twice_as_many_workers_bring_less_and_less() -> None:
    rates = {workers: workers / Job(steps=20).sync(workers).p50 for workers in (25, 50, 100, 200)}
    gains = [rates[2 * workers] / rates[workers] for workers in (25, 50, 100)]
    assert 2 > gains[0] > gains[2] > 1 and 2 > gains[1] > gains[2]


def test_each_backup_worker_brings_less_than_the_one_before() -> None:
    """Without a limit of the links a step of more workers is never longer."""
    found = [Job(float("inf"), steps=60).sync(backup=backup).p50 for backup in range(9)]
    assert found == sorted(found, reverse=True)
    assert found[0] - found[1] > found[1] - found[2] > (found[2] - found[4]) / 2 > (found[4] - found[8]) / 4


@pytest.mark.parametrize("seed", range(3))
def test_one_backup_worker_removes_an_injected_tail(seed: int) -> None:
    job, tail = Job(seed=seed, steps=60), Injected(every=5, seconds=1.0)
    clean, late, backed = job.sync().p90, job.sync(tail=tail).p90, job.sync(backup=1, tail=tail).p90
    assert late - clean > 0.3 and late - backed > 0.8 * (late - clean)


def test_the_same_seed_is_the_same_run() -> None:
    first, again, other = (SyncReplicas(12, fitted(PERCENTILES, REPLICAS), 5e9, seed).run(10, 8) for seed in (1, 1, 2))
    assert first == again != other
