"""A scheduler that is stepped after each epoch holds from the first step of the next one, as in a loop of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import tfnb

ROWS, BATCH, EPOCHS = 21, 8, 4  # the last batch of an epoch has 5 rows: tasks take 3 and 2


class ByEpoch:
    """An object that is called after each epoch."""

    def __init__(self, step: Callable[[Any], None]) -> None:
        self.on_epoch = step


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda o: lr_scheduler.StepLR(o, 1, 0.3),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS),
    "lambda of a group": lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.5**e, lambda e: 1 + e]),
    "in a row": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.2, patience=0, threshold=0.5),
}


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def optimizer(of: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": of[0].parameters()}, {"params": of[2].parameters(), "lr": 0.05}], 0.3, 0.9)


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(6)
    return torch.randn(ROWS, 3, dtype=torch.float64), torch.randint(0, 2, (ROWS,))


def eager(make: Callable[[Any], Any], data: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """The loop of plain torch."""
    net = model()
    rule = optimizer(net)
    schedule = make(rule)
    for _ in range(EPOCHS):
        losses = 0.0
        for x, y in zip(data[0].split(BATCH), data[1].split(BATCH), strict=True):
            rule.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            rule.step()
            losses += float(loss.detach()) * len(x) / ROWS
        schedule.step(*[losses] * isinstance(schedule, lr_scheduler.ReduceLROnPlateau))
    return [p.detach() for p in net.parameters()]


def fitted(
    make: Callable[[Any], Any], data: tuple[torch.Tensor, torch.Tensor], cluster: Any = None, *,
    as_feeds: bool = False, by_object: bool = False, **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """The same by `fit`."""
    net = model()
    rule = optimizer(net)
    schedule = make(rule)
    with tfnb.record("scheduled"):
        x, y = (tfnb.placeholder(rows[:4]) for rows in data)
        loss = F.cross_entropy(net(x), y)
        rule.zero_grad()
        loss.backward()
        step = rule.step()

    def after(progress: Any) -> None:
        schedule.step(*[progress.values["loss"]] * isinstance(schedule, lr_scheduler.ReduceLROnPlateau))

    feeds = [dict(zip((x, y), part, strict=True)) for part in zip(*(r.split(BATCH) for r in data), strict=True)]
    arrays = {} if as_feeds else {"batch_size": BATCH, "shuffle": False}
    tfnb.fit(
        step, feeds if as_feeds else dict(zip((x, y), data, strict=True)), epochs=EPOCHS, watch={"loss": loss},
        callbacks=ByEpoch(after) if by_object else after, **arrays, **options,
    )  # fmt: skip
    if cluster is not None:
        cluster.pull()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_here_each_scheduler_trains_as_in_torch(name: str, data: Any) -> None:
    for a, b in zip(fitted(SCHEDULERS[name], data), eager(SCHEDULERS[name], data), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_on_two_tasks_each_scheduler_trains_as_in_torch(data: Any, connect: Callable[..., Any]) -> None:
    cluster = connect(2)
    for number, (name, make) in enumerate(SCHEDULERS.items()):
        found = fitted(make, data, cluster, as_feeds=number % 2 == 1, by_object=number % 3 == 1)
        for a, b in zip(found, eager(make, data), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


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
