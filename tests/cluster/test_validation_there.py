"""Validation on a cluster: after each epoch tasks stand still, and everything is as in the local training."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.cluster.test_queues_on_servers import until
from tfnb.cluster.engine.members import Ahead
from tfnb.cluster.engine.sources import Near
from tfnb.state.batch_order import RowOrder
from tfnb.state.chunks import ChunkedArray

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "arrays": (dict, {"epochs": 4, "batch_size": 8}),
    "a part of the last pass": (dict, {"steps": 14, "batch_size": 9, "seed": 3}),
    "feed dicts": (list, {"epochs": 3}),
    "an iterator": (iter, {}),
}


class Line:
    """Noise to fit, which later epochs fit too well: the validation data is other noise."""

    def __init__(self, *, draws: bool = False) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 1)).double()
        self.data = torch.randn(41, 3, dtype=torch.float64), torch.randn(41, 1, dtype=torch.float64)
        self.other = torch.randn(23, 3, dtype=torch.float64), torch.randn(23, 1, dtype=torch.float64)
        with tfnb.record("line") as self.graph:
            x, y = tfnb.placeholder(self.data[0][:5], name="x"), tfnb.placeholder(self.data[1][:5], name="y")
            net.train(draws)
            self.loss = F.mse_loss(net(x), y)
            self.train = tfnb.train.Adam(3e-2).minimize(self.loss)
        self.feeds = x, y

    def fed(self, data: tuple[torch.Tensor, ...], kind: Any) -> Any:
        if kind is dict:
            return dict(zip(self.feeds, data, strict=True))
        parts = [dict(zip(self.feeds, part, strict=True)) for part in zip(*(d.split(8) for d in data), strict=True)]
        return kind(parts)

    def fit(self, kind: Any, options: dict[str, Any]) -> tuple[Any, list[Any], list[torch.Tensor]]:
        seen: list[Any] = []
        stopping = tfnb.train.EarlyStopping("val_loss", patience=0)
        done = tfnb.fit(
            self.train, self.fed(self.data, kind), watch={"loss": self.loss}, validation=self.fed(self.other, dict),
            callbacks=[stopping, lambda at: seen.append((at.step, at.epoch, dict(at.values)))], **options,
        )  # fmt: skip
        return done, [*seen, stopping.best_epoch], [v.value().clone() for v in self.graph.variables]


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_the_local_training(connect, case: str) -> None:
    kind, options = CASES[case]
    here, seen_here, values_here = Line().fit(kind, options)
    there = Line()
    connect(2)
    done, seen, values = there.fit(kind, options)
    assert (done.steps, done.stopped) == (here.steps, here.stopped)
    assert_near(done.history, here.history), assert_near(seen, seen_here)
    for mine, other in zip(values, values_here, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [dict, list])
def test_random_numbers_go_on_behind_those_of_the_validation(connect, kind: Any) -> None:
    """Both graphs draw: a step after the first epoch draws what it draws here. On one task its bits are the same."""
    options = {"epochs": 3} | ({"batch_size": 8} if kind is dict else {})
    here, _, values_here = Line(draws=True).fit(kind, options)
    there = Line(draws=True)
    connect(1)
    done, _, values = there.fit(kind, options)
    assert_near(done.history, here.history)
    assert all(map(torch.equal, values, values_here))


def test_an_interrupt_of_a_validation_leaves_whole_epochs(connect) -> None:
    class Interrupted(list[Any]):
        """Validation data that the user interrupts in the second epoch."""

        def on_epoch(self, progress: Any) -> None:
            self.is_second = progress.epoch == 1

        def __iter__(self) -> Any:
            if getattr(self, "is_second", False):
                os.kill(os.getpid(), signal.SIGINT)
            return super().__iter__()

    here, there = Line(), Line()
    tfnb.fit(here.train, here.fed(here.data, dict), epochs=2, batch_size=8)
    other = Interrupted(there.fed(there.other, list))
    cluster = connect(2)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 12; variables are at step 12"):
        tfnb.fit(
            there.train, there.fed(there.data, dict), epochs=5, batch_size=8, watch={"loss": there.loss},
            validation=other, callbacks=[other.on_epoch],
        )  # fmt: skip
    assert cluster.step == 12
    for mine, other in zip(there.graph.variables, here.graph.variables, strict=True):
        torch.testing.assert_close(mine.storage, other.storage, rtol=1e-12, atol=1e-12)
    tfnb.fit(there.train, there.fed(there.data, dict), batch_size=8)
    assert cluster.step == 18


def test_what_a_callback_writes_between_two_epochs_counts(connect) -> None:
    """Storages here show the epoch's end then, and what is written into them is sent before the next step."""
    lines, found = [Line(), Line()], []
    for line, where in zip(lines, (lambda: None, lambda: connect(2)), strict=True):
        where()
        weight = next(iter(line.graph.variables))

        def halve(progress: Any, weight: Any = weight) -> None:
            found.append(weight.storage.clone())
            with torch.no_grad():
                weight.storage.mul_(0.5)

        tfnb.fit(
            line.train, line.fed(line.data, dict), epochs=3, batch_size=8, watch={"loss": line.loss}, callbacks=halve,
            validation=line.fed(line.other, dict),
        )  # fmt: skip
    assert_near([each.tolist() for each in found[3:]], [each.tolist() for each in found[:3]])
    for mine, other in zip(lines[1].graph.variables, lines[0].graph.variables, strict=True):
        torch.testing.assert_close(mine.value(), other.value(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [dict, list])
def test_what_a_slow_callback_writes_counts_too(connect, kind: Any) -> None:
    """The values here were pulled so long ago that they are due again: what is written counts, a reader's value too."""
    lines, clusters = [Line(), Line()], [None]
    for line, where in zip(lines, (lambda: None, lambda: clusters.append(connect(2))), strict=True):
        where()
        weight = next(iter(line.graph.variables))
        unused = alone()

        def written(progress: Any, weight: Any = weight, unused: Any = unused) -> None:
            with torch.no_grad():
                weight.storage.mul_(0.5)
                unused.storage.add_(1.0)
            if cluster := clusters[-1]:
                cluster._variables._due = 0.0

        tfnb.fit(
            line.train, line.fed(line.data, kind), epochs=3, watch={"loss": line.loss}, callbacks=written,
            validation=line.fed(line.other, dict), **({"batch_size": 8} if kind is dict else {}),
        )  # fmt: skip
        assert unused.value().tolist() == unused.storage.tolist() == [4.0] * 3
    for mine, other in zip(lines[1].graph.variables, lines[0].graph.variables, strict=True):
        torch.testing.assert_close(mine.value(), other.value(), rtol=1e-12, atol=1e-12)


def test_what_is_written_between_two_steps_outlasts_a_pull(connect) -> None:
    """A Variable that the step does not write shows what a callback wrote, though values here are due again."""
    line = Line()
    cluster = connect(2)
    unused = alone()

    class Writes:
        def on_step(self, progress: Any) -> None:
            with torch.no_grad():
                unused.storage.add_(1.0)
            cluster._variables._due = 0.0

    done = tfnb.fit(line.train, line.fed(line.data, list), epochs=2, callbacks=Writes())
    assert unused.value().tolist() == unused.storage.tolist() == [1.0 + done.steps] * 3


def alone() -> tfnb.Variable:
    """One that another graph used, and no training."""
    unused = tfnb.Variable(torch.ones(3), name="unused")
    with tfnb.record():
        seen = unused + 0
    tfnb.run(seen)
    return unused


def test_one_training_is_held_at_each_epoch_and_arrays_are_sent_once(
    connect, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    line, asked, trainings = Line(), Counter[str](), set[str]()
    link = connect(2)._engine.link
    call = link.call

    def told(peer: Any, method: str, meta: Any, *args: Any, **how: Any) -> Any:
        asked[method] += 1
        trainings.update([meta["training"]] if method == "lend" else ())
        return call(peer, method, meta, *args, **how)

    monkeypatch.setattr(link, "call", told)
    line.fit(dict, {"epochs": 3, "batch_size": 8})
    assert asked["load"] == 2 and len(trainings) == 1
    until(lambda: asked["unload"] == 2)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
def test_a_task_that_is_killed_around_a_validation_changes_no_number(connect, delay: float) -> None:
    """At the end of an epoch, while the validation runs, or when the next epoch begins.

    Watched values of a step may die with a task that had not told of them; those of the validation may not.
    """
    options = {"epochs": 5, "batch_size": 8, "seed": 2}
    here = Line()
    expected = tfnb.fit(
        here.train,
        here.fed(here.data, dict),
        watch={"loss": here.loss},
        validation=here.fed(here.other, dict),
        **options,
    )
    there = Line()
    cluster = connect(3)
    timers: list[threading.Timer] = []

    def strike(at: Any) -> None:
        if at.epoch <= 2:
            member = cluster._engine.tasks[at.epoch]
            timers.append(threading.Timer(delay, os.kill, [member.info["pid"], signal.SIGKILL]))
            timers[-1].start()

    done = tfnb.fit(
        there.train, there.fed(there.data, dict), watch={"loss": there.loss}, validation=there.fed(there.other, dict),
        callbacks=[strike], **options,
    )  # fmt: skip
    [timer.join() for timer in timers]
    assert len(timers) == 2 and done.steps == expected.steps == cluster.step
    assert_near([one["val_loss"] for one in done.history], [one["val_loss"] for one in expected.history])


def test_early_stopping_ends_the_training_after_that_epoch(connect) -> None:
    here, *_ = Line().fit(dict, {"epochs": 60, "batch_size": 8})
    there = Line()
    cluster = connect(3)
    done, _, _ = there.fit(dict, {"epochs": 60, "batch_size": 8})
    assert here.stopped and done.stopped == here.stopped and done.steps == here.steps == cluster.step < 360


def test_asynchronous_tasks_stand_still_too(connect) -> None:
    line = Line()
    connect(3)
    checks: list[tuple[float, float]] = []

    def check(progress: Any) -> None:
        now = tfnb.run(line.loss, dict(zip(line.feeds, line.other, strict=True)))
        checks.append((progress.values["val_loss"], now.item()))
        if progress.epoch == 2:
            progress.change("bounded", staleness=1)

    done = tfnb.fit(
        line.train, line.fed(line.data, list), epochs=4, mode="async", watch={"loss": line.loss}, callbacks=check,
        validation=line.fed(line.other, dict),
    )  # fmt: skip
    assert done.steps == 24 and len(checks) == 4 and len({value for value, _ in checks}) == 4
    assert all(value == pytest.approx(now, rel=1e-12) for value, now in checks)


def assert_near(found: Any, expected: Any) -> None:
    """Equal, but for the last digits of numbers."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        [assert_near(found[key], expected[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        [assert_near(*pair) for pair in zip(found, expected, strict=True)]
    else:
        assert found == expected


def test_chunks_are_taken_pass_by_pass_and_tasks_stand_between() -> None:
    array = ChunkedArray("x", (4, 2, 6, 3, 5), (), torch.float32, homes=(("a",),) * 5)

    def steps(by_pass: bool) -> tuple[list[int], list[int]]:
        near = Near(Ahead((array,), RowOrder(20, 2, seed=1, within=0), total=25, run=int, by_pass=by_pass), ["a"])
        taken, stood = list[int](), list[int]()
        while near.left:
            taken += near.take(3, task=0)
            stood += [len(taken)] if near.stands else []
        return taken, stood

    taken, stood = steps(by_pass=True)
    assert stood == [10, 20] and taken == list(range(25))
    assert steps(by_pass=False) == (taken, [])
