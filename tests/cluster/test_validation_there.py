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
from tests.quick import quick
from tfnb.cluster.fit.sources import Near
from tfnb.cluster.members import Ahead
from tfnb.state.batch_order import Order
from tfnb.state.chunks import Chunked

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "arrays": (dict, {"epochs": 4, "batch_size": 8}),
    "a part of the last pass": (dict, {"steps": 14, "batch_size": 9, "seed": 3}),
    "feed dicts": (list, {"epochs": 3}),
    "an iterator": (iter, {}),
}


class Line:
    """Noise to fit, which later epochs fit too well: the validation data is other noise."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 1)).double()
        self.data = torch.randn(41, 3, dtype=torch.float64), torch.randn(41, 1, dtype=torch.float64)
        self.other = torch.randn(23, 3, dtype=torch.float64), torch.randn(23, 1, dtype=torch.float64)
        with tfnb.record("line") as self.graph:
            x, y = tfnb.placeholder(self.data[0][:5], name="x"), tfnb.placeholder(self.data[1][:5], name="y")
            net.eval()
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


@pytest.mark.parametrize("case", quick(1, CASES))
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


def test_arrays_are_sent_once_and_dropped_at_the_end(connect, monkeypatch: pytest.MonkeyPatch) -> None:
    line, asked = Line(), Counter[str]()
    link = connect(2)._engine.link
    call = link.call

    def told(peer: Any, method: str, *args: Any, **how: Any) -> Any:
        asked[method] += 1
        return call(peer, method, *args, **how)

    monkeypatch.setattr(link, "call", told)
    line.fit(dict, {"epochs": 3, "batch_size": 8})
    assert asked["load"] == 2
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


def test_chunks_of_a_later_pass_come_in_the_order_of_that_pass() -> None:
    array = Chunked("x", (4, 2, 6, 3, 5), (), torch.float32, homes=(("a",),) * 5)

    def steps(first: int, passes: int) -> list[int]:
        order = Order(20, 2, seed=1, within=0, first=first)
        near = Near(Ahead((array,), order, total=10 * passes, run_index=0), ["a"])
        return [step for piece in iter(lambda: near.take(3, task=0) if near.left else [], []) for step in piece]

    both = steps(1, 2)
    assert sorted(both) == list(range(20))
    assert [step - 10 for step in both[10:]] == steps(2, 1)
