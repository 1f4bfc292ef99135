"""How much of its throughput a training of eight tasks keeps where one of them is struck every 15 seconds; virtually.

`tests.benchmarks.cluster_faults` prints the same for half an hour. Each run checks that every step counts once.
"""

from __future__ import annotations

import pytest

from tests.cluster.alone.virtual_cluster import BACK, MODES, kept

SECONDS = 90.0  # of the virtual clock


@pytest.mark.parametrize("mode", MODES)
def test_a_training_keeps_most_of_its_throughput_where_tasks_are_killed(mode: str) -> None:
    share, account = kept(mode, "killed", SECONDS)
    assert account.faults == 6 and 0.95 <= share < 1.0, f"{share}: {account}"
    assert sum(account.shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", ["sync, backup=1", "async"])
def test_nobody_waits_for_a_task_that_stands_still_where_there_is_a_spare_one_or_no_round(mode: str) -> None:
    share, account = kept(mode, "killed or stopped", SECONDS)
    assert 0.94 <= share < 1.0 and account.shares["waiting until a fault is known"] < 0.03, f"{share}: {account}"


def test_a_step_without_a_spare_task_waits_until_one_that_stands_still_is_a_suspect() -> None:
    share, account = kept("sync", "killed or stopped", SECONDS)
    away, unknown = (account.shares[name] for name in ("away", "waiting until a fault is known"))
    assert away < unknown < 0.25 and share < 0.9, "most of what is lost, and the reason for backup=1"


def test_a_longer_absence_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    _, before = kept("async", "killed", SECONDS)
    monkeypatch.setattr("tests.cluster.alone.virtual_cluster.BACK", 2 * BACK)
    _, after = kept("async", "killed", SECONDS)
    assert after.shares["away"] == pytest.approx(2 * before.shares["away"], rel=0.05)
    assert after.steps < before.steps
