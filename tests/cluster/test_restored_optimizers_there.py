"""Param groups and schedulers, saved and restored while a cluster is connected: as torch's own training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.test_restored_optimizers import OPTIMIZERS, SCHEDULERS, Run


@pytest.mark.parametrize(("here", "there"), [("save", "restore"), ("restore", "save"), ("", "both")])
def test_a_training_goes_on_with_the_rates_of_the_file(connect, tmp_path: Path, here: str, there: str) -> None:
    def on_a_cluster(work: Any, *names: str) -> None:
        cluster = connect(2) if there in names else None
        work()
        if cluster is not None:
            cluster.close()

    make = SCHEDULERS["StepLR"]
    whole, first, again = Run(scheduler=make, theirs=True).run(9), Run(scheduler=make), Run(scheduler=make)
    for run in (first, again):
        run.session.reads(run.scheduler)

    def save() -> None:
        first.run(5).session.save(tmp_path / "v")

    def restore() -> None:
        again.run(1)  # the servers hold it
        with pytest.warns(UserWarning, match=r"restored the param groups: SGD: lr 0.1 -> 0.05") as notes:
            again.resumed(tmp_path / "v", 5)
        assert len(notes) == 1
        again.run(4)

    on_a_cluster(save, "save", "both")
    on_a_cluster(restore, "restore", "both")
    again.is_like(whole)


def test_a_rate_that_was_changed_here_counts_after_a_restore_that_leaves_it_alone(connect, tmp_path: Path) -> None:
    whole, run = Run(OPTIMIZERS["adamw"], theirs=True), Run(OPTIMIZERS["adamw"])
    cluster = connect(1)
    run.run(2).session.save(tmp_path / "v")
    whole.run(2)
    for one in (run, whole):
        one.optimizer.param_groups[0]["lr"] = 0.3
    run.run(1)  # of this nothing is left
    run.taken = 2
    run.session.restore(tmp_path / "v", strict=False)
    run.run(2)
    whole.run(2)
    cluster.close()
    run.is_like(whole)
    assert run.optimizer.param_groups[0]["lr"] == 0.3
