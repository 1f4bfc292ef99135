"""Param groups and schedulers, saved and restored while a cluster is connected: as torch's own training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
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


def first_state(optimizer: type[torch.optim.Optimizer], **options: Any) -> dict[str, torch.Tensor]:
    """The state of an optimizer, as a first look shows it behind a training of five steps."""
    torch.manual_seed(2)
    net, data = nn.Linear(3, 1).double(), torch.randn(40, 3, dtype=torch.float64)
    mine = optimizer(net.parameters(), 0.01, **options)
    with tfnb.record():
        x = tfnb.placeholder(data[:4])
        net(x).square().mean().backward()
        step = mine.step()
    tfnb.fit(step, {x: data}, batch_size=8, shuffle=False)
    return {name: x.clone() for name, x in mine.state_dict()["state"][0].items() if isinstance(x, torch.Tensor)}


def test_the_first_look_at_a_state_shows_the_sizes_of_steps_of_the_training(connect) -> None:
    """Before the first step of all, such a size is the rate; a count that came home later made it so again."""
    here = first_state(torch.optim.Rprop)
    connect(2)
    torch.testing.assert_close(first_state(torch.optim.Rprop), here, rtol=1e-12, atol=0)


def test_a_rate_that_torch_rounds_to_the_default_dtype_is_that_of_the_notebook(connect) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        here = first_state(torch.optim.ASGD, lambd=0.1, t0=2)
        connect(2)
        torch.testing.assert_close(first_state(torch.optim.ASGD, lambd=0.1, t0=2), here, rtol=1e-14, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)
