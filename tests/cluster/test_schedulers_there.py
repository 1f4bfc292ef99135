"""A scheduler that is stepped after each epoch holds from the first step of the next one, as in a loop of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import tfnb


class Descent:
    """Steps of which each takes the rate off ``weight``, and long enough to be told from what comes between them."""

    def __init__(self) -> None:
        self.module = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(self.module.weight)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 1.0)
        with tfnb.record("descent"):
            self.x = tfnb.placeholder(torch.ones(2, 1, dtype=torch.float64))
            busy = torch.eye(500, dtype=torch.float64)
            for _ in range(6):
                busy = busy @ (busy + self.x.mean() * 0)
            loss = (self.module(self.x) * busy[0, 0]).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.step = self.optimizer.step()

    @property
    def taken(self) -> float:
        """How much the steps took off, so far."""
        return -float(self.module.weight.detach())


@pytest.mark.filterwarnings("ignore:.*may be none over others")  # the work beside it multiplies means by nothing
@pytest.mark.parametrize("options", [{}, {"backup": 1}], ids=str)
def test_each_synchronous_step_takes_the_rate_of_its_epoch(connect: Callable[..., Any], options: Any) -> None:
    cluster, descent = connect(3), Descent()
    schedule = lr_scheduler.StepLR(descent.optimizer, 1, 0.1)
    data = {descent.x: torch.ones(9, 1, dtype=torch.float64)}
    tfnb.fit(descent.step, data, epochs=3, batch_size=4, callbacks=lambda progress: schedule.step(), **options)
    cluster.pull()
    assert descent.taken == pytest.approx(3 * (1 + 0.1 + 0.01))


def test_asynchronous_steps_that_begin_after_the_callback_take_its_rate(connect: Callable[..., Any]) -> None:
    cluster = connect(2)
    descent, seen = Descent(), list[float]()

    def stop(progress: Any) -> None:
        if progress.epoch == 1:
            descent.optimizer.param_groups[0]["lr"] = 0.0
            cluster.pull()
            seen.append(descent.taken)

    data = {descent.x: torch.ones(60, 1, dtype=torch.float64)}
    tfnb.fit(descent.step, data, epochs=2, batch_size=2, mode="async", callbacks=stop)
    cluster.pull()
    assert 30 <= seen[0] <= descent.taken <= seen[0] + 2 * len(cluster.tasks) < 60
