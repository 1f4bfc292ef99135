"""Programs that do the same here and on a cluster of two tasks: one table, and plain PyTorch or Python says what."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import tfnb
from tests.recording import test_bound_names as names
from tests.recording import test_statements as statements
from tests.recording.test_statements import DATA, World
from tests.state.test_lookup_tables import inserted_by_runs
from tests.test_fitting import assert_fetched_scalars_are_watched
from tests.test_watching import WAYS, watched

Check = Callable[[], None]  # once the values are here
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


def rows_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
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
    make: Callable[[Any], Any], data: tuple[torch.Tensor, torch.Tensor], *, as_feeds: bool = False,
    by_object: bool = False,
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
        callbacks=ByEpoch(after) if by_object else after, **arrays,
    )  # fmt: skip
    return [p.detach() for p in net.parameters()]


def trained_by_name() -> Check:
    history, models = names.trained()

    def check() -> None:
        plain_history, plain_models = names.by_torch()
        assert history == pytest.approx(plain_history)
        names.assert_equal(models, plain_models)

    return check


def fetched_scalars() -> Check:
    assert_fetched_scalars_are_watched()
    return lambda: None


def fitted_statement(statement: str, place: str) -> Check:
    world, _, x, loss, made = statements.recorded(statement, place, "by_torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tfnb.fit(made, {x: torch.cat(DATA)}, batch_size=4, epochs=2, shuffle=False, mode="sync", watch=[loss])
    return lambda: torch.testing.assert_close(
        world.state(), statements.eager(statement, place, "by_torch", [*DATA, *DATA])[-1]
    )


def run_statement(statement: str, place: str) -> Check:
    world, _, x, _, made = statements.recorded(statement, place, "by_torch")
    for batch in DATA:
        tfnb.run(made, {x: batch})
    return lambda: torch.testing.assert_close(world.state(), statements.eager(statement, place, "by_torch")[-1])


def everything_of_a_block() -> Check:
    world, plain = World(), World()
    with tfnb.record():
        x = tfnb.placeholder(DATA[0])
        world.count.assign_add(x.sum())
        statements.train(world, x, "average", "after", "by_torch")
        everything = tfnb.effects()
    for batch in DATA:
        tfnb.run(everything, {x: batch})
        plain.count.assign_add(batch.sum())
        statements.train(plain, batch, "average", "after", "by_torch")
    return lambda: torch.testing.assert_close(world.state(), plain.state())


def scheduled(name: str, **options: Any) -> Check:
    make, data = SCHEDULERS[name], rows_and_labels()
    found = fitted(make, data, **options)

    def check() -> None:
        for a, b in zip(found, eager(make, data), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    return check


PLACES = "before", "after"
ROWS_ONLY = "copy_feed", "statistics", "in_branch"  # what they write is made of the rows that a task sees
BOTH: dict[str, Callable[[], Check]] = {
    "trained by name": trained_by_name,
    "fetched scalars": fetched_scalars,
    "everything of a block": everything_of_a_block,
    **{f"fit: {s} {p}": partial(fitted_statement, s, p) for s in ("average", "clamp", "count") for p in PLACES},
    **{
        f"scheduler: {name}": partial(scheduled, name, as_feeds=number % 2 == 1, by_object=number % 3 == 1)
        for number, name in enumerate(SCHEDULERS)
    },
}
HERE = {f"fit: {s} {p}": partial(fitted_statement, s, p) for s in ("statistics", "in_branch") for p in PLACES} | {
    f"scheduler: {name}, arrays": partial(scheduled, name) for name in SCHEDULERS
}
THERE = {  # here beside their functions, statements with each kind of step
    f"run: {s} {p}": partial(run_statement, s, p)
    for s in ("average", "clamp", "count", "count_variable", *ROWS_ONLY) for p in PLACES
} | {"table of keys": inserted_by_runs} | {f"watched: {how}": partial(watched, how) for how in WAYS}  # fmt: skip
PROGRAMS = {("there", name): program for name, program in (BOTH | THERE).items()} | {
    ("here", name): program for name, program in (BOTH | HERE).items()
}


@pytest.mark.parametrize(("where", "name"), PROGRAMS)
def test_a_program_gives_what_plain_pytorch_gives(request: pytest.FixtureRequest, where: str, name: str) -> None:
    cluster = request.getfixturevalue("connect")(2) if where == "there" else None
    check = PROGRAMS[where, name]()
    if cluster is not None:
        cluster.close()
    check()
